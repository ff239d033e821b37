"""Operators of ExecuTorch's Qualcomm backend, read from its sources without an import of the backend or of torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import msgspec

from farm.base.errors import ConfigError, MissingToolError

OPERATORS_FILE = "operators.json"

# ExecuTorch 1.5: backends/qualcomm/builders/op_NAME.py has visitors, each with `target = ["aten.abs.default"]`.
_FOLDER = ("backends", "qualcomm", "builders")
_PREFIX = "op_"


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
        f"the operators are those of ExecuTorch's Qualcomm backend, and {'/'.join((package, *below))} is not "
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
    if isinstance(statement, ast.Assign):
        names, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        names, value = [statement.target], statement.value
    else:
        return []
    if not any(isinstance(name, ast.Name) and name.id == "target" for name in names):
        return []
    elements = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    return [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]


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
