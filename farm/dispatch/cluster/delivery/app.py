"""Procrastinate's part of messages: the app, its connections and the tasks of messages.

The settings here avoid three traps of Procrastinate 3.10: synchronous tasks would share asyncio's small default pool, a
worker without a periodic task ends its heartbeat at the first error of the database and goes on (its #1597), and
retries are timed by this machine's clock, which may be wrong.
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

from farm.dispatch.cluster.delivery.notices import TryAgainError
from farm.store.messages.notices import NOTIFY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from procrastinate.job_context import JobContext
    from procrastinate.jobs import Job
    from psycopg import AsyncConnection

SERVICE_QUEUE = "farm"
"""Queue of the tasks for any agent: ends of runs, recovery of abandoned work."""
MOST_CONNECTIONS = 2
"""Most connections of an app beside the listening one."""
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_EVERY_10_S = "* * * * * */10"
_EVERY_HOUR = "17 * * * *"


@dataclass(frozen=True)
class Periodic:
    """Periodic call by a single agent of several with the same configuration."""

    name: str
    cron: str
    """Minute, hour, day, month, weekday, and seconds, if they matter: `0 1 * * *`, `* * * * * */30`."""
    call: Callable[[], object]
    """Callable, run in a thread; hosts with different clocks may call it twice at once."""

    @property
    def queue(self) -> str:
        """Queue of the agents that are configured for it; other agents do not listen to it."""
        return f"{SERVICE_QUEUE}:{self.name}"


class Handler(Protocol):
    """Handler of messages, on the event loop."""

    async def finish(self, run: str) -> None:
        """Record the end of a run whose work is over."""

    async def recover(self) -> None:
        """Repair the rows and messages of dead agents."""

    async def remove_ended(self) -> None:
        """Remove ended messages."""

    async def call(self, periodic: Periodic) -> None:
        """Make a periodic call."""

    async def notify(self, job: Job) -> None:
        """Attempt to send a notice. Raises TryAgainError."""


class _PutBack(BaseRetryStrategy):
    """Put a message back into its queue when its worker ends before it does, or when it asks for another attempt."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        del job
        if isinstance(exception, TryAgainError):
            return RetryDecision(retry_at=exception.at)
        # In the past: this machine's clock may be ahead of the database's.
        return RetryDecision(retry_at=_LONG_AGO) if isinstance(exception, CancelledError) else None


async def _commit_by_itself(connection: AsyncConnection[Any]) -> None:
    # Each of Procrastinate's statements is a transaction: BEGIN and COMMIT around it would be three.
    await connection.set_autocommit(True)


def _make_pool(**settings: Any) -> AsyncConnectionPool:
    # Procrastinate checks a connection before each use, which would be half of the statements of idle agents. A broken
    # connection ends the worker, and the next worker opens new ones.
    return AsyncConnectionPool(**{**settings, "check": None})


def make_app(arguments: Mapping[str, Any], handler: Handler, periodic: Sequence[Periodic]) -> App:
    """Return the app, not open yet, which connects to the database by `arguments` of psycopg's `connect`."""
    # The agent logs all problems itself; without a handler Python would print the warnings of these loggers.
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

    @app.task(name=NOTIFY, retry=put_back, pass_context=True)
    async def notify(context: JobContext, /, **_: Any) -> None:
        await handler.notify(context.job)

    # No lock: the message of a dead worker would keep it, and with it this task, which puts such messages back.
    @app.periodic(cron=_EVERY_10_S)
    @app.task(name="farm.recover", queue=SERVICE_QUEUE, queueing_lock="farm.recover", priority=100)
    async def recover(timestamp: int) -> None:
        del timestamp
        await handler.recover()

    @app.periodic(cron=_EVERY_HOUR)
    @app.task(name="farm.remove_ended", queue=SERVICE_QUEUE, queueing_lock="farm.remove_ended")
    async def remove_ended(timestamp: int) -> None:
        del timestamp
        await handler.remove_ended()

    for one in periodic:
        _add_periodic(app, one, handler)
    return app


def _add_periodic(app: App, one: Periodic, handler: Handler) -> None:
    @app.periodic(cron=one.cron)
    @app.task(name=f"farm.periodic.{one.name}", queue=one.queue, queueing_lock=one.queue, priority=75)
    async def call(timestamp: int) -> None:
        del timestamp
        await handler.call(one)
