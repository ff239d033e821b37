"""Pages of the nightly runs, and of one nightly run with its runs (cells: suite x SoC)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.report.model import format as fmt
from farm.report.model.grid import GridNightlyRun, nightly_runs_of
from farm.serve.page import Facts, Text
from farm.serve.pages.status import StatusFacts, status_facts
from farm.store.queries.grid import JobFilter
from farm.store.records import RunCommit
from farm.store.store import Store
from farm.store.values import branch_text


class NightlyRunsQuery(msgspec.Struct, frozen=True):
    """Query of the page of nightly runs."""

    branch: Text = ""
    before: Annotated[int, msgspec.Meta(ge=0, lt=2**53, description="Only nightly runs before this time; ms.")] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="Number of nightly runs.")] = 30


class NightlyRunsFacts(Facts, frozen=True, kw_only=True):
    """Facts of the page of nightly runs, which are newest first."""

    path: ClassVar[str] = "/nightly"
    template: ClassVar[str] = "nightly_runs.html.j2"
    schema: int = 2
    nightly_runs: list[GridNightlyRun]
    branches: list[str]
    branch: str
    commit_url: str
    older: int
    """Value of `before` for the page of older nightly runs; 0 without older ones."""


class NightlyRunQuery(msgspec.Struct, frozen=True):
    """Query of the page of a nightly run."""

    nightly_run: Text
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="Rows of each list.")] = 20


class NightlyRunFacts(StatusFacts, frozen=True, kw_only=True):
    """Facts of the page of a nightly run: the state of its jobs, and its commits."""

    path: ClassVar[str] = "/nightly/{nightly_run:str}"
    nightly_run: str
    commits: list[RunCommit]
    """Commits since the nightly run before, newest first."""


def nightly_runs_page(store: Store, query: NightlyRunsQuery) -> NightlyRunsFacts:
    """Return nightly runs with the results of their jobs."""
    branch = store.status.branch_to_show(query.branch or None)
    # Read one more than shown: the last shown nightly run is compared with it, and it gives the link to older ones.
    found = store.grid.nightly_runs(branch, query.limit + 1, before_ms=query.before or None)
    nightly_runs = nightly_runs_of(found, store.grid.jobs(found, JobFilter()))
    more = len(nightly_runs) > query.limit
    return NightlyRunsFacts(
        title=f"Nightly runs of {branch_text(branch)}",
        nightly_runs=nightly_runs[: query.limit],
        branches=list(map(branch_text, store.status.branches())),
        branch=branch_text(branch),
        commit_url=found[0].toolchain.commit_url if found else "",
        older=nightly_runs[query.limit - 1].started_ms if more else 0,
    )


def nightly_run_page(store: Store, query: NightlyRunQuery) -> NightlyRunFacts:
    """Return a nightly run with the state of its jobs."""
    nightly_run = store.grid.nightly_run(query.nightly_run)
    if nightly_run is None:
        known = [one.id for one in store.grid.nightly_runs(None, 20)]
        raise UnknownNameError("nightly run", query.nightly_run, known, "" if known else "(the store has none)")
    facts = status_facts(store, query.limit, runs=[run.run_id for run in nightly_run.runs])
    commits = {one.hash: one for run in nightly_run.runs if run.toolchain for one in run.toolchain.since}
    return NightlyRunFacts(
        **{name: getattr(facts, name) for name in facts.__struct_fields__ if name != "title"},
        title=f"Nightly run {fmt.day(nightly_run.started_ms)}: {facts.title}",
        nightly_run=nightly_run.id,
        commits=list(commits.values()),
    )
