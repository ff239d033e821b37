"""Random edits of Python functions, as people make them: mutations for bench/toolchains.py."""

from __future__ import annotations

import ast
import copy
import random

_SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
            ast.Is: ast.IsNot}  # fmt: skip

# Number of places in a function that are tried for an edit.
_TRIES = 40


def outermost_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the functions of a module and of its classes, in their order."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node)
        elif not isinstance(node, ast.AsyncFunctionDef):
            found += outermost_functions(node)
    return found


def mutated(source: str, number: int, draw: random.Random) -> str | None:
    """Return `source` with an edit in the body of its outermost function `number`; None if no edit is possible.

    All other characters of the file stay.
    """
    function = outermost_functions(ast.parse(source))[number]
    count = sum(1 for _ in ast.walk(function))
    numbers = draw.sample(range(count), min(count, _TRIES))
    body = next((edit for place in numbers if (edit := _edit_at(function, place)) is not None), None)
    if not body:
        return None
    first, last = function.body[0], function.body[-1]
    lines = source.splitlines(keepends=True)
    if first.lineno <= function.lineno or last.end_lineno is None:
        return None
    text = ast.unparse(ast.Module(body=body, type_ignores=[]))
    indent = " " * first.col_offset
    # Strings of several lines must not be moved.
    if any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and "\n" in one.value for one in ast.walk(function)
    ):
        return None
    new = "".join(f"{indent}{line}\n" for line in text.splitlines())
    return "".join([*lines[: first.lineno - 1], new, *lines[last.end_lineno :]])


def _edit_at(function: ast.FunctionDef, number: int) -> list[ast.stmt] | None:
    changed = copy.deepcopy(function)
    header = {id(one) for part in (changed.args, *changed.decorator_list) for one in ast.walk(part)}
    node = next(one for place, one in enumerate(ast.walk(changed)) if place == number)
    if node is changed or id(node) in header or not _edit(node):
        return None
    return changed.body


def _edit(node: ast.AST) -> bool:  # noqa: PLR0911 - one way each
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
        return True
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
        return True
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        node.ops[0] = _SWAPPED[type(node.ops[0])]()
        return True
    if isinstance(node, ast.If | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return isinstance(node, ast.If)
    if isinstance(node, ast.Call) and len(node.args) > 1:
        node.args[0], node.args[1] = node.args[1], node.args[0]
        return not any(isinstance(one, ast.Starred) for one in node.args)
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With) and len(node.body) > 1:
        del node.body[-1]
        return True
    if isinstance(node, ast.Return) and node.value is not None:
        node.value = ast.Constant(None)
        return True
    return False
