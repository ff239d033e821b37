"""Compared jobs of two sides with a known result."""

from __future__ import annotations

from typing import Any

import msgspec

from farm.report.model.compare import (
    ComparedJob,
    CompareReport,
    CompareSide,
    CompiledFacts,
    PairedMetric,
    SideResult,
)
from farm.results.analysis.confirmation import Answer


def compiled(program: str = "p", **more: Any) -> CompiledFacts:
    fields: dict[str, Any] = {
        "key": f"key of {program}", "cached": False, "program": program, "data": "d", "seconds": {"total": 2.0},
        "peak_bytes": 900_000_000, "traced": False, "pte_bytes": 1000, "partitions": 1, "delegated_ops": 3,
        "fallback_ops": {},
    }  # fmt: skip
    return CompiledFacts(**{**fields, **more})


def side(program: str | None = "p", verdict: str = "", reason: str = "", **more: Any) -> SideResult:
    facts = {name: more.pop(name) for name in CompiledFacts.__struct_fields__ if name in more}
    return SideResult(
        job_id="ops/add[SM8650-htp-8a8w]",
        compiled=None if program is None else compiled(program, **facts),
        verdict=verdict,
        stage=more.pop("stage", "numerics" if reason else ""),
        reason=reason,
        **more,
    )


def passed(program: str = "p", **more: Any) -> SideResult:
    return side(program, "passed", stage="done", **more)


def broken(reason: str = "the pass raised ValueError", **more: Any) -> SideResult:
    return side(None, "failed", reason, stage="build", **more)


def moved(metric: str = "htp_cycles", change: float = 0.1, answer: str = "worse", **more: Any) -> PairedMetric:
    unit = {"htp_cycles": "cycles", "latency": "ns"}.get(metric, "dB")
    fields: dict[str, Any] = {
        "metric": metric, "unit": unit, "a": 1000.0, "b": 1100.0, "change": change, "low": change / 2,
        "high": change * 2, "pairs": 10, "p_value": 0.0005, "decides": True,
        "worse": Answer.CONFIRMED if answer == "worse" else Answer.REFUTED,
        "better": Answer.CONFIRMED if answer == "better" else Answer.REFUTED,
    }  # fmt: skip
    return PairedMetric(**{**fields, **more})


def job(a: SideResult, b: SideResult, *metrics: PairedMetric, **more: Any) -> ComparedJob:
    executed = "passed" in (a.verdict, b.verdict) or bool(metrics)
    fields = {"name": "ops/add[SM8650-htp-8a8w]", "executed": executed, "metrics": metrics}
    return ComparedJob(a=a, b=b, **{**fields, **more})


def report(*jobs: ComparedJob, **more: Any) -> CompareReport:
    facts = {"executorch": "1.5.0", "torch": "2.13.0", "qnn": "v2.51"}
    sides = (
        CompareSide(label="A", name="origin/main of here", facts=facts),
        CompareSide(
            label="B", name="here", facts=facts | {"executorch": "1.5.1", "commit": "1a2b3c" * 7, "dirty": "yes"}
        ),
    )
    fields: dict[str, Any] = {
        "id": "20261123-001422-b34918", "command": "farm perf compare --checkout . --base origin/main",
        "started_ms": 1_795_392_000_000, "seconds": 75.0, "kind": "virtual", "devices": ("virtual-SM8650-0",),
        "sides": sides, "pairs": 10,
        "jobs": tuple(
            msgspec.structs.replace(one, name=f"ops/case_{number}[SM8650-htp-8a8w]") for number, one in enumerate(jobs)
        ),
    }  # fmt: skip
    return CompareReport(**{**fields, **more})


HOSTILE = "<script>alert(1)</script> | [x](http://x) \x1b[31m\u202e @all"


def everything() -> CompareReport:
    """Return a comparison with a job of every kind."""
    return report(
        job(passed("p"), broken(HOSTILE, log=HOSTILE)),
        job(passed("p"), passed("q", fallback_ops={HOSTILE: 2}, pte_bytes=900), moved(change=0.2)),
        job(side("p"), side("q"), left_out="no device was left"),
        job(broken(), passed("q")),
        job(
            passed("p"),
            passed("q"),
            moved("sqnr_fp32[0]", 2.0, "better", a=30.0, b=32.0),
            moved(change=-0.1, answer="better"),
        ),
        job(broken(), broken()),
        job(passed("p"), passed("r")),
        job(side("p"), side("p")),
        notes=("one runner", HOSTILE),
    )
