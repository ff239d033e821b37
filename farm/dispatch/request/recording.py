"""Record of a beginning run, equal for every command: user, host and toolchain."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.base.git import git
from farm.builds.toolchains.toolchain import STUB_BRANCH, Toolchain
from farm.store.records import RunRecord
from farm.store.toolchains import COMMITS_LIMIT
from farm.store.view import Purpose, RunCommit, RunToolchain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.store.store import Store

logger = logging.getLogger(__name__)

# Longer, and the run begins without: it is only for people.
_GIT_SECONDS = 5.0
# Most counted commits, beyond any number between two nightly runs; a rewritten history may have no end.
_MOST_COUNTED = 10_000


def run_record(
    config: Config,
    store: Store,
    tools: Toolchain,
    *,
    command: str,
    facts: Mapping[str, str],
    purpose: Purpose = Purpose.LOCAL,
    name: str = "",
    nightly_run: str = "",
    again: RunToolchain | None = None,
) -> RunRecord:
    """Return the record of a run with `tools`, the selected toolchain of `config`; `facts` are its fingerprint.

    `again` is the toolchain of a run whose program is run again. A name that an earlier run has is logged, except for
    nightly runs, whose names repeat.
    """
    if not nightly_run and (before := store.runs.newest_called(name)):
        logger.info("%r means this run from now on: it meant %s", name, before)
    toolchain = recorded_toolchain(config, store, tools, purpose)
    facts = dict(facts)
    if again is not None and again != toolchain:
        # An old program is no nightly run of its branch. The branch of a stub has no results of Qualcomm's libraries,
        # and theirs none of a stub.
        over_stub = {one.split(" ")[-1] == STUB_BRANCH for one in (again.branch, tools.branch)}
        branch = again.branch if len(over_stub) == 1 else tools.branch
        toolchain = msgspec.structs.replace(again, private=True, branch=branch)
        own = {"toolchain": again.name, "commit": again.commit, "dirty": "yes" if again.dirty else ""}
        facts = {name: value for name, value in {**facts, **own}.items() if value or name not in own}
    return RunRecord(
        command=command,
        user=store.user,
        host=socket.gethostname(),
        fingerprint=facts,
        priority="nightly" if purpose is Purpose.NIGHTLY else "person",
        toolchain=toolchain,
        name=name,
        nightly_run=nightly_run,
    )


def recorded_toolchain(config: Config, store: Store, tools: Toolchain, purpose: Purpose) -> RunToolchain:
    """Return a toolchain's record, with the commits since the newest run of its branch."""
    source, folder = tools.source, config.toolchain.checkout
    since: tuple[RunCommit, ...] = ()
    more, last = 0, ""
    if source.commit:
        last = store.status.newest_toolchain(tools.branch).commit
        if folder is not None:
            since, more = commits_between(folder, last, source.commit)
    return RunToolchain(
        name=tools.name,
        branch=tools.branch,
        private=is_private_run(tools, purpose),
        commit=source.commit,
        dirty=source.dirty,
        git_branch=source.branch,
        subject=source.subject,
        committed_ms=source.committed_ms,
        before=last if last != source.commit else "",
        since=since,
        more=more,
        commit_url=config.toolchain.commit_url,
    )


def is_private_run(tools: Toolchain, purpose: Purpose) -> bool:
    """Return whether a run is only compared with its branch, like a local run or a run of edited sources."""
    return purpose is Purpose.LOCAL or tools.private or tools.source.dirty


def commits_between(folder: Path, last: str, now: str) -> tuple[tuple[RunCommit, ...], int]:
    """Return the commits after `last` up to `now` along first parents, newest first, and the number of further ones.

    No commits if `last` is empty or no ancestor of `now`, or if git fails.
    """
    if not last or last == now:
        return (), 0
    limit = f"--max-count={_MOST_COUNTED}"
    try:
        git(folder, "merge-base", "--is-ancestor", last, now, timeout_s=_GIT_SECONDS)
        text = git(
            folder, "log", "--first-parent", "-z", limit, "--format=%H %s", f"{last}..{now}", "--",
            timeout_s=_GIT_SECONDS,
        )  # fmt: skip
    except FarmError:
        # Another branch, a shallow clone or a missing git: the run goes on without its list of commits.
        return (), 0
    found = [RunCommit(*entry.partition(" ")[::2]) for entry in text.split("\0") if entry]
    return tuple(found[:COMMITS_LIMIT]), max(0, len(found) - COMMITS_LIMIT)
