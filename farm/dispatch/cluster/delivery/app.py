"""Procrastinate's side of messages: its app, its connections and the tasks that messages name.

Traps of Procrastinate 3.10 that the settings here avoid: synchronous tasks would share asyncio's small default pool, a
worker without a periodic task ends its heartbeat at the first error of the database and goes on (its #1597), and the
time of a retry is that of this machine's clock, which may be wrong.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from procrastinate import App, PsycopgConnector, RetryDecision
from procrastinate.retry import BaseRetryStrategy
from psycopg_pool import AsyncConnectionPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from procrastinate.jobs import Job
    from psycopg import AsyncConnection

SERVICE_QUEUE = "farm"
"""Of what any agent does: ends of runs, mending."""
MOST_CONNECTIONS = 2
"""Beside the one that listens."""
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_EVERY_10_S = "* * * * * */10"
_EVERY_HOUR = "17 * * * *"


@dataclass(frozen=True)
class Periodic:
    """Something that one of the agents which have it does now and then."""

    name: str
    cron: str
    """Minute, hour, day, month, weekday, and seconds, if they matter: `0 1 * * *`, `* * * * * */30`."""
    call: Callable[[], object]
    """In a thread; it may be called twice at once where the clocks of hosts are not the same."""

    @property
    def queue(self) -> str:
        """The queue of the agents that have it: others know nothing of it."""
        return f"{SERVICE_QUEUE}:{self.name}"


class Handler(Protocol):
    """What is done about messages, on the event loop."""

    async def finish(self, run: str) -> None:
        """The work of a run is over."""

    async def mend(self) -> None:
        """See to what others left."""

    async def tidy(self) -> None:
        """Remove what nobody needs."""

    async def call(self, periodic: Periodic) -> None:
        """Do what is done now and then."""


class _PutBack(BaseRetryStrategy):
    """Put a message back into its queue when its worker ends before it does."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        del job
        # In the past: this machine's clock may be ahead of the database's.
        return RetryDecision(retry_at=_LONG_AGO) if isinstance(exception, CancelledError) else None


async def _commit_by_itself(connection: AsyncConnection[Any]) -> None:
    # Each of Procrastinate's statements is a transaction: BEGIN and COMMIT around it would be three.
    await connection.set_autocommit(True)


def _make_pool(**settings: Any) -> AsyncConnectionPool:
    # Procrastinate has each connection asked whether it is alive before each use, which would be half of what idle
    # agents ask. A broken one ends the worker, and the next worker has new ones.
    return AsyncConnectionPool(**{**settings, "check": None})


def make_app(arguments: Mapping[str, Any], handler: Handler, periodic: Sequence[Periodic]) -> App:
    """Return the app, not open yet, which reaches the database by `arguments` of psycopg's `connect`."""
    # What is to be known of it is noted by who runs it; without a handler Python would print warnings.
    for name in ("procrastinate", "psycopg"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    connector = PsycopgConnector(
        pool_factory=_make_pool,
        kwargs={"application_name": "farm messages", **arguments},
        min_size=1,
        max_size=MOST_CONNECTIONS,
        timeout=5.0,
        reconnect_timeout=5.0,
        configure=_commit_by_itself,
        name="messages",
    )
    app = App(connector=connector)
    put_back = _PutBack()

    @app.task(name="farm.finish", queue=SERVICE_QUEUE, retry=put_back)
    async def finish(run: str) -> None:
        await handler.finish(run)

    # No lock: a message that a dead worker holds would keep it, and nobody would be there to put that back.
    @app.periodic(cron=_EVERY_10_S)
    @app.task(name="farm.mend", queue=SERVICE_QUEUE, queueing_lock="farm.mend", priority=100)
    async def mend(timestamp: int) -> None:
        del timestamp
        await handler.mend()

    @app.periodic(cron=_EVERY_HOUR)
    @app.task(name="farm.tidy", queue=SERVICE_QUEUE, queueing_lock="farm.tidy")
    async def tidy(timestamp: int) -> None:
        del timestamp
        await handler.tidy()

    for one in periodic:
        _add_periodic(app, one, handler)
    return app


def _add_periodic(app: App, one: Periodic, handler: Handler) -> None:
    @app.periodic(cron=one.cron)
    @app.task(name=f"farm.periodic.{one.name}", queue=one.queue, queueing_lock=one.queue, priority=75)
    async def call(timestamp: int) -> None:
        del timestamp
        await handler.call(one)
