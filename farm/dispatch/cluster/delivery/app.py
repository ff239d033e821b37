"""Procrastinate's part of messages: the app, its connections and the tasks of messages.

The settings here avoid three traps of Procrastinate 3.10: synchronous tasks would share asyncio's small default pool, a
worker without a periodic task ends its heartbeat at the first error of the database and goes on (its #1597), and
retries are timed by this machine's clock, which may be wrong.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from procrastinate import App, PsycopgConnector, RetryDecision
from procrastinate.retry import BaseRetryStrategy
from psycopg_pool import AsyncConnectionPool

from farm.dispatch.cluster.delivery.notices import TryAgainError
from farm.store.messages.messages import NOTIFY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from procrastinate.job_context import JobContext
    from procrastinate.jobs import Job
    from psycopg import AsyncConnection

logger = logging.getLogger(__name__)

SERVICE_QUEUE = "farm"
"""Queue of the tasks for any agent: ends of runs, recovery of abandoned work."""
MOST_CONNECTIONS = 2
"""Most connections of an app beside the listening one."""
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_EVERY_10_S = "* * * * * */10"
_EVERY_HALF_MINUTE = "* * * * * */30"
_EVERY_HOUR = "17 * * * *"


REPEAT_S = 5.0
SERVICES = 4
"""Handlers that run at once."""


class Serving:
    """Handlers of jobs, each called in a thread."""

    def __init__(
        self,
        *,
        finish: Callable[[str], object],
        recover: Callable[[], bool],
        remove_ended: Callable[[], object],
        notify: Callable[[Job], None],
    ) -> None:
        """`finish` gets a run whose work is over; `recover` returns whether any run goes on; `notify` raises
        TryAgainError."""
        self.finish, self.recover, self.remove_ended, self.notify = finish, recover, remove_ended, notify
        # Not asyncio's own pool, which other code of the loop may fill.
        self.threads = ThreadPoolExecutor(SERVICES, thread_name_prefix="service")

    async def call(self, what: str, call: Callable[[], object]) -> object:
        """Return the result of `call`; None after a logged error. A cancelled handler leaves `call` running."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self.threads.submit(call)))
        except Exception as error:  # noqa: BLE001 - the next job of its kind comes within seconds
            logger.warning("%s: %s", what, error)
            return None


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


def make_app(arguments: Mapping[str, Any], serving: Serving, checks: Mapping[str, Callable[[], object]]) -> App:
    """Return the app, not open yet, which connects to the database by `arguments` of psycopg's `connect`.

    `checks` are called every half minute, each by a single agent of several that have it: hosts with different clocks
    may call it twice at once.
    """
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
        await serving.call(f"the end of run {run}", partial(serving.finish, run))

    @app.task(name=NOTIFY, retry=put_back, pass_context=True)
    async def notify(context: JobContext, /, **_: Any) -> None:
        attempt = asyncio.wrap_future(serving.threads.submit(serving.notify, context.job))
        try:
            await asyncio.shield(attempt)
        except CancelledError:
            # An attempt that has begun is recorded also at the end of the worker.
            await attempt

    # No lock: the message of a dead worker would keep it, and with it this task, which puts such messages back.
    @app.periodic(cron=_EVERY_10_S)
    @app.task(name="farm.recover", queue=SERVICE_QUEUE, queueing_lock="farm.recover", priority=100)
    async def recover(timestamp: int) -> None:
        del timestamp
        # Once more after a pause while runs go on: an idle farm asks half as often.
        if await serving.call("recovery", serving.recover):
            await asyncio.sleep(REPEAT_S)
            await serving.call("recovery", serving.recover)

    @app.periodic(cron=_EVERY_HOUR)
    @app.task(name="farm.remove_ended", queue=SERVICE_QUEUE, queueing_lock="farm.remove_ended")
    async def remove_ended(timestamp: int) -> None:
        del timestamp
        await serving.call("old messages", serving.remove_ended)

    for name, check in checks.items():
        _add_check(app, serving, name, check)
    return app


def queue_of(check: str) -> str:
    """Return the queue of the agents that have a check; other agents do not listen to it."""
    return f"{SERVICE_QUEUE}:{check}"


def _add_check(app: App, serving: Serving, name: str, check: Callable[[], object]) -> None:
    queue = queue_of(name)

    @app.periodic(cron=_EVERY_HALF_MINUTE)
    @app.task(name=f"farm.periodic.{name}", queue=queue, queueing_lock=queue, priority=75)
    async def call(timestamp: int) -> None:
        del timestamp
        await serving.call(name, check)
