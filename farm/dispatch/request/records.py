"""Records of a run: its beginning in the store, its request for a resume, its exit code and report."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import ExitCode, FarmError, UsageError
from farm.base.files import make_folders, weakness_of_open, write_atomically
from farm.base.git import git
from farm.base.paths import is_path
from farm.builds.bundles.key import source_digest, source_place
from farm.builds.toolchains.toolchain import STUB_BRANCH, Toolchain
from farm.results.attempt import Verdict
from farm.store.records import Background, DeviceView, Purpose, RunCommit, RunRecord, RunToolchain, RunView
from farm.store.values import COMMITS_LIMIT
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.dispatch.request.request import RunRequest
    from farm.report.html.page_of_run import ReportContext
    from farm.store.artifacts import ArtifactStore
    from farm.store.store import Store


# Record of a beginning run, equal for every command: user, host and toolchain.


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


# Request of a run, kept beside it, so that an unfinished run can be resumed.


_FILE, _LOCK = "intent.json", "lock"
# Shown characters of a hash: enough for two different runtimes.
_SHOWN = 16
# Errors of a file from another version of farm, or of an incomplete one.
_UNREADABLE = (msgspec.DecodeError, KeyError, ValueError, TypeError)


def leave_intent(folder: Path, request: RunRequest | None, jobs: Sequence[Job], toolchain: str = "") -> None:
    """Write the intent of a run; without a request it belongs to a command that is not resumed.

    `toolchain` is then the name of the selected toolchain.
    """
    make_folders(folder)
    own = {"request": request} if request is not None else {"toolchain": toolchain}
    intent = {"jobs": jobs, "sources": _sources(jobs), **own}
    write_atomically(folder / _FILE, msgspec.json.encode(intent, enc_hook=str), mode=0o644)


def read_intent(folder: Path) -> tuple[RunRequest, tuple[Job, ...]]:
    """Return the intent of the run in `folder`.

    Raises UsageError for a missing intent, an intent of another user, and changed code of its cases.
    """
    from farm.dispatch.request.request import RunRequest

    try:
        data = _read(folder)
        if "request" not in data:
            raise UsageError(f"run {folder.name} had one job, and there is nothing to resume: give its command again")
        request = msgspec.json.decode(data["request"], type=RunRequest)
        jobs = _jobs(data)
        changed = _changed(data, jobs)
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: there is nothing to resume: the run was on another machine, or of another command"
        ) from None
    except _UNREADABLE as error:
        raise UsageError(
            f"run {folder.name} cannot be resumed: its plan was written by another version of farm ({error}): "
            "start anew"
        ) from None
    if changed:
        raise UsageError(
            f"run {folder.name} cannot be resumed: the code of {', '.join(changed)} has changed since: start anew"
        )
    return request, jobs


def planned_jobs(folder: Path) -> tuple[Job, ...]:
    """Return the jobs of the run in `folder` as this user planned them; none if that is unknown here."""
    try:
        return _jobs(_read(folder))
    except (OSError, UsageError, *_UNREADABLE):
        return ()


def toolchain_of_run(config: Config, run_id: str) -> str:
    """Return the `--toolchain` of a run that this user began here; empty for the default or an unknown one."""
    from farm.dispatch.request.request import RunRequest

    try:
        data = _read(config.run_folder(run_id))
        if "request" in data:
            return msgspec.json.decode(data["request"], type=RunRequest).toolchain
        return msgspec.json.decode(data["toolchain"], type=str)
    except (OSError, UsageError, *_UNREADABLE):
        return ""


def config_of_run(config: Config, run: RunView, given: str) -> Config:
    """Return `config` with the `given` toolchain selected, or else the toolchain of a run.

    Raises UsageError or MissingToolError for an unusable toolchain, or a toolchain of another user or machine.
    """
    from farm.builds.toolchains.selection import use_toolchain

    return use_toolchain(config, given or toolchain_of_run(config, run.id) or _recorded(run))


def config_to_run_again(config: Config, run: RunView, given: str) -> Config:
    """Return the same; if the run's toolchain is gone, `config` itself, which runs a cached bundle.

    A bundle to be made again is refused with the differences. Raises as `config_of_run` for a `given` toolchain.
    """
    try:
        return config_of_run(config, run, given)
    except FarmError as error:
        if given:
            raise
        logger.warning("the toolchain of run %s cannot be used: %s", run.id, error)
        return config


def _recorded(run: RunView) -> str:
    """Return the name of a run's toolchain in the store. Raises UsageError for a path, which any user may own."""
    name = run.toolchain.name if run.toolchain else ""
    if is_path(name):
        raise UsageError(f"{name} is of another user or machine, whose programs are not started")
    return name


def changed_code(folder: Path, job: Job) -> list[str]:
    """Return the places of changed code of `job` since the run in `folder`; none if unknown."""
    try:
        return _changed(_read(folder), [job])
    except (OSError, UsageError, *_UNREADABLE):
        return []


def _read(folder: Path) -> dict[str, msgspec.Raw]:
    """Return the intent in the folder of a run. Raises UsageError if another user could have written it.

    The intent names code and arguments of pytest, which are executed.
    """
    file = folder / _FILE
    with file.open("rb") as opened:
        if problem := weakness_of_open(opened.fileno()):
            raise UsageError(f"{file} has the plan of the run and is not used: {problem}: start anew")
        return msgspec.json.decode(opened.read(), type=dict[str, msgspec.Raw])


def _jobs(data: Mapping[str, msgspec.Raw]) -> tuple[Job, ...]:
    return msgspec.json.decode(data["jobs"], type=tuple[Job, ...], dec_hook=lambda kind, text: kind(text))


def _changed(data: Mapping[str, msgspec.Raw], jobs: Sequence[Job]) -> list[str]:
    then = msgspec.json.decode(data["sources"], type=dict[str, str])
    return sorted(name for name, digest in _sources(jobs).items() if then.get(name) != digest)


def _sources(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the hash of the code and files of each place that the cases of `jobs` come from."""
    cases = {source_place(job.case): job.case for job in jobs}
    return {f"{place[0]}: {', '.join(filter(None, place[1:]))}": source_digest(case) for place, case in cases.items()}


def missing_jobs(view: RunView, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return the `jobs` without a verdict on the code: not tried, or failed by infrastructure alone. Pure."""
    decided = {job.id for job in view.jobs if job.decisive is not None and job.decisive.verdict is not Verdict.INFRA}
    return tuple(job for job in jobs if job.id not in decided)


def require_same(then: Mapping[str, str], now: Mapping[str, str], run_id: str) -> None:
    """Raise UsageError if new numbers would not be comparable with the numbers of the run."""
    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if changed:
        changes = ", ".join(f"{name} ({then.get(name, 'nothing')}, now {now.get(name, 'nothing')})" for name in changed)
        raise UsageError(
            f"run {run_id} cannot be resumed, as its numbers would not be comparable: {changes}: start anew"
        )


def require_same_conditions(view: RunView, now: Mapping[str, str]) -> None:
    """Raise UsageError if the fingerprint `now` of new numbers is not comparable with the fingerprint of a run.

    Before a run has a device, its kind of device is a guess, which the store replaces with the first device.
    """
    then = view.fingerprint if view.devices else {**view.fingerprint, "device_kind": now["device_kind"]}
    require_same(then, now, view.id)


def require_same_runtimes(
    then: Iterable[DeviceView], now: Callable[[DeviceView], Sequence[Mapping[str, str]]], run_id: str
) -> None:
    """Raise UsageError if a device of the run has another runtime now.

    `now` returns the versions of the runtimes of which the device gets one. The store keeps one runtime of a device for
    all attempts of a run.
    """
    for device in then:
        # The store adds the SoC that the device reports.
        had = {name: value for name, value in device.runtime.items() if name != "soc_reported"}
        versions = now(device)
        if had and versions and had not in versions:
            was, is_now = (
                {f"{name} of {device.serial}": value[:_SHOWN] for name, value in facts.items()}
                for facts in (had, versions[0])
            )
            require_same(was, is_now, run_id)


@contextmanager
def in_progress(folder: Path) -> Iterator[int]:
    """Lock a run for this process; yield the process id of its last owner, which is dead, 0 for none.

    Raises UsageError while another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"run {folder.name} is still running: wait for it, or stop it with Ctrl-C") from None
        file.seek(0)
        before = file.read()
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield int(before) if before.isdecimal() else 0


# End of every command with a run in the store: exit code and report.


def write_report(view: RunView, path: Path, store: Store, config: Config) -> Path:
    """Write the HTML report of a run, with its history in the store, and return the file."""
    from farm.report.html.page_of_run import artifact_links, write_html
    from farm.report.html.templates import keep_templates
    from farm.store.artifacts import open_artifacts

    keep_templates(config.cache_dir)
    artifacts = open_artifacts(config)

    def links(known: Background) -> dict[str, str]:
        # On a shared farm only jobs of this machine left their files here.
        artifacts.share(record for records in known.artifacts.values() for record in records)
        return artifact_links(known, artifacts, path)

    write_html(view, path, report_context(store, view, artifacts, links))
    return path


def report_context(
    store: Store, view: RunView, artifacts: ArtifactStore, links: Callable[[Background], dict[str, str]]
) -> ReportContext:
    """Return the context of a run in the store; `links` has the links of a page to artifacts, by hash."""
    from farm.report.formats.layers_csv import shown_places
    from farm.report.html.page_of_run import ReportContext
    from farm.report.model.sections import heap_rows

    background = store.history.background(view.id)
    return ReportContext(
        status=store.status.of_run(view.id),
        # An empty list may mean that the run was not judged yet, so that the page leaves alerts out.
        alerts=tuple(store.alerts.of_run(view.id)) or None,
        background=background,
        links=links(background),
        heap=heap_rows(view, store.history.pasts_of_run(view.id)) if "heap" in view.fingerprint else (),
        places=shown_places(background.artifacts, artifacts),
    )


def exit_code_of(view: RunView) -> int:
    """Return the exit code of `farm run` for a run: 0, 1 (a job failed), 4 (infrastructure), 5 (all skipped)."""
    from farm.report.model.summary import Outcome, count_outcomes

    counts = count_outcomes(view)
    if counts[Outcome.FAILED]:
        return 1
    if counts[Outcome.INFRA] or counts[Outcome.NOT_RUN]:
        return ExitCode.INFRA
    return ExitCode.NOTHING if counts[Outcome.SKIPPED] == len(view.jobs) > 0 else 0
