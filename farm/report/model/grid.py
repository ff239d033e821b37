"""Results of nightly runs -> rows of a grid: state of each job, order, and counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from farm.report.model.history import changed_texts
from farm.report.model.status import Standing, standing_after
from farm.results.analysis.history import Record, Reliability
from farm.store.queries.grid import GridJob, NightlyRun

# Verdicts about the code; the other letters of a cell decide nothing about the job before.
_VERDICTS = "pfk"
_OUTCOMES = {"p": "passed", "f": "failed", "k": "known", "i": "infra"}
_FLAKY = (Reliability.FLAKY, Reliability.NEWLY_FLAKY)
# Facts that change with each commit.
_OF_A_COMMIT = frozenset({"commit", "dirty", "executorch_content", "native_runner", "profile"})
STATES = {
    Standing.NEW_FAILURE: "new failures",
    Standing.STILL_FAILING: "still failing",
    Standing.INFRA: "infra",
    Standing.FIXED: "fixed",
    Standing.NOT_TESTED: "not tested",
    Standing.KNOWN: "known issues",
    Standing.PASSED: "passed",
}
"""Words for the states of jobs, in the order in which a grid lists them."""


class GridRow(GridJob, frozen=True, kw_only=True):
    """Job with its results in nightly runs, the newest first."""

    standing: Standing
    """State in the newest nightly run that planned the job."""
    flaky: Record | None = None
    """Reliability of a flaky job."""


class GridNightlyRun(msgspec.Struct, frozen=True, kw_only=True):
    """Column of a grid: a nightly run."""

    id: str
    started_ms: int
    finished_ms: int | None
    """End of its last run; None while one is unfinished."""
    runs: list[str]
    commit: str
    subject: str
    counts: dict[str, int]
    """Jobs by letter, without jobs that have no row."""
    new: int
    """Jobs that failed here and passed at the verdict before, or had none."""
    events: list[str]
    """Changed tools since the nightly run before in the grid."""


def rows_of(jobs: Sequence[GridJob], records: Mapping[str, Record]) -> list[GridRow]:
    """Return the rows of a grid, the most urgent first, then by name; `records` are by job id."""
    rows = []
    for job in jobs:
        record = records.get(job.job_id)
        flaky = record if record is not None and record.reliability in _FLAKY else None
        rows.append(GridRow(**msgspec.structs.asdict(job), standing=standing_of(job.cells), flaky=flaky))
    order = list(STATES)
    # A flaky job is more urgent than others of its state.
    return sorted(rows, key=lambda row: (order.index(row.standing), row.flaky is None, row.job_id))


def standing_of(cells: str) -> Standing:
    """Return the state of a job by its cells, newest first."""
    there = cells.lstrip("\N{MIDDLE DOT}")
    now, before = there[:1], next((letter for letter in there[1:] if letter in _VERDICTS), "")
    return standing_after(_OUTCOMES.get(now, ""), _OUTCOMES.get(before, ""))


def may_be_flaky(job: GridJob) -> bool:
    """Return True for a job with passes and failures, whose reliability is worth a query."""
    return "p" in job.cells and ("f" in job.cells or "k" in job.cells)


def nightly_runs_of(nightly_runs: Sequence[NightlyRun], jobs: Sequence[GridJob]) -> list[GridNightlyRun]:
    """Return the columns of a grid, newest first."""
    found = []
    for place, nightly_run in enumerate(nightly_runs):
        letters = Counter(job.cells[place] for job in jobs)
        new = sum(job.cells[place] == "f" and standing_of(job.cells[place:]) is Standing.NEW_FAILURE for job in jobs)
        before = nightly_runs[place + 1].facts if place + 1 < len(nightly_runs) else nightly_run.facts
        changed = changed_texts(before, nightly_run.facts)
        ends = [run.finished_ms for run in nightly_run.runs]
        found.append(
            GridNightlyRun(
                id=nightly_run.id,
                started_ms=nightly_run.started_ms,
                finished_ms=None if None in ends else max(end for end in ends if end is not None),
                runs=[run.run_id for run in nightly_run.runs],
                commit=nightly_run.toolchain.commit,
                subject=nightly_run.toolchain.subject,
                counts={letter: count for letter, count in sorted(letters.items()) if letter != "\N{MIDDLE DOT}"},
                new=new,
                events=[text for name, text in changed.items() if name not in _OF_A_COMMIT],
            )
        )
    return found
