"""Effect of an edit of a Python file on processes that ran some of its functions, by syntax, not by layout. Pure.

A file consists of its *skeleton*, the code that runs at import (statements of the module and of class bodies,
decorators, signatures, defaults, the names of all functions), and the bodies of its outermost functions, which matter
only if they ran. Nested functions, classes and lambdas in a body belong to the body.
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
    """Body of an outermost function."""

    first: int
    """First line of the body; `last` is the last one."""
    last: int
    always: bool
    """True for a body whose lines do not show whether it ran: it counts as run."""
    digest: str


class Parts(NamedTuple):
    """Skeleton and bodies of a file."""

    skeleton: str
    """Hash of the skeleton."""
    bodies: tuple[Body, ...]
    """Bodies in the order of the skeleton, which has their names: equal skeletons have the same functions."""


class Edit(NamedTuple):
    """Difference between two contents of a file."""

    everywhere: bool
    """True for a different skeleton or an unknown difference: every process that loaded the file is concerned."""
    bodies: tuple[Body, ...] = ()
    """Bodies of the old content that are different in the new one."""

    def concerns(self, trace: FileTrace) -> bool:
        """Return whether the edit may concern a process that left `trace` of the old content."""
        if self.everywhere or trace.whole:
            return True
        return any(body.always or trace.ran(body.first, body.last) for body in self.bodies)


EVERYWHERE = Edit(everywhere=True)


def edit_between(old: bytes, new: bytes) -> Edit:
    """Return the difference between two contents of a file."""
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
    """Return the skeleton and bodies of a file. Raises SyntaxError, ValueError, RecursionError."""
    tree = ast.parse(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Code that parses may still not compile: a `break` outside of a loop ends the import of the file.
        compile(source, "<edit>", "exec", dont_inherit=True)
    bodies: list[Body] = []
    _take_bodies(tree, bodies)
    return Parts(_digest(ast.dump(tree)), tuple(bodies))


def _take_bodies(node: ast.AST, bodies: list[Body]) -> None:
    """Take the bodies of the outermost functions below `node` out of the tree, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            bodies.append(_body(child))
            # Traits of the function that are visible without running its body: a `yield` makes it a generator, other
            # code may read its docstring, and a class provides `__class__` to methods that use it.
            is_generator = any(map(_yields, child.body))
            names = {node.id for node in ast.walk(child) if isinstance(node, ast.Name)}
            wants_its_class = not names.isdisjoint(("__class__", "super"))
            traits = (is_generator, ast.get_docstring(child, clean=False), wants_its_class)
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


def _yields(node: ast.AST) -> bool:
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, _Function | ast.Lambda | ast.ClassDef):
        return False
    return any(_yields(child) for child in ast.iter_child_nodes(node))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
