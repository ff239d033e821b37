"""Compilers of a run: builds during execution, `farm run --rebuild`, and `farm run --compile-only` without devices."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import BundleError, ExitCode, FarmError
from farm.base.files import make_folders, own_folder
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.bundles.reuse import FoundBundle, Tools, find_bundles_for
from farm.builds.compile.pool import BuilderPool, BuilderSettings
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.request.choose import check_machine, check_ready, collect, jobs_of
from farm.report.model.format import plural
from farm.results.attempt import Verdict
from farm.store.records import BuildRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.dispatcher import ProgressListener
    from farm.dispatch.request.request import RunPlan, RunRequest
    from farm.store.store import Store
    from farm.suites.suite import Job


# Compiling overlaps running: the builder pool of one run, where its replies go, and `farm run --rebuild`.


logger = logging.getLogger(__name__)

# Seconds between two looks for room to write a reply.
_ROOM_SECONDS = 0.5


class _OldBundle(NamedTuple):
    job_ids: list[str]
    bundle: Bundle | None
    """Cached bundle; its manifest is read, its files are removed later."""
    program: str
    """Hash of its program, from `program_of`."""


class Rebuild:
    """Bundles of jobs; with --rebuild cached ones are compiled again and compared. Safe for several threads."""

    def __init__(self, cache: BundleCache, *, is_wanted: bool) -> None:
        """`is_wanted` is True for --rebuild."""
        self._cache, self._is_wanted = cache, is_wanted
        self._before: dict[str, _OldBundle] = {}
        self._open: set[str] = set()
        self._same = self._other = 0
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of newly compiled bundles."""
        return frozenset(self._before)

    def find(self, jobs: Iterable[Job], tools: Tools) -> dict[str, FoundBundle]:
        """Return the bundle of each job; with --rebuild an uncached one with today's key."""
        jobs = list(jobs)
        cached = find_bundles_for(jobs, tools, self._cache)
        if not self._is_wanted:
            return cached
        found = {}
        for job in jobs:
            key = bundle_key(job, tools.versions)
            found[job.id] = FoundBundle(key, cached=False)
            if key not in self._before:
                self._before[key] = self._remembered(cached[job.id])
            self._before[key].job_ids.append(job.id)
        self._open = set(self._before)
        return found

    def ended(self, reply: BuildReply) -> str:
        """Return the difference of the new program from the cached one, "" for none, and record it."""
        before = self._before.get(reply.key)
        if before is None:
            return ""
        with self._lock:
            text = self._difference(before, reply)
            self._open.discard(reply.key)
            was_last = not self._open
        if text:
            more = f" (and {len(before.job_ids) - 1} more with the same bundle)" if len(before.job_ids) > 1 else ""
            logger.info("%s%s: %s", before.job_ids[0], more, text)
        if was_last:
            logger.info(self._summary())
        return text

    def _remembered(self, found: FoundBundle) -> _OldBundle:
        from farm.builds.bundles.same import program_of

        with suppress(BundleError, OSError):
            if found.cached:
                bundle = load_bundle(self._cache.folder(found.key))
                return _OldBundle([], bundle, program_of(bundle))
        return _OldBundle([], None, "")

    def _difference(self, before: _OldBundle, reply: BuildReply) -> str:
        from farm.builds.bundles.same import differences

        if before.bundle is None:
            return ""
        if not reply.ok:
            return "did not compile again; the cached bundle stays in the cache"
        found = differences(before.bundle.manifest, before.program, load_bundle(self._cache.folder(reply.key)))
        if not found:
            self._same += 1
            return ""
        self._other += 1
        return f"compiled again, it differs from the cached bundle: {'; '.join(found)}"

    def _summary(self) -> str:
        had = sum(before.bundle is not None for before in self._before.values())
        done = f"compiled again: {plural(len(self._before), 'bundle')}, {had} of them cached before"
        return f"{done}: {self._same} the same, {self._other} different" if had else done


@contextmanager
def builders(
    config: Config,
    plan: RunPlan,
    tools: Toolchain,
    supervisor: Supervisor,
    listener: ProgressListener,
    store: Store,
    rebuild: Rebuild,
) -> Iterator[int]:
    """Compile the missing bundles of the plan during the body; yield the number of missing bundles of jobs.

    Every reply is written for the device processes and recorded for all jobs that share the bundle. Health checks come
    first, as every device waits for its own.
    """

    builds = _Builds(plan, listener, store, BundleCache(config.cache_dir), rebuild)
    lacking = [(one.job, one.key) for one in (*plan.health_checks, *plan.jobs) if not one.cached]
    requests = _requests(lacking, tools, rebuild, plan.build_log)
    builds.record_cached(requests.keys())
    pool = BuilderPool(
        requests.values(),
        tools.compiler,
        BuilderSettings.of(config, supervisor, plan.folder / "logs"),
        width=config.builders,
        on_start=builds.started,
        on_done=builds.ended,
    )
    pool.start()
    try:
        yield len(requests.keys() & builds.jobs_of.keys())
    finally:
        builds.over.set()
        pool.stop()


def _requests(
    lacking: Iterable[tuple[Job, str]], tools: Toolchain, rebuild: Rebuild, log: Callable[[str], Path]
) -> dict[str, BuildRequest]:
    """Return a request for each key, of the first job that has it."""
    requests: dict[str, BuildRequest] = {}
    for job, key in lacking:
        versions = dict(tools.versions)
        requests.setdefault(key, BuildRequest(job, key, versions, str(log(key)), anew=key in rebuild.keys))
    return requests


class _Builds:
    """Handler of the replies of builders."""

    def __init__(
        self, plan: RunPlan, listener: ProgressListener, store: Store, cache: BundleCache, rebuild: Rebuild
    ) -> None:
        self._plan, self._listener, self._store, self._cache = plan, listener, store, cache
        self._rebuild = rebuild
        self.over = threading.Event()
        """Set once no process waits for replies."""
        self.jobs_of: dict[str, list[str]] = {}
        """Job ids by bundle key; health checks have none."""
        for planned in plan.jobs:
            self.jobs_of.setdefault(planned.key, []).append(planned.job.id)

    def record_cached(self, lacking: Collection[str]) -> None:
        """Record the bundles that are there."""
        self._record({key: 0.0 for key in self.jobs_of if key not in lacking}, cached=True)

    def started(self, key: str) -> None:
        """Report that a bundle is being compiled."""
        if key in self.jobs_of:
            self._listener.build_started(self.jobs_of[key][0])

    def ended(self, reply: BuildReply) -> None:
        """Record and report how it went, and let the workers know."""
        jobs = self.jobs_of.get(reply.key)
        try:
            if jobs:
                self._record({reply.key: reply.seconds}, cached=False)
            elif not reply.ok:
                logger.warning("devices are used without a health check, as it was not compiled: %s", reply.reason)
        except FarmError as error:
            logger.warning("how %s was compiled could not be recorded: %s", jobs[0] if jobs else reply.key, error)
        finally:
            # The reply is written in every case, as a device process waits for it.
            self._leave(reply)
        if jobs:
            self._listener.build_ended(jobs[0], reply)
            self._rebuild.ended(reply)

    def _leave(self, reply: BuildReply) -> None:
        """Let the workers know, as soon as there is room on the disk."""
        while not self.over.is_set():
            with suppress(OSError):
                self._plan.leave_reply(reply)
                return
            self.over.wait(_ROOM_SECONDS)

    def _record(self, seconds: Mapping[str, float], *, cached: bool) -> None:
        """Record the bundles of the keys of `seconds`, in one transaction."""
        builds = []
        for key, took_s in seconds.items():
            # Only the manifest is read: files were verified at the lookup, and are verified again before use.
            facts: dict[str, Any] = {}
            with suppress(BundleError):
                manifest = load_bundle(self._cache.folder(key)).manifest
                facts = {name: getattr(manifest, name) for name in ("fallback_ops", "operators", "program")}
            builds += [BuildRecord(job_id, took_s, cached, key, **facts) for job_id in self.jobs_of[key]]
        if builds:
            self._store.record_builds(self._plan.run_id, builds)


# `farm run --compile-only`: the jobs of a run, compiled into the cache. No device is asked and no run is recorded.


class CompileOutcome(StrEnum):
    """Outcome of compiling a job."""

    COMPILED = "compiled"
    CACHED = "cached"
    FAILED = "failed"
    KNOWN_ISSUE = "known issue"
    INFRA = "infra"
    NOT_BEGUN = "not begun"


class CompiledJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job with its bundle, if there is one."""

    job: str
    outcome: CompileOutcome
    reason: str = ""
    """Reason of a failure, or the difference of a new program from the cached one."""
    log: str = ""
    """File with the compiler's output, for a failure."""
    key: str = ""
    """Key of its bundle."""
    folder: str = ""
    """Folder of its bundle; empty without one."""
    seconds: float = 0.0
    """How long it took now."""
    pte_bytes: int = 0
    partitions: int = 0
    """Delegated ones."""
    fallback_ops: dict[str, int] = {}
    """Left to the CPU."""


class Compilation(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of all jobs, in the order of the manifests."""

    jobs: tuple[CompiledJob, ...]
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code as of a run: 1 if a job fails, known issues aside, 4 if the machine is at fault."""
        outcomes = {job.outcome for job in self.jobs}
        if self.interrupted:
            return INTERRUPTED
        if CompileOutcome.FAILED in outcomes:
            return ExitCode.FAILED
        return ExitCode.INFRA if outcomes & {CompileOutcome.INFRA, CompileOutcome.NOT_BEGUN} else 0


def compile_only(config: Config, request: RunRequest, listener: ProgressListener) -> Compilation:
    """Compile what `request` selects and the cache lacks, or with its `rebuild` all of it, and return what came of it.

    A job fails as it would in a run at the stage build. Raises UsageError, NothingSelectedError, MissingToolError where
    nothing was compiled.
    """
    from farm.builds.toolchains.selection import prepare, use_toolchain
    from farm.store.rows import new_run_id

    chosen = set(collect(config, request, judged=False))
    jobs = [job for job in jobs_of(config, request) if job.id in chosen]
    config = use_toolchain(config, request.toolchain)
    check_machine(config, request)
    check_ready(jobs)
    with InterruptHandler(), Supervisor() as supervisor:
        tools = prepare(config, virtual=request.virtual > 0)
        with own_folder(config.cache_dir / "compiles", new_run_id(time.time_ns() // 1_000_000)) as folder:
            return _Compiling(config, jobs, tools, listener, folder, request.rebuild).execute(supervisor)


@dataclass
class _Compiling:
    """The bundles of some jobs, and the replies of builders."""

    _config: Config
    _jobs: Sequence[Job]
    _tools: Toolchain
    _listener: ProgressListener
    _folder: Path
    _is_rebuild: bool

    def __post_init__(self) -> None:
        self._cache = BundleCache(self._config.cache_dir)
        self._rebuild = Rebuild(self._cache, is_wanted=self._is_rebuild)
        self._found = self._rebuild.find(self._jobs, self._tools)
        self._first = {self._found[job.id].key: job for job in reversed(self._jobs)}
        self._replies: dict[str, BuildReply] = {}
        self._differing: dict[str, str] = {}
        self._kept: dict[str, str] = {}

    def execute(self, supervisor: Supervisor) -> Compilation:
        found = [(job, *self._found[job.id]) for job in self._jobs]
        lacking = [(job, key) for job, key, cached in found if not cached]
        requests = _requests(lacking, self._tools, self._rebuild, self._log)
        pool = BuilderPool(
            requests.values(),
            self._tools.compiler,
            BuilderSettings.of(self._config, supervisor, self._folder),
            width=self._config.builders,
            on_start=lambda key: self._listener.build_started(self._first[key].id),
            on_done=self._ended,
        )
        self._listener.begin(jobs=len(self._jobs), to_build=len(requests), devices=[])
        pool.start()
        interrupted = False
        try:
            pool.join()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            pool.stop()
        return Compilation(jobs=tuple(map(self._outcome, self._jobs)), interrupted=interrupted)

    def _ended(self, reply: BuildReply) -> None:
        job = self._first[reply.key]
        self._replies[reply.key] = reply
        self._differing[reply.key] = self._rebuild.ended(reply)
        self._listener.build_ended(job.id, reply)
        if not reply.ok:
            logger.warning("%s did not compile: %s", job.id, reply.reason)

    def _outcome(self, job: Job) -> CompiledJob:
        from farm.results.judge import build_failure, build_problem  # imports NumPy

        key, cached = self._found[job.id]
        if not cached and key not in self._replies:
            return CompiledJob(job=job.id, outcome=CompileOutcome.NOT_BEGUN, key=key)
        reply = self._replies.get(key) or BuildReply(key, ok=True, seconds=0.0)
        made = CompiledJob(
            job=job.id,
            outcome=CompileOutcome.CACHED if cached else CompileOutcome.COMPILED,
            reason=self._differing.get(key, ""),
            key=key,
            seconds=reply.seconds,
        )
        if (bundle := self._cache.lookup(key) if reply.ok else None) is None:
            failure = build_failure(job, reply.lost_reason, infra=reply.infra or reply.ok)
            made = msgspec.structs.replace(made, log=self._kept_log(key))
        else:
            made = _described(made, job, bundle)
            if not (problem := build_problem(job, bundle)):
                return made
            failure = build_failure(job, problem)
        outcome = CompileOutcome.INFRA if failure.verdict is Verdict.INFRA else CompileOutcome.FAILED
        outcome = CompileOutcome.KNOWN_ISSUE if failure.known_issue else outcome
        return msgspec.structs.replace(made, outcome=outcome, reason=failure.reason)

    def _log(self, key: str) -> Path:
        return self._folder / f"{key}.log"

    def _kept_log(self, key: str) -> str:
        """Return the file of the compiler's output, "" for an empty one."""

        log, kept = self._log(key), self._config.cache_dir / "logs" / f"{key}.log"
        # Jobs may share a bundle: the second finds it kept.
        if log.is_file():
            make_folders(kept.parent)
            log.replace(kept)
            self._kept[key] = str(kept)
        return self._kept.get(key, "")


def _described(made: CompiledJob, job: Job, bundle: Bundle) -> CompiledJob:
    manifest = bundle.manifest
    return msgspec.structs.replace(
        made,
        folder=str(bundle.folder),
        pte_bytes=manifest.pte_bytes,
        partitions=manifest.partitions,
        # On the CPU that is where all of it runs.
        fallback_ops={} if runs_on_cpu(job.target.backend) else manifest.fallback_ops,
    )
