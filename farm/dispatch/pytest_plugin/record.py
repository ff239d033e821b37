"""Conversion of tests to jobs, and of pytest's reports to attempts. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import msgspec
import pytest

from farm.base.text import bounded_log, reason_line
from farm.policy.retries import Tried, as_recorded, classify, tried
from farm.results.attempt import Attempt, Cause, Measurement, OperatorProfile, Stage, Verdict
from farm.store.values import storable
from farm.suites.suite import Case, Job, Target

SUITE = "pytest"
"""Suite of all tests."""

OPEN = "farm_open"
"""Attribute of a report with the cause of a failure that may be the device's fault as well."""

SERIAL = "farm_serial"
"""Attribute of a report: the device, for a worker that dies before its last report."""

PROCESS = "farm_process"
"""Attribute of a report: id of the process that has leased the device."""

FACTS = "farm_facts"
"""Attribute of a test's last report: facts of its worker that pytest does not have."""

# The id of a job has 512 characters in the store, with suite and target; parameters can make a node id longer.
_NAME_CHARS = 400
_PHASES = ("setup", "call", "teardown")


class DeviceFacts(msgspec.Struct, frozen=True):
    """Facts of a worker about a test that has ended."""

    device: str
    """Serial of the device."""
    fence: int
    """Fence of the lease; 0 without a lease."""
    infra: str = ""
    """Fault of the farm or the device; empty for none."""
    stage: Stage = Stage.EXECUTE
    """Stage of the failure, if any."""
    cause: Cause = Cause.NONE
    reason: str = ""
    """Reason of a failed test by upstream's own record; empty for pytest's."""
    bundle_key: str = ""
    measurements: tuple[Measurement, ...] = ()
    """Measurements of the test's program; none after several programs."""
    operators: tuple[OperatorProfile, ...] = ()
    notes: tuple[str, ...] = ()
    earlier: tuple[Tried, ...] = ()
    """Attempts of the test on other devices."""
    others: int = 0
    """Number of devices that might have tried the test again."""

    def packed(self) -> str:
        """Return the facts, infinities included, as text that any plugin can carry with a report."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()


class UpstreamResult(msgspec.Struct, frozen=True):
    """Result of a test by upstream's own record."""

    reason: str
    stage: Stage
    cause: Cause
    notes: tuple[str, ...]


def unpack(report: pytest.TestReport) -> DeviceFacts | None:
    """Return the worker's facts in a report; None if the worker died before, or had no facts."""
    packed = getattr(report, FACTS, None)
    return msgspec.msgpack.decode(base64.b64decode(packed), type=DeviceFacts) if isinstance(packed, str) else None


def job_of_test(nodeid: str, soc: str, backend: str, source: str) -> Job:
    """Return the job of a test: `pytest/tests/test_net.py::test_net[SM8650-htp]`.

    `source` is the hash of its file. The precision of a test is unknown, so that its target has none.
    """
    name = storable(nodeid)
    if len(name) > _NAME_CHARS:
        name = f"{name[: _NAME_CHARS - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    case = Case(SUITE, name, module=f"nodeid:{storable(nodeid)}", inputs=(), kwargs={"source": source})
    return Job(case, Target(soc, backend, ""))


def attempt_of(job_id: str, reports: Sequence[pytest.TestReport]) -> Attempt:
    """Return the attempt of one execution of a test, from the reports of the test and its subtests.

    The verdict takes the test's earlier attempts on other devices into account.
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
    return as_recorded(attempt, history, classify(history, others=facts.others))


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
    """Return the attempt of a collection error, for example of a module with a failed import."""
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
    # A skipped subtest does not skip the others.
    skip = next((report for report in reports if type(report) is pytest.TestReport and report.skipped), None)
    if skip is not None:
        return Verdict.SKIPPED, Stage.EXECUTE, Cause.NONE, _skip_reason(skip), "", ()
    return Verdict.PASSED, Stage.DONE, Cause.NONE, "", "", ()


def _failure(bad: Sequence[pytest.TestReport], facts: DeviceFacts) -> _Ending:
    reason = (facts.reason or _reason(bad[0])) + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    if bad[0].when not in _PHASES:
        # This is xdist's own report of a dead worker.
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
    # The first line of an assertion has the compared values.
    return where + (message.strip().partition("\n")[0] or "it failed and did not say why")


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else _last_line(report.longreprtext)
    return reason.removeprefix("Skipped: ").strip() or "skipped"


def _text(report: pytest.TestReport) -> str:
    sections = [f"---- {title} ----\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *sections])


def _last_line(text: str) -> str:
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    # Pytest marks the lines of an exception by this prefix.
    return last.removeprefix("E   ")
