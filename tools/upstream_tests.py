"""The modules of ExecuTorch's own operator tests: its tests run here with a recorder in place of the compiler."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from farm.suites.op_builders import OPERATOR_TESTS, native_functions, operator_of_test, plain_name, tests_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

Recorded = list[tuple[torch.nn.Module, tuple[Any, ...]]]

_TESTS = "executorch.backends.qualcomm.tests"


def modules_of_tests(operator: str) -> Recorded:
    """Return the modules, with their inputs, that ExecuTorch's tests with the operator in their name compile."""
    recorded: Recorded = []
    for path, function in _tests_of(operator):
        if path.name == "test_qnn_delegate.py":
            _run_older(path, function, recorded)
        else:
            _run_newer(function, recorded)
    return [(module.eval(), tuple(inputs)) for module, inputs in recorded]


def _tests_of(operator: str) -> Iterator[tuple[Path, str]]:
    """Yield the tests that are called after an operator: file and function."""
    for path in (tests_folder() / name for name in OPERATOR_TESTS):
        for node in ast.walk(ast.parse(path.read_bytes(), path.name)):
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            if plain_name(operator_of_test(name), native_functions()) == operator:
                yield path, name


def _run_newer(function: str, recorded: Recorded) -> None:
    """Run a test of `rework`, which passes a module to `export_and_verify` and gets the rest from fixtures."""
    operators = importlib.import_module(f"{_TESTS}.rework.src.op")
    tests = importlib.import_module(f"{_TESTS}.rework.htp.op.v68.test")
    fixtures = {
        "qnn_config": SimpleNamespace(device_workspace=""),
        "subtests": SimpleNamespace(test=_nothing),
        "quantizers": lambda **_: None,
        "compile_specs": lambda **_: None,
    }
    wanted = {"act": 8, "expected": contextlib.nullcontext()}
    record = mock.patch.object(
        operators, "export_and_verify", lambda module, inputs, **_: recorded.append((module, inputs))
    )
    with record:
        getattr(tests, function)(SimpleNamespace(getfixturevalue=fixtures.__getitem__), wanted)


class _RecordedError(Exception):
    """Signal that the rest of a test has nothing to compile."""


def _run_older(path: Path, function: str, recorded: Recorded) -> None:
    """Run each method named `function` on its own, as an import of its file would need packages and an SDK."""

    def record(module: torch.nn.Module, inputs: tuple[Any, ...], **_: Any) -> None:
        recorded.append((module, inputs))
        raise _RecordedError

    test = SimpleNamespace(
        get_qdq_module=record,
        lower_module_and_test_output=record,
        subTest=lambda **_: contextlib.suppress(_RecordedError),
        enable_x86_64=False,
    )
    for method in _methods(path, function):
        names = {**vars(importlib.import_module(f"{_TESTS}.models")), **_imported()}
        exec(method, names)  # noqa: S102 - a test of the installed ExecuTorch
        with contextlib.suppress(_RecordedError):
            names[function](test)


def _methods(path: Path, function: str) -> Iterator[Any]:
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            node.decorator_list = []
            yield compile(ast.Module([node], []), str(path), "exec")


@functools.cache
def _imported() -> dict[str, Any]:
    """Return what these tests import beside the modules."""
    return {"QuantDtype": importlib.import_module("executorch.backends.qualcomm.export_utils").QuantDtype}


def _nothing(**_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
