"""`farm bisect --commits`: a bisection over commits that begins, or goes on where it was killed."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.bundles.key import bundle_key
from farm.config.toolchains import ToolchainConfig
from farm.errors import UsageError
from farm.regressions.commit_bisect import CommitBisection
from farm.regressions.commit_lab import WorktreeLab
from farm.regressions.commit_records import STATE_FILE, CommitsRequest, CommitsState, JobSearch, read_state, write_state
from farm.request.pruning import BISECTS
from farm.request.resume import in_progress
from farm.store.rows import new_run_id
from farm.store.values import judged_by
from farm.system.ids import is_run_id
from farm.system.interrupts import InterruptHandler
from farm.toolchains.commits import Checkout
from farm.toolchains.select import toolchain_of
from farm.toolchains.worktrees import toolchain_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farm.config.settings import Config
    from farm.store.store import Store
    from farm.suites.suite import Job
    from farm.toolchains.commits import Commit


class CommitsOutcome(msgspec.Struct, frozen=True):
    """What is known at the end."""

    state: CommitsState
    folder: Path
    """Where its state and logs are."""
    changed_files: dict[str, tuple[str, ...]]
    """What the first bad commits change, by hash: status and path."""

    @property
    def found(self) -> list[str]:
        """Ids of the jobs that have a step, whose first bad commits are known."""
        searches = self.state.searches.items()
        return [job_id for job_id, one in searches if one.question is not None and one.question.is_open]

    def first_bad(self, job_id: str) -> Commit:
        """Return the first commit that is known to be bad for a job."""
        return self.state.commits[self.state.range_of(job_id).bad]


def commits_request(config: Config, checkout: Path, span: str, **fields: object) -> CommitsRequest:
    """Return the request of `GOOD..BAD`, with the commits that these are now. Raises UsageError."""
    good, dots, bad = span.partition("..")
    if not dots or not good or bad.startswith("."):
        raise UsageError(f"--commits {span}: expected GOOD..BAD, such as v1.5.0..main")
    repository = Checkout(_selected(config, checkout, str(fields.get("toolchain", ""))))
    ends = repository.commit(good), repository.commit(bad or "HEAD")
    repository.between(*ends)
    shas = {"good": ends[0].sha, "bad": ends[1].sha}
    return CommitsRequest(checkout=str(repository.folder), **shas, **fields)  # type: ignore[arg-type]


def _selected(config: Config, checkout: Path | None, ref: str) -> Path:
    toolchain = _named(config, ref) if ref else ToolchainConfig()
    folder = checkout or toolchain.checkout
    if folder is None:
        raise UsageError("name the source tree of ExecuTorch with --checkout DIR")
    return folder


def _named(config: Config, ref: str) -> ToolchainConfig:
    """Return the toolchain that commits are to be compiled with. Raises UsageError for one that has no commits."""
    toolchain = toolchain_of(config, ref)
    if toolchain.version:
        raise UsageError(
            f"--toolchain {ref} is release {toolchain.version} of ExecuTorch, which is no commit: name one with "
            "python, or leave it out"
        )
    return toolchain


def bisect_commits(
    config: Config,
    store: Store,
    request: CommitsRequest,
    jobs: Sequence[Job],
    command: str,
    note: Callable[[str], None],
    *,
    anew: bool = False,
) -> CommitsOutcome:
    """Find the first bad commit of each job; what was found out before goes on unless `anew`.

    `store` is asked for leases only. Raises UsageError, NoDeviceError, MissingToolError, InfraError; what is known by
    then is kept, also after Ctrl-C.
    """
    checkout = Checkout(Path(request.checkout))
    good = checkout.commit(request.good)
    known = None if anew else _unfinished(config, request)
    state_id = known.name if known is not None else new_run_id(time.time_ns() // 1_000_000)
    folder = config.state_dir / BISECTS / state_id
    config = with_toolchain(config, checkout, request)
    with InterruptHandler(), in_progress(folder):
        with WorktreeLab(config, store, checkout, good, request, folder, command, note) as lab:
            _, tools = lab.tools(good)
            if known is None:
                commits = (good, *checkout.between(good, checkout.commit(request.bad)))
                built = bool(toolchain_at(config, checkout.folder).build)
                content = tuple(checkout.content_key(commit, built=built) for commit in commits)
                searches = {job.id: JobSearch(definition=_definition(job)) for job in jobs}
                state = CommitsState(
                    id=state_id, request=request, identity=dict(tools.versions), commits=commits, content=content,
                    searches=searches,
                )  # fmt: skip
                write_state(folder, state)
                merges = sum(commit.is_merge for commit in commits[1:])
                of_merges = f", {merges} of them merges, taken as one along first parents" if merges else ""
                note(f"bisection {state_id}: {len(commits) - 1} commits{of_merges}")
            else:
                state = read_state(folder)
                _require_same(state, jobs, tools.versions)
                note(f"bisection {state_id} goes on: {len(state.compiled)} commits were compiled before")
            CommitBisection(state, jobs, lab, lambda: write_state(folder, state), note).run()
        return outcome_of(checkout, folder, state)


def outcome_of(checkout: Checkout, folder: Path, state: CommitsState) -> CommitsOutcome:
    """Return what a state says, with what the first bad commits change."""
    outcome = CommitsOutcome(state, folder, {})
    shas = {outcome.first_bad(job_id) for job_id in outcome.found}
    changed = {commit.sha: tuple(checkout.changed_files(commit)) for commit in shas}
    return msgspec.structs.replace(outcome, changed_files=changed)


def find_bisection(config: Config, ref: str) -> Path:
    """Return the folder of a bisection: its id, or `latest`. Raises UsageError."""
    folder = config.state_dir / BISECTS
    if ref == "latest":
        known = sorted(_bisections(config))
        if not known:
            raise UsageError(f"there is no bisection in {folder}: 'farm bisect --commits GOOD..BAD JOB' begins one")
        return known[-1]
    if not is_run_id(ref) or not (folder / ref / STATE_FILE).is_file():
        raise UsageError(f"there is no bisection {ref!r} in {folder}")
    return folder / ref


def _bisections(config: Config) -> Iterator[Path]:
    for file in (config.state_dir / BISECTS).glob(f"*/{STATE_FILE}"):
        if is_run_id(file.parent.name):
            yield file.parent


def _unfinished(config: Config, request: CommitsRequest) -> Path | None:
    """Return the folder of what was begun with this request and is not finished.

    Raises UsageError where one of these commits is not finished that was asked for something else.
    """
    for folder in sorted(_bisections(config), reverse=True):
        try:
            state = read_state(folder)
        except UsageError:
            continue
        other = state.request
        if state.is_finished or (other.checkout, other.good, other.bad) != (
            request.checkout,
            request.good,
            request.bad,
        ):
            continue
        if other == request:
            return folder
        names = [name for name in request.__struct_fields__ if getattr(other, name) != getattr(request, name)]
        raise UsageError(
            f"bisection {folder.name} of these commits is not finished and was asked otherwise ({', '.join(names)}): "
            f"'farm bisect --resume {folder.name}' goes on with it, --anew begins another"
        )
    return None


def _require_same(state: CommitsState, jobs: Sequence[Job], identity: dict[str, str]) -> None:
    """Raise UsageError where what is compiled now could not be compared with what was compiled before."""
    changed = [
        name for name in sorted(state.identity.keys() | identity) if state.identity.get(name) != identity.get(name)
    ]
    others = [job.id for job in jobs if state.searches[job.id].definition != _definition(job)]
    changed += [f"the case of {job_id}, or the way farm compiles it," for job_id in others]
    if changed:
        raise UsageError(
            f"bisection {state.id} cannot go on: {', '.join(changed)} changed since it began: --anew begins another"
        )


def _definition(job: Job) -> str:
    """Return a hash of what decides a job's bundle and verdict, apart from its toolchain."""
    return hashlib.sha256(f"{bundle_key(job, {})} {judged_by(job)}".encode()).hexdigest()


def with_toolchain(config: Config, checkout: Checkout, request: CommitsRequest) -> Config:
    """Return `config` with what commits are compiled with as the selected one, and the request's build command.

    That is the toolchain that was named, else the table of farm.toml whose checkout this is. Raises UsageError for one
    that was named and is of something else.
    """
    if not request.toolchain:
        base = toolchain_at(config, checkout.folder)
    else:
        base = _named(config, request.toolchain)
        if base.checkout is None:
            base = msgspec.structs.replace(base, named=False, checkout=checkout.folder)
        elif base.checkout.resolve() != checkout.folder:
            raise UsageError(
                f"--toolchain {request.toolchain} is of {base.checkout}, not of {checkout.folder}: leave --checkout or "
                "--toolchain out"
            )
    if request.build:
        base = msgspec.structs.replace(base, build=request.build)
    return msgspec.structs.replace(config, toolchain=base)
