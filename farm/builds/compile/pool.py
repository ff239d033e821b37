"""Pool of builder processes that fills the bundle cache in the order of its requests."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from farm.builds.bundles.cache import BundleCache, remove_leftovers
from farm.builds.bundles.key import source_as_of_ns
from farm.builds.bundles.reuse import forget_pruned
from farm.builds.compile.builder_slot import BuilderGate, BuilderSettings, BuilderSlot, MemoryLimits
from farm.builds.compile.order import case_of, take_next
from farm.builds.compile.template import BuilderTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farm.builds.compile.protocol import BuildReply, BuildRequest
    from farm.builds.toolchains.toolchain import Compiler

__all__ = ["BuilderPool", "BuilderSettings", "MemoryLimits", "build_one"]


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
        self._sweeper = threading.Thread(target=self._sweep, name="leftovers", daemon=True)

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

    def _sweep(self) -> None:
        remove_leftovers(self._cache.root)
        forget_pruned(self._cache)

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
