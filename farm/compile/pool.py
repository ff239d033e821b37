"""A pool of builder processes that fills the bundle cache in the order it is given."""

from __future__ import annotations

import enum
import signal
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.bundles.cache import BundleCache, remove_leftovers
from farm.bundles.key import source_as_of_ns
from farm.bundles.reuse import base_key, forget_pruned, remember_traced
from farm.bundles.trace import has_trace
from farm.compile.compiler_process import BuilderProcess
from farm.compile.protocol import BuildReply, BuildRequest
from farm.system.processes import ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from farm.compile.compiler_process import CompilerEnding
    from farm.system.processes import Supervisor
    from farm.toolchains.toolchain import Compiler

_TRIES = 2


class MemoryLimits(NamedTuple):
    """Resident memory of one builder and all it started, in MiB. Linux only: elsewhere nothing is limited."""

    most_mb: int
    """With more than this the builder is ended, and its job fails."""
    recycle_mb: int
    """With more than this it gets no other job: a fresh one takes its place."""


class _Again(enum.Enum):
    NO = enum.auto()
    BESIDE = enum.auto()
    ALONE = enum.auto()
    """While no other builder works."""


class BuilderPool:
    """`width` builder processes, each fed by a thread of this one.

    `on_start(key)` and `on_done(reply)` are called from those threads.
    """

    def __init__(
        self,
        requests: Iterable[BuildRequest],
        *,
        width: int,
        limits: MemoryLimits,
        cache_root: Path,
        compiler: Compiler,
        supervisor: Supervisor,
        log_folder: Path,
        timeout_s: float,
        on_start: Callable[[str], None],
        on_done: Callable[[BuildReply], None],
    ) -> None:
        self._queue = deque(
            msgspec.structs.replace(request, suite_as_of_ns=source_as_of_ns(request.job)) for request in requests
        )
        self._cache, self._supervisor, self._log_folder = BundleCache(cache_root), supervisor, log_folder
        self._timeout_s, self._limits = timeout_s, limits
        self._compiler = compiler
        self._on_start, self._on_done = on_start, on_done
        self._builders: dict[int, BuilderProcess] = {}
        self._stopping = threading.Event()
        self._turns = _Turns(self._stopping)
        width = min(width, len(self._queue))
        self._threads = [threading.Thread(target=self._feed, args=(n,), name=f"builder-{n}") for n in range(width)]
        # It may take a while, and nothing waits for it but `join`.
        self._sweeper = threading.Thread(target=self._sweep, name="leftovers", daemon=True)

    def start(self) -> None:
        """Start the processes, and remove meanwhile what killed ones left in the cache. Returns at once."""
        self._sweeper.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the processes, whatever they are doing; what is unpublished is lost, what is published is whole."""
        self._stopping.set()
        self._queue.clear()
        for thread in self._threads:
            # A thread may just be starting a process that was not there to be ended a moment ago.
            while thread.is_alive():
                for builder in list(self._builders.values()):
                    builder.interrupt()
                thread.join(timeout=0.1)

    def join(self) -> None:
        """Wait until everything is built."""
        for thread in (*self._threads, self._sweeper):
            thread.join()

    def _sweep(self) -> None:
        remove_leftovers(self._cache.root)
        forget_pruned(self._cache)

    def _feed(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                request = self._queue.popleft()
            except IndexError:
                break
            self._on_start(request.key)
            reply = self._build(number, request)
            if reply.ok:
                self._remember(request)
            if not self._stopping.is_set():
                self._on_done(reply)
            # After the reply: no job waits for this.
            if number in self._builders and not self._builders[number].is_alive:
                self._end_builder(number)
            self._cache.remove_half_made(request.key)
        self._end_builder(number)

    def _remember(self, request: BuildRequest) -> None:
        """Let the bundle be found after edits that concern nothing that took part in it."""
        developed = self._compiler.developed
        if developed and has_trace(self._cache.folder(request.key)):
            # Without that note it is compiled again, once.
            with suppress(OSError):
                base = base_key(request.job, request.versions, developed)
                remember_traced(self._cache.root, base, request.key)

    def _end_builder(self, number: int) -> None:
        builder = self._builders.pop(number, None)
        if builder is not None:
            builder.end()

    def _build(self, number: int, request: BuildRequest) -> BuildReply:
        reply, again = BuildReply(request.key, ok=False, seconds=0.0, reason="not tried", infra=True), _Again.BESIDE
        for _ in range(_TRIES):
            with self._turns.take(alone=again is _Again.ALONE):
                if self._stopping.is_set():
                    break
                try:
                    reply, again = self._ask(number, request)
                except Exception as error:  # noqa: BLE001 - a job waits for a reply, whatever happened
                    # What it was asked it may still answer, and that would be taken for the answer to the next.
                    self._end_builder(number)
                    reply = BuildReply(request.key, ok=False, seconds=0.0, reason=f"no builder: {error}", infra=True)
                    again = _Again.BESIDE
            if again is _Again.NO:
                break
        return reply

    def _ask(self, number: int, request: BuildRequest) -> tuple[BuildReply, _Again]:
        builder = self._builder(number)
        fresh = builder.is_fresh
        answer = builder.ask(request, self._timeout_s, self._limits.most_mb)
        if isinstance(answer, BuildReply):
            return answer, _Again.BESIDE if answer.infra else _Again.NO
        return self._without_reply(request, answer, builder.log, fresh=fresh)

    def _without_reply(
        self, request: BuildRequest, ended: CompilerEnding, log: Path, *, fresh: bool
    ) -> tuple[BuildReply, _Again]:
        def failed(reason: str, *, seconds: float = 0.0, infra: bool = False) -> BuildReply:
            return BuildReply(request.key, ok=False, seconds=seconds, reason=reason, infra=infra)

        if ended.greedy and not ended.overdue:
            reason = (
                f"the compiler was ended as it took more than {self._limits.most_mb} MB of memory: "
                "if the case needs them, raise build.memory_mb in farm.toml"
            )
            # What jobs before have left behind may be in it.
            return failed(reason), _Again.NO if fresh else _Again.BESIDE
        if reason := ended.compiler_reason(self._timeout_s):
            return failed(reason, seconds=self._timeout_s if ended.overdue else 0.0), _Again.NO
        if -ended.code == signal.SIGKILL:
            reason = (
                "the builder process was killed (signal 9), most likely as the machine ran out of memory: "
                f"set build.builders or build.memory_mb lower in farm.toml (log: {log})"
            )
            return failed(reason, infra=True), _Again.ALONE
        return failed(f"the builder process ended with {ending(ended.code)}: see {log}", infra=True), _Again.BESIDE

    def _builder(self, number: int) -> BuilderProcess:
        """Return the process of that number, a fresh one when it is gone or has grown too much."""
        builder = self._builders.get(number)
        if builder is not None and builder.is_alive and not builder.has_grown(self._limits.recycle_mb):
            return builder
        self._end_builder(number)
        builder = self._builders[number] = BuilderProcess(
            number,
            self._cache.root,
            self._compiler,
            self._supervisor,
            self._log_folder / f"builder-{number}.log",
        )
        return builder


def build_one(
    request: BuildRequest,
    *,
    limits: MemoryLimits,
    cache_root: Path,
    compiler: Compiler,
    supervisor: Supervisor,
    log_folder: Path,
    timeout_s: float,
) -> BuildReply:
    """Build a single bundle in a builder of its own and return how it went."""
    replies: list[BuildReply] = []
    pool = BuilderPool(
        [request],
        width=1,
        limits=limits,
        cache_root=cache_root,
        compiler=compiler,
        supervisor=supervisor,
        log_folder=log_folder,
        timeout_s=timeout_s,
        on_start=lambda _key: None,
        on_done=replies.append,
    )
    pool.start()
    try:
        pool.join()
    finally:
        pool.stop()
    return replies[0]


class _Turns:
    """Many may work at the same time, or one alone. Who wants to be alone comes before all who begin after it asked."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._changed = threading.Condition()
        self._working = 0
        self._alone = 0

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Wait for a turn and have it while the body runs; the wait ends once the pool is stopping."""
        with self._changed:
            if alone:
                self._alone += 1
            while not self._stopping.is_set() and (self._working if alone else self._alone):
                self._changed.wait(timeout=0.5)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._alone -= alone
                self._changed.notify_all()
