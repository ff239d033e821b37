"""Handlers of Procrastinate's jobs: callables of an agent, in threads of their own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.delivery.app import Periodic

logger = logging.getLogger(__name__)

REPEAT_S = 5.0
SERVICES = 4
"""Handlers that run at once."""


@dataclass(frozen=True)
class Calls:
    """Callables of the jobs, each called in a thread."""

    finish: Callable[[str], object]
    """Called with a run whose work is over."""
    recover: Callable[[], bool]
    """Returns whether any run goes on."""
    remove_ended: Callable[[], object]


class Serving:
    """Handlers of jobs on one event loop (`farm.dispatch.cluster.delivery.app.Handler`)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        # Not asyncio's own pool, which other code of the loop may fill.
        self._threads = ThreadPoolExecutor(SERVICES, thread_name_prefix="service")

    async def finish(self, run: str) -> None:
        """Record the end of a run."""
        await self._call(f"the end of run {run}", lambda: self._calls.finish(run))

    async def recover(self) -> None:
        """Repair rows of dead agents, once more after a pause while runs go on: an idle farm asks half as often."""
        if await self._call("recovery", self._calls.recover):
            await asyncio.sleep(REPEAT_S)
            await self._call("recovery", self._calls.recover)

    async def remove_ended(self) -> None:
        """Remove ended jobs."""
        await self._call("old messages", self._calls.remove_ended)

    async def call(self, periodic: Periodic) -> None:
        """Call a periodic callable."""
        await self._call(periodic.name, periodic.call)

    def close(self) -> None:
        """Begin no other handler; running handlers go on."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, what: str, call: Callable[[], object]) -> object:
        """Return the result of `call`; None after a logged error. A cancelled handler leaves `call` running."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._threads.submit(call)))
        except Exception as error:  # noqa: BLE001 - the next job of its kind comes within seconds
            logger.warning("%s: %s", what, error)
            return None
