"""Events of a device -> its health. Pure: docs/explanation/health.md."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

FAILURES_IN_A_ROW = 8
"""So many, with no job finished in between, put a device into quarantine."""


class Health(StrEnum):
    """Health of a device, which decides whether it gets jobs."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Something went wrong on it: it has to pass a health check before the next job."""
    QUARANTINED = "quarantined"
    """The device gets no job until a person releases it."""


class Event(StrEnum):
    """Event of a device that concerns its health."""

    JOB_DONE = "job_done"
    """A job came to a verdict on it that is not infra, passed or failed: the device did its part."""
    INFRA = "infra"
    """An attempt on it was infra."""
    OUTVOTED = "outvoted"
    """A job that had ended the runner here, or given wrong numbers, passed on another device."""
    CHECK_PASSED = "check_passed"
    CHECK_FAILED = "check_failed"
    RECOVERED = "recovered"
    """The recovery ladder ended with a device that answers."""
    GAVE_UP = "gave_up"
    """The recovery ladder ended without."""
    RELEASED = "released"
    """A person took it out of quarantine."""


class HealthEvent(msgspec.Struct, frozen=True):
    """A recorded event in the health of a device."""

    device: str
    """Id of the device."""
    event: str
    """`health_check`, a cause of `farm.results.attempt`, or a step of recovery."""
    state: str
    """Health of the device from this event on."""
    reason: str
    detail: dict[str, str | float] = {}
    latency_ns: tuple[float, ...] = ()
    """Measured by a health check."""
    time_ms: int = 0
    """0 is now, on the database's clock."""


class HealthMark(msgspec.Struct, frozen=True):
    """Event of a device with its cause."""

    event: Event
    cause: str = ""
    """Cause of a failure: a value of `farm.results.attempt.Cause`."""
    reason: str = ""


RECOVERY = "recovery"
"""Event of one recovery step: it is recorded and has no effect on health by itself."""

# Causes of failures that are no device's fault.
NOT_DEVICE_CAUSES = frozenset(
    {"adb_server", "lease", "worker", "builder", "compile", "disk", "local", "request", "infeasible"}
)
# Cause for space taken by other files: no fault of the device, and no recovery step frees it. No job runs without
# space, so that the device has to show free space again.
FULL = "space"
# Causes that may be the job's, until another device has tried it: a suite full of programs that crash, are refused or
# compute wrong numbers must not put every device into quarantine.
OPEN_CAUSES = frozenset({"crash", "hang", "numerics", "refused"})
RUNTIME = "runtime"
"""Libraries that farm pushed do not fit: no fault of the device, and no recovery changes it; but no job runs with them,
so that a health check has to pass."""
_NEVER_QUARANTINE = frozenset({FULL, RUNTIME})


def is_doubtful(mark: HealthMark) -> bool:
    """Tell whether a device has to show by a health check, after this event, that it works."""
    return mark.event is Event.OUTVOTED or (mark.event is Event.INFRA and mark.cause not in NOT_DEVICE_CAUSES)


def counts(mark: HealthMark) -> bool:
    """Tell whether an event brings the device nearer to quarantine."""
    return is_doubtful(mark) and not (mark.event is Event.INFRA and mark.cause in OPEN_CAUSES | _NEVER_QUARANTINE)


def next_health(state: Health, recent: Sequence[HealthMark], mark: HealthMark) -> tuple[Health, str]:
    """Return the health of a device after `mark` and the reason in one line, empty for a healthy device.

    `recent` has its events before, oldest first; a dozen is enough. The reason is empty also for an unchanged state,
    whose earlier reason holds.
    """
    if mark.event is Event.RELEASED:
        return Health.SUSPECT, "released from quarantine: a health check has to pass first"
    if state is not Health.QUARANTINED:
        if problem := _quarantine(recent, mark):
            return Health.QUARANTINED, _because(problem, mark)
        if problem := _doubt(mark):
            return Health.SUSPECT, _because(problem, mark)
        if mark.event in {Event.CHECK_PASSED, Event.JOB_DONE}:
            return Health.HEALTHY, ""
    return state, ""


def _quarantine(recent: Sequence[HealthMark], mark: HealthMark) -> str:
    """Return why `mark` puts a device into quarantine, empty when it does not."""
    if mark.cause in NOT_DEVICE_CAUSES | _NEVER_QUARANTINE:
        return ""
    if mark.event is Event.GAVE_UP:
        return "it could not be brought back"
    if mark.event is Event.CHECK_FAILED and _ladder_was_climbed(recent):
        return "its health check fails, also after recovery"
    row = _failures_in_a_row((*recent, mark))
    if counts(mark) and row >= FAILURES_IN_A_ROW:
        return f"{row} failures in a row, no job finished in between; the last"
    return ""


def _doubt(mark: HealthMark) -> str:
    """Return why `mark` makes a device suspect, empty when it does not."""
    if mark.cause == FULL:
        return "its storage is full"
    if mark.cause == RUNTIME:
        return "its runtime does not fit"
    if mark.event is Event.CHECK_FAILED:
        return "" if mark.cause in NOT_DEVICE_CAUSES else "its health check fails"
    if mark.event is Event.OUTVOTED:
        return "other devices did what failed here"
    if mark.event is Event.INFRA and mark.cause in OPEN_CAUSES:
        return "a job that failed here is tried on another device"
    return "a job did not come to its end" if is_doubtful(mark) else ""


def _failures_in_a_row(marks: Sequence[HealthMark]) -> int:
    """Return the number of failures since the last finished job or release by a person.

    A passed health check proves too little to reset the count.
    """
    row = 0
    for mark in reversed(marks):
        if mark.event in {Event.JOB_DONE, Event.RELEASED}:
            break
        row += counts(mark)
    return row


def _ladder_was_climbed(recent: Sequence[HealthMark]) -> bool:
    """Tell whether a recovery has come since the device was last known to be well, or was released."""
    for mark in reversed(recent):
        if mark.event is Event.RECOVERED:
            return True
        if mark.event in {Event.CHECK_PASSED, Event.JOB_DONE, Event.RELEASED}:
            return False
    return False


def _because(what: str, mark: HealthMark) -> str:
    detail = " ".join(part for part in (f"({mark.cause})" if mark.cause else "", mark.reason) if part)
    return f"{what}: {detail}" if detail else what
