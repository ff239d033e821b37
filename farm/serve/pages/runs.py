"""Runs, and the files of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farm.serve.page import Facts, PageNumber, Text, one_of
from farm.store.queries.browse import STATES, Known, ListedRun, RunFile, RunFilter
from farm.store.records import Purpose
from farm.store.values import branch_text

if TYPE_CHECKING:
    from farm.store.store import Store

_PURPOSES = tuple(map(str, Purpose))
_MOST_FILES = 2000


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


class FilesQuery(msgspec.Struct, frozen=True):
    """Run whose files are listed."""

    run: Text


class FilesFacts(Facts, frozen=True, kw_only=True):
    """Files of a run."""

    path: ClassVar[str] = "/runs/{run:str}/files"
    template: ClassVar[str] = "files.html.j2"
    run_id: str
    files: list[RunFile]


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


def files_page(store: Store, query: FilesQuery) -> FilesFacts:
    """Return the files of a run."""
    run_id = store.runs.resolve(query.run, own=False)
    return FilesFacts(title=f"Files of {run_id}", run_id=run_id, files=store.browse.files(run_id, _MOST_FILES))
