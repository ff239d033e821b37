"""Pool of builder processes that fills the bundle cache, and the order in which builders take its requests."""

from __future__ import annotations

import enum
import signal
import threading
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import InfraError
from farm.base.processes import Supervisor, ending
from farm.builds.bundles.cache import BundleCache, remove_leftovers
from farm.builds.bundles.key import source_as_of_ns
from farm.builds.bundles.reuse import base_key, forget_pruned, has_trace, remember_traced
from farm.builds.compile.processes import BuilderProcess, BuilderTemplate
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.compile.watched import take_node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Compiler
    from farm.suites.suite import Job


_TRIES = 2
_AHEAD = 16
"""Requests at the front from which a builder chooses: the order keeps devices of all SoCs busy."""


class MemoryLimits(NamedTuple):
    """Limits of the resident memory of a builder and its child processes, in MiB; only Linux has them."""

    most_mb: int
    """Limit above which the builder is ended, and its job fails."""
    recycle_mb: int
    """Limit above which the builder gets no other job: a fresh builder takes its place."""


class BuilderSettings(NamedTuple):
    """Limits and places of builder processes."""

    limits: MemoryLimits
    timeout_s: float
    """Time limit of one bundle."""
    cache_root: Path
    supervisor: Supervisor
    log_folder: Path
    """Folder of the logs of the processes."""

    @classmethod
    def of(cls, config: Config, supervisor: Supervisor, log_folder: Path) -> BuilderSettings:
        """Return the settings of farm.toml."""
        limits = MemoryLimits(config.build_memory_mb, config.build_recycle_mb)
        return cls(limits, config.build_timeout_s, config.cache_dir, supervisor, log_folder)


class _Retry(enum.Enum):
    NO = enum.auto()
    BESIDE = enum.auto()
    ALONE = enum.auto()
    """While no other builder works."""


class BuilderSlot:
    """Slot for one builder process at a time, used by one thread; other threads may call `stop`."""

    def __init__(
        self, number: int, settings: BuilderSettings, gate: BuilderGate, template: BuilderTemplate | None = None
    ) -> None:
        """With a `template` builders are its forks."""
        self._number, self._settings, self._gate, self._template = number, settings, gate, template
        self._limits, self._timeout_s = settings.limits, settings.timeout_s
        self._cache = BundleCache(settings.cache_root)
        self._is_fork = False
        self._builder: BuilderProcess | None = None
        self._compiler: Compiler | None = None
        self._abandoned = ""

    def build(self, request: BuildRequest, compiler: Compiler) -> BuildReply:
        """Return the reply of `compiler` to `request`; the process stays for the next request.

        After a fault of the machine the request is tried a second time, unless `abandon` was called meanwhile.
        """
        self._abandoned = ""
        reply, again = BuildReply(request.key, ok=False, seconds=0.0, reason="not tried", infra=True), _Retry.BESIDE
        for _ in range(_TRIES):
            with self._gate.admit(alone=again is _Retry.ALONE):
                if self._gate.is_stopping or self._abandoned == request.key:
                    break
                try:
                    reply, again = self._ask(request, compiler)
                except Exception as error:  # noqa: BLE001 - a job waits for a reply, whatever happened
                    # The process may still answer this request, and the next request would get that answer.
                    self.end()
                    reply = BuildReply(request.key, ok=False, seconds=0.0, reason=f"no builder: {error}", infra=True)
                    again = _Retry.BESIDE
            if again is _Retry.NO:
                break
        if reply.ok:
            self._remember(request, compiler)
        return reply

    def clean_up(self, key: str) -> None:
        """Remove the unfinished folders of a bundle, and a process that has ended."""
        if self._builder is not None and not self._builder.is_alive:
            self.end()
        self._cache.remove_half_made(key)

    def abandon(self, key: str) -> None:
        """End the process of the bundle of `key` without a second attempt; any thread may call it.

        A process that is just starting is not ended: call this until `build` has returned.
        """
        self._abandoned = key
        self.interrupt()

    def interrupt(self) -> None:
        """End the process at any point of its work; any thread may call this."""
        builder = self._builder
        if builder is not None:
            builder.interrupt()

    def end(self) -> None:
        """End the process, and remove its leftovers."""
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.end()
        if self._is_fork and self._template is not None:
            self._is_fork = False
            self._template.release()

    def rest(self) -> None:
        """End the process, and the template after its last builder, until the next request."""
        self.end()
        if self._template is not None:
            self._template.end_unused()

    def _remember(self, request: BuildRequest, compiler: Compiler) -> None:
        """Record the bundle for reuse after edits outside of its trace."""
        developed = compiler.developed
        if developed and has_trace(self._cache.folder(request.key)):
            # Without this record the bundle is compiled again, once.
            with suppress(OSError):
                base = base_key(request.job, request.versions, developed)
                remember_traced(self._cache.root, base, request.key)

    def _ask(self, request: BuildRequest, compiler: Compiler) -> tuple[BuildReply, _Retry]:
        builder = self._process(compiler, request.job)
        fresh = builder.is_fresh
        answer = builder.ask(request, self._timeout_s, self._limits.most_mb)
        if isinstance(answer, BuildReply):
            return answer, _Retry.BESIDE if answer.infra else _Retry.NO
        node, infra, again = take_node(Path(request.log)), False, _Retry.NO
        if answer.greedy and not answer.overdue:
            reason = (
                f"the compiler was ended as it took more than {self._limits.most_mb} MB of memory: "
                "if the case needs them, raise build.memory_mb in farm.toml"
            )
            # Leftovers of earlier jobs may be a part of the memory, so that a used builder gets a second attempt.
            again = _Retry.NO if fresh else _Retry.BESIDE
        elif not (reason := answer.compiler_reason(self._timeout_s)):
            infra, again = True, _Retry.BESIDE
            reason = f"the builder process ended with {ending(answer.code)}: see {builder.log}"
            if -answer.code == signal.SIGKILL:
                again = _Retry.ALONE
                reason = (
                    "the builder process was killed (signal 9), most likely as the machine ran out of memory: "
                    f"set build.builders or build.memory_mb lower in farm.toml (log: {builder.log})"
                )
        seconds = self._timeout_s if answer.overdue else 0.0
        reason = f"{reason}; it was at {node}" if node else reason
        return BuildReply(request.key, ok=False, seconds=seconds, reason=reason, infra=infra), again

    def _process(self, compiler: Compiler, job: Job) -> BuilderProcess:
        """Return the process; a fresh one if it has ended, has grown too much or belongs to another toolchain."""
        builder = self._builder
        is_right = builder is not None and self._compiler == compiler
        if builder is not None and is_right and builder.is_alive and not builder.has_grown(self._limits.recycle_mb):
            return builder
        self.end()
        self._compiler = compiler
        popen = None
        if self._template is not None:
            popen = self._template.acquire(compiler, job, self._timeout_s, lambda: self._gate.is_stopping)
        self._is_fork = popen is not None
        settings, log = self._settings, self._settings.log_folder / f"builder-{self._number}.log"
        start = partial(BuilderProcess, self._number, self._cache.root, compiler, settings.supervisor, log)
        try:
            self._builder = start(popen)
        except InfraError:
            # The template has exited, or takes no request, as with an environment that is too long for a message.
            if popen is None:
                raise
            self._builder = start()
        return self._builder


class BuilderGate:
    """Admission of builders: many at the same time, or one alone. A request to work alone precedes later requests."""

    def __init__(self) -> None:
        self.is_stopping = False
        """True after `stop`: all waits for admission end at once."""
        self._changed = threading.Condition()
        self._working = 0
        self._alone = 0

    def stop(self) -> None:
        """End every wait for admission; no further work begins."""
        self.is_stopping = True

    @contextmanager
    def admit(self, *, alone: bool) -> Iterator[None]:
        """Wait for admission and keep it while the body runs; the wait ends with `stop`."""
        with self._changed:
            if alone:
                self._alone += 1
            while not self.is_stopping and (self._working if alone else self._alone):
                self._changed.wait(timeout=0.5)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._alone -= alone
                self._changed.notify_all()


def case_of(request: BuildRequest) -> tuple[str, str]:
    """Return the identity of the case of `request`, whose export its precisions share."""
    return request.job.case.folder, request.job.case.name


def take_next(
    queue: deque[BuildRequest], own: tuple[str, str] | None, others: Collection[tuple[str, str]]
) -> BuildRequest:
    """Remove and return the next request for a builder of the case `own` beside builders of the cases `others`.

    The builder stays with its case, then takes a case without another builder, then the first request. Raises
    IndexError for an empty queue.
    """
    front = list(islice(queue, _AHEAD))
    chosen = next((one for one in front if case_of(one) == own), None)
    chosen = chosen or next((one for one in front if case_of(one) not in others), None) or queue[0]
    queue.remove(chosen)
    return chosen


class BuilderPool:
    """Pool of `width` builder processes, forks of one process, each fed by a thread of this process.

    The threads call `is_wanted(key)` and leave unwanted bundles out; for the others they call `on_start(key)` and then
    `on_done(reply)`.
    """

    def __init__(
        self,
        requests: Iterable[BuildRequest],
        compiler: Compiler,
        settings: BuilderSettings,
        *,
        width: int,
        on_done: Callable[[BuildReply], None],
        on_start: Callable[[str], None] = lambda _: None,
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._queue = deque(
            msgspec.structs.replace(request, suite_as_of_ns=source_as_of_ns(request.job)) for request in requests
        )
        self._taking = threading.Lock()
        self._cases: dict[BuilderSlot, tuple[str, str]] = {}
        """Case of the last request of each builder."""
        self._cache, self._compiler = BundleCache(settings.cache_root), compiler
        self._on_start, self._on_done, self._is_wanted = on_start, on_done, is_wanted
        self._gate = BuilderGate()
        width = min(width, len(self._queue))
        # A single builder shares its imports with no other.
        shared = settings.supervisor, settings.cache_root, settings.log_folder
        self._template = BuilderTemplate(*shared) if width > 1 else None
        self._slots = [BuilderSlot(number, settings, self._gate, self._template) for number in range(width)]
        self._working = len(self._slots)
        self._threads = [
            threading.Thread(target=self._feed, args=(slot,), name=f"builder-{number}")
            for number, slot in enumerate(self._slots)
        ]
        # The removal of leftovers may take a while, and only `join` waits for it.
        self._sweeper = threading.Thread(target=sweep, args=(self._cache,), name="leftovers", daemon=True)

    def start(self) -> None:
        """Start the processes, and meanwhile remove leftovers of killed processes from the cache. Returns at once."""
        self._sweeper.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the processes at any point of their work; unpublished bundles are lost, published ones are complete."""
        self._gate.stop()
        with self._taking:
            self._queue.clear()
        for thread in self._threads:
            # A thread may have started another process after the last interrupt.
            while thread.is_alive():
                for slot in self._slots:
                    slot.interrupt()
                thread.join(timeout=0.1)

    def join(self) -> None:
        """Wait until all bundles are built."""
        for thread in (*self._threads, self._sweeper):
            thread.join()

    def _take(self, slot: BuilderSlot) -> BuildRequest:
        with self._taking:
            others = [case for other, case in self._cases.items() if other is not slot]
            request = take_next(self._queue, self._cases.get(slot), others)
            self._cases[slot] = case_of(request)
            return request

    def _feed(self, slot: BuilderSlot) -> None:
        while not self._gate.is_stopping:
            try:
                request = self._take(slot)
            except IndexError:
                break
            if not self._is_wanted(request.key):
                continue
            self._on_start(request.key)
            reply = slot.build(request, self._compiler)
            if not self._gate.is_stopping:
                self._on_done(reply)
            # The cleanup follows the reply, so that no job waits for it.
            slot.clean_up(request.key)
        slot.end()
        with self._taking:
            self._working -= 1
            is_last = not self._working
        if is_last and self._template is not None:
            self._template.close()


def sweep(cache: BundleCache) -> None:
    """Remove the leftovers of killed builders from a cache, and records of bundles that were pruned."""
    remove_leftovers(cache.root)
    forget_pruned(cache)


def build_one(request: BuildRequest, compiler: Compiler, settings: BuilderSettings) -> BuildReply:
    """Build a single bundle in a builder of its own and return the reply."""
    replies: list[BuildReply] = []
    pool = BuilderPool([request], compiler, settings, width=1, on_done=replies.append)
    pool.start()
    try:
        pool.join()
    finally:
        pool.stop()
    return replies[0]
