"""Runs, one run with its jobs, and the files of a run."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar

import msgspec

from farm.report.model.status import Standing, standing
from farm.report.model.summary import Outcome
from farm.serve.page import Facts, PageNumber, Text, has_words, one_of
from farm.store.queries.browse import STATES, Known, ListedRun, RunFilter, RunJob
from farm.store.records import AlertRecord, Purpose
from farm.store.store import Store
from farm.store.values import branch_text

_PURPOSES = tuple(map(str, Purpose))


class RunsQuery(msgspec.Struct, frozen=True):
    """Filter of runs."""

    user: Text = ""
    purpose: Text = ""
    soc: Text = ""
    suite: Text = ""
    state: Text = ""
    branch: Text = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="Runs of a page.")] = 25
    page: PageNumber = 1


class RunsFacts(Facts, frozen=True, kw_only=True):
    """Runs of a page, newest first."""

    path: ClassVar[str] = "/runs"
    template: ClassVar[str] = "runs.html.j2"
    schema: int = 3
    runs: list[ListedRun]
    total: int
    wanted: RunFilter
    known: Known
    branches: list[str]
    number: int
    pages: int

    def shown(self) -> dict[str, Any]:
        """Return the choices of the filters."""
        return {"states": STATES, "purposes": _PURPOSES}


def runs_page(store: Store, query: RunsQuery) -> RunsFacts:
    """Return runs, newest first."""
    wanted = RunFilter(
        user=query.user,
        purpose=one_of("purpose", query.purpose, _PURPOSES),
        soc=query.soc,
        suite=query.suite,
        state=one_of("state", query.state, STATES),
        branch=branch_text(store.status.branch_to_show(query.branch)) if query.branch else "",
    )
    found, total = store.browse.runs(wanted, query.limit, (query.page - 1) * query.limit)
    return RunsFacts(
        title="Runs",
        runs=found,
        total=total,
        wanted=wanted,
        known=store.browse.known(),
        branches=list(map(branch_text, store.status.branches())),
        number=query.page,
        pages=max(1, -(-total // query.limit)),
    )


OUTCOMES = tuple(one.value for one in Outcome if one is not Outcome.OUTDATED)
"""Outcomes of jobs, the most urgent first."""


class RunQuery(msgspec.Struct, frozen=True):
    """A run and the filter of its jobs."""

    run: Text
    """Id, its beginning, a name or `latest`."""
    outcome: Text = ""
    q: Text = ""
    """Words of job, device or reason."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=20_000, description="Jobs, the most urgent first.")] = 300


class RunFacts(Facts, frozen=True, kw_only=True):
    """Run with its jobs."""

    path: ClassVar[str] = "/runs/{run:str}"
    template: ClassVar[str] = "run_page.html.j2"
    schema: int = 2
    run: ListedRun
    fingerprint: dict[str, str]
    jobs: list[RunJob]
    """Jobs that match the filter, the most urgent first."""
    total: int
    """Jobs that match the filter."""
    counts: dict[str, int]
    """All jobs by outcome."""
    new: list[str]
    """Jobs that failed newly."""
    alerts: list[AlertRecord]
    nightly_run: str
    """Id of the nightly run that this run is a cell of; empty without."""
    submitted: bool
    """True for a submitted run that has not ended."""

    def shown(self) -> dict[str, Any]:
        """Return the choices of the filter."""
        return {"outcomes": OUTCOMES}


def run_page(store: Store, query: RunQuery) -> RunFacts:
    """Return a run with its jobs."""
    run_id = store.runs.resolve(query.run, own=False)
    run = store.browse.run(run_id)
    jobs = store.browse.jobs_of_run(run_id)
    new = {job.job_id for job in store.status.of_run(run_id).jobs if standing(job) is Standing.NEW_FAILURE}
    fits = [
        job
        for job in jobs
        if query.outcome in ("", job.outcome) and has_words(query.q, job.job_id, job.device, job.reason)
    ]
    place = {outcome: number for number, outcome in enumerate(OUTCOMES)}
    fits.sort(key=lambda job: (place.get(job.outcome, -1), job.job_id not in new))
    counts = Counter(job.outcome for job in jobs)
    return RunFacts(
        title=f"{counts['failed']} failed of {len(jobs)} jobs: run {run.run.name or run_id}",
        run=run.run,
        fingerprint=run.fingerprint,
        jobs=fits[: query.limit],
        total=len(fits),
        counts={outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]},
        new=sorted(new),
        alerts=store.alerts.of_run(run_id),
        nightly_run=run.nightly_run,
        submitted=store.is_shared and run.run.progress.finished_ms is None and _is_submitted(store, run_id),
    )


def _is_submitted(store: Store, run_id: str) -> bool:
    order = store.cluster.order(run_id)
    return order is not None and order.state == "open"
