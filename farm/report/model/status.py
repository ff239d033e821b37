"""How things stand -> lines for a terminal: newly red, what was not tested, what is wrong with the farm. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.flakiness import Record, Reliability
from farm.report.model import format as fmt
from farm.report.model.alerts import alert_lines, remark_text
from farm.store.records import AlertRecord, AlertState, JobStatus, Remark, RunStatus, UnfinishedRun
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEAST_WIDTH = 40
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
"""What is told job by job, in the order in which somebody looks at it."""


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
    """Those of which pairs did not tell what it is."""
    remarks: dict[str, Remark] = {}
    """What was last said of its jobs, by id."""


def status_of(
    run: RunStatus | None,
    devices: Sequence[SickDevice],
    unfinished: Sequence[UnfinishedRun],
    records: Mapping[str, Record] | None = None,
    *,
    regressions: Sequence[AlertRecord] = (),
    found: Sequence[AlertRecord] = (),
    remarks: Mapping[str, Remark] | None = None,
) -> Status:
    """Return how things stand; `run` is told as it ended, whatever came after it.

    `records` and `remarks` are of its jobs, by id; `regressions` are all that are open, `found` what stands out in it.
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


def status_lines(status: Status, now_ms: int, limit: int, width: int = 80) -> list[str]:
    """Return how things stand, what needs a look first; at most `limit` jobs of a kind, no line wider than `width`."""
    width = max(width, _LEAST_WIDTH)
    lines = ["no run yet: 'farm run' makes one"] if status.run is None else _run(status, status.run, now_ms, limit)
    if status.devices:
        lines += ["", f"DEVICES: {len(status.devices)} not fit"]
        lines += [f"  {one.device}: {one.state}{f': {one.reason}' if one.reason else ''}" for one in status.devices]
    for one in status.unfinished:
        lines.append(f"unfinished: {one.run_id} of {one.user} on {one.host}, began {ago(one.started_ms, now_ms)}")
    return [_clean(line, width) for line in lines]


def _run(status: Status, run: RunStatus, now_ms: int, limit: int) -> list[str]:
    kind = f" on {run.device_kind} devices" if run.device_kind else ""
    ended = f"exit code {run.exit_code}" if run.finished_ms is not None else "NOT FINISHED"
    lines = [
        f"{run.run_id}: {run.priority} run of {run.user}, {ago(run.started_ms, now_ms)}, {ended}",
        f"  {run.command}",
        f"  {counts(status)}{kind}",
    ]
    first, *others = TITLES
    lines += _jobs(status, run, now_ms, limit, (first,))
    lines += _regressions(status, run, limit)
    lines += _jobs(status, run, now_ms, limit, others)
    for title, found in (("NEWLY FLAKY", status.newly_flaky), ("HEALED", status.healed)):
        if found:
            lines += ["", f"{title}: {len(found)}"]
            for job_id, record in list(found.items())[:limit]:
                lines += [f"  {job_id}", f"    {fmt.record(record)}"]
            lines += [f"  and {len(found) - limit} more: --limit"] if len(found) > limit else []
    return lines


def _jobs(status: Status, run: RunStatus, now_ms: int, limit: int, kinds: Sequence[Standing]) -> list[str]:
    lines: list[str] = []
    for kind_of_job in kinds:
        jobs = [job for job in run.jobs if status.jobs[job.job_id] is kind_of_job]
        if jobs:
            lines += ["", f"{TITLES[kind_of_job].upper()}: {len(jobs)}"]
            for job in jobs[:limit]:
                lines += [f"  {job.job_id}", *(f"    {said}" for said in said_of(job, now_ms))]
                if remark := status.remarks.get(job.job_id):
                    lines.append(f"    {remark_text(remark)}")
            lines += [f"  and {len(jobs) - limit} more: --limit"] if len(jobs) > limit else []
    return lines


def _regressions(status: Status, run: RunStatus, limit: int) -> list[str]:
    lines = []
    if status.regressions:
        new = sum(one.run_id == run.run_id for one in status.regressions)
        lines += ["", f"REGRESSIONS: {len(status.regressions)}, {new or 'none'} of this run"]
        lines += alert_lines(status.regressions, limit)
    return lines + ([""] if status.unmeasured or status.unknown else []) + unsure_lines(status)


def unsure_lines(status: Status) -> list[str]:
    """Return how many numbers of the run nobody can judge yet, and what to do."""
    lines = []
    if status.unmeasured:
        lines.append(f"{_looks(status.unmeasured)} different from before: 'farm confirm' measures again")
    if status.unknown:
        lines.append(f"{_looks(status.unknown)} different, and pairs do not tell: 'farm confirm' lists which")
    return lines


def _looks(number: int) -> str:
    return f"{number:,} number looks" if number == 1 else f"{number:,} numbers look"


def counts(status: Status) -> str:
    """Return how many jobs there are, and how they ended."""
    told = {kind: sum(one is kind for one in status.jobs.values()) for kind in Standing}
    told[Standing.PASSED] += told.pop(Standing.FIXED)
    failed = told.pop(Standing.NEW_FAILURE) + told.pop(Standing.STILL_FAILING)
    words = {Standing.PASSED: "passed", Standing.KNOWN: "known", Standing.INFRA: "infra", Standing.STALE: "NOT TESTED"}
    parts = [f"{failed} failed", *(f"{told[kind]} {word}" for kind, word in words.items() if told[kind])]
    return f"{len(status.jobs)} job{'s' * (len(status.jobs) != 1)}: {', '.join(parts)}"


def said_of(job: JobStatus, now_ms: int) -> list[str]:
    """Return why a job is where it is, and what it was before."""
    stage = f"{job.stage}: " if job.stage and job.verdict != _PASSED else ""
    lines = [f"{stage}{job.reason}"] if job.reason else []
    if job.before is None:
        return [*lines, "never had a verdict before"]
    verdict = "known issue" if job.before.known_issue else job.before.verdict
    return [*lines, f"before: {verdict} in {job.before.run_id}, {ago(job.before.time_ms, now_ms)}"]


def ago(time_ms: int, now_ms: int) -> str:
    """Return how long ago something was: `3 min 05 s ago`, `12 days ago`."""
    seconds = (now_ms - time_ms) / 1000
    return f"{round(seconds / 86_400)} days ago" if seconds >= 2 * 86_400 else f"{fmt.duration(max(0.0, seconds))} ago"


def _clean(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip())
    return " " * indent + one_line(line, width - indent)
