"""The status of a run and of the farm: newly red, what was not tested, devices that are not fit. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.flakiness import Record, Reliability
from farm.report.model import format as fmt
from farm.store.records import AlertRecord, AlertState, JobStatus, Remark, RunStatus, UnfinishedRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PASSED, _FAILED, _INFRA = "passed", "failed", "infra"


class Standing(StrEnum):
    """How a job stands, in the order in which somebody looks at them."""

    NEW_FAILURE = "new_failure"
    """It failed, and did not the last time that it had a verdict, or never had one."""
    STILL_FAILING = "still_failing"
    STALE = "stale"
    """It was left out, or has not been run: what is known of it is old."""
    INFRA = "infra"
    """The farm could not judge it."""
    FIXED = "fixed"
    """It failed the last time, known issues among that."""
    KNOWN = "known"
    PASSED = "passed"


TITLES = {
    Standing.NEW_FAILURE: "New failures",
    Standing.STILL_FAILING: "Still failing",
    Standing.STALE: "Not tested",
    Standing.INFRA: "Infra",
    Standing.FIXED: "Fixed",
}
"""What is listed job by job, in the order in which somebody looks at it."""


class SickDevice(msgspec.Struct, frozen=True):
    """A device that is not healthy, or out of service."""

    device: str
    state: str
    reason: str


class Status(msgspec.Struct, frozen=True):
    """How things stand."""

    run: RunStatus | None
    """The newest nightly run, or else the newest; None where there is none."""
    jobs: dict[str, Standing]
    """Of the run, by id."""
    devices: tuple[SickDevice, ...]
    unfinished: tuple[UnfinishedRun, ...]
    newly_flaky: dict[str, Record]
    """Jobs of the run, by id, those of the newest runs first."""
    healed: dict[str, Record]
    """Those that this run was the proof for."""
    regressions: tuple[AlertRecord, ...] = ()
    """All that are open, of whatever run."""
    unmeasured: int = 0
    """Numbers of the run that look different, and for which nothing was measured yet."""
    unknown: int = 0
    """Those that interleaved A/B did not settle."""
    remarks: dict[str, Remark] = {}
    """The last remark on each of its jobs, by id."""
    line: str | msgspec.UnsetType = msgspec.UNSET
    """What it is about; not there for the default line."""


def status_of(
    run: RunStatus | None,
    devices: Sequence[SickDevice],
    unfinished: Sequence[UnfinishedRun],
    records: Mapping[str, Record] | None = None,
    *,
    regressions: Sequence[AlertRecord] = (),
    found: Sequence[AlertRecord] = (),
    remarks: Mapping[str, Remark] | None = None,
    line: str = "",
) -> Status:
    """Return how things stand; `run` is shown as it ended, whatever came after it.

    `records` and `remarks` are of its jobs, by id; `regressions` are all that are open, `found` its candidates.
    """
    jobs = {} if run is None else {job.job_id: standing(job) for job in run.jobs}
    others = tuple(one for one in unfinished if run is None or one.run_id != run.run_id)
    records = dict(sorted((records or {}).items(), key=lambda one: one[1].since, reverse=True))
    flaky = {job: one for job, one in records.items() if one.reliability is Reliability.NEWLY_FLAKY}
    healed = {
        job: one
        for job, one in records.items()
        if one.reliability is Reliability.HEALED and run is not None and one.since == run.run_id
    }
    return Status(
        run, jobs, tuple(devices), others, flaky, healed, tuple(regressions),
        unmeasured=sum(one.state == AlertState.CANDIDATE for one in found),
        unknown=sum(one.state == AlertState.UNKNOWN for one in found),
        remarks=dict(remarks or {}),
        line=line or msgspec.UNSET,
    )  # fmt: skip


def standing(job: JobStatus) -> Standing:
    """Return how one job stands."""
    before = job.before
    failed_before = before is not None and before.verdict == _FAILED and not before.known_issue
    if job.verdict == _INFRA:
        return Standing.INFRA
    if job.verdict == _FAILED:
        if job.known_issue:
            return Standing.KNOWN
        return Standing.STILL_FAILING if failed_before else Standing.NEW_FAILURE
    if not job.verdict:
        return Standing.STALE
    if job.verdict == _PASSED and before is not None and before.verdict == _FAILED:
        return Standing.FIXED
    return Standing.PASSED


def unsure_lines(status: Status) -> list[str]:
    """Return how many numbers of the run nobody can judge yet, and what to do."""
    lines = []
    if status.unmeasured:
        lines.append(f"{_look(status.unmeasured)} different from before: 'farm confirm' measures again")
    if status.unknown:
        lines.append(f"{_look(status.unknown)} different, interleaved A/B is unsure: 'farm confirm' lists which")
    return lines


def _look(number: int) -> str:
    return "1 number looks" if number == 1 else f"{number:,} numbers look"


def counts(status: Status) -> str:
    """Return how many jobs there are, and how they ended."""
    found = {kind: sum(one is kind for one in status.jobs.values()) for kind in Standing}
    found[Standing.PASSED] += found.pop(Standing.FIXED)
    failed = found.pop(Standing.NEW_FAILURE) + found.pop(Standing.STILL_FAILING)
    words = {Standing.PASSED: "passed", Standing.KNOWN: "known", Standing.INFRA: "infra", Standing.STALE: "NOT TESTED"}
    parts = [f"{failed} failed", *(f"{found[kind]} {word}" for kind, word in words.items() if found[kind])]
    return f"{fmt.plural(len(status.jobs), 'job')}: {', '.join(parts)}"


def reasons_of(job: JobStatus, now_ms: int) -> list[str]:
    """Return why a job is where it is, and what it was before."""
    stage = f"{job.stage}: " if job.stage and job.verdict != _PASSED else ""
    lines = [f"{stage}{job.reason}"] if job.reason else []
    if job.before is None:
        return [*lines, "never had a verdict before"]
    verdict = "known issue" if job.before.known_issue else job.before.verdict
    return [*lines, f"before: {verdict} in {job.before.run_id}, {ago(job.before.time_ms, now_ms)}"]


def exit_meaning(code: int | None, stale: int = 0) -> str:
    """Return what an exit code of `farm run` means; `stale` is how many jobs are."""
    if code is None:
        return "none yet: the run has not finished"
    if stale and code in {0, 5}:
        return "nothing that ran failed, stale jobs aside" if code == 0 else "no job was run, all are stale"
    meanings = {
        0: "all passed",
        1: "a job failed",
        2: "usage or configuration error",
        3: "nothing failed, but there are regressions",
        4: "no device, or infrastructure trouble",
        5: "nothing was selected",
        130: "interrupted",
    }
    return meanings.get(code, "unknown")


def ago(time_ms: int, now_ms: int) -> str:
    """Return how long ago something was: `3 min 05 s ago`, `12 days ago`."""
    return f"{fmt.age((now_ms - time_ms) / 1000)} ago"
