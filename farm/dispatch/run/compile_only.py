"""`farm run --compile-only`: the jobs of a run, compiled into the cache. No device is asked and no run is recorded."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.pool import BuilderPool, BuilderSettings
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.request.choose import check_machine, check_ready, collect, jobs_of
from farm.dispatch.run.compiling import Rebuild
from farm.results.attempt import Verdict
from farm.results.judge import build_failure, build_problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.progress import ProgressListener
    from farm.dispatch.request.request import RunRequest
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)


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
    from farm.base.processes import Supervisor
    from farm.base.publish import own_folder
    from farm.builds.toolchains.prepare import prepare
    from farm.builds.toolchains.select import use_toolchain
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
        requests: dict[str, BuildRequest] = {}
        for job in self._jobs:
            key, cached = self._found[job.id]
            if not cached:
                versions, log = dict(self._tools.versions), str(self._log(key))
                requests.setdefault(key, BuildRequest(job, key, versions, log, anew=key in self._rebuild.keys))
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
        key, cached = self._found[job.id]
        reply = self._replies.get(key)
        if reply is None and not cached:
            return CompiledJob(job=job.id, outcome=CompileOutcome.NOT_BEGUN, key=key)
        bundle = self._cache.lookup(key) if reply is None or reply.ok else None
        if bundle is None:
            reply = reply or BuildReply(key, ok=True, seconds=0.0)
            return self._failure(job, reply)
        made = _described(job, bundle, seconds=reply.seconds if reply else 0.0)
        if problem := build_problem(job, bundle):
            known = build_failure(job, problem).known_issue
            outcome = CompileOutcome.KNOWN_ISSUE if known else CompileOutcome.FAILED
            return msgspec.structs.replace(made, outcome=outcome, reason=problem)
        outcome = CompileOutcome.CACHED if cached else CompileOutcome.COMPILED
        return msgspec.structs.replace(made, outcome=outcome, reason=self._differing.get(key, ""))

    def _failure(self, job: Job, reply: BuildReply) -> CompiledJob:
        attempt = build_failure(job, reply.lost_reason, infra=reply.infra or reply.ok)
        outcome = CompileOutcome.INFRA if attempt.verdict is Verdict.INFRA else CompileOutcome.FAILED
        return CompiledJob(
            job=job.id,
            outcome=CompileOutcome.KNOWN_ISSUE if attempt.known_issue else outcome,
            reason=attempt.reason,
            log=self._kept_log(reply.key),
            key=reply.key,
            seconds=reply.seconds,
        )

    def _log(self, key: str) -> Path:
        return self._folder / f"{key}.log"

    def _kept_log(self, key: str) -> str:
        """Return the file of the compiler's output, "" for an empty one."""
        from farm.base.publish import make_folders

        log, kept = self._log(key), self._config.cache_dir / "logs" / f"{key}.log"
        # Jobs may share a bundle: the second finds it kept.
        if log.is_file():
            make_folders(kept.parent)
            log.replace(kept)
            self._kept[key] = str(kept)
        return self._kept.get(key, "")


def _described(job: Job, bundle: Bundle, *, seconds: float) -> CompiledJob:
    manifest = bundle.manifest
    return CompiledJob(
        job=job.id,
        outcome=CompileOutcome.COMPILED,
        key=manifest.key,
        folder=str(bundle.folder),
        seconds=seconds,
        pte_bytes=manifest.pte_bytes,
        partitions=manifest.partitions,
        # On the CPU that is where all of it runs.
        fallback_ops={} if runs_on_cpu(job.target.backend) else manifest.fallback_ops,
    )
