"""The process of one device: runs the jobs that the agent sends by the worker that a single machine has as well.

Its results go to the agent, which spools and records them: what the worker has in the place of a store only keeps them
until the job has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from farm.cluster.slots.slot_protocol import (
    LOOKED,
    Back,
    Begin,
    Break,
    Broken,
    DeviceEvent,
    End,
    Ended,
    Frames,
    LookNow,
    RunJob,
    SetGrant,
    ToSlot,
    frame,
)
from farm.device_run.device_worker import DeviceWorker
from farm.device_run.executor import Executor
from farm.pool.worker_grant import WorkerGrant
from farm.request.plan import read_plan
from farm.run.worker import Done, Outfit, Returned, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.cluster.slots.slot_protocol import FromSlot
    from farm.request.plan import PlannedJob, RunPlan
    from farm.results.attempt import Attempt
    from farm.results.blame import Tried
    from farm.store.leases.registry import HealthEvent
    from farm.store.records import ArtifactRecord

_READ_BYTES = 1 << 16


class UnrecordedJob:
    """What a job leaves, in the place of a store."""

    def __init__(self, tell: Callable[[FromSlot], None]) -> None:
        self._tell = tell
        self.attempts: list[Attempt] = []
        self.artifacts: tuple[ArtifactRecord, ...] = ()

    @property
    def devices(self) -> UnrecordedJob:
        """Where the health of devices is recorded."""
        return self

    def clear(self) -> None:
        """Forget what the last job left."""
        self.attempts, self.artifacts = [], ()

    def record_attempt(
        self,
        run_id: str,
        attempt: Attempt,
        *,
        artifacts: Sequence[ArtifactRecord] = (),
        fence: tuple[str, int] | None = None,
    ) -> None:
        """Keep an attempt."""
        del run_id, fence
        self.attempts.append(attempt)
        self.artifacts = tuple(artifacts)

    def record_health(self, event: HealthEvent) -> None:
        """Let the agent record what happened to a device."""
        self._tell(DeviceEvent(event))

    def close(self) -> None:
        """Nothing is open."""


class SlotWorker(Worker):
    """The worker of a single machine; its grants, and what other devices found, come from the agent."""

    def __init__(
        self,
        plan: RunPlan,
        controller: int,
        grant: Callable[[], WorkerGrant],
        kept: UnrecordedJob,
        server_losses: Counter[str],
    ) -> None:
        self._newest, self._kept = grant, kept
        self._history: tuple[Tried, ...] = ()
        self.repeat: tuple[Tried, ...] = ()
        super().__init__(plan, 0, controller, self._outfit)
        self._server_losses = server_losses

    def run_next(
        self, planned: PlannedJob, history: tuple[Tried, ...], following: PlannedJob | None
    ) -> Done | Returned:
        """Run a job that other devices may have tried, as `run` does."""
        self._kept.clear()
        self._history, self.repeat = history, ()
        return self.run(planned, following)

    def break_off(self) -> None:
        """End what runs with an error. Any thread may call it."""
        self._device_worker.run.break_off()

    def _outfit(self, plan: RunPlan, number: int, unwanted: Callable[[], bool]) -> Outfit:
        device_worker = DeviceWorker(plan, number, self._kept, unwanted)
        return Outfit(self._kept, device_worker, Executor(plan, device_worker))

    def _read_grant(self) -> WorkerGrant:
        # So that the agent sees this process go on.
        with contextlib.suppress(OSError):
            os.utime(self._plan.workers / str(self._number))
        return self._newest()

    def _tried(self, job_id: str) -> tuple[Tried, ...]:
        del job_id
        return self._history

    def _leave_to_others(self, job_id: str, history: tuple[Tried, ...]) -> None:
        del job_id
        # Virtual devices of two hosts may have one serial.
        last = msgspec.structs.replace(history[-1], device=self._device.id if history[-1].device else "")
        self.repeat = (*history[:-1], last)


class SlotLoop:
    """What a slot does between its first message and its last."""

    def __init__(self, tell: Callable[[FromSlot], None], controller: int) -> None:
        """`controller` is the id of the agent's process: without it nothing goes on."""
        self._tell, self._controller = tell, controller
        self._queue: SimpleQueue[ToSlot] = SimpleQueue()
        self._grant = WorkerGrant(go=False)
        self._holds_back = False
        """What comes is given back until the next grant."""
        self._broken_off = False
        self._worker: SlotWorker | None = None
        self._kept = UnrecordedJob(tell)
        self._server_losses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Of each run, as its worker ends where another begins."""
        self._plan: RunPlan | None = None

    def take(self, message: ToSlot) -> None:
        """Take a message of the agent's. Called in another thread than `run`."""
        if isinstance(message, SetGrant):
            self._grant, self._holds_back = message.grant, False
        elif isinstance(message, Break):
            self._break_off()
        elif isinstance(message, End):
            self._grant, self._holds_back = WorkerGrant(go=False), True
            self._break_off()
            self._queue.put(message)
        else:
            self._queue.put(message)

    def run(self) -> None:
        """Do what is asked for until that is to end, or the agent is gone."""
        after: ToSlot | None = None
        try:
            while not isinstance(message := after or self._queue.get(), End):
                after = None
                if isinstance(message, RunJob):
                    after = self._queue.get() if message.more or not self._queue.empty() else None
                    self._run(message, after if isinstance(after, RunJob) else None)
                elif isinstance(message, LookNow):
                    self._look()
                elif isinstance(message, Begin):
                    self._begin(message)
        finally:
            self._close_worker()

    def _break_off(self) -> None:
        self._broken_off = True
        if (worker := self._worker) is not None:
            worker.break_off()

    def _begin(self, message: Begin) -> None:
        self._close_worker()
        self._plan = read_plan(Path(message.plan))
        self._broken_off = False

    def _begun(self, plan: RunPlan) -> SlotWorker:
        """Return the worker of the plan; it begins a session ahead of the first job."""
        if self._worker is None:
            losses = self._server_losses[plan.run_id]
            self._worker = SlotWorker(plan, self._controller, lambda: self._grant, self._kept, losses)
        return self._worker

    def _close_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            # Which a worker that closes is deaf to: here others follow.
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _run(self, message: RunJob, following: RunJob | None) -> None:
        if self._holds_back or self._plan is None:
            self._tell(Back(message.number, off=True))
            return
        try:
            worker = self._begun(self._plan)
            done = worker.run_next(message.planned, message.history, following.planned if following else None)
        except Exception:  # noqa: BLE001 - this job has no result; others may have one
            self._tell(Broken(message.number, traceback.format_exc()))
            return
        if self._broken_off or isinstance(done, Returned):
            self._hold_back()
            if self._broken_off:
                self._close_worker()
            self._tell(_back(message.number, done))
            return
        kept = self._kept
        self._tell(Ended(message.number, tuple(kept.attempts), kept.artifacts, worker.repeat if done.avoid else ()))

    def _look(self) -> None:
        if self._broken_off:
            # What was broken off is of no more use.
            self._close_worker()
        if self._worker is None:
            returned: Returned | None = None
            if self._grant.recover and self._plan is not None:
                returned = self._begun(self._plan).look()
        else:
            returned = self._worker.look()
        self._hold_back()
        self._tell(_back(LOOKED, returned))

    def _hold_back(self) -> None:
        self._holds_back = True


def _back(number: int, returned: Done | Returned | None) -> Back:
    if not isinstance(returned, Returned):
        return Back(number, off=True)
    return Back(
        number,
        off=returned.off or not (returned.unfit or returned.recovered or returned.given_up or returned.halt),
        unfit=returned.unfit,
        recovered=returned.recovered,
        given_up=returned.given_up,
        halt=returned.halt,
    )


def main() -> None:
    """Be a slot: messages come on standard input and go to standard output."""
    # The agent says what a signal means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What anything prints by mistake is no message.
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    # Several threads answer: what runs, and what is staged.
    lock = threading.Lock()

    def tell(message: FromSlot) -> None:
        data = frame(message)
        with lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(stdout, data) :]

    loop = SlotLoop(tell, os.getppid())
    threading.Thread(target=_listen, args=(stdin, loop), daemon=True, name="agent").start()
    with contextlib.suppress(KeyboardInterrupt):
        loop.run()


def _listen(stdin: int, loop: SlotLoop) -> None:
    frames: Any = Frames(ToSlot)
    while data := os.read(stdin, _READ_BYTES):
        for message in frames.feed(data):
            loop.take(message)
    loop.take(End())


if __name__ == "__main__":
    main()
    sys.exit(0)
