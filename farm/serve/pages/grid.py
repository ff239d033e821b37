"""Grid: jobs by nightly run, as in TestGrid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from farm.report.model import format as fmt
from farm.report.model.grid import STATES, GridNightlyRun, GridRow, may_be_flaky, nightly_runs_of, rows_of
from farm.report.model.status import Standing
from farm.results.analysis.history import Record
from farm.serve.page import Facts, Text
from farm.store.queries.grid import GridJob, JobFilter, NightlyRun, Targets
from farm.store.store import Store
from farm.store.values import branch_text

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
    schema: int = 2
    nightly_runs: list[GridNightlyRun]
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
    branches: list[str]
    branch: str

    def shown(self) -> dict[str, Any]:
        """Return the choices of the filter."""
        return {"states": STATES}


FLAKY = "flaky"
"""State of a filter for flaky jobs of any verdict."""


def grid_page(store: Store, query: GridQuery) -> GridFacts:
    """Return the results of jobs in the newest nightly runs."""
    branch = store.status.branch_to_show(query.branch or None)
    nightly_runs = store.grid.nightly_runs(branch, query.nights)
    wanted = JobFilter(query.suite, query.soc, query.backend, query.precision, query.q)
    jobs = store.grid.jobs(nightly_runs, wanted)
    rows = rows_of(jobs, records_of_jobs(store, jobs, nightly_runs, branch))
    counts = {str(standing): sum(row.standing is standing for row in rows) for standing in STATES}
    flaky = sum(row.flaky is not None for row in rows)
    if query.state:
        rows = [row for row in rows if query.state in (row.standing, FLAKY if row.flaky else "")]
    return GridFacts(
        title=_title(counts, len(jobs), query),
        nightly_runs=nightly_runs_of(nightly_runs, jobs),
        rows=rows[: query.limit],
        total=len(rows),
        counts=counts,
        flaky=flaky,
        query=query,
        targets=store.grid.targets(),
        branches=list(map(branch_text, store.status.branches())),
        branch=branch_text(branch),
    )


def records_of_jobs(
    store: Store, jobs: Sequence[GridJob], nightly_runs: Sequence[NightlyRun], branch: str
) -> dict[str, Record]:
    """Return the reliability of the jobs with passes and failures, by job id."""
    mixed = [job.job_id for job in jobs if may_be_flaky(job)][:_MOST_MIXED]
    kinds = sorted({run.device_kind for nightly_run in nightly_runs for run in nightly_run.runs})
    found: dict[str, Record] = {}
    for kind in kinds if mixed else ():
        found |= store.history.reliability(mixed, kind, branch=branch)
    return found


def _title(counts: dict[str, int], jobs: int, query: GridQuery) -> str:
    new, still = counts[Standing.NEW_FAILURE], counts[Standing.STILL_FAILING]
    chosen = ", ".join(filter(None, (query.suite, query.soc, query.backend, query.precision, query.q)))
    what = f"{fmt.plural(new, 'new failure')}, {still} still failing of {fmt.plural(jobs, 'job')}"
    return f"{what}: {chosen}" if chosen else what
