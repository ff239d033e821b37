"""RunView -> records of PyTorch's benchmark database, version 3, which ExecuTorch's dashboard reads. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from farm.base.text import one_line
from farm.report.formats import export_format
from farm.report.model.summary import JobSummary, Outcome, RunSummary, summarize
from farm.results.attempt import Measurement
from farm.store.records import DeviceView, RunView
from farm.suites.figures import figure_of

_TEXT_LIMIT = 1000
_FAILURE = "FAILURE_REPORT"
# Metric names that the dashboard knows; other metrics keep farm's name, with the unit.
_NAMES = {"latency": "avg_inference_latency"}
_FAILED = frozenset({Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA})
_REPOSITORIES = {"executorch": "pytorch/executorch", "torch": "pytorch/pytorch"}
_DEPENDENCIES = ("executorch", "torch", "torchao", "qnn")


@export_format("hud", suffix="hud.json", about="records of PyTorch's benchmark database, for ExecuTorch's dashboard")
def render_hud(view: RunView) -> str:
    """Return a JSON list: a record for each metric of each job that passed, and one for each job that failed.

    A value is the mean over the samples of the final attempt; for a figure of outputs it is the deciding value. Values
    that are not finite have no record, since neither JSON nor the database's column holds them.
    """
    summary = summarize(view)
    devices = {device.serial: device for device in view.devices}
    records = [record for job in summary.jobs for record in _records(summary, job, devices)]
    return msgspec.json.format(msgspec.json.encode(records), indent=1).decode()


def _records(summary: RunSummary, job: JobSummary, devices: Mapping[str, DeviceView]) -> Iterable[dict[str, Any]]:
    if job.outcome in _FAILED:
        metrics = [_failure(job)]
    elif job.outcome is Outcome.PASSED and job.attempt is not None:
        metrics = [metric for row in job.attempt.measurements if (metric := _metric(row)) is not None]
    else:
        metrics = []
    common = {
        "benchmark": _benchmark(summary, job),
        "model": _model(job),
        "inputs": {},
        "runners": [_runner(job, devices.get(job.device))],
        "dependencies": _dependencies(summary.view),
    }
    return ({**common, "metric": metric} for metric in metrics)


def _metric(row: Measurement) -> dict[str, Any] | None:
    samples = [sample / 1e6 for sample in row.samples] if row.unit == "ns" else row.samples
    if not samples or not all(map(math.isfinite, samples)):
        return None
    unit = "ms" if row.unit == "ns" else row.unit
    name = _NAMES.get(row.metric, row.metric)
    facts: dict[str, object] = {
        "unit": unit,
        "direction": row.direction.value,
        "samples": len(samples),
        "p50": statistics.median(samples),
        "least": min(samples),
        "greatest": max(samples),
    }
    if row.exact and all(float(sample).is_integer() for sample in row.samples):
        # The database has Float32, which represents integers exactly only up to 2^24.
        facts["exact"] = int(statistics.median_low(row.samples))
    return {
        "name": name if unit == "1" else f"{_text(name)}({_text(unit)})",
        "benchmark_values": [statistics.fmean(samples) if figure_of(row.metric) is None else row.value],
        "target_value": 0,
        "extra_info": _strings(facts),
    }


def _failure(job: JobSummary) -> dict[str, Any]:
    attempt = job.attempt
    facts = {"verdict": job.outcome.value, "reason": job.reason}
    if attempt is not None:
        facts |= {"stage": attempt.stage.value, "cause": attempt.cause.value, "known_issue": attempt.known_issue}
    return {"name": _FAILURE, "benchmark_values": [0], "target_value": 0, "extra_info": _strings(facts)}


def _benchmark(summary: RunSummary, job: JobSummary) -> dict[str, Any]:
    view = summary.view
    facts = {
        "app_type": "farm",
        "run": view.id,
        "suite": job.job.suite,
        "started_ms": view.started_ms,
        "attempts": len(job.job.attempts),
        "device_kind": job.kind,
        **{f"fingerprint.{name}": value for name, value in view.fingerprint.items()},
    }
    return {"name": "ExecuTorch", "mode": "inference", "dtype": _text(job.job.precision), "extra_info": _strings(facts)}


def _model(job: JobSummary) -> dict[str, Any]:
    view = job.job
    facts = {"job": view.id, "module": view.case_module, "case_version": view.case_version, "soc": view.soc}
    facts |= {f"option.{name}": value for name, value in view.options.items()}
    return {
        "name": _text(view.case),
        "type": _text(view.suite),
        "backend": _text(view.backend),
        "origins": [],
        "extra_info": _strings(facts),
    }


def _runner(job: JobSummary, device: DeviceView | None) -> dict[str, Any]:
    soc = f"{job.job.soc}, simulated" if job.virtual else job.job.soc
    soc = f"{job.job.soc}, stub of QNN" if job.stub else soc
    facts = {"device_kind": job.kind, "soc": job.job.soc}
    if device is not None:
        facts |= {"build": device.build, "times_are": job.host_time or "those of the device"}
    return {
        "name": _text(job.device),
        # A chart shows only this text, so it marks a simulator: times of a simulator must not pass for a phone's.
        "type": _text(f"{job.kind} {soc}" if job.kind else "no device"),
        "cpu_info": _text(soc),
        # The memory is unknown here; the database has no value for unknown.
        "avail_mem_in_gb": 0,
        "total_mem_in_gb": 0,
        "extra_info": _strings(facts),
    }


def _dependencies(view: RunView) -> dict[str, Any]:
    return {
        name: {
            "repo": _REPOSITORIES.get(name, ""),
            "branch": "",
            "sha": "",
            "version": _text(view.fingerprint.get(name, "")),
            "extra_info": {},
        }
        for name in _DEPENDENCIES
        if name == "executorch" or name in view.fingerprint
    }


def _strings(facts: Mapping[str, object]) -> dict[str, str]:
    """Return facts as the database stores them: all values are text."""
    return {_text(name): _text(str(value)) for name, value in facts.items()}


def _text(text: str) -> str:
    return one_line(text, _TEXT_LIMIT)
