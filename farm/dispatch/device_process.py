"""Process of one device: runs the jobs that a dispatcher sends, and sends their results back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from farm.devices.health import HealthEvent
from farm.dispatch.messages import (
    GRANT_APPLIED,
    Abort,
    ApplyGrant,
    Begin,
    DeviceEvent,
    End,
    Frames,
    FromDevice,
    Grant,
    JobBegun,
    JobBroken,
    JobEnded,
    JobReturned,
    RunJob,
    SetGrant,
    ToDevice,
    frame,
)
from farm.dispatch.request.plan import RunPlan, read_plan
from farm.dispatch.worker import Worker

_READ_BYTES = 1 << 16


class DeviceLoop:
    """Messages of a device process, from the first to the last."""

    def __init__(self, send: Callable[[FromDevice], None], make: Callable[..., Worker] = Worker) -> None:
        """`send` sends a message to the dispatcher; `make` returns a worker, with the arguments of `Worker`."""
        self._send, self._make = send, make
        self._queue: SimpleQueue[ToDevice] = SimpleQueue()
        self._after: ToDevice | None = None
        """Message behind the running job, which was looked at to stage its bundle."""
        self._grant = Grant(go=False)
        self._returns_all = False
        """Each job is returned until the next grant."""
        self._aborted = self._is_orphan = False
        self._worker: Worker | None = None
        self._server_losses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Ends of the adb server by run: a worker ends when a worker of another run begins."""
        self._plan: RunPlan | None = None
        self._number = 0

    def take(self, message: ToDevice) -> None:
        """Take a message. Called in another thread than `run`."""
        if isinstance(message, SetGrant):
            self._grant, self._returns_all = message.grant, False
        elif isinstance(message, Abort):
            self._abort()
        elif isinstance(message, End):
            self._grant, self._returns_all = Grant(go=False), True
            self._abort()
            self._queue.put(message)
        else:
            self._queue.put(message)

    def dispatcher_exited(self) -> None:
        """End everything: the dispatcher has exited."""
        self._is_orphan = True
        self.take(End())

    def run(self) -> None:
        """Handle messages until End."""
        try:
            while self.step():
                pass
        finally:
            self._close_worker()

    @property
    def has_message(self) -> bool:
        """True if `step` would find a message."""
        return self._after is not None or not self._queue.empty()

    def step(self) -> bool:
        """Wait for a message and handle it; return False for End."""
        message = self._after or self._queue.get()
        self._after = None
        if isinstance(message, RunJob):
            self._after = self._queue.get() if message.more or not self._queue.empty() else None
            self._run(message, self._after if isinstance(self._after, RunJob) else None)
        elif isinstance(message, ApplyGrant):
            self._apply_grant()
        elif isinstance(message, Begin):
            self._begin(message)
        return not isinstance(message, End)

    def _abort(self) -> None:
        self._aborted = True
        if (worker := self._worker) is not None:
            worker.abort()

    def _begin(self, message: Begin) -> None:
        self._close_worker()
        self._plan, self._number = read_plan(Path(message.plan)), message.number
        self._aborted = False
        if self._grant.go:
            with contextlib.suppress(Exception):
                # The first job reports the fault.
                self._begun(self._plan)

    def _begun(self, plan: RunPlan) -> Worker:
        """Return the worker of the plan; it opens a session ahead of the first job."""
        if self._worker is None:
            self._worker = self._make(
                plan,
                self._number,
                lambda: self._grant,
                record_health=self._record_health,
                is_orphan=lambda: self._is_orphan,
                server_losses=self._server_losses[plan.run_id],
            )
        return self._worker

    def _record_health(self, event: HealthEvent) -> None:
        # The end of a job that the dispatcher broke off is no event of the device.
        if not self._aborted:
            self._send(DeviceEvent(event))

    def _close_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            # A worker that closes ignores SIGTERM, and others follow here.
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _run(self, message: RunJob, following: RunJob | None) -> None:
        if self._returns_all or self._plan is None:
            self._send(JobReturned(off=True, number=message.number))
            return
        self._send(JobBegun(message.number))
        try:
            worker = self._begun(self._plan)
            done = worker.run(message.planned, following.planned if following else None)
        except Exception:  # noqa: BLE001 - other jobs may have a result
            self._send(JobBroken(message.number, traceback.format_exc()))
            return
        if self._aborted or isinstance(done, JobReturned):
            self._returns_all = True
            if self._aborted:
                self._close_worker()
            self._send(_returned(message.number, done))
            return
        self._send(msgspec.structs.replace(done, number=message.number))

    def _apply_grant(self) -> None:
        if self._aborted:
            # A session that was broken off cannot run another job.
            self._close_worker()
        if self._worker is None:
            returned: JobReturned | None = None
            if self._grant.recover and self._plan is not None:
                returned = self._begun(self._plan).apply_grant()
        else:
            returned = self._worker.apply_grant()
        self._returns_all = True
        self._send(_returned(GRANT_APPLIED, returned))


def _returned(number: int, done: JobEnded | JobReturned | None) -> JobReturned:
    """Return the answer about a job that the worker returned, or dropped; without another fault the device is left."""
    if not isinstance(done, JobReturned):
        return JobReturned(off=True, number=number)
    has_fault = done.unfit or done.recovered or done.given_up or done.halt
    return msgspec.structs.replace(done, off=done.off or not has_fault, number=number)


def serve(stdin: int, stdout: int) -> None:
    """Handle the messages of the descriptor `stdin` and write answers to `stdout`, until End or its end."""
    # Signals of the terminal are for the dispatcher.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Several threads answer: running and staging.
    lock = threading.Lock()

    def send(message: FromDevice) -> None:
        data = frame(message)
        with lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(stdout, data) :]

    loop = DeviceLoop(send)
    threading.Thread(target=_listen, args=(stdin, loop), daemon=True, name="dispatcher").start()
    with contextlib.suppress(KeyboardInterrupt):
        loop.run()


def _listen(stdin: int, loop: DeviceLoop) -> None:
    frames: Any = Frames(ToDevice)
    try:
        while data := os.read(stdin, _READ_BYTES):
            for message in frames.feed(data):
                loop.take(message)
    finally:
        loop.dispatcher_exited()
