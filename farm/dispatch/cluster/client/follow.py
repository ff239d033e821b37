"""Following a run on a shared farm, and cancelling it: the display of a local run, from the records of agents.

The store is read after a notification, at most five times a second, and every two seconds without one. Following only
reads: the run goes on, and ends, without it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack, closing, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from farm.base.errors import StoreError, StoreLostError, UsageError
from farm.dispatch.cluster.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from farm.base.interrupts import InterruptHandler
    from farm.dispatch.dispatcher import ProgressListener
    from farm.store.cluster.records import Order, RunProgress
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
# The same while a command waits for the end of a cancelled run.
_END_LOOK_SECONDS = 1.0
# Least time between two reads of the store, for any number of notifications.
_LEAST_SECONDS = 0.2
# Seconds between two looks at why a run waits.
_QUIET_SECONDS = 10.0
# Prefix of builds that a shard needs beside the bundles of its jobs.
_NEEDED = "needs "
# Agents end a cancelled run within a heartbeat; following does not wait for dead agents beyond this time.
_CANCELLED_SECONDS = 15.0


class InterruptChoice(StrEnum):
    """Meaning of Ctrl-C: the user's choice for the run."""

    LEAVE = "leave"
    CANCEL = "cancel"
    FOLLOW = "follow"


class FollowEnd(StrEnum):
    """Reason for the end of following."""

    FINISHED = "finished"
    LEFT = "left"
    """The run goes on."""
    CANCELLED = "cancelled"
    """The run was cancelled, and some agent has not reported its devices free yet."""


class Signals:
    """Handler of Ctrl-C, SIGTERM and SIGHUP, which it notes; a second one raises KeyboardInterrupt at once.

    A closed terminal leaves the run running: the user follows it again by `farm runs watch`. Within another command
    (`interrupts`) it notes that command's request to end, as SIGTERM.
    """

    def __init__(self, interrupts: InterruptHandler | None = None) -> None:
        self._interrupts = interrupts
        self._outer = ExitStack()
        self.received: list[int] = []
        self._read, self._write = os.pipe()
        self._kept: dict[int, Any] = {}

    @property
    def is_within(self) -> bool:
        """True within another command."""
        return self._interrupts is not None

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable with a signal."""
        return self._read

    def __enter__(self) -> Signals:
        if self._interrupts is not None:
            self._outer.enter_context(self._interrupts.finishing(self._note_end))
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Signals that nohup ignores stay ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._kept[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._outer.close()
        os.close(self._read)
        os.close(self._write)

    def forget(self) -> None:
        """Clear the noted signals, so that the next one counts as the first."""
        self.received.clear()
        os.read(self._read, 100)

    def _note_end(self) -> None:
        self.received.append(signal.SIGTERM)
        os.write(self._write, b".")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        os.write(self._write, b".")
        if len(self.received) > 1:
            signal.default_int_handler(number, frame)


class Follower:
    """Display of a run until it is over, or until the user leaves or cancels it."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        listener: ProgressListener,
        *,
        ask: Callable[[], InterruptChoice] | None = None,
        built: int = 0,
    ) -> None:
        """`built` is the number of bundles that existed before following began.

        `ask` asks the user for the meaning of Ctrl-C; without it (no terminal), Ctrl-C cancels the run.
        """
        self._store, self._run_id = store, run_id
        self._ask = ask
        self._view = ProgressView(listener, built)
        self._cancelled_s: float | None = None
        self._unreachable_since_s: float | None = None
        self._last_reason, self._last_reason_s = "", time.monotonic()

    def follow(self, first: RunProgress, signals: Signals | None = None) -> FollowEnd:
        """Show the run from its state `first` on, and return the reason for the end of following.

        `signals` is a handler that is active already. Raises StoreError for a lost store, not for an unreachable one.
        """
        self._view.show(first)
        with closing(Hints(self._store)) as hints, Signals() if signals is None else nullcontext(signals) as noted:
            try:
                return self._loop(hints, first.last, noted)
            except KeyboardInterrupt:
                if noted.is_within:
                    raise
                logger.info(self._leave_message())
                return FollowEnd.LEFT

    def _loop(self, hints: Hints, after: int, signals: Signals) -> FollowEnd:
        while True:
            read_s = time.monotonic()
            progress = self._read_progress(after)
            if progress is not None:
                after = progress.last
                self._view.show(progress)
                if progress.finished:
                    return FollowEnd.FINISHED
                self._log_wait_reason(progress)
            if self._cancelled_s is not None and time.monotonic() - self._cancelled_s > _CANCELLED_SECONDS:
                return FollowEnd.CANCELLED
            ending = self._wait(hints, read_s, signals)
            if ending is not None:
                return ending

    def _wait(self, hints: Hints, read_s: float, signals: Signals) -> FollowEnd | None:
        """Wait for a notification or the next read; return an ending if the user or the command requested one."""
        while True:
            if signals.received and self._cancelled_s is None:
                if self._decide(signals) is InterruptChoice.LEAVE:
                    logger.info(self._leave_message())
                    return FollowEnd.LEFT
                return None
            # Once the run is cancelled, a further signal changes nothing.
            also = signals.descriptor if self._cancelled_s is None else None
            payloads = hints.wait(max(0.0, read_s + _LOOK_SECONDS - time.monotonic()), also=also)
            if any(payload.endswith(self._run_id) for payload in payloads):
                time.sleep(max(0.0, read_s + _LEAST_SECONDS - time.monotonic()))
                return None
            if time.monotonic() - read_s >= _LOOK_SECONDS:
                return None

    def _decide(self, signals: Signals) -> InterruptChoice:
        """Find out the meaning of the noted signal, act on it, and return it."""
        if signals.received[0] == signal.SIGHUP:
            return InterruptChoice.LEAVE
        choice = InterruptChoice.CANCEL
        if signals.received[0] == signal.SIGINT and self._ask is not None:
            choice = self._ask()
        if choice is InterruptChoice.CANCEL:
            again = "" if signals.is_within else "; Ctrl-C again does not wait for its devices"
            self._store.cluster.cancel(self._run_id, self._store.user, may_others=False)
            self._cancelled_s = time.monotonic()
            logger.info("the run is cancelled%s", again)
        elif choice is InterruptChoice.FOLLOW:
            signals.forget()
        return choice

    def _leave_message(self) -> str:
        if self._cancelled_s is not None:
            return f"run {self._run_id} is cancelled: its devices let go of it by themselves"
        run_id = self._run_id
        return f"run {run_id} continues: 'farm runs watch {run_id}' follows it, 'farm runs cancel {run_id}' ends it"

    def _read_progress(self, after: int) -> RunProgress | None:
        """Return the progress since `after`; None while the store does not answer."""
        try:
            progress = self._store.cluster.progress(self._run_id, after)
        except StoreLostError:
            raise
        except StoreError as error:
            if self._unreachable_since_s is None:
                self._unreachable_since_s = time.monotonic()
                logger.warning("the run goes on, and is shown again once the store answers: %s", error)
            return None
        if self._unreachable_since_s is not None:
            self._unreachable_since_s = None
            logger.info("the store answers again")
        return progress

    def _log_wait_reason(self, progress: RunProgress) -> None:
        """Log the reason why a run waits while no device and no builder works for it."""
        if progress.running or progress.building or self._cancelled_s is not None:
            self._last_reason_s = time.monotonic()
            return
        if time.monotonic() - self._last_reason_s < (_QUIET_SECONDS if self._last_reason else 1.0):
            return
        from farm.dispatch.cluster.queue import why_it_waits

        self._last_reason_s = time.monotonic()
        try:
            words = why_it_waits(self._store.cluster.queue(), self._run_id)
        except StoreError:
            return
        if words and words != self._last_reason:
            self._last_reason = words
            logger.info("waiting: %s", words)


class ProgressView:
    """State of a listener's view of a run: each job ends once, for any number of reads."""

    def __init__(self, listener: ProgressListener, built: int = 0) -> None:
        self._listener = listener
        self._open: dict[str, dict[str, Any]] = {}
        """Newest attempt of each job that is tried again."""
        self._building: set[str] = set()
        self._built = built

    def show(self, progress: RunProgress) -> None:
        """Report new builds, attempts and running devices to the listener."""
        self._show_builds(progress)
        last = {attempt["job_id"]: index for index, attempt in enumerate(progress.attempts)}
        for index, attempt in enumerate(progress.attempts):
            job_id = attempt["job_id"]
            if last[job_id] != index or job_id in progress.retried:
                self._open[job_id] = attempt
                self._listener.job_repeated(attempt)
            else:
                self._open.pop(job_id, None)
                self._listener.job_ended(attempt)
        # Jobs without a further attempt: no device was left, or the run is over.
        for job_id in self._open.keys() - progress.retried:
            self._listener.job_ended(self._open.pop(job_id))
        self._listener.devices(progress.running)

    def _show_builds(self, progress: RunProgress) -> None:
        from farm.builds.compile.protocol import BuildReply

        building = {"health check" if name.startswith(_NEEDED) else name for name in progress.building}
        for job_id in building - self._building:
            self._listener.build_started(job_id)
        ended = sorted(self._building - building)
        new = max(0, progress.built - self._built)
        # A build shorter than the time between two reads has no known name, but is counted.
        names = [*ended[:new], *[""] * (new - len(ended))]
        for job_id in names:
            self._listener.build_ended(job_id, BuildReply("", ok=True, seconds=0.0))
        self._building, self._built = building, max(self._built, progress.built)


def cancel(store: Store, run_id: str, user: str, *, force: bool = False) -> Order:
    """Cancel a run for `user` and return its order as it was before; a run of another user needs `force`.

    Raises UsageError for a run that is over, belongs to another user, or was never submitted.
    """
    order = store.cluster.order(run_id)
    if order is None:
        raise UsageError(f"run {run_id} was not submitted to the shared farm: Ctrl-C ends it where it was started")
    if order.state != "open":
        how = "cancelled" if order.cancelled_by else "over"
        raise UsageError(f"run {run_id} is {how} already: 'farm report {run_id}' shows its results")
    if order.user != user and not force:
        raise UsageError(f"run {run_id} is {order.user}'s: ask them, or give --force")
    store.cluster.cancel(run_id, user, may_others=force)
    return order


def await_end(store: Store, run_id: str, seconds: float) -> bool:
    """Wait until agents have released all devices of a run and ended it; return False after `seconds`."""
    end_s = time.monotonic() + seconds
    with closing(Hints(store)) as hints:
        while True:
            order = store.cluster.order(run_id)
            if order is None or order.state == "ended":
                return True
            left = end_s - time.monotonic()
            if left <= 0:
                return False
            hints.wait(min(left, _END_LOOK_SECONDS))
