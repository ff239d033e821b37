"""Toolchains of runs, and one with its runs."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.report.model.status import short
from farm.serve.page import Facts, Text
from farm.store.queries.browse import ListedRun, RunFilter, UsedToolchain
from farm.store.records import RunToolchain
from farm.store.store import Store

_MOST_RUNS = 100


class ToolchainsQuery(msgspec.Struct, frozen=True):
    """Number of toolchains."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=200, description="Toolchains, the newest first.")] = 60


class ToolchainsFacts(Facts, frozen=True, kw_only=True):
    """Toolchains of runs, newest first."""

    path: ClassVar[str] = "/toolchains"
    template: ClassVar[str] = "toolchains.html.j2"
    schema: int = 2
    toolchains: list[UsedToolchain]
    commit_url: str


class ToolchainQuery(msgspec.Struct, frozen=True):
    """A commit, and the name of the toolchain where several have it."""

    commit: Text
    name: Text = ""


class ToolchainFacts(Facts, frozen=True, kw_only=True):
    """Toolchain with its runs."""

    path: ClassVar[str] = "/toolchains/{commit:str}"
    template: ClassVar[str] = "toolchain.html.j2"
    schema: int = 2
    toolchain: UsedToolchain
    known: RunToolchain
    """Commit, branch and earlier commits, as its newest run has them."""
    fingerprint: dict[str, str]
    """Fingerprint of its newest run."""
    runs: list[ListedRun]


def toolchains_page(store: Store, query: ToolchainsQuery) -> ToolchainsFacts:
    """Return the toolchains of runs."""
    found = store.browse.toolchains(most=query.limit)
    url = store.status.newest_toolchain(found[0].branch).commit_url if found else ""
    return ToolchainsFacts(title="Toolchains", toolchains=found, commit_url=url)


def toolchain_page(store: Store, query: ToolchainQuery) -> ToolchainFacts:
    """Return a toolchain with its runs; without a commit the path has `-`."""
    commit = "" if query.commit == "-" else query.commit
    found = [one for one in store.browse.toolchains(commit) if one.hash == commit and query.name in ("", one.name)]
    if not found:
        known = [one.hash for one in store.browse.toolchains() if one.hash]
        raise UnknownNameError("commit", query.commit, known, "" if known else "(no run has one)")
    one = found[0]
    newest = store.browse.run(one.newest)
    runs, _ = store.browse.runs(RunFilter(commit=commit, toolchain=one.name), _MOST_RUNS)
    return ToolchainFacts(
        title=f"Toolchain {one.name or 'default'} at {short(commit) or 'no commit'}",
        toolchain=one,
        known=newest.run.toolchain or RunToolchain(),
        fingerprint=newest.fingerprint,
        runs=runs,
    )
