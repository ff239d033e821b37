"""Operators of ExecuTorch's Qualcomm backend and of its tests, read from sources without importing them, or torch.

Many operators of tests have no builder, as a pass decomposes them first: only a case of the operator covers that pass.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from farm.base.errors import ConfigError, MissingToolError

OPERATORS_FILE = "operators.json"

# ExecuTorch 1.5: backends/qualcomm/builders/op_NAME.py has visitors, each with `target = ["aten.abs.default"]`.
_FOLDER = ("backends", "qualcomm", "builders")
_PREFIX = "op_"
_TESTS = ("backends", "qualcomm", "tests")
_NATIVE = ("packaged", "ATen", "native", "native_functions.yaml")
_FUNCTION = re.compile(r"^- func: (\w+)", re.MULTILINE)
_NAMED = re.compile(r"test_(?:qnn_backend_)?(\w+)")
# ATen's aliases, and the names of tests of `==` and its kind.
_SAME = {
    "equal": "eq", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "special_expm1": "expm1", "swapaxes": "transpose", "swapdims": "transpose",
}  # fmt: skip
OPERATOR_TESTS = ("test_qnn_delegate.py", "rework/htp/op/v68/test.py")
"""Files in the folder of ExecuTorch's tests with one test per operator."""


def installed_builders() -> dict[str, tuple[str, ...]]:
    """Return the builders of the installed ExecuTorch by name, `op_conv.py` as `conv`, with the operators they build.

    Operators have the name of a node's target, `aten.convolution.default`. A builder without operators in its source,
    such as `custom_op`, has none here. Raises MissingToolError if ExecuTorch is not installed.
    """
    return builders_in(installed("executorch", *_FOLDER))


def installed(package: str, *below: str) -> Path:
    """Return a file or folder of an installed package, which is not imported. Raises MissingToolError."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, *below)
        if path.exists():
            return path
    raise MissingToolError(
        f"the operators come from ExecuTorch's Qualcomm backend, and {'/'.join((package, *below))} is not "
        "installed: pip install 'snapdragon-farm[build]'"
    )


@functools.cache
def builders_in(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the same for a folder of builders, sorted by name."""
    return {path.stem.removeprefix(_PREFIX): _targets(path) for path in sorted(folder.glob(f"{_PREFIX}*.py"))}


def _targets(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                found += _assigned(statement)
    return tuple(dict.fromkeys(found))


def _assigned(statement: ast.stmt) -> list[str]:
    """Return the strings in the list that `target` is set to."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name("target")], value=ast.List(elements) | ast.Tuple(elements))
            | ast.AnnAssign(target=ast.Name("target"), value=ast.List(elements) | ast.Tuple(elements))
        ):
            return [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return []


class SuiteOperators(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operators of a suite, from `operators.json` in its folder."""

    cases: dict[str, tuple[str, ...]] = {}
    """Operators that the backend builds of each case."""
    without: dict[str, str] = {}
    """Builders that no case is for, and why; `custom_op` or, as the file is called, `op_custom_op`."""
    aten: dict[str, tuple[str, ...]] = {}
    """Operators in each case after torch.export, named as by `operators_in_tests`."""
    tests: dict[str, tuple[str, ...]] = {}
    """The same of ExecuTorch's tests that are called after an operator, where no case has it."""


def suite_operators(folder: Path) -> SuiteOperators:
    """Return the operators of the suite in `folder`, none without that file. Raises ConfigError."""
    path = folder / OPERATORS_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SuiteOperators)
    except FileNotFoundError:
        return SuiteOperators()
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", str(error)) from None
    return msgspec.structs.replace(
        found, without={name.removeprefix(_PREFIX): reason for name, reason in found.without.items()}
    )


@functools.cache
def operators_in_tests() -> tuple[str, ...]:
    """Return the operators by ATen's names without overloads, `acosh`, sorted. Raises MissingToolError.

    The operators are those named in the tests, `torch.ops.aten.fill.Scalar`, and those in the names of tests.
    """
    folder, known = tests_folder(), native_functions()
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        of_operators = path.relative_to(folder).as_posix() in OPERATOR_TESTS
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.Attribute) and (name := _written_out(node)):
                found.add(name)
            elif of_operators and isinstance(node, ast.FunctionDef):
                found.add(operator_of_test(node.name))
    return tuple(sorted({plain_name(name, known) for name in found} - {""}))


def tests_folder() -> Path:
    """Return the folder of ExecuTorch's tests of QNN. Raises MissingToolError."""
    return installed("executorch", *_TESTS)


def operator_of_test(name: str) -> str:
    """Return the operator that a test is called after: `acosh` of `test_acosh` or `test_qnn_backend_acosh`; else ""."""
    match = _NAMED.fullmatch(name)
    return match[1] if match else ""


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
    return frozenset(_FUNCTION.findall(installed("torchgen", *_NATIVE).read_text(encoding="utf-8")))


def _written_out(node: ast.Attribute) -> str:
    """Return X of `torch.ops.aten.X.overload`; "" for another attribute."""
    match node.value:
        case ast.Attribute(attr=name, value=ast.Attribute(attr="aten")):
            return name
    return ""
