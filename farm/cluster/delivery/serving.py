"""What an agent does about messages: its callables, in threads, as often as there is something to do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farm.cluster.delivery.threads import Threads
from farm.store.messages.messages import queue_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farm.cluster.delivery.app import Periodic

AGAIN_S = 2.0
"""What nothing free may have now is looked at again after that, by one message of a queue at a time."""
MEND_AGAIN_S = 5.0
SERVICES = 4
"""Messages of no device at once: they do not wait for those of devices."""


@dataclass(frozen=True)
class Calls:
    """What is called about messages, each in a thread."""

    work: Callable[[str], bool]
    """With an SoC; False where there is work that nothing free may have now."""
    build: Callable[[str], bool]
    """With the id of a toolchain; the same."""
    finish: Callable[[str], object]
    """With a run."""
    mend: Callable[[], bool]
    """Whether runs go on."""
    tidy: Callable[[], object]


class Serving:
    """Handlers of messages on one event loop (`farm.cluster.delivery.app.Handler`)."""

    def __init__(self, calls: Calls, note: Callable[[str], None], size: int) -> None:
        self._calls, self._note = calls, note
        self._devices, self._services = Threads("work", size), Threads("service", SERVICES)
        self._waiting: set[str] = set()
        self._names: dict[str, str] = {}

    def listen_to(self, queues: Iterable[str]) -> tuple[str, ...]:
        """Know queues by the names that they have in messages, and return these."""
        self._names = {queue_name(queue): queue for queue in queues}
        return tuple(self._names)

    async def work(self, queue: str) -> None:
        """Serve the devices of an SoC."""
        soc = self._subject(queue)
        await self._serve(f"work for {soc}", lambda: self._calls.work(soc))

    async def build(self, queue: str) -> None:
        """Make bundles with a toolchain."""
        toolchain = self._subject(queue)
        await self._serve(f"builds with {toolchain}", lambda: self._calls.build(toolchain))

    def _subject(self, queue: str) -> str:
        return self._names.get(queue, queue).partition(":")[2]

    async def finish(self, run: str) -> None:
        """Record the end of a run."""
        await self._call(f"the end of run {run}", lambda: self._calls.finish(run))

    async def mend(self) -> None:
        """See to what others left, once more where runs go on: who is idle asks half as often."""
        if await self._call("mending", self._calls.mend):
            await asyncio.sleep(MEND_AGAIN_S)
            await self._call("mending", self._calls.mend)

    async def tidy(self) -> None:
        """Remove what nobody needs."""
        await self._call("old messages", self._calls.tidy)

    async def call(self, periodic: Periodic) -> None:
        """Do what is done now and then."""
        await self._call(periodic.name, periodic.call)

    def resize(self, size: int) -> None:
        """Serve so many devices and builds at once from now on."""
        self._devices.resize(size)

    def close(self) -> None:
        """Begin nothing any more."""
        self._devices.close()
        self._services.close()

    async def _serve(self, what: str, call: Callable[[], bool]) -> None:
        """Call until there is nothing more to do; a message that comes while as many are served is done with."""
        while self._devices.has_room:
            try:
                is_done = await self._devices.call(call)
            except Exception as error:  # noqa: BLE001 - one job's trouble is not the others'
                self._note(f"{what}: {error}")
                is_done = False
            if is_done or what in self._waiting:
                return
            self._waiting.add(what)
            try:
                await asyncio.sleep(AGAIN_S)
            finally:
                self._waiting.discard(what)

    async def _call(self, what: str, call: Callable[[], object]) -> object:
        """Call it, in a thread that does not wait for work; what it raises is noted, and None returned."""
        try:
            return await self._services.call(call)
        except Exception as error:  # noqa: BLE001 - it is done again in a few seconds
            self._note(f"{what}: {error}")
            return None
