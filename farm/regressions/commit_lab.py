"""What compiles jobs at commits, in worktrees, and runs what comes of it on one device for each target."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farm.bundles.cache import BundleCache
from farm.bundles.reuse import find_bundles_for
from farm.bundles.same import data_hash, program_of
from farm.compile.pool import BuilderPool, MemoryLimits
from farm.compile.protocol import BuildReply, BuildRequest
from farm.errors import (
    InfraError,
    MissingPackageError,
    MissingToolError,
    NativeBuildError,
    NeedsDeviceError,
    UntrustedError,
    UsageError,
)
from farm.pool.fleet import Choice
from farm.regressions.commit_records import BuildState, CommitBuild, CommitRun
from farm.regressions.interleaved_ab import InterleavedBench, Side
from farm.regressions.paired_test import compare, worse
from farm.results.attempt import Stage, Verdict
from farm.suites.socs import find_soc
from farm.system.processes import Supervisor
from farm.system.publish import make_folders
from farm.system.text import reason_line
from farm.toolchains.prepare import prepare
from farm.toolchains.select import select
from farm.toolchains.worktrees import require_built, worktree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from farm.analysis.confirmation import Confirmation
    from farm.analysis.scale import Series
    from farm.bundles.reuse import FoundBundle
    from farm.config.settings import Config
    from farm.regressions.commit_records import CommitsRequest
    from farm.runtime.runtime import Runtime
    from farm.store.store import Store
    from farm.suites.suite import Job, Target
    from farm.toolchains.commits import Checkout, Commit
    from farm.toolchains.toolchain import Toolchain

_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
_IMPORT_SECONDS = 120.0
# What a builder imports before it compiles.
_IMPORT = "import sys; from farm.compile.flows.compiler import flow_of; flow_of(sys.argv[1])"


class WorktreeLab:
    """Worktrees of a checkout, builders and devices of one bisection. A context manager, for one thread."""

    def __init__(
        self,
        config: Config,
        store: Store,
        checkout: Checkout,
        good: Commit,
        request: CommitsRequest,
        folder: Path,
        command: str,
        note: Callable[[str], None],
    ) -> None:
        """`folder` takes logs; `command` is what others see who wait for a device. `store` is asked for leases only."""
        self._config, self._store, self._checkout, self._good = config, store, checkout, good
        self._request, self._folder, self._command, self._note = request, folder, command, note
        self._cache = BundleCache(config.cache_dir)
        self._tools: dict[str, tuple[Config, Toolchain]] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._benches: dict[Target, InterleavedBench] = {}
        self._runtimes: dict[tuple[str, Target], Runtime] = {}
        self._stack, self._open = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._supervisor = self._stack.enter_context(Supervisor())
            self._stack.callback(self._close_benches)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tools(self, commit: Commit) -> tuple[Config, Toolchain]:
        """Return the toolchain of a commit. Raises NativeBuildError, UsageError, MissingToolError, InfraError."""
        if commit.sha not in self._tools:
            require_built(self._config, self._checkout, commit)
            tree = worktree(self._config, self._checkout, commit, self._note)
            config = select(self._config, tree.toolchain, self._note)
            tools = prepare(config, self._note, virtual=self._request.virtual)
            self._warnings[commit.sha] = tree.warnings
            self._tools[commit.sha] = config, tools
        return self._tools[commit.sha]

    def warnings(self, commit: Commit) -> tuple[str, ...]:
        """Return what was not as the commit has it."""
        return self._warnings.get(commit.sha, ())

    def has(self, build: CommitBuild) -> bool:
        """Return whether the bundle of a build is in the cache."""
        return self._cache.lookup(build.bundle) is not None

    def build(self, commit: Commit, jobs: Sequence[Job]) -> Mapping[str, CommitBuild]:
        """Return what each job compiles to at a commit, by id. Raises InfraError for the machine's trouble."""
        try:
            config, tools = self.tools(commit)
        except UntrustedError:
            raise
        except (NativeBuildError, UsageError, MissingToolError) as error:
            failed = CommitBuild(state=BuildState.NOT_BUILT, reason=reason_line(str(error)), cached=True)
            return {job.id: failed for job in jobs}
        found = find_bundles_for(jobs, tools, self._cache)
        wanted = {found[job.id].key: job for job in jobs if not found[job.id].cached}
        replies = self._compile(commit, tools, wanted) if wanted else {}
        return {job.id: self._built(tools, config.toolchain.checkout, job, found[job.id], replies) for job in jobs}

    def run(self, job: Job, build: CommitBuild, commit: Commit) -> CommitRun:
        """Run a program and judge it. Raises InfraError."""
        bench = self._bench(job.target)
        self._note(f"running {job.id} of {commit.short} on {bench.device.serial} ({bench.device.kind})")
        try:
            attempt = bench.judge(self._side(bench, job, build, commit))
        except (NeedsDeviceError, MissingPackageError) as error:
            # Other jobs may be searched for.
            return CommitRun(verdict=Verdict.SKIPPED, stage=Stage.BUILD, reason=reason_line(str(error)))
        return CommitRun(
            verdict=attempt.verdict,
            stage=str(attempt.stage),
            reason=attempt.reason,
            device=attempt.device or bench.device.serial,
            measurements=attempt.measurements,
        )

    def pairs(
        self,
        job: Job,
        good: tuple[CommitBuild, Commit],
        new: tuple[CommitBuild, Commit],
        series: Series,
        gate: float | None,
    ) -> Confirmation:
        """Measure in turns whether the new program is worse than the good one.

        Raises InfraError, UsageError for more inferences than its runner can be asked for.
        """
        bench = self._bench(job.target)
        was, now = (self._side(bench, job, *one) for one in (good, new))
        for side in (was, now):
            bench.require_inferences(side)
        pairs, inferences = self._request.pairs, self._request.inferences
        [compared] = compare(bench, [worse(series)], was, now, pairs, inferences, gate=gate)
        return compared.confirmation

    def _compile(self, commit: Commit, tools: Toolchain, wanted: Mapping[str, Job]) -> dict[str, BuildReply]:
        """Return how bundles were compiled, by key."""
        if not self._request.virtual:
            # An attached device is not kept from others meanwhile.
            self._close_benches()
        config, folder = self._config, self._folder / "logs" / commit.short
        make_folders(folder)
        self._note(f"compiling {len(wanted)} at {commit.short} {commit.subject}")
        replies: dict[str, BuildReply] = {}
        pool = BuilderPool(
            [BuildRequest(job, key, dict(tools.versions), str(folder / f"{key}.log")) for key, job in wanted.items()],
            width=config.builders,
            limits=MemoryLimits(config.build_memory_mb, config.build_recycle_mb),
            cache_root=config.cache_dir,
            compiler=tools.compiler,
            supervisor=self._supervisor,
            log_folder=folder,
            timeout_s=config.build_timeout_s,
            on_start=lambda _key: None,
            on_done=lambda reply: replies.update({reply.key: reply}),
        )
        pool.start()
        try:
            pool.join()
        finally:
            pool.stop()
        return replies

    def _built(
        self, tools: Toolchain, tree: Path | None, job: Job, found: FoundBundle, replies: Mapping[str, BuildReply]
    ) -> CommitBuild:
        bundle = self._cache.lookup(found.key)
        if bundle is not None:
            digest = hashlib.sha256(f"{program_of(bundle)} {data_hash(bundle.manifest)}".encode()).hexdigest()
            return CommitBuild.of(bundle.manifest, digest, cached=found.cached, runner=tools.runner)
        reply = replies.get(found.key)
        if reply is None or reply.ok:
            raise InfraError(f"the bundle of {job.id} is not in the cache: is somebody pruning {self._cache.root}?")
        # For people who have the commit, and not this cache.
        place = f"{tree}/"
        if reason := self._import_problem(tools, job, reply):
            return CommitBuild(state=BuildState.NOT_IMPORTED, reason=reason.replace(place, ""))
        if reply.infra:
            raise InfraError(f"{job.id} could not be compiled: {reply.reason}")
        return CommitBuild(state=BuildState.NOT_COMPILED, reason=reply.reason.replace(place, ""))

    def _import_problem(self, tools: Toolchain, job: Job, reply: BuildReply) -> str:
        """Return why the toolchain of a failed compile cannot even be imported, empty where it can."""
        if reply.reason.startswith(_IMPORT_ERRORS):
            return reply.reason
        log = self._folder / "logs" / "import.log"
        argv = [tools.compiler.python, "-c", _IMPORT, job.target.backend]
        child = self._supervisor.spawn(argv, name="import", env={**os.environ, **tools.compiler.env}, stderr=log)
        with child.limited(_IMPORT_SECONDS):
            code = child.process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return reason_line(lines[-1] if lines else f"exit code {code}") if code else ""

    def _bench(self, target: Target) -> InterleavedBench:
        """Return the device that a target is measured on, the same for all commits."""
        if target not in self._benches:
            config, _ = self.tools(self._good)
            choice = Choice((self._request.device,)) if self._request.device else None
            bench = InterleavedBench(
                config, self._store, target, self._note,
                virtual=self._request.virtual, choice=choice, purpose=self._command,
                least_inferences=self._request.least_inferences,
            )  # fmt: skip
            self._benches[target] = self._open.enter_context(bench)
        return self._benches[target]

    def _close_benches(self) -> None:
        self._benches.clear()
        self._runtimes.clear()
        self._open.close()

    def _side(self, bench: InterleavedBench, job: Job, build: CommitBuild, commit: Commit) -> Side:
        bundle = self._cache.lookup(build.bundle)
        if bundle is None:
            raise InfraError(f"the bundle {build.bundle[:12]} of {commit.short} is not in the cache any more")
        return Side(job, bundle, runtime=self._runtime(bench, job.target, build, commit))

    def _runtime(self, bench: InterleavedBench, target: Target, build: CommitBuild, commit: Commit) -> Runtime | None:
        """Return the runner of a commit whose native parts were built, None where it is that of the bench."""
        if not self._request.virtual or build.runner == bench.tools.runner:
            return None
        key = build.runner, target
        if key not in self._runtimes:
            from farm.runtime.runtime import virtual_runtime

            config, _ = self.tools(commit)
            self._runtimes[key] = virtual_runtime(config, find_soc(target.soc), target.backend, mode=target.mode)
        return self._runtimes[key]
