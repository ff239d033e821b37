"""Job with its bundle and the files of a device: real files in the layout of the packages that make them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import flatbuffers
import made
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from farm.builds.bundles.bundle import Bundle, TensorSpec
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Attempt
from farm.suites.suite import Case, Expectation, InputSpec, Job, KnownIssue, Limits, Metric, Target, Tolerance

# A loaded machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])

DECIBELS = Tolerance(fp32=Limits(sqnr_db=20.0), quantized=Limits(sqnr_db=30.0))
SHAPE = (2, 3, 4)


def measured(attempt: Attempt) -> dict[str, tuple[float, ...]]:
    return {measurement.metric: measurement.samples for measurement in attempt.measurements}


class Execution:
    """Successful execution, which tests change."""

    def __init__(self, root: Path, samples: int = 2, dtypes: Sequence[str] = ("float32",)) -> None:
        self.samples, self.tolerance = samples, DECIBELS
        self.known_issues: tuple[KnownIssue, ...] = ()
        self.expect: tuple[Expectation, ...] = ()
        self.metrics: tuple[Metric, ...] = ()
        self.deterministic: bool | None = None
        self.folder, self.bundle_folder = root / "raw", root / "bundle"
        self.folder.mkdir()
        specs = tuple(TensorSpec(SHAPE, dtype) for dtype in dtypes)
        self.manifest = made.manifest(
            key="0123456789abcdef", job_id="suite/case[SM8650-htp-8a8w]", samples=samples, outputs=specs,
            inputs=(TensorSpec((1,), "float32"),), pte_bytes=62976, delegated_ops=7, seconds={"total": 2.0},
        )  # fmt: skip
        self.raw: dict[str, Any] = {"exit_code": 0, "run_seconds": 0.5, "push_seconds": 0.25, "pull_seconds": 0.25}
        self.report: dict[str, Any] = {
            "schema": 1, "ok": True, "exit_code": 0, "error": None, "method": "forward", "verification_ns": 60_000,
            "load_ns": 3_500_000, "inputs": [], "versions": {"executorch": "1.5.1"},
            "outputs": [{"shape": list(SHAPE), "dtype": spec.dtype, "nbytes": spec.nbytes} for spec in specs],
            "inferences": [
                {"line": n, "warm_up_ns": [9_000_000], "iterations_ns": [3_000_000 + n, 4_000_000],
                 "differing": {"count": 0, "executions": []}}
                for n in range(samples)
            ],
        }  # fmt: skip
        random = np.random.default_rng(0)
        for sample in range(samples):
            for index, spec in enumerate(specs):
                self.set_both(sample, index, (random.standard_normal(SHAPE) * 5).astype(spec.dtype))

    def set_reference(self, sample: int, index: int, values: np.ndarray, kind: str = "") -> None:
        for name in (kind,) if kind else ("fp32", "quantized"):
            folder = self.bundle_folder / f"reference_{name}"
            folder.mkdir(parents=True, exist_ok=True)
            values.tofile(folder / f"output_{sample}_{index}.raw")

    def set_output(self, sample: int, index: int, values: np.ndarray) -> None:
        values.tofile(self.folder / f"output_{sample}_{index}.raw")

    def output(self, sample: int, index: int) -> np.ndarray:
        spec = self.manifest.outputs[index]
        return np.fromfile(self.folder / f"output_{sample}_{index}.raw", spec.dtype).reshape(SHAPE)

    def set_both(self, sample: int, index: int, values: np.ndarray, kind: str = "") -> None:
        """Set an output to what its reference has."""
        self.set_reference(sample, index, values, kind)
        self.set_output(sample, index, values)

    def scale_output(self, factor: float, sample: int = 0, index: int = 0) -> None:
        values = self.output(sample, index)
        self.set_output(sample, index, values * values.dtype.type(factor))

    def fail(
        self, stage: str, message: str, code: int | None = None, line: int | None = None, exit_code: int = 4
    ) -> None:
        """Let the runner report an error."""
        error = {"stage": stage, "message": message, "code": code, "line": line}
        self.report |= {"ok": False, "exit_code": exit_code, "error": error, "inferences": []}
        self.raw["exit_code"] = exit_code

    @property
    def job(self) -> Job:
        case = Case(
            "suite", "case", ".module:Module", (InputSpec((1,)),), samples=self.samples,
            tolerances=dict.fromkeys(("8a8w", "fp16a8w"), self.tolerance), known_issues=self.known_issues,
            expect=self.expect, metrics=self.metrics, deterministic=self.deterministic,
        )  # fmt: skip
        return Job(case, Target("SM8650", self.manifest.backend, self.manifest.precision))

    def judge(self, *, write_report: bool = True, any_runner: bool = False) -> Attempt:
        from farm.results.judge import judge

        if write_report:
            (self.folder / "result.json").write_text(json.dumps(self.report))
        raw = RawResult(
            job_id=self.job.id, serial="emulator-5554", workspace=PurePosixPath("/device"), folder=self.folder,
            started_ms=1, **self.raw,
        )  # fmt: skip
        return judge(self.job, Bundle(self.bundle_folder, self.manifest), raw, any_runner=any_runner)

    def on_the_cpu(self) -> None:
        """Make it a baseline of which XNNPACK took nothing."""
        self.replace_manifest(
            backend="xnnpack", precision="fp32", references=("fp32",), delegates={}, delegated_ops=0,
            fallback_ops={"aten.cumsum.default": 1},
        )  # fmt: skip
        shutil.rmtree(self.bundle_folder / "reference_quantized")

    def replace_manifest(self, **changes: Any) -> None:
        self.manifest = msgspec.structs.replace(self.manifest, **changes)


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(tmp_path)


@pytest.fixture
def make_execution(tmp_path: Path) -> Callable[..., Execution]:
    return lambda **how: Execution(tmp_path, **how)


def write_etdump(blocks: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> bytes:
    """Return an ETDump as the event tracer writes it: size-prefixed, its slots as in etdump_schema_flatcc.fbs."""
    builder = flatbuffers.Builder(1024)

    def table(*slots: tuple[str, int, int]) -> int:
        builder.StartObject(8)
        for kind, slot, value in slots:
            getattr(builder, f"Prepend{kind}Slot")(slot, value, -1 if kind == "Int32" else 0)
        return int(builder.EndObject())

    def vector(offsets: Sequence[int]) -> int:
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())

    def event_table(event: dict[str, Any]) -> int:
        slots = [
            (_OFFSET, slot, builder.CreateString(event[key]))
            for slot, key in ((0, "name"), (4, "delegate"))
            if key in event
        ]
        slots.append(("Int32", 3, event.get("debug_id", -1)))
        if "debug" in event:  # etdump.DebugEvent
            return table((_OFFSET, 2, table(*slots)))
        slots += [("Int32", 2, event.get("instruction", -1)), ("Uint64", 6, event.get("start", 0))]
        return table((_OFFSET, 0, table(*slots, ("Uint64", 7, event["end"]))))

    runs = []
    for name, events in blocks:
        all_of_it = vector([event_table(event) for event in events])
        runs.append(table((_OFFSET, 0, builder.CreateString(name)), (_OFFSET, 3, all_of_it)))
    builder.FinishSizePrefixed(table((_OFFSET, 1, vector(runs))), b"ED00")
    return bytes(builder.Output())


_OFFSET = "UOffsetTRelative"


def inference_block(*cycles: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the block of one inference with one delegate call, as QNN 2.51 fills it at profile level 2."""
    rows = [{"delegate": f"aten_relu_default:OpId_{n} (cycles)", "end": count} for n, count in enumerate(cycles)]
    return "Execute", [
        {"delegate": "Num times yield occured (count)", "end": 3, "instruction": 0},
        {"delegate": "Accelerator (execute) time (cycles)", "end": sum(cycles), "instruction": 0},
        *rows,
        {"delegate": "QNN (execute) time (us)", "end": 12444, "instruction": 0},
        {"name": "DELEGATE_CALL", "start": 100, "end": 900, "instruction": 0},
        {"name": "Method::execute", "start": 90, "end": 910, "instruction": 0},
    ]


LOAD_BLOCK = ("Default", [{"name": "Method::init", "start": 10, "end": 80}])


@pytest.fixture
def etdump() -> Callable[..., bytes]:
    """Return a function from the cycles of each inference's nodes to an ETDump."""
    return lambda *inferences: write_etdump([LOAD_BLOCK, *(inference_block(*cycles) for cycles in inferences)])
