"""Mutants of farm/ for tools/mutants.py: small faults, each in one place of one source file."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Mutant = dict[str, Any]

PACKAGES = (
    "results", "dispatch/run", "dispatch/pool", "store/leases", "dispatch/cluster", "numbers/regressions",
    "builds/bundles", "suites", "builds/compile/flows",
)  # fmt: skip
"""Parts of farm/ that get mutants."""
SWAPS = {
    "Eq": ("==", "!="), "NotEq": ("!=", "=="), "Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="),
    "GtE": (">=", ">"), "Is": ("is", "is not"), "IsNot": ("is not", "is"), "In": ("in", "not in"),
    "NotIn": ("not in", "in"), "Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "/"), "Div": ("/", "*"),
    "FloorDiv": ("//", "*"), "Mod": ("%", "*"), "BitOr": ("|", "&"), "BitAnd": ("&", "|"), "LShift": ("<<", ">>"),
    "RShift": (">>", "<<"), "And": ("and", "or"), "Or": ("or", "and"),
}  # fmt: skip
"""Operators by their class in `ast`: text, text in a mutant."""
TEXT_CALL = re.compile(r"_?(log\w*|notif\w+|notices?|warn\w*|echo|say|tell|told|debug|info|error|exception)")
"""Functions whose arguments are texts for a reader: no mutant is planted there."""
SAME_EITHER_WAY = {"strict", "frozen", "slots", "kw_only"}
"""Keyword arguments whose value changes no result of a correct program."""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def is_for_type_checker(test: ast.expr) -> bool:
    """Return whether a condition is `TYPE_CHECKING`."""
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that may get a mutant: no annotation, no decorator, no text for a reader."""
    if isinstance(node, FUNCTION):
        yield from (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body)
    elif isinstance(node, ast.ClassDef):
        yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from filter(None, [node.value])
    elif isinstance(node, ast.If) and is_for_type_checker(node.test):
        yield from node.orelse
    elif isinstance(node, ast.Call):
        if not TEXT_CALL.fullmatch(getattr(node.func, "attr", getattr(node.func, "id", ""))):
            yield from (node.func, *node.args, *(one.value for one in node.keywords if one.arg not in SAME_EITHER_WAY))
    elif not isinstance(node, ast.JoinedStr):
        yield from ast.iter_child_nodes(node)


class Sites:
    """Places of one source file where a mutant is possible, found in its syntax tree."""

    def __init__(self, package: str, file: str, source: bytes) -> None:
        self.package, self.file, self.source = package, file, source
        self.found: list[Mutant] = []
        self.statements: set[int] = set()
        self._starts = [0, *(place.end() for place in re.finditer(rb"\n", source)), len(source)]
        self._visit(ast.parse(source), 0, None)

    def _visit(self, node: ast.AST, statement: int, function: FUNCTION | None) -> None:
        if isinstance(node, ast.stmt):
            statement = node.lineno
            self.statements.add(statement)
        for kind, start, end, new in self._faults(node, function):
            self._add(kind, start, end, new, {"statement": statement, "at_import": function is None})
        for part in parts(node):
            in_body = isinstance(node, FUNCTION) and isinstance(part, ast.stmt)
            self._visit(part, statement, node if in_body else function)

    def _faults(self, node: ast.AST, function: FUNCTION | None) -> Iterator[tuple[str, int, int, str]]:
        """Yield kind, first and last byte, and new text of the mutants of one node."""
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                yield from itertools.chain(*map(self._swap, node.ops, operands, operands[1:]))
            case ast.BoolOp():
                for left, right in itertools.pairwise(node.values):
                    yield from self._swap(node.op, left, right)
            case ast.BinOp():
                yield from self._swap(node.op, node.left, node.right)
            case ast.AugAssign():
                yield from self._swap(node.op, node.target, node.value)
            case ast.Constant(value=bool()):
                yield "constant", *self._span(node), repr(not node.value)
            case ast.Constant(value=int() | float()):
                yield "constant", *self._span(node), repr(node.value + 1)
            case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant) or node.value.value:
                start, end = self._span(node.value)
                is_bool = (
                    function is not None and isinstance(function.returns, ast.Name) and function.returns.id == "bool"
                )
                yield "return", start, end, f"not ({self.source[start:end].decode()})" if is_bool else "None"
        tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
        for test in tests:
            if isinstance(test, ast.expr) and not isinstance(test, ast.Constant) and not is_for_type_checker(test):
                start, end = self._span(test)
                yield "condition", start, end, f"(not ({self.source[start:end].decode()}))"

    def _swap(self, sign: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[tuple[str, int, int, str]]:
        old, new = SWAPS.get(type(sign).__name__, ("", ""))
        edge = rb"\b" if old[:1].isalpha() else b""
        pattern = edge + rb"\s+".join(re.escape(word.encode()) for word in old.split()) + edge
        place = re.compile(pattern).search(self.source, self._span(left)[1], self._span(right)[0])
        if old and place:
            yield "operator", *place.span(), new

    def _span(self, node: ast.expr) -> tuple[int, int]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[last - 1] + column

    def _add(self, kind: str, start: int, end: int, new: str, more: dict[str, Any]) -> None:
        first, last = self.source.count(b"\n", 0, start), self.source.count(b"\n", 0, end)
        begin, stop = self._starts[first], self._starts[last + 1]
        after = self.source[begin:start] + new.encode() + self.source[end:stop]
        self.found.append(
            {
                "id": f"{self.file}:{first + 1}:{start - begin}:{kind}:{new.splitlines()[0]}",
                "package": self.package,
                "file": self.file,
                "line": first + 1,
                **more,
                "change": f"{self.source[start:end].decode()} -> {new}",
                "before": self.source[begin:stop].decode(),
                "after": after.decode(),
            }
        )


def draw(source: Path, seed: int, count: int, packages: Iterable[str] = PACKAGES) -> list[Mutant]:
    """Return `count` mutants, each on another line; in proportion to the code lines of each package."""
    lines: dict[str, int] = {}
    found: dict[str, dict[tuple[str, int], list[Mutant]]] = {}
    for package in packages:
        files = sorted((source / "farm" / package).rglob("*.py"))
        sites = [Sites(package, file.relative_to(source).as_posix(), file.read_bytes()) for file in files]
        lines[package] = sum(len(one.statements) for one in sites)
        found[package] = defaultdict(list)
        for mutant in (mutant for one in sites for mutant in one.found):
            found[package][mutant["file"], mutant["line"]].append(mutant)
    exact = {package: count * number / sum(lines.values()) for package, number in lines.items()}
    share = {package: int(number) for package, number in exact.items()}
    for package in sorted(exact, key=lambda one: share[one] - exact[one])[: count - sum(share.values())]:
        share[package] += 1
    drawn: list[Mutant] = []
    for package, places in found.items():
        keys = sorted(places)
        random.Random(f"{seed} {package}").shuffle(keys)  # noqa: S311 - a sample, not a secret
        # The generator of a line is its own: a larger count has the mutants of a smaller one.
        picks = (random.Random(f"{seed} {key}").choice(places[key]) for key in keys)  # noqa: S311
        drawn += itertools.islice((one for one in picks if is_program(one, source)), share[package])
    return drawn


def is_program(mutant: Mutant, source: Path) -> bool:
    """Return whether Python accepts the mutant and reads another program than without it."""
    try:
        mutated = ast.parse(applied(mutant, source) or "")
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse((source / mutant["file"]).read_text()))


def applied(mutant: Mutant, tree: Path) -> str | None:
    """Return the text of the mutated file; None where the lines are gone or, in another place, not unique."""
    text = (tree / mutant["file"]).read_text()
    start = sum(len(line) + 1 for line in text.split("\n")[: mutant["line"] - 1])
    if not text.startswith(mutant["before"], start):
        start = text.find(mutant["before"]) if text.count(mutant["before"]) == 1 else -1
    return None if start < 0 else text[:start] + mutant["after"] + text[start + len(mutant["before"]) :]
