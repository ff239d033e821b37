"""What an edit of a Python file changes, for who has run some of its functions: by syntax, whatever the layout. Pure.

A file is its *skeleton*, all that runs when it is imported (statements of the module and of class bodies, decorators,
signatures, defaults, the names of all functions), and the bodies of its outermost functions, which decide something
only where they ran. Nested functions, classes and lambdas in a body belong to it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import warnings
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from farm.builds.bundles.trace import FileTrace

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Statements that may run without any event of a line.
_SILENT = (ast.Pass, ast.Global, ast.Nonlocal)


class Body(NamedTuple):
    """The body of an outermost function."""

    first: int
    """Its lines."""
    last: int
    always: bool
    """Whether it ran cannot be told by its lines: it is taken to have run."""
    digest: str


class Parts(NamedTuple):
    """A file in parts."""

    skeleton: str
    """A hash."""
    bodies: tuple[Body, ...]
    """In the order of the skeleton, which names them: equal skeletons have the same functions."""


class Edit(NamedTuple):
    """What is different between two contents of a file."""

    everywhere: bool
    """The skeleton is, or what is different is not known: who has loaded the file is concerned."""
    bodies: tuple[Body, ...] = ()
    """Of the old content, those that are different."""

    def concerns(self, trace: FileTrace) -> bool:
        """Return whether it may concern who has left `trace` of the old content."""
        if self.everywhere or trace.whole:
            return True
        return any(body.always or trace.ran(body.first, body.last) for body in self.bodies)


EVERYWHERE = Edit(everywhere=True)


def edit_between(old: bytes, new: bytes) -> Edit:
    """Return what is different between two contents of a file."""
    try:
        before, after = parts_of(old), parts_of(new)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return EVERYWHERE
    if before.skeleton != after.skeleton or len(before.bodies) != len(after.bodies):
        return EVERYWHERE
    pairs = zip(before.bodies, after.bodies, strict=True)
    return Edit(everywhere=False, bodies=tuple(one for one, other in pairs if one.digest != other.digest))


@functools.lru_cache(64)
def parts_of(source: bytes) -> Parts:
    """Return a file in parts. Raises SyntaxError, ValueError, RecursionError."""
    tree = ast.parse(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What parses need not compile: a `break` outside of a loop would end the import, whoever runs it.
        compile(source, "<edit>", "exec", dont_inherit=True)
    bodies: list[Body] = []
    _take_bodies(tree, bodies)
    return Parts(_digest(ast.dump(tree)), tuple(bodies))


def _take_bodies(node: ast.AST, bodies: list[Body]) -> None:
    """Take the bodies of the outermost functions below `node` out of the tree, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            bodies.append(_body(child))
            # What calling it gives without running its body: a generator is one by what is in it.
            # Its docstring may be read by others, and a class notices where a method wants to know it.
            traits = (_kind(child), ast.get_docstring(child, clean=False), _wants_its_class(child))
            child.body = [ast.Expr(ast.Constant(repr(traits)))]
        else:
            _take_bodies(child, bodies)


def _body(function: _Function) -> Body:
    body = function.body
    header = [function.lineno, *(end for part in _header(function) if (end := getattr(part, "end_lineno", None)))]
    first, last = body[0].lineno, max(one.end_lineno or one.lineno for one in body)
    always = first <= max(header) or all(_is_silent(one) for one in body)
    return Body(first, last, always, _digest("".join(map(ast.dump, body))))


def _header(function: _Function) -> list[ast.AST]:
    arguments = function.args
    found: list[ast.AST | None] = [*function.decorator_list, function.returns, arguments.vararg, arguments.kwarg]
    found += [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found += [*arguments.defaults, *arguments.kw_defaults]
    return [one for one in found if one is not None]


def _is_silent(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, _SILENT) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _kind(function: _Function) -> str:
    return "generator" if any(_yields(one) for one in function.body) else "function"


def _wants_its_class(function: _Function) -> bool:
    return any(isinstance(node, ast.Name) and node.id in {"__class__", "super"} for node in ast.walk(function))


def _yields(node: ast.AST) -> bool:
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, _Function | ast.Lambda | ast.ClassDef):
        return False
    return any(_yields(child) for child in ast.iter_child_nodes(node))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
