"""Writes of a ready `.pte` into inputs and buffers are read from its file, and compared with the module's writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.builds.bundles.ready import output_specs, read_ready, ready_manifest
from farm.builds.program.pte import Method, read_pte
from farm.suites.suite import Case, InputSpec, Job, Target

MODULES = Path(__file__).with_name("made_ready_writes.py")
TARGET = Target("SM8650", "xnnpack", "fp32")


@pytest.fixture(scope="module")
def folder(filled_by: Callable[[Path], Path]) -> Path:
    """Programs of the modules, by ExecuTorch's own kernels."""
    return filled_by(MODULES)


@pytest.fixture(scope="module")
def taken(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_ready_writes.py."""
    return printed_json(MODULES)


def method_of(folder: Path, name: str) -> Method:
    return read_pte(folder / f"{name}.pte").method("forward", "")


@pytest.mark.parametrize(
    ("name", "inputs", "buffers"), [("Adds", (0,), 0), ("Sums", (), 1), ("Passes", (), 0), ("Doubles", (), 0)]
)
def test_the_file_tells_the_writes(folder: Path, name: str, inputs: tuple[int, ...], buffers: int) -> None:
    method = method_of(folder, name)
    assert (method.written_inputs, method.written_buffers) == (inputs, buffers)
    # An input that is passed on is no written input.
    assert [spec.written for spec in output_specs(method)] == [bool(inputs)] + [False] * (len(method.outputs) - 1)


def test_a_ready_program_with_a_state_says_so_without_a_module(folder: Path) -> None:
    for name, stateful, writes in (("Sums", True, ("buffer",)), ("Adds", False, ("input 0",)), ("Doubles", False, ())):
        case = Case("mine", "one", "", (InputSpec((1, 8)),), pte=f"{name}.pte", folder=str(folder))
        method = read_ready(Job(case, TARGET))
        manifest = ready_manifest(
            method, TARGET, folder / f"{name}.pte", key="k", job_id="j", samples=1, inputs=(),
            outputs=output_specs(method), files={},
        )  # fmt: skip
        assert (manifest.stateful, manifest.writes) == (stateful, writes)


def test_a_ready_program_is_compared_with_the_writes_of_its_module(taken: dict[str, Any]) -> None:
    program = taken["compared"]["Adds Adds"]
    assert (program["writes"], program["lost"]) == (["input x"], [])
    assert program["outputs"] == [["x", True], ["", False]]
    assert program["first"] == [2.0, 4.0]
    assert taken["compared"]["Sums Sums"]["stateful"]


@pytest.mark.parametrize(
    ("pte", "module", "lost"), [("Doubles", "Adds", "input x"), ("Doubles", "Sums", "buffer total")]
)
def test_a_ready_program_without_the_write_fails(taken: dict[str, Any], pte: str, module: str, lost: str) -> None:
    assert taken["compared"][f"{pte} {module}"]["lost"] == [lost]


def test_a_written_input_is_no_passed_on_input(taken: dict[str, Any]) -> None:
    # Both have two outputs, and the module counts the written input as one: the file alone shows the difference.
    assert taken["compared"]["Passes Adds"]["lost"] == ["input x"]


def test_expected_files_of_a_stateful_program_are_of_one_execution_each(taken: dict[str, Any]) -> None:
    program = taken["expected"]["Sums"]
    assert (program["stateful"], program["writes"]) == (True, ["buffer"])


def test_an_expected_written_input_is_named(taken: dict[str, Any]) -> None:
    assert taken["expected"]["Adds"]["outputs"] == [["0", True], ["", False]]
