"""The ATen operators that ExecuTorch's own tests of QNN name, read from its sources: neither it nor torch is imported.

Many of them have no builder, as a pass decomposes them first: only a case of the operator covers that pass.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from farm.suites.op_builders import installed

_TESTS = ("backends", "qualcomm", "tests")
_NATIVE = ("packaged", "ATen", "native", "native_functions.yaml")
_FUNCTION = re.compile(r"^- func: (\w+)", re.MULTILINE)
# `test_acosh`, and in the older tests `test_qnn_backend_acosh`.
_TEST = re.compile(r"test_(?:qnn_backend_)?(\w+)")
# ATen's aliases, and the names of tests of `==` and its kind.
_SAME = {
    "equal": "eq", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "special_expm1": "expm1", "swapaxes": "transpose", "swapdims": "transpose",
}  # fmt: skip
# Files with one test per operator.
_OPERATOR_TESTS = ("test_qnn_delegate.py", "rework/htp/op/v68/test.py")


def operators_in_tests() -> tuple[str, ...]:
    """Return the operators by ATen's names without overloads, `acosh`, sorted. Raises MissingToolError.

    The operators are those named in the tests, `torch.ops.aten.fill.Scalar`, and those in the names of tests.
    """
    return _named_in(installed("executorch", *_TESTS), installed("torchgen", *_NATIVE))


def operator_tests(operator: str) -> tuple[tuple[Path, str], ...]:
    """Return the tests that are called after an operator: file and function. Raises MissingToolError."""
    folder, known = installed("executorch", *_TESTS), native_functions()
    return tuple(
        (folder / name, node.name)
        for name in _OPERATOR_TESTS
        for node in ast.walk(ast.parse((folder / name).read_bytes(), name))
        if isinstance(node, ast.FunctionDef)
        and (match := _TEST.fullmatch(node.name))
        and plain_name(match[1], known) == operator
    )


def plain_name(operator: str, known: Collection[str]) -> str:
    """Return an ATen operator among the `known` ones without its overload; a copying or in-place variant becomes its
    base operator: `aten.select_copy.int` is `select`."""
    name = operator.removeprefix("aten.").partition(".")[0]
    name = _SAME.get(name, name)
    for variant in (name.removesuffix("_copy").removesuffix("_"), name, f"_{name}"):
        if variant in known:
            return variant
    return ""


@functools.cache
def native_functions() -> frozenset[str]:
    """Return the names of all functions of ATen, from the installed torch. Raises MissingToolError."""
    return _functions(installed("torchgen", *_NATIVE))


def _functions(path: Path) -> frozenset[str]:
    return frozenset(_FUNCTION.findall(path.read_text(encoding="utf-8")))


@functools.cache
def _named_in(folder: Path, native: Path) -> tuple[str, ...]:
    known = _functions(native)
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        of_operators = path.relative_to(folder).as_posix() in _OPERATOR_TESTS
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.Attribute):
                found.update(_written_out(node))
            elif of_operators and isinstance(node, ast.FunctionDef) and (match := _TEST.fullmatch(node.name)):
                found.add(match[1])
    return tuple(sorted({plain_name(name, known) for name in found} - {""}))


def _written_out(node: ast.Attribute) -> Iterator[str]:
    """Yield X of `torch.ops.aten.X.overload`."""
    above = node.value
    if isinstance(above, ast.Attribute) and isinstance(above.value, ast.Attribute) and above.value.attr == "aten":
        yield above.attr
