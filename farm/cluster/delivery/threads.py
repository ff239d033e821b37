"""Threads for handlers of messages: as many as there are devices, never asyncio's few."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Threads:
    """A bounded number of threads; who asks for more than there are is refused. Used on one event loop."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size, self._busy = size, 0
        self._pool = ThreadPoolExecutor(max(size, 1), thread_name_prefix=name)

    @property
    def has_room(self) -> bool:
        """Whether a thread is free."""
        return self._busy < self._size

    def resize(self, size: int) -> None:
        """Have so many threads from now on; what runs goes on."""
        if size != self._size:
            self._pool.shutdown(wait=False)
            self._pool, self._size = ThreadPoolExecutor(max(size, 1), thread_name_prefix=self._name), size

    async def call(self, function: Callable[[], _T]) -> _T:
        """Return what the function returns, in a thread; it goes on there where the caller is cancelled."""
        loop = asyncio.get_running_loop()
        future = self._pool.submit(function)
        self._busy += 1
        future.add_done_callback(lambda _: _on_loop(loop, self._end))
        return await asyncio.shield(asyncio.wrap_future(future))

    def _end(self) -> None:
        self._busy -= 1

    def close(self) -> None:
        """Begin nothing any more; what runs goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
