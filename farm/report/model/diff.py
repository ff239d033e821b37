"""Comparison of two runs job by job: newly red, fixed, slower, faster, changed counters, missing. Pure."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.builds.bundles.same import ProgramComparison, compare_hashes
from farm.report.model.status import range_link
from farm.report.model.summary import JobSummary, Outcome, RunSummary, Spread, spread_of, summarize
from farm.results.analysis.history import changed_facts, fact_row
from farm.results.attempt import Direction, Measurement
from farm.suites.figures import TIME_UNITS, counter_of, is_of_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.store.records import RunView
    from farm.store.store import Store

LEAST_TIME = 0.02
"""Share from which a change of a time is listed, however well its samples agree."""
LEAST_RATE = 0.1
"""Share from which a rate of one or two prompts is listed; so few samples do not show the variation."""
LEAST_DB = 0.1
LEAST_FIGURE = 1e-4
"""Share from which figures without a unit are listed: cosine, top-1, tokens."""
LEAST_BYTES = 4096
"""Bytes from which a change of a program's kept heap is listed: a page."""
LEAST_SAMPLES = 3
RATES = "tokens/s"
"""Unit of metrics with a sample for each prompt."""
_TIMES = frozenset({*TIME_UNITS, "us", "cycles"})
_JUDGED = frozenset({Outcome.PASSED, Outcome.FAILED, Outcome.KNOWN})


class DiffGroup(StrEnum):
    """Change of a job between two runs, in the order in which a reader looks at them."""

    NEW_FAILURE = "new_failure"
    """Failed now, and did not fail before or was absent."""
    MISSING = "missing"
    """Judged before, and now absent, skipped, not run, or ended as infra."""
    FIXED = "fixed"
    STILL_FAILING = "still_failing"
    ADDED = "added"
    """Not judged before, and not failed now."""
    SAME = "same"


class MetricChange(msgspec.Struct, frozen=True):
    """Values of a metric before and after, in its unit: the deciding value of a figure, else the median."""

    metric: str
    unit: str
    before: float
    after: float
    exact: bool
    worse: bool | None
    """True for a change for the worse; None when neither direction is better."""

    @property
    def ratio(self) -> float | None:
        """Return after divided by before; None when the quotient has no meaning."""
        return self.after / self.before if self.before > 0 and math.isfinite(self.after / self.before) else None

    @property
    def is_time(self) -> bool:
        """Return True for a time, whose ratio is more telling than its difference."""
        return not self.exact and self.unit in _TIMES


class JobDiff(msgspec.Struct, frozen=True):
    """Job in two runs."""

    job_id: str
    group: DiffGroup
    before: str
    """Outcome in the older run, or `absent`."""
    after: str
    reason: str
    """Reason why the job fails or is missing now; "" otherwise."""
    changes: tuple[MetricChange, ...] = ()
    not_compared: str = ""
    """Reason why the numbers are not compared; "" when they are."""
    same_program: bool | msgspec.UnsetType = msgspec.UNSET
    """True when both runs executed the same program, so that differences have another cause."""


ONE_STUB = "one of the two ran over a stub of QNN"
"""Reason against comparing the numbers of two runs."""


class RunDiff(msgspec.Struct, frozen=True):
    """Comparison of two runs."""

    before: str
    """Id of the older run."""
    after: str
    before_ms: int
    """Start of the older run; epoch, milliseconds."""
    after_ms: int
    facts: tuple[tuple[str, str, str], ...]
    """Facts of the fingerprint that differ: name, before, after; "" for a fact that a side lacks."""
    jobs: tuple[JobDiff, ...]
    """Jobs of both runs, in the order of the newer one; missing jobs come last."""
    programs: ProgramComparison | msgspec.UnsetType = msgspec.UNSET
    """Comparison of the programs of jobs that both runs compiled and recorded with a program hash."""
    commits_url: str | msgspec.UnsetType = msgspec.UNSET
    """Address of the commits between the runs; unset when it is not known."""
    not_finished: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the runs that are unfinished or were killed: missing results may still arrive."""

    stub: bool | msgspec.UnsetType = msgspec.UNSET
    """True when both ran over a stub of QNN's libraries; unset otherwise."""

    @property
    def has_times(self) -> bool:
        """Return True when a time differs."""
        return any(change.is_time for job in self.jobs for change in job.changes)

    def having(self, group: DiffGroup) -> tuple[JobDiff, ...]:
        """Return the jobs of one group."""
        return tuple(job for job in self.jobs if job.group is group)

    def changed(self, *, time: bool, worse: bool | None) -> tuple[tuple[JobDiff, MetricChange], ...]:
        """Return changes of times, or of all other metrics, with their jobs; times by the size of the ratio."""
        changes = ((job, change) for job in self.jobs for change in job.changes if change.worse is worse)
        found = [one for one in changes if one[1].is_time is time]
        return tuple(sorted(found, key=lambda one: -abs(math.log(one[1].ratio or 1.0))) if time else found)


def read_diff(store: Store, before: str, after: str) -> tuple[RunDiff, bool]:
    """Return the comparison of two runs of the store, and True if a device of either is virtual."""
    views = [store.runs.view(store.runs.resolve(run)) for run in (before, after)]
    return diff_runs(*views), any(device.kind == "virtual" for view in views for device in view.devices)


def diff_runs(before: RunView, after: RunView) -> RunDiff:
    """Compare two runs.

    Times differ when no sample of one side is within the range of the other and the medians are more than 2 % apart.
    Two runs are two nights, so a difference is a hint and no regression. Rates differ when the rates of all prompts
    moved the same way; with one prompt or two, when they moved by more than 10 % on attached devices. Counters differ
    when they are unequal. Numbers of another kind of device, or of another test under the same name, are not compared,
    and neither are times and cycles of virtual devices, which differ by half for one program.
    """
    old, new = summarize(before), summarize(after)
    programs = compare_hashes(*_programs(before, after))
    same = frozenset(programs.same)
    earlier = {job.job.id: job for job in old.jobs}
    jobs = [_job(earlier.pop(job.job.id, None), job, same_program=job.job.id in same) for job in new.jobs]
    jobs += [_gone(job, new) for job in earlier.values()]
    facts = changed_facts(before.fingerprint, after.fingerprint)
    not_finished = tuple(run.id for run in (before, after) if run.finished_ms is None)
    was, now = before.toolchain, after.toolchain
    commits_url = range_link(now.commit_url, was.commit, now.commit) if was and now else ""
    return RunDiff(
        before.id, after.id, before.started_ms, after.started_ms,
        tuple(fact_row(name, *values) for name, values in facts.items()),
        tuple(jobs), programs if programs.same or programs.changed else msgspec.UNSET,
        commits_url or msgspec.UNSET, not_finished or msgspec.UNSET,
        bool(old.stub and new.stub) or msgspec.UNSET,
    )  # fmt: skip


def _programs(before: RunView, after: RunView) -> list[dict[str, str]]:
    known = [{job.id: job.program for job in view.jobs if isinstance(job.program, str)} for view in (before, after)]
    return [{job: program for job, program in side.items() if all(job in other for other in known)} for side in known]


def _job(before: JobSummary | None, after: JobSummary, *, same_program: bool) -> JobDiff:
    then, now = before.outcome if before else None, after.outcome
    changes, refused = ((), "") if before is None else _changes(before, after)
    group = _group(then, now)
    return JobDiff(
        job_id=after.job.id,
        group=group,
        before=then or "absent",
        after=now,
        reason=after.reason if group in {DiffGroup.NEW_FAILURE, DiffGroup.MISSING, DiffGroup.STILL_FAILING} else "",
        changes=changes,
        not_compared=refused,
        same_program=same_program or msgspec.UNSET,
    )


def _gone(job: JobSummary, new: RunSummary) -> JobDiff:
    judged = job.outcome in _JUDGED
    reason = "" if job.job.suite in {one.job.suite for one in new.jobs} else f"the run has no job of {job.job.suite}"
    return JobDiff(job.job.id, DiffGroup.MISSING if judged else DiffGroup.SAME, job.outcome, "absent", reason)


def _group(then: Outcome | None, now: Outcome) -> DiffGroup:
    if now is Outcome.FAILED:
        return DiffGroup.STILL_FAILING if then is Outcome.FAILED else DiffGroup.NEW_FAILURE
    if then in _JUDGED and now not in _JUDGED:
        return DiffGroup.MISSING
    if now is Outcome.PASSED and then in {Outcome.FAILED, Outcome.KNOWN}:
        return DiffGroup.FIXED
    if now is Outcome.KNOWN and then is Outcome.FAILED:
        return DiffGroup.STILL_FAILING
    if now in _JUDGED and then not in _JUDGED:
        return DiffGroup.ADDED
    return DiffGroup.SAME


def _changes(before: JobSummary, after: JobSummary) -> tuple[tuple[MetricChange, ...], str]:
    if before.attempt is None or after.attempt is None:
        return (), ""
    if before.job.case_version != after.job.case_version:
        return (), "another test under the same name"
    if before.kind != after.kind:
        return (), f"before on {before.kind or 'no'} device, after on {after.kind or 'no'} device"
    if bool(before.stub) != bool(after.stub):
        return (), ONE_STUB
    old, new = _measured(before.attempt.measurements), _measured(after.attempt.measurements)
    kind = "virtual" if after.virtual else after.kind
    both = [metric for metric in new if metric in old and not is_of_host(metric, new[metric][0].unit, kind)]
    return tuple(change for metric in both if (change := _change(old[metric], new[metric])) is not None), ""


def _measured(rows: Iterable[Measurement]) -> dict[str, tuple[Measurement, Spread]]:
    return {row.metric: (row, spread) for row in rows if (spread := spread_of(row)) is not None}


def _all_moved(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True when the rates of all prompts moved the same way; rates of short and long prompts are far apart."""
    ways = {(new > old) - (new < old) for old, new in zip(before, after, strict=False)}
    return len(before) == len(after) and len(ways) == 1


def _change(before: tuple[Measurement, Spread], after: tuple[Measurement, Spread]) -> MetricChange | None:
    (row, old), (newer, new) = before, after
    no_numbers = [math.isnan(one.value) for one in (old, new)]
    if row.unit != newer.unit or old.value == new.value or all(no_numbers):
        return None
    worse = no_numbers[1] if any(no_numbers) else (new.value > old.value) is (newer.direction is Direction.LOWER)
    judged = None if newer.direction is Direction.NONE else worse
    change = MetricChange(row.metric, row.unit, old.value, new.value, row.exact, judged)
    if change.exact or any(no_numbers):
        return change
    if change.is_time:
        is_rate = row.unit == RATES
        apart = _all_moved(row.samples, newer.samples) if is_rate else old.most < new.least or new.most < old.least
        enough = min(old.n, new.n) >= LEAST_SAMPLES
        least_time = LEAST_TIME if enough else LEAST_RATE if is_rate else math.inf
        far = change.ratio is not None and abs(math.log(change.ratio)) > math.log1p(least_time)
        return change if apart and far else None
    counter = counter_of(row.metric)
    if counter is not None and counter.signed:
        return change if abs(new.value - old.value) >= LEAST_BYTES else None
    least = LEAST_DB if row.unit == "dB" else LEAST_FIGURE * max(abs(old.value), abs(new.value))
    # Equal outputs have an SQNR of inf, so a change between inf and a finite figure is listed as well.
    return change if abs(new.value - old.value) > least and row.unit in {"dB", "1"} else None
