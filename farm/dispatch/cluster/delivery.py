"""Jobs of Procrastinate for the agents of a shared farm: ends of runs, recovery, nightly starts and notices."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from asyncio import CancelledError
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from procrastinate import App, PsycopgConnector, RetryDecision
from procrastinate.retry import BaseRetryStrategy
from psycopg_pool import AsyncConnectionPool

from farm.base.errors import ExitCode, FarmError, StoreError
from farm.base.interrupts import INTERRUPTED
from farm.base.text import one_line
from farm.dispatch.cluster.terms import decode_terms
from farm.dispatch.notify.channels import NotifyError
from farm.dispatch.notify.delivery import Delivery
from farm.dispatch.request.records import exit_code_of
from farm.dispatch.request.selection import Budget
from farm.store.cluster.part import REFUSED_BY
from farm.store.leases.rows import always_stable
from farm.store.messages.messages import NOTIFY, NoticeArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from procrastinate.job_context import JobContext
    from procrastinate.jobs import Job
    from procrastinate.worker import Worker
    from psycopg import AsyncConnection

    from farm.dispatch.notify.delivery import Receiver
    from farm.store.cluster.records import Order
    from farm.store.records import RunView
    from farm.store.store import Store


# Task of Procrastinate that sends a notice to a receiver of this host: one attempt per job and time.
#
# The process that queued a notice tries first, for some minutes (`farm.dispatch.notify.delivery`).


logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 600.0
_MOST_TRIES = 42
"""Number of attempts, about six hours."""


class TryAgainError(Exception):
    """Failed attempt of a job, to be repeated at `at`."""

    def __init__(self, at: datetime) -> None:
        super().__init__(at)
        self.at = at


def retry_wait_s(tries: int) -> float:
    """Return the time until the next attempt after `tries` failed ones. Pure."""
    return min(_FIRST_WAIT_S * 2.0 ** min(tries - 1, 60), _LONGEST_WAIT_S)


class NoticeTask:
    """Notices for the receivers of this host. Any thread may call it."""

    def __init__(self, store: Store, receivers: Iterable[Receiver]) -> None:
        self._store = store
        self._receivers = {one.queue: one for one in receivers}
        self._sent: set[int] = set()
        """Jobs that were sent here: the database may go away before it has the end of the job."""

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of the queues of its receivers."""
        return tuple(self._receivers)

    def attempt(self, job: Job) -> None:
        """Attempt a notice once, and record its outcome. Raises TryAgainError."""
        receiver = self._receivers[job.queue]
        try:
            notice = msgspec.convert(job.task_kwargs, NoticeArguments)
        except msgspec.ValidationError as error:
            logger.warning("a notice for %s is dropped: its row is unreadable: %s", receiver.to, error)
            return
        delivery = Delivery(receiver.to, ok=True)
        try:
            if job.id not in self._sent:
                receiver.deliver(notice.message, job.lock or "")
        except NotifyError as error:
            if error.may_pass and job.attempts + 1 < _MOST_TRIES:
                raise TryAgainError(self._after(retry_wait_s(job.attempts + 1))) from None
            delivery = Delivery(receiver.to, ok=False, problem=str(error))
        else:
            self._sent.add(job.id or 0)
        level = logging.INFO if delivery.ok else logging.WARNING
        logger.log(level, "notice of %s: %s", one_line(notice.about, 200), delivery.line)
        if notice.claim:
            with suppress(FarmError):
                self._store.quarantines.add_outcome(notice.claim, delivery.line)

    def _after(self, wait_s: float) -> datetime:
        """Return the time in `wait_s` on the clock of the database, by which jobs are due."""
        try:
            now_s = self._store.leases.now_ms() / 1000
        except StoreError:
            now_s = time.time()
        return datetime.fromtimestamp(now_s + wait_s, UTC)


# Procrastinate's part of messages: the app, its connections and the tasks of messages.
#
# The settings here avoid three traps of Procrastinate 3.10: synchronous tasks would share asyncio's small default
# pool, a worker without a periodic task ends its heartbeat at the first error of the database and goes on (its
# #1597), and retries are timed by this machine's clock, which may be wrong.


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


@dataclass
class Serving:
    """Handlers of jobs, each called in a thread."""

    finish: Callable[[str], object]
    """Called with a run whose work is over."""
    recover: Callable[[], bool]
    """Returns whether any run goes on."""
    remove_ended: Callable[[], object]
    notify: Callable[[Job], None]
    """Raises TryAgainError."""

    def __post_init__(self) -> None:
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


# An agent's worker of Procrastinate, in a thread of its own, and what its jobs do.
#
# `finish` records the end of a run: several agents may call it at once and again, and only the first complete call
# counts.


_KEPT_HOURS = 1.0


def recover(store: Store, *, ttl_s: float, is_stable: Callable[[], bool] = always_stable) -> bool:
    """Put back the shards and builds of dead agents and workers, and defer jobs that are missing.

    Any number of agents may recover at once. Returns whether any run goes on. `ttl_s` and `is_stable` as in
    `AbandonedWork.recover`. Raises StoreError.
    """
    recovered = store.cluster.recover(ttl_s=ttl_s, is_stable=is_stable)
    store.messages.retry(ttl_s, is_stable)
    for line in recovered.lines:
        logger.info(line)
    return recovered.is_busy


def remove_ended(store: Store) -> None:
    """Remove ended messages that were kept, after an hour, and notices without a receiver. Raises StoreError."""
    store.messages.remove_ended(_KEPT_HOURS)
    for about in store.messages.drop_untried():
        logger.warning("NOT NOTIFIED of %s: no host has had the receiver for a day", one_line(about, 200))


def finish(store: Store, run_id: str) -> int | None:
    """Record the end of a run and compare its numbers with earlier runs; return its exit code.

    None while work of the run is left, and for a run that was not submitted. Raises StoreError.
    """
    from farm.dispatch.history_comparison import record_comparison

    store.cluster.end_if_over(run_id)
    order = store.cluster.order(run_id)
    if order is None or order.state != "ended":
        return None
    view = store.runs.view(run_id)
    if view.finished_ms is not None:
        return view.exit_code
    if not order.cancelled_by:
        _mark_skipped(store, view, order)
        view = store.runs.view(run_id)
    code = INTERRUPTED if order.cancelled_by else exit_code_of(view)
    if order.cancelled_by == REFUSED_BY:
        code = ExitCode.REFUSED
    try:
        record_comparison(store, run_id)
    except FarmError as error:
        # Verdicts are in the store, and stay.
        run = {"run": run_id}
        logger.warning("the numbers of run %s were not compared with those before: %s", run_id, error, extra=run)
    # Last: if this agent dies before, other agents find a run without an end and repeat these steps.
    store.finish_run(run_id, code, once=True)
    return code


def _mark_skipped(store: Store, view: RunView, order: Order) -> None:
    """Mark the jobs that the budget kept from starting as skipped."""
    try:
        terms = decode_terms(order.terms)
    except msgspec.MsgspecError:
        # An order of another version of farm.
        return
    left = [job.id for job in view.jobs if not job.attempts and job.skipped is None]
    if terms.budget_s is None or not left or not order.is_late:
        return
    branch, private = store.runs.branch(view.id)
    kind = view.fingerprint.get("device_kind", "hardware")
    past = store.selection.expected(left, kind, branch, local_runs_of=view.user if private else "")
    store.mark_skipped(view.id, dict(Budget(terms.budget_s).unbegun(left, past)))


# Interval of looks without a notification, which may be lost. Every recovery job sends one, so that looks are rare.
_LOOK_S = 12.0
_CONNECT_EVERY_S = 1.0
# Wait for handlers after the database went away; the rest of them goes on in threads.
_HURRY_S = 0.5


class MessageDelivery:
    """Jobs of Procrastinate for one agent. Its methods may be called in any thread.

    An error of a handler becomes a note. A job may come twice, late, or for nothing. A worker without a heartbeat for
    `ttl_s` is dead.
    """

    def __init__(
        self,
        store: Store,
        *,
        finish_run: Callable[[str], object] | None = None,
        recover: Callable[[], bool],
        ttl_s: float,
        checks: Mapping[str, Callable[[], object]] | None = None,
        notices: NoticeTask | None = None,
    ) -> None:
        self._store, self._checks, self._ttl_s = store, checks or {}, ttl_s
        self._notices = notices or NoticeTask(store, ())
        self._serving = Serving(
            finish=finish_run or partial(finish, store),
            recover=recover,
            remove_ended=partial(remove_ended, store),
            notify=self._notices.attempt,
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._is_ending, self._patience_s = False, 0.0
        self._is_away = False
        self._worker: Worker | None = None
        self._cleanups: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """True while a worker listens."""
        return self._worker is not None

    def start(self) -> None:
        """Begin to take jobs.

        Raises StoreError if the store lacks the tables of Procrastinate, and this user may not create them.
        """
        self._store.messages.require()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Stop taking messages, wait `patience_s` for handlers, and put back the messages of unfinished handlers."""
        self._patience_s, self._is_ending = patience_s, True
        if self._loop is not None:
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
        if self._thread is not None:
            # While the database is away no message can be put back: others find them once this worker counts as dead.
            self._thread.join(patience_s + 15)

    def _run(self) -> None:
        asyncio.run(self._deliver())

    async def _deliver(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Tasks abandoned when the database went away have unread results: keep asyncio from logging them.
        self._loop.set_exception_handler(lambda *_: None)
        while not self._is_ending:
            try:
                await self._await_database()
                await self._listen()
            except Exception as error:  # noqa: BLE001 - whatever ends a worker, another one has to go on
                self._is_away = True
                logger.warning("messages: %s: trying again", self._words(error.__cause__ or error))
                await self._pause()
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=_CONNECT_EVERY_S)
        self._serving.threads.shutdown(wait=False, cancel_futures=True)

    async def _await_database(self) -> None:
        """Return once the database can be reached, or once this delivery ends."""
        import psycopg

        arguments = self._store.connection_arguments()
        while not self._is_ending:
            try:
                connection = await psycopg.AsyncConnection.connect(**arguments)
            except (psycopg.Error, OSError) as error:
                if not self._is_away:
                    logger.warning("messages: the database is away, they wait for it: %s", self._words(error))
                self._is_away = True
                await self._pause()
            else:
                await connection.close()
                if self._is_away:
                    logger.info("messages: the database is back")
                self._is_away = False
                return

    def _words(self, error: BaseException) -> str:
        return " ".join(self._store.without_secrets(str(error)).split()) or type(error).__name__

    async def _listen(self) -> None:
        """Run a worker until this delivery ends, or the worker ends by itself; raises the worker's error."""
        app = make_app(self._store.connection_arguments(), self._serving, self._checks)
        await app.open_async()
        task, worker = self._start_worker(app)
        self._worker = worker
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
            if not self._is_ending:
                await task
                raise ConnectionError("the worker ended; was the connection lost?")
        finally:
            self._worker = None
            ending.cancel()
            hurry_s = self._patience_s if self._is_ending else _HURRY_S
            cleanup = asyncio.create_task(_wind_up(app, task, worker, hurry_s))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            if self._is_ending:
                await cleanup

    def _start_worker(self, app: App) -> tuple[asyncio.Task[None], Worker]:
        from procrastinate.worker import Worker

        worker = Worker(
            app,
            queues=[SERVICE_QUEUE, *map(queue_of, self._checks), *self._notices.queues],
            concurrency=SERVICES,
            fetch_job_polling_interval=_LOOK_S,
            update_heartbeat_interval=self._ttl_s / 3,
            stalled_worker_timeout=2 * self._ttl_s,
            # Timeout for a worker that ends by itself because the database is away.
            shutdown_graceful_timeout=_HURRY_S,
            delete_jobs="always",
            install_signal_handlers=False,
        )
        task: asyncio.Task[None] = asyncio.create_task(worker.run())  # type: ignore[no-untyped-call]
        return task, worker

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), _CONNECT_EVERY_S)


async def _wind_up(app: App, task: asyncio.Task[None], worker: Worker, patience_s: float) -> None:
    """End a worker, wait `patience_s` for its handlers, put back their jobs, and close the app's connections."""
    worker.shutdown_graceful_timeout = patience_s
    worker.stop()  # type: ignore[no-untyped-call]
    # The connection pool of the worker waits up to 5 s for an unreachable database.
    await asyncio.wait((task,), timeout=patience_s + 12)
    task.cancel()
    with suppress(Exception):
        await app.close_async()
