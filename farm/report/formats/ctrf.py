"""RunView -> CTRF, the Common Test Report Format: JSON for dashboards and chat bots. Pure."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from farm import __version__
from farm.base.text import one_line, visible, with_texts
from farm.report.formats import export_format
from farm.report.model.format import short_log
from farm.report.model.summary import JobSummary, Outcome, RunSummary, Tone, summarize
from farm.results.attempt import Attempt, Verdict
from farm.store.records import RunView
from farm.store.values import jsonable

LOG_LIMIT = 20_000
"""Most characters of a log in a test."""

# Version of the format, and the namespace of ids: equal names give equal ids.
_VERSION = "0.0.0"
_IDS = uuid.UUID("6f0f7c52-6a63-5b0c-9d52-6661726d0001")

_STATUS = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.SKIPPED: "skipped",
    # The job may still run: the run continues, or is resumed.
    Outcome.NOT_RUN: "pending",
    # Known issues and infrastructure trouble do not count against the code under test.
    Outcome.KNOWN: "other",
    Outcome.INFRA: "other",
}


@export_format("ctrf", suffix="ctrf.json", about="Common Test Report Format, for dashboards and chat bots")
def render_ctrf(view: RunView) -> str:
    """Return the run as a CTRF document: one test per job, in the order of the run. Times are in ms."""
    summary = summarize(view)
    tests = [_test(job) for job in summary.jobs]
    document = {
        "reportFormat": "CTRF",
        "specVersion": _VERSION,
        "reportId": str(uuid.uuid5(_IDS, one_line(view.id))),
        "generatedBy": f"farm {__version__}",
        "results": {
            "tool": {"name": "farm", "version": view.fingerprint.get("farm", __version__)},
            "summary": _summary(summary, tests),
            "tests": tests,
            "environment": _environment(summary),
        },
    }
    return msgspec.json.format(msgspec.json.encode(with_texts(jsonable(document), visible)), indent=1).decode()


def _summary(summary: RunSummary, tests: list[dict[str, Any]]) -> dict[str, Any]:
    view = summary.view
    counts = dict.fromkeys(("passed", "failed", "skipped", "pending", "other"), 0)
    for test in tests:
        counts[test["status"]] += 1
    ends = [test["stop"] for test in tests if "stop" in test]
    stop = view.finished_ms if view.finished_ms is not None else max([view.started_ms, *ends])
    return {
        "tests": len(tests),
        **counts,
        "suites": len({job.job.suite for job in summary.jobs}),
        "start": view.started_ms,
        "stop": stop,
        "extra": {"verdict": summary.verdict_line, "needs_attention": summary.attention},
    }


def _test(job: JobSummary) -> dict[str, Any]:
    view, attempt = job.job, job.attempt
    # A skipped attempt, as on a virtual device, executed nothing.
    others = [
        (number, one)
        for number, one in enumerate(view.attempts, start=1)
        if one is not attempt and one.verdict is not Verdict.SKIPPED
    ]
    test: dict[str, Any] = {
        "id": str(uuid.uuid5(_IDS, one_line(view.id))),
        "name": view.id or "unnamed",
        "status": _STATUS[job.outcome],
        "rawStatus": job.outcome.value,
        "duration": round(job.seconds * 1000),
        "suite": [view.suite],
        "tags": [tag for tag in (view.soc, view.backend, view.precision, job.kind) if tag],
        "parameters": {"soc": view.soc, "backend": view.backend, "precision": view.precision, **view.options},
        "retries": len(others),
        # Trouble of the farm or a device makes no test flaky.
        "flaky": job.outcome is Outcome.PASSED and any(one.verdict is Verdict.FAILED for _, one in others),
    }
    begun = [one for one in view.attempts if one.started_ms]
    log = attempt.log if attempt and job.outcome in {Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA} else ""
    optional = {
        "start": min((one.started_ms for one in begun), default=0),
        "stop": max(map(_stop, begun), default=0),
        "message": _message(job),
        "trace": short_log(log, LOG_LIMIT),
        "device": f"{job.device} ({job.kind})" if job.device and job.kind else job.device,
        "retryAttempts": [_retry(number, one) for number, one in others],
    }
    return {**test, **{name: value for name, value in optional.items() if value}, "extra": _extra(job)}


def _message(job: JobSummary) -> str:
    if job.outcome is Outcome.KNOWN and job.attempt is not None:
        return f"known issue: {job.attempt.known_issue}: {job.reason}"
    return "" if job.outcome is Outcome.PASSED else job.reason


def _retry(number: int, attempt: Attempt) -> dict[str, Any]:
    retry: dict[str, Any] = {
        "attempt": number,
        "status": "other" if attempt.verdict is Verdict.INFRA else attempt.verdict.value,
        "duration": _stop(attempt) - attempt.started_ms,
        "extra": {"verdict": attempt.verdict.value, "stage": attempt.stage.value, "device": attempt.device},
    }
    if attempt.started_ms:
        retry |= {"start": attempt.started_ms, "stop": _stop(attempt)}
    return {**retry, "message": attempt.reason} if attempt.reason else retry


def _extra(job: JobSummary) -> dict[str, Any]:
    numbers = {name: value for name, value in msgspec.structs.asdict(job.numbers).items() if value is not None}
    extra: dict[str, Any] = {"numbers": numbers, "device_kind": job.kind, "run_again": job.rerun}
    if job.host_time:
        extra["times_are"] = job.host_time
    if job.attempt is not None:
        extra |= {"stage": job.attempt.stage.value, "cause": job.attempt.cause.value, "notes": list(job.attempt.notes)}
    return extra


def _environment(summary: RunSummary) -> dict[str, Any]:
    view = summary.view
    kinds = sorted({device.kind for device in view.devices})
    return {
        "reportName": view.id,
        "appName": "ExecuTorch",
        "appVersion": view.fingerprint.get("executorch", ""),
        "testEnvironment": ", ".join(kinds),
        "healthy": summary.tone is Tone.PASSED,
        "extra": {"command": view.command, "user": view.user, "host": view.host, "fingerprint": view.fingerprint},
    }


def _stop(attempt: Attempt) -> int:
    seconds = attempt.seconds if -1e12 < attempt.seconds < 1e12 else 0.0
    return attempt.started_ms + max(0, round(seconds * 1000))
