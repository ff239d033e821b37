"""Outputs that the exported graph makes constant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest

from farm.builds.bundles.bundle import Bundle, Constant, load_bundle
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Attempt
from farm.results.judge import judge
from farm.suites.suite import Job

MODULES = Path(__file__).with_name("made_constants.py")
EXPECTED = {
    Constant.LITERAL: (
        "full", "flag", "zeros_like", "buffer", "moved", "painted", "masked", "empty", "cut", "overwritten",
    ),
    Constant.COMPUTED: ("computed", "zero", "grid", "zeroed"),
    Constant.NONE: (
        "live", "dead", "times_zero", "filled", "input", "written", "written_with_input", "random", "argmax", "partly",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_constants.py."""
    return printed_json(MODULES)


def test_outputs_that_depend_on_no_input_are_constant(found: dict[str, Any]) -> None:
    assert found["graph"]["constants"] == {name: constant for constant, names in EXPECTED.items() for name in names}


def test_inputs_that_the_program_writes_to_come_before_its_outputs(found: dict[str, Any]) -> None:
    marked = found["graph"]["marked"]
    assert marked[:2] == [Constant.NONE, Constant.LITERAL]
    assert marked[1:] == found["graph"]["in order"]


@pytest.mark.parametrize(("module", "expected"), [("Two", Constant.LITERAL), ("NoGraph", Constant.NONE)])
def test_a_ready_program_is_marked_by_the_graph_of_its_module(
    found: dict[str, Any], module: str, expected: Constant
) -> None:
    assert found["ready"][module] == [Constant.NONE, expected]


def test_a_module_is_not_exported_for_outputs_that_can_be_judged(found: dict[str, Any]) -> None:
    assert found["judged"] == {"same": True, "exports": 0}


@pytest.fixture(scope="module")
def compiled(filled_by: Callable[[Path], Path]) -> tuple[Job, Bundle]:
    """A detector head, compiled for the CPU, and its bundle as it is read from the disk."""
    folder = filled_by(MODULES)
    return msgspec.json.decode((folder / "job.json").read_bytes(), type=Job), load_bundle(folder / "bundle")


def judged(compiled: tuple[Job, Bundle], folder: Path, changed: int = -1, element: int = 0, by: float = 0.0) -> Attempt:
    """Return the attempt of an execution that gave the references, but for one element of output `changed`."""
    job, bundle = compiled
    specs = bundle.manifest.outputs
    for sample in range(2):
        for index, spec in enumerate(specs):
            values = bundle.reference("fp32", sample, index).copy()
            if index == changed:
                values.flat[element] = not values.flat[element] if spec.dtype == "bool" else values.flat[element] + by
            values.tofile(folder / f"output_{sample}_{index}.raw")
    outputs = [{"shape": list(spec.shape), "dtype": spec.dtype, "nbytes": spec.nbytes} for spec in specs]
    inferences: list[dict[str, Any]] = [
        {"line": line, "warm_up_ns": [], "iterations_ns": [1000], "differing": {"count": 0, "executions": []}}
        for line in range(2)
    ]
    report = {
        "schema": 1, "ok": True, "exit_code": 0, "error": None, "method": "forward", "verification_ns": 1, "load_ns": 1,
        "inputs": [], "outputs": outputs, "inferences": inferences, "versions": {},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(report))
    raw = RawResult(
        job_id=job.id, serial="stub", workspace=PurePosixPath("/device"), folder=folder, started_ms=1, exit_code=0,
        run_seconds=1.0, push_seconds=0.0, pull_seconds=0.0,
    )  # fmt: skip
    return judge(job, bundle, raw)


def test_constants_of_the_graph_reach_the_judgement(compiled: tuple[Job, Bundle], tmp_path: Path) -> None:
    marks = {spec.name: spec.constant for spec in compiled[1].manifest.outputs}
    literal = dict.fromkeys(("stride", "anchors", "flags"), Constant.LITERAL)
    assert marks == {"boxes": Constant.NONE, "first": Constant.NONE, **literal}
    attempt = judged(compiled, tmp_path)
    assert (attempt.verdict, attempt.reason) == ("passed", "")
    assert "constant by the graph, compared exactly: output stride, output anchors, output flags" in attempt.notes


@pytest.mark.parametrize(("output", "by"), [("stride", 0.001), ("anchors", 0.001), ("flags", 1)])
def test_a_constant_that_the_device_changes_fails_within_its_limits(
    compiled: tuple[Job, Bundle], tmp_path: Path, output: str, by: float
) -> None:
    names = [spec.name for spec in compiled[1].manifest.outputs]
    attempt = judged(compiled, tmp_path, names.index(output), 1, by)
    assert (attempt.verdict, attempt.cause) == ("failed", "numerics")
    assert f"output {output} is constant by the graph" in attempt.reason


def test_a_live_output_may_differ_within_its_limits(compiled: tuple[Job, Bundle], tmp_path: Path) -> None:
    names = [spec.name for spec in compiled[1].manifest.outputs]
    assert judged(compiled, tmp_path, names.index("boxes"), 1, 0.001).verdict == "passed"
