"""Toolchain of a run <-> its columns, and the branch of a query. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from farm.store import values
from farm.store.view import Purpose, RunCommit, RunToolchain

if TYPE_CHECKING:
    from sqlalchemy import Row

COMMITS_LIMIT = 50
"""Most commits stored with a run; further ones are only counted."""
DEFAULT_BRANCH = "default"
"""Name of the branch without a name, in texts that need one."""

# Fields with a column of their own; the others are in `run_source`.
_COLUMNS = {
    "name": "run_toolchain",
    "branch": "run_branch",
    "private": "run_private",
    "commit": "run_commit",
    "dirty": "run_dirty",
}
_TEXTS = {
    **dict.fromkeys(("name", "branch", "git_branch", "subject"), values.NAME_LIMIT),
    **dict.fromkeys(("commit", "before"), values.SOC_LIMIT),
    "commit_url": values.REASON_LIMIT,
}


def toolchain_columns(toolchain: RunToolchain) -> dict[str, Any]:
    """Return the columns of a run's toolchain, with texts within the store's limits."""
    bounded = bounded_toolchain(toolchain)
    row = {column: getattr(bounded, name) for name, column in _COLUMNS.items()}
    rest = msgspec.to_builtins(bounded)
    return {**row, "run_source": {name: value for name, value in rest.items() if name not in _COLUMNS} or None}


def toolchain_of(row: Row[Any]) -> RunToolchain | msgspec.UnsetType:
    """Return the toolchain of a row of `run`, UNSET for the default one without further facts."""
    known = {name: getattr(row, column) for name, column in _COLUMNS.items()}
    found = msgspec.convert({**(row.run_source or {}), **known}, RunToolchain)
    return UNSET if found == RunToolchain() else found


def bounded_toolchain(toolchain: RunToolchain) -> RunToolchain:
    """Return `toolchain` with its texts and number of commits within the store's limits."""
    kept = toolchain.since[:COMMITS_LIMIT]
    return msgspec.structs.replace(
        toolchain,
        **{name: values.clean(getattr(toolchain, name), limit) for name, limit in _TEXTS.items()},
        since=tuple(
            RunCommit(values.clean(one.hash, values.SOC_LIMIT), values.clean(one.subject, values.NAME_LIMIT))
            for one in kept
        ),
        more=toolchain.more + len(toolchain.since) - len(kept),
    )


def purpose_of(row: Row[Any]) -> Purpose:
    """Return the purpose of the run of a row of `run`."""
    if row.priority == Purpose.NIGHTLY:
        return Purpose.NIGHTLY
    return Purpose.LOCAL if row.run_private else Purpose.MANUAL


def of_branch(branch: str | None) -> dict[str, Any]:
    """Return the parameters of a statement for one branch; None for every run, local runs as well."""
    return {"branch": branch or "", "any_branch": int(branch is None)}


def branch_text(branch: str) -> str:
    """Return the name of a branch for texts."""
    return branch or DEFAULT_BRANCH
