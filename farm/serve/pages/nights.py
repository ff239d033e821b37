"""Pages of the nightly runs, and of one nightly run with its runs (cells: suite x SoC)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.report.model import format as fmt
from farm.report.model.grid import GridNight, nights_of
from farm.serve.page import Facts, Text
from farm.serve.pages.status import StatusFacts, status_facts
from farm.store.queries.grid import JobFilter
from farm.store.toolchains import line_text
from farm.store.view import RunCommit

if TYPE_CHECKING:
    from farm.store.store import Store


class NightsQuery(msgspec.Struct, frozen=True):
    """Query of the page of nightly runs."""

    branch: Text = ""
    before: Annotated[int, msgspec.Meta(ge=0, lt=2**53, description="Only nightly runs before this time; ms.")] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="Number of nightly runs.")] = 30


class NightsFacts(Facts, frozen=True, kw_only=True):
    """Facts of the page of nightly runs, which are newest first."""

    path: ClassVar[str] = "/nights"
    template: ClassVar[str] = "nights.html.j2"
    nights: list[GridNight]
    lines: list[str]
    line: str
    commit_url: str
    older: int
    """Value of `before` for the page of older nightly runs; 0 without older ones."""


class NightQuery(msgspec.Struct, frozen=True):
    """Query of the page of a nightly run."""

    night: Text
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="Rows of each list.")] = 20


class NightFacts(StatusFacts, frozen=True, kw_only=True):
    """Facts of the page of a nightly run: the state of its jobs, and its commits."""

    path: ClassVar[str] = "/nights/{night:str}"
    night: str
    commits: list[RunCommit]
    """Commits since the nightly run before, newest first."""


def nights_page(store: Store, query: NightsQuery) -> NightsFacts:
    """Return nightly runs with the results of their jobs."""
    line = store.status.line_to_show(query.branch or None)
    # Read one night more than shown: the last shown night is compared with it, and it gives the link to older nights.
    found = store.grid.nights(line, query.limit + 1, before_ms=query.before or None)
    nights = nights_of(found, store.grid.jobs(found, JobFilter()))
    more = len(nights) > query.limit
    return NightsFacts(
        title=f"Nightly runs of {line_text(line)}",
        nights=nights[: query.limit],
        lines=list(map(line_text, store.status.lines())),
        line=line_text(line),
        commit_url=found[0].toolchain.commit_url if found else "",
        older=nights[query.limit - 1].started_ms if more else 0,
    )


def night_page(store: Store, query: NightQuery) -> NightFacts:
    """Return a nightly run with the state of its jobs."""
    night = store.grid.night(query.night)
    if night is None:
        known = [one.id for one in store.grid.nights(None, 20)]
        raise UnknownNameError("nightly run", query.night, known, "" if known else "(the store has none)")
    facts = status_facts(store, query.limit, runs=[run.run_id for run in night.runs])
    commits = {one.hash: one for run in night.runs if run.toolchain for one in run.toolchain.since}
    return NightFacts(
        **{name: getattr(facts, name) for name in facts.__struct_fields__ if name != "title"},
        title=f"Nightly run {fmt.day(night.started_ms)}: {facts.title}",
        night=night.id,
        commits=list(commits.values()),
    )
