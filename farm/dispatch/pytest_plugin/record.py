"""Tests -> jobs, and reports of pytest -> attempts. Pure."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.text import bounded_log, reason_line
from farm.policy.retries import Tried, classify, settle, tried
from farm.results.attempt import Attempt, Cause, Measurement, OperatorProfile, Stage, Verdict
from farm.store.values import storable
from farm.suites.suite import Case, Job, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

SUITE = "pytest"
"""The suite that every test belongs to."""

OPEN = "farm_open"
"""Attribute of a report of a failure that may be the device's as well: its cause."""

SERIAL = "farm_serial"
"""Attribute of a report: the device, for a worker that dies before the last one."""

PROCESS = "farm_process"
"""Attribute of a report: id of the process that has leased the device."""

FACTS = "farm_facts"
"""Attribute of a test's last report: what its worker knows that pytest does not."""

# The id of a job has 512 characters in the store, with suite and target; parameters can make a node id longer.
_NAME_CHARS = 400
_PHASES = ("setup", "call", "teardown")


class DeviceFacts(msgspec.Struct, frozen=True):
    """What a worker knows of a test that has ended."""

    device: str
    """Serial."""
    fence: int
    """Of the lease; 0 without one."""
    infra: str = ""
    """What the farm or the device did wrong; empty when nothing."""
    stage: Stage = Stage.EXECUTE
    """Where it failed, if it did."""
    cause: Cause = Cause.NONE
    bundle_key: str = ""
    measurements: tuple[Measurement, ...] = ()
    """Of the one program that it ran; none where it ran several."""
    operators: tuple[OperatorProfile, ...] = ()
    notes: tuple[str, ...] = ()
    earlier: tuple[Tried, ...] = ()
    """Attempts of the test on other devices."""
    others: int = 0
    """Devices that might have tried it once more."""

    def packed(self) -> str:
        """Return it as text that every plugin can carry with a report, infinities included."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()


def unpack(report: pytest.TestReport) -> DeviceFacts | None:
    """Return what the worker sent with a report; None where it died before, or had nothing to send."""
    packed = getattr(report, FACTS, None)
    return msgspec.msgpack.decode(base64.b64decode(packed), type=DeviceFacts) if isinstance(packed, str) else None


def job_of_test(nodeid: str, soc: str, backend: str, source: str) -> Job:
    """Return the job of a test: `pytest/tests/test_net.py::test_net[SM8650-htp]`.

    `source` is the hash of its file. A test has no precision that farm knows of.
    """
    name = storable(nodeid)
    if len(name) > _NAME_CHARS:
        name = f"{name[: _NAME_CHARS - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    case = Case(SUITE, name, module=f"nodeid:{storable(nodeid)}", inputs=(), kwargs={"source": source})
    return Job(case, Target(soc, backend, ""))


def attempt_of(job_id: str, reports: Sequence[pytest.TestReport]) -> Attempt:
    """Return what the reports of one execution of a test say, those of its subtests among them.

    The verdict takes in the devices that tried it before.
    """
    facts = next((facts for report in reversed(reports) if (facts := unpack(report)) is not None), None)
    if facts is None:
        # A dead worker sends no facts.
        serial = next((str(found) for report in reports if (found := getattr(report, SERIAL, ""))), "")
        return _attempt_of(job_id, reports, DeviceFacts(serial, 0))
    attempt = _attempt_of(job_id, reports, facts)
    is_undecided = any(getattr(report, OPEN, "") for report in reports) and not attempt.known_issue
    if not (facts.earlier or is_undecided):
        return attempt
    history = (*facts.earlier, tried(attempt))
    return settle(attempt, history, classify(history, others=facts.others))


def _attempt_of(job_id: str, reports: Sequence[pytest.TestReport], facts: DeviceFacts) -> Attempt:
    starts = [start for report in reports if (start := getattr(report, "start", 0.0))]
    bad = [report for report in reports if report.failed or report.outcome == "rerun"]  # type: ignore[comparison-overlap]
    verdict, stage, cause, reason, known_issue, notes = _ending(reports, bad, facts)
    return Attempt(
        job_id,
        verdict,
        stage,
        reason_line(reason),
        device=facts.device,
        started_ms=int(min(starts) * 1000) if starts else 0,
        seconds=sum(report.duration for report in reports if report.when in _PHASES),
        bundle_key=facts.bundle_key,
        known_issue=reason_line(known_issue),
        measurements=() if verdict is Verdict.INFRA else facts.measurements,
        operators=facts.operators,
        log=bounded_log("\n".join(_text(report) for report in (bad or _shown(reports)))),
        notes=tuple(map(reason_line, (*facts.notes, *notes))),
        cause=cause,
    )


def collection_failure(job_id: str, report: pytest.CollectReport) -> Attempt:
    """Return the attempt of what could not be collected, as a module that cannot be imported."""
    reason = reason_line(_last_line(report.longreprtext)) or "it cannot be collected"
    return Attempt(job_id, Verdict.FAILED, Stage.LOAD, reason, log=bounded_log(report.longreprtext))


_Ending = tuple[Verdict, Stage, Cause, str, str, tuple[str, ...]]
"""Verdict, stage, cause, reason, known issue, notes."""


def _ending(reports: Sequence[pytest.TestReport], bad: Sequence[pytest.TestReport], facts: DeviceFacts) -> _Ending:
    if bad:
        return _failure(bad, facts)
    expected = next((report for report in reports if hasattr(report, "wasxfail")), None)
    if expected is not None:
        why = str(expected.wasxfail).removeprefix("reason: ") or "it is expected to fail"
        if expected.skipped:
            return Verdict.FAILED, facts.stage, facts.cause, _reason(expected), f"xfail: {why}", ()
        return Verdict.PASSED, Stage.DONE, Cause.NONE, "", "", (f"expected to fail, and passed: {why}",)
    # A subtest that was skipped leaves the others.
    skip = next((report for report in reports if type(report) is pytest.TestReport and report.skipped), None)
    if skip is not None:
        return Verdict.SKIPPED, Stage.EXECUTE, Cause.NONE, _skip_reason(skip), "", ()
    return Verdict.PASSED, Stage.DONE, Cause.NONE, "", "", ()


def _failure(bad: Sequence[pytest.TestReport], facts: DeviceFacts) -> _Ending:
    reason = _reason(bad[0]) + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    if bad[0].when not in _PHASES:
        # xdist's own report of a worker that is gone.
        return Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, reason, "", ()
    if facts.infra:
        return Verdict.INFRA, facts.stage, facts.cause, facts.infra, "", ()
    by_plugin = bad[0].outcome == "rerun" and not getattr(bad[0], OPEN, "")  # type: ignore[comparison-overlap]
    notes = ("a plugin ran it again",) if by_plugin else ()
    return Verdict.FAILED, facts.stage, facts.cause, reason, "", notes


def _shown(reports: Sequence[pytest.TestReport]) -> list[pytest.TestReport]:
    return [report for report in reports if report.skipped and hasattr(report, "wasxfail")]


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else _last_line(report.longreprtext)
    where = "" if report.when in ("call", "???") else f"{report.when}: "
    # An assertion's first line says what was compared.
    return where + (message.strip().partition("\n")[0] or "it failed and did not say why")


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else _last_line(report.longreprtext)
    return reason.removeprefix("Skipped: ").strip() or "skipped"


def _text(report: pytest.TestReport) -> str:
    sections = [f"---- {title} ----\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *sections])


def _last_line(text: str) -> str:
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    # How pytest marks the lines of an exception.
    return last.removeprefix("E   ")
