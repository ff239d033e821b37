"""Grid: jobs by nightly run, as in TestGrid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farm.report.model import format as fmt
from farm.report.model.grid import GridNight, GridRow, may_be_flaky, nights_of, rows_of
from farm.report.model.status import Standing
from farm.serve.page import Facts, Text
from farm.store.queries.grid import GridJob, JobFilter, Night, Targets
from farm.store.toolchains import line_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.results.analysis.flakiness import Record
    from farm.store.store import Store

# Jobs whose reliability is looked up; of more, those without it are shown as they are.
_MOST_MIXED = 300


class GridQuery(msgspec.Struct, frozen=True):
    """Filter of the grid."""

    suite: Text = ""
    soc: Text = ""
    backend: Text = ""
    precision: Text = ""
    branch: Text = ""
    q: Text = ""
    """Words of a job's name."""
    state: Text = ""
    """State of the jobs, for example `new_failure`; empty for all."""
    nights: Annotated[int, msgspec.Meta(ge=1, le=120, description="Nightly runs, the newest first.")] = 30
    limit: Annotated[int, msgspec.Meta(ge=1, le=5000, description="Jobs, the most urgent first.")] = 400


class GridFacts(Facts, frozen=True, kw_only=True):
    """Jobs by nightly run."""

    path: ClassVar[str] = "/grid"
    template: ClassVar[str] = "grid.html.j2"
    nights: list[GridNight]
    rows: list[GridRow]
    """Jobs, the most urgent first."""
    total: int
    """Jobs that match the filter."""
    counts: dict[str, int]
    """Jobs that match the filter without `state`, by state."""
    flaky: int
    """Flaky jobs among them."""
    query: GridQuery
    targets: Targets
    lines: list[str]
    line: str

    def shown(self) -> dict[str, Any]:
        """Return the choices of the filter."""
        return {"states": STATES}


STATES = {
    Standing.NEW_FAILURE: "new failures",
    Standing.STILL_FAILING: "still failing",
    Standing.INFRA: "infra",
    Standing.FIXED: "fixed",
    Standing.NOT_TESTED: "not tested",
    Standing.KNOWN: "known issues",
    Standing.PASSED: "passed",
}
"""Words for the states of jobs, in the order of the grid."""
FLAKY = "flaky"
"""State of a filter for flaky jobs of any verdict."""


def grid_page(store: Store, query: GridQuery) -> GridFacts:
    """Return the results of jobs in the newest nightly runs."""
    line = store.status.line_to_show(query.branch or None)
    nights = store.grid.nights(line, query.nights)
    wanted = JobFilter(query.suite, query.soc, query.backend, query.precision, query.q)
    jobs = store.grid.jobs(nights, wanted)
    rows = rows_of(jobs, records_of_jobs(store, jobs, nights, line))
    counts = {str(standing): sum(row.standing is standing for row in rows) for standing in STATES}
    flaky = sum(row.flaky is not None for row in rows)
    if query.state:
        rows = [row for row in rows if query.state in (row.standing, FLAKY if row.flaky else "")]
    return GridFacts(
        title=_title(counts, len(jobs), query),
        nights=nights_of(nights, jobs),
        rows=rows[: query.limit],
        total=len(rows),
        counts=counts,
        flaky=flaky,
        query=query,
        targets=store.grid.targets(),
        lines=list(map(line_text, store.status.lines())),
        line=line_text(line),
    )


def records_of_jobs(store: Store, jobs: Sequence[GridJob], nights: Sequence[Night], line: str) -> dict[str, Record]:
    """Return the reliability of the jobs with passes and failures, by job id."""
    mixed = [job.job_id for job in jobs if may_be_flaky(job)][:_MOST_MIXED]
    kinds = sorted({run.device_kind for night in nights for run in night.runs})
    found: dict[str, Record] = {}
    for kind in kinds if mixed else ():
        found |= store.history.reliability(mixed, kind, line=line)
    return found


def _title(counts: dict[str, int], jobs: int, query: GridQuery) -> str:
    new, still = counts[Standing.NEW_FAILURE], counts[Standing.STILL_FAILING]
    chosen = ", ".join(filter(None, (query.suite, query.soc, query.backend, query.precision, query.q)))
    what = f"{fmt.plural(new, 'new failure')}, {still} still failing of {fmt.plural(jobs, 'job')}"
    return f"{what}: {chosen}" if chosen else what
