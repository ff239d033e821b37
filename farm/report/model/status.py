"""Status of a run and of the farm: newly red jobs, alerts, toolchains and commits, in words. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import msgspec

from farm.base.errors import ExitCode
from farm.base.grouping import grouped
from farm.base.text import one_line
from farm.report.model import format as fmt
from farm.results.analysis.history import SHORT_COMMIT, Record, Reliability
from farm.store.records import AlertRecord, AlertState, JobStatus, Remark, RunStatus, UnfinishedRun
from farm.suites.figures import TIME_UNITS

if TYPE_CHECKING:
    from farm.store.queries.browse import Progress
    from farm.store.records import RunToolchain
    from farm.store.store import Store


# Toolchain, its commit, and the commits between two runs, in words and as links. Pure.


_HASH = re.compile(r"[0-9a-f]{7,64}")
_PLACE = "{commit}"
# Address patterns of GitHub and GitLab, and of servers with the same patterns.
_ONE, _BETWEEN = "/commit/{commit}", "/compare/"


def short(commit: str) -> str:
    """Return the short form of a commit's hash."""
    return commit[:SHORT_COMMIT]


def commit_link(template: str, commit: str) -> str:
    """Return the address of a commit; "" when `template` is no web address with a place for the commit.

    Template and commit are untrusted: the result begins with http:// or https:// and contains no password.
    """
    if not _HASH.fullmatch(commit) or _PLACE not in template or not template.isprintable():
        return ""
    address = template.replace(_PLACE, quote(commit))
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    is_web = parts.scheme in {"http", "https"} and parts.netloc and "@" not in parts.netloc
    return address if is_web and " " not in address else ""


def range_link(template: str, good: str, bad: str) -> str:
    """Return the address of the commits after `good` up to `bad`; "" when `template` is not of a known server."""
    if not template.endswith(_ONE) or not _HASH.fullmatch(good) or good == bad or not commit_link(template, bad):
        return ""
    return f"{template.removesuffix(_ONE)}{_BETWEEN}{quote(good)}...{quote(bad)}"


def toolchain_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the toolchain of a run: `main, commit 1a2b3c4d5e (dirty) on branch x: Fix pad`; "" without one."""
    if not toolchain or not toolchain.is_named:
        return ""
    state = f"commit {short(toolchain.commit)}" if toolchain.commit else ""
    if toolchain.dirty:
        state = f"{state} (dirty)" if state else "changed files"
    state += f" on branch {toolchain.git_branch}" if toolchain.git_branch else ""
    text = ", ".join(filter(None, (toolchain.name or "default toolchain", state)))
    return f"{text}: {toolchain.subject}" if toolchain.subject and toolchain.commit else text


def branch_name(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the branch of a run for a sentence."""
    return f"branch {toolchain.branch}" if toolchain and toolchain.branch else "the default branch"


def standing_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the use of the numbers of a local run; "" for a run that belongs to its branch."""
    if not toolchain or not toolchain.private:
        return ""
    return f"compared with {branch_name(toolchain)} and not part of its history"


def since_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the number of new commits since the previous run of the branch; "" when it is not known."""
    if not toolchain or not toolchain.since:
        return ""
    count = len(toolchain.since) + toolchain.more
    return f"{count} new commit{'' if count == 1 else 's'} since the previous run of its branch"


# Changed numbers in words: by range of runs, with the size of the change and the user's remark. Pure.


_WORSE, _BETTER = "regression", "improvement"
_TIMES = frozenset({*TIME_UNITS, "us", "cycles"})
UNSURE = {
    AlertState.SUSPECTED: "suspected change, not confirmed yet",
    AlertState.REFUTED: "refuted",
    AlertState.UNKNOWN: "interleaved A/B is unsure",
}
"""Words for a number whose change is not certain."""


def by_range(alerts: Iterable[AlertRecord]) -> list[tuple[str, str, list[AlertRecord]]]:
    """Return alerts by last good and first bad run, the newest range first: a range most likely has one cause."""
    ranges = grouped(((one.first_bad, one.last_good), one) for one in alerts)
    return [(good, bad, sorted(found, key=_severity)) for (bad, good), found in sorted(ranges.items(), reverse=True)]


def is_confirmed(alert: AlertRecord) -> bool:
    """Return True for a number that got worse for certain."""
    return alert.finding == _WORSE and alert.state in {AlertState.CONFIRMED, AlertState.EXACT}


def alert_change(alert: AlertRecord) -> str:
    """Return the change of a number: `+8.2 % (+7.1 % to +9.4 %)`; empty without a known change."""
    if math.isnan(alert.change):
        return ""
    from farm.results.analysis.statistics import change_text, scale_of

    scale = scale_of(alert.metric, alert.unit)
    change = change_text(scale, alert.change)
    if alert.low == alert.high or not (math.isfinite(alert.low) and math.isfinite(alert.high)):
        return change
    return f"{change} ({change_text(scale, alert.low)} to {change_text(scale, alert.high)})"


def change_of(alert: AlertRecord) -> str:
    """Return the change for a line of its own; for a deterministic number the old and the new value."""
    is_exact = alert.exact or alert.state == AlertState.EXACT
    return one_line(alert.reason) if is_exact else alert_change(alert) or "changed"


def change_line(alert: AlertRecord) -> str:
    """Return metric, kind of change and change: `latency slower: +12.0 %`."""
    return f"{alert.metric} {word_of(alert)}: {change_of(alert)}"


def word_of(alert: AlertRecord) -> str:
    """Return the kind of change in one word: slower, faster, worse, better, changed."""
    words = {_WORSE: ("worse", "slower"), _BETTER: ("better", "faster")}.get(alert.finding, ("changed", "changed"))
    return words[alert.unit in _TIMES]


def remark_text(remark: Remark) -> str:
    """Return the remark of a user with its owner, who handles it."""
    return f"{remark.state}: {remark.owner or remark.user}{f': {remark.note}' if remark.note else ''}"


def _severity(one: AlertRecord) -> tuple[bool, float, str, str]:
    size = 0.0 if math.isnan(one.change) else -abs(one.change)
    return one.finding != _WORSE, size, one.job_id, one.metric


# Status of a run and of the farm: newly red jobs, untested jobs, unfit devices.


_PASSED, _FAILED, _INFRA = "passed", "failed", "infra"


class Standing(StrEnum):
    """State of a job compared with its previous verdict, in the order in which a reader looks at them."""

    NEW_FAILURE = "new_failure"
    """Failed now; passed at the previous verdict, or never had one."""
    STILL_FAILING = "still_failing"
    NOT_TESTED = "not_tested"
    """Skipped for lack of time, or not run: the last result is old."""
    INFRA = "infra"
    """Not judged because of trouble with the farm or a device."""
    FIXED = "fixed"
    """Passed now; failed at the previous verdict, as a known issue or not."""
    KNOWN = "known"
    PASSED = "passed"


TITLES = {
    Standing.NEW_FAILURE: "New failures",
    Standing.STILL_FAILING: "Still failing",
    Standing.NOT_TESTED: "Not tested",
    Standing.INFRA: "Infra",
    Standing.FIXED: "Fixed",
}
"""Titles of the groups that are listed job by job, in the order of the page."""


class SickDevice(msgspec.Struct, frozen=True):
    """Device that is not healthy, or out of service."""

    device: str
    state: str
    reason: str


class RunStanding(msgspec.Struct, frozen=True):
    """State of one run."""

    run: RunStatus
    jobs: dict[str, Standing]
    """State of each job by its id."""
    newly_flaky: dict[str, Record] = {}
    """Newly flaky jobs by id, jobs of the newest runs first."""
    healed: dict[str, Record] = {}
    """Jobs by id whose recovery this run proved."""
    regressions: int = 0
    """Open regressions that this run found."""
    unmeasured: int = 0
    """Suspected regressions of this run without a repeated measurement."""
    unknown: int = 0
    """Suspected regressions of this run that interleaved A/B did not settle."""

    @property
    def title(self) -> str:
        """Return the name of the run, or its id."""
        return self.run.name or self.run.run_id

    def having(self, *kinds: Standing) -> list[JobStatus]:
        """Return the jobs in these states."""
        return [job for job in self.run.jobs if self.jobs[job.job_id] in kinds]


class Status(msgspec.Struct, frozen=True):
    """State of the farm's results and devices."""

    runs: tuple[RunStanding, ...]
    """All cells of the newest nightly run, the worst first; or one run, or none."""
    devices: tuple[SickDevice, ...]
    unfinished: tuple[UnfinishedRun, ...]
    regressions: tuple[AlertRecord, ...] = ()
    """All open regressions, of any run."""
    remarks: dict[str, Remark] = {}
    """Last remark on each job with a regression, by job id."""
    branch: str | msgspec.UnsetType = msgspec.UNSET
    """Branch of the status; unset for the default branch, or several."""

    def jobs(self, *kinds: Standing) -> list[tuple[RunStanding, JobStatus]]:
        """Return the jobs of all runs in these states."""
        return [(one, job) for one in self.runs for job in one.having(*kinds)]

    def records(self, field: str) -> list[tuple[str, Record]]:
        """Return `newly_flaky` or `healed` of all runs, jobs of the newest runs first."""
        found = [pair for one in self.runs for pair in getattr(one, field).items()]
        return sorted(found, key=lambda pair: pair[1].since, reverse=True)


def run_standing(
    run: RunStatus,
    records: Mapping[str, Record] | None = None,
    *,
    regressions: Sequence[AlertRecord] = (),
    found: Sequence[AlertRecord] = (),
) -> RunStanding:
    """Return the state of a run at its end, without regard to later runs.

    `records` are reliability records of its jobs, by id; `regressions` are all open regressions, `found` the suspected
    regressions of the run.
    """
    # A run that never began has no results of jobs.
    run = run if run.began else msgspec.structs.replace(run, jobs=())
    records = dict(sorted((records or {}).items(), key=lambda one: one[1].since, reverse=True))
    return RunStanding(
        run,
        {job.job_id: standing(job) for job in run.jobs},
        {job: one for job, one in records.items() if one.reliability is Reliability.NEWLY_FLAKY},
        {job: one for job, one in records.items() if one.reliability is Reliability.HEALED and one.since == run.run_id},
        regressions=sum(one.run_id == run.run_id for one in regressions),
        unmeasured=sum(one.state == AlertState.SUSPECTED for one in found),
        unknown=sum(one.state == AlertState.UNKNOWN for one in found),
    )


def status_of(
    runs: Sequence[RunStanding],
    devices: Sequence[SickDevice],
    unfinished: Sequence[UnfinishedRun],
    *,
    regressions: Sequence[AlertRecord] = (),
    remarks: Mapping[str, Remark] | None = None,
    branch: str = "",
) -> Status:
    """Return the status; `regressions` are all open regressions, `remarks` are by job id."""
    shown = {one.run.run_id for one in runs}
    return Status(
        tuple(sorted(runs, key=_worst_first)),
        tuple(devices),
        tuple(one for one in unfinished if one.run_id not in shown),
        tuple(regressions),
        dict(remarks or {}),
        branch or msgspec.UNSET,
    )


def read_status(store: Store, branch: str | None = None, *, run_ids: Sequence[str] = ()) -> Status:
    """Return the status of `run_ids`, else of the runs of `runs_to_show`. Raises UnknownNameError."""
    runs = list(map(store.status.of_run, run_ids)) if run_ids else runs_to_show(store, branch)
    branches = sorted({_branch_of(run) for run in runs})
    if branch is not None or not runs:
        branches = [store.status.branch_to_show(branch)]
    regressions = [one for name in branches for one in store.alerts.open(branch=name)]

    def stands(run: RunStatus) -> RunStanding:
        jobs, of_branch = [job.job_id for job in run.jobs], branches[0] if len(branches) == 1 else _branch_of(run)
        reliability = store.history.reliability(
            jobs, run.device_kind, run.run_id, failed_of_late=True, branch=of_branch
        )
        return run_standing(run, reliability, regressions=regressions, found=store.alerts.of_run(run.run_id))

    return status_of(
        [stands(run) for run in runs],
        _sick(store),
        [one for name in branches for one in store.status.unfinished_runs(name)],
        regressions=regressions,
        remarks=store.alerts.remarks_of_jobs({job.job_id for run in runs for job in run.jobs}),
        branch=branches[0] if len(branches) == 1 else "",
    )


def runs_to_show(store: Store, branch: str | None = None) -> list[RunStatus]:
    """Return the cells of the newest nightly run, cells that never began included; without a nightly run another run.

    The nightly run is of `branch`, with the meaning of `StatusReader.branch_to_show`, or of all branches for None. The
    other run is the newest of the branch; for None it may be a local run of the user. Raises UnknownNameError.
    """
    nightly_run = store.status.nightly_run(None if branch is None else store.status.branch_to_show(branch))
    run_ids = nightly_run or filter(
        None, [store.status.run_to_show(store.status.branch_to_show(branch), own=branch is None)]
    )
    return list(map(store.status.of_run, run_ids))


def _branch_of(run: RunStatus) -> str:
    return run.toolchain.branch if run.toolchain else ""


def _sick(store: Store) -> list[SickDevice]:
    found = []
    for device in store.devices.all():
        name = device.name or device.id
        if not device.in_service:
            found.append(SickDevice(name, "out of service", device.service_note))
        elif device.health != "healthy":
            found.append(SickDevice(name, device.health, device.health_reason))
    return found


# The first state that applies to a run counts, in order of urgency; an unfinished run ranks like an interrupted one.
_PRECEDENCE = (ExitCode.FAILED, ExitCode.REGRESSION, ExitCode.INFRA, None, ExitCode.NOTHING, ExitCode.PASSED)
_MEANINGS = {int(one): one.meaning for one in ExitCode}


def _worst_first(one: RunStanding) -> tuple[int, ...]:
    code = one.run.exit_code
    new, red = len(one.having(Standing.NEW_FAILURE)), len(one.having(Standing.NEW_FAILURE, Standing.STILL_FAILING))
    if red:
        code = ExitCode.FAILED
    elif one.regressions and code in (ExitCode.PASSED, ExitCode.NOTHING, None):
        code = ExitCode.REGRESSION
    elif code not in _PRECEDENCE:
        code = ExitCode.INFRA
    return _PRECEDENCE.index(code), -new, -red, -one.run.started_ms


def standing(job: JobStatus) -> Standing:
    """Return the state of one job."""
    before = "" if job.before is None else outcome_of(job.before.verdict, job.before.known_issue)
    return standing_after(outcome_of(job.verdict, job.known_issue), before)


def outcome_of(verdict: str, known_issue: str) -> str:
    """Return a verdict with known issues apart: `known` for a failure that was expected."""
    return "known" if verdict == _FAILED and known_issue else verdict


def standing_after(now: str, before: str) -> Standing:
    """Return the state of a job by its outcome and the one before; an empty outcome is none."""
    if now == _FAILED:
        return Standing.STILL_FAILING if before == _FAILED else Standing.NEW_FAILURE
    if now == _PASSED and before in (_FAILED, "known"):
        return Standing.FIXED
    return {_INFRA: Standing.INFRA, "known": Standing.KNOWN, "": Standing.NOT_TESTED}.get(now, Standing.PASSED)


def unsure_lines(status: Status) -> list[str]:
    """Return the number of unsettled suspected regressions of each run, with the command to settle them."""
    lines = []
    for one in status.runs:
        command = "farm perf confirm" if len(status.runs) == 1 else f"farm perf confirm --run {one.run.run_id}"
        if one.unmeasured:
            lines.append(f"{_look(one.unmeasured)} different from before: '{command}' measures again")
        if one.unknown:
            lines.append(f"{_look(one.unknown)} different, pairs are unsure: '{command}' lists which")
    return lines


def _look(number: int) -> str:
    return "1 number looks" if number == 1 else f"{number:,} numbers look"


def counts(runs: Sequence[RunStanding]) -> str:
    """Return the number of jobs, and of jobs by outcome."""
    found = {kind: sum(len(one.having(kind)) for one in runs) for kind in Standing}
    total = sum(found.values())
    found[Standing.PASSED] += found.pop(Standing.FIXED)
    failed = found.pop(Standing.NEW_FAILURE) + found.pop(Standing.STILL_FAILING)
    words = {
        Standing.PASSED: "passed",
        Standing.KNOWN: "known",
        Standing.INFRA: "infra",
        Standing.NOT_TESTED: "NOT TESTED",
    }
    parts = [f"{failed} failed", *(f"{found[kind]} {word}" for kind, word in words.items() if found[kind])]
    return f"{fmt.plural(total, 'job')}: {', '.join(parts)}"


def purpose_text(run: RunStatus) -> str:
    """Return the purpose of a run: `nightly run`, `local run` or `manual run`."""
    return f"{run.purpose} run"


def ended_text(run: RunStatus) -> str:
    """Return the end of a run: `exit code 1`."""
    if run.finished_ms is None:
        return "NOT FINISHED"
    return f"exit code {run.exit_code}" if run.began else "NEVER BEGAN"


def reasons_of(job: JobStatus, run: RunStatus, now_ms: int) -> list[str]:
    """Return the reasons for the state of a job of a run, and its previous verdict on the branch."""
    stage = f"{job.stage}: " if job.stage and job.verdict != _PASSED else ""
    lines = [f"{stage}{job.reason}"] if job.reason else []
    if job.before is None:
        return [*lines, f"never had a verdict in {branch_name(run.toolchain)} before"]
    verdict = "known issue" if job.before.known_issue else job.before.verdict
    return [*lines, f"before: {verdict} in {job.before.run_id}, {ago(job.before.time_ms, now_ms)}"]


def exit_meaning(code: int | None, skipped: int = 0) -> str:
    """Return the meaning of an exit code of `farm run`; `skipped` is the number of jobs skipped for lack of time."""
    if code is None:
        return "none yet: the run has not finished"
    if skipped and code in {0, 5}:
        return "nothing that ran failed, skipped jobs aside" if code == 0 else "no job was run, all are skipped"
    return _MEANINGS.get(code, "unknown")


def ago(time_ms: int, now_ms: int) -> str:
    """Return the age of a time: `3 min 05 s ago`, `12 days ago`."""
    return f"{fmt.age((now_ms - time_ms) / 1000)} ago"


def progress_text(progress: Progress) -> str:
    """Return the progress of a run in words, the worst first: `12 of 40 jobs: 1 failed, 11 passed`."""
    words = {"failed": "failed", "infra": "infra", "skipped": "skipped", "known": "known issues", "passed": "passed"}
    parts = [f"{progress.counts[key]} {word}" for key, word in words.items() if progress.counts.get(key)]
    parts += [f"{progress.skipped} skipped"] if progress.skipped else []
    jobs = f"{progress.done} of {progress.planned} jobs"
    return f"{jobs}: {', '.join(parts)}" if parts else jobs
