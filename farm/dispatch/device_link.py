"""Shards and jobs of one device, and the link to its device process, by which jobs and grants are sent.

The process is started when it is needed, and again after it exited. It gets jobs in a session of a run, under a lease,
some of them ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import FarmError
from farm.base.text import bounded_log, reason_line
from farm.dispatch import messages
from farm.results.attempt import Attempt, Cause, Stage, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.device import Device
    from farm.dispatch.dispatcher import Dispatcher, Prepared
    from farm.dispatch.request.request import RunPlan
    from farm.store.cluster.records import HeldShard, PlannedJob


MOST_SHARDS = 2
"""Shards of one device: the running shard and the next."""

_MOST_SENT = 3
"""Jobs in a device process: one runs, the next is staged, and the third is known when the second begins."""

_AHEAD = 2
"""The next shard is claimed when so many jobs are left."""

_MOST_EXITS = 2
"""After so many exits of the device process under one job, the job is not tried again here."""


class AssignedShard:
    """A claimed shard."""

    def __init__(self, held: HeldShard) -> None:
        self.held = held
        self.left = deque(held.jobs)
        """Jobs that are not in the device process."""
        self.prepared: Prepared | None = None
        self._position = {job.job.id: at for at, job in enumerate(held.jobs)}

    @property
    def begun_as(self) -> tuple[str, int]:
        """Run and fence: the device process must have begun them before the jobs."""
        return self.held.run_id, self.held.lease.fence

    def ready(self, prepared: Prepared) -> None:
        """Take the files that its jobs need."""
        self.prepared = prepared
        self.left = deque(prepared.planned)

    def take_back(self, job: PlannedJob) -> None:
        """Put a job that was not begun back in its place."""
        self.left = deque(sorted((*self.left, job), key=lambda one: self._position[one.job.id]))


class SentJob(NamedTuple):
    """A job in the device process."""

    shard: AssignedShard
    job: PlannedJob


class DeviceJobs:
    """Shards and jobs of one device, and run and grant that its process has begun. Belongs to the decision thread."""

    def __init__(self, link: DeviceLink, others: Callable[[HeldShard], tuple[str, ...]]) -> None:
        """`others` returns the devices that could try a failed job of a shard."""
        self._link, self._others = link, others
        self.shards: list[AssignedShard] = []
        """Claimed; the first is running."""
        self.jobs: dict[int, SentJob] = {}
        """In the device process, by number, in order: the first is running."""
        self._numbers = itertools.count()
        self.running: int | None = None
        """Number of the job that the device process works on."""
        self._exits: Counter[tuple[int, str]] = Counter()
        self.until_s: float | None = None
        """End of the lease unless it is renewed, on the clock of `now_s`; None without a lease."""
        self.outvoted = 0
        """Number of jobs that failed on the device and passed on others, in this session."""
        self.plan: RunPlan | None = None
        """Plan of the run that was begun last."""
        self._number = 0
        """Number of the device in the plan."""
        self._begun: tuple[str, int] | None = None
        self._must_begin = False
        """The files of the begun run are removed."""
        self._sent: messages.Grant | None = None

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs of its shards."""
        return frozenset(shard.held.run_id for shard in self.shards)

    def runs_now(self, run_id: str) -> bool:
        """Return whether its first shard is of a run."""
        return bool(self.shards) and self.shards[0].held.run_id == run_id

    @property
    def is_nearly_empty(self) -> bool:
        """Return whether it is time to claim the next shard."""
        left = sum(len(shard.left) for shard in self.shards) + len(self.jobs)
        return len(self.shards) < MOST_SHARDS and left <= _AHEAD

    def ended(self, number: int) -> SentJob:
        """Return a finished job, and remove its shard after the last job."""
        done = self.jobs.pop(number)
        shard = done.shard
        if not shard.left and shard in self.shards and not any(one.shard is shard for one in self.jobs.values()):
            self.shards.remove(shard)
        return done

    def take_back(self, number: int) -> None:
        """Take back a job that did not begin."""
        if (found := self.jobs.pop(number, None)) is not None:
            found.shard.take_back(found.job)

    def take_all_back(self) -> None:
        """Take every job back from the device process."""
        for number in list(self.jobs):
            self.take_back(number)

    @property
    def has_begun(self) -> bool:
        """True if files or processes of a run may be on the device."""
        return self._begun is not None

    def exited(self, *, aborted: bool) -> int | None:
        """Count an exit of the device process; return the number of its job if that is not to be tried again.

        A process that was to break off its job may have been killed for that: such an exit does not count.
        """
        self._begun = self._sent = None
        number, self.running = self.running, None
        if aborted or number not in self.jobs:
            return None
        shard, job = self.jobs[number]
        self._exits[shard.held.id, job.job.id] += 1
        return number if self._exits[shard.held.id, job.job.id] >= _MOST_EXITS else None

    def forget(self, run_id: str) -> None:
        """Begin a run anew, if it goes on: its files are removed."""
        self._must_begin = self._must_begin or (self._begun is not None and self._begun[0] == run_id)

    def grant(self, fence: int | None, *, recover: bool = False, go: bool = True) -> None:
        """Send the present grant if it has changed; without a `fence` it permits nothing."""
        newest = self._newest(fence, recover=recover, go=go)
        if newest != self._sent:
            self._sent = newest
            self._link.send(newest)

    def revoked(self, *, aborted: bool) -> messages.Grant:
        """Return the message that ends the use of the device; a run that is `aborted` begins anew the next time."""
        self._sent = None
        if aborted:
            self._begun = None
        return messages.Grant(go=False)

    def recovering_again(self, fence: int) -> list[messages.ToDevice]:
        """Return the messages that let a new process recover the device."""
        if self.plan is None:
            return []
        self._begun = self.plan.run_id, fence
        self._sent = self._newest(fence, recover=True, go=False)
        return [self._sent, messages.Begin(str(self.plan.path), self._number)]

    def feed(self) -> None:
        """Send as many jobs as the device process has room for."""
        sent: list[messages.ToDevice] = []
        runs: list[messages.RunJob] = []
        while len(self.jobs) < _MOST_SENT:
            shard = next((one for one in self.shards if one.left), None)
            if shard is None or shard.prepared is None:
                break
            if self._begun != shard.begun_as or self._must_begin:
                if self.jobs:
                    # A shard of another run, or under another lease, begins after all jobs before it.
                    break
                sent += self._beginning(shard, shard.prepared.plan, shard.prepared.number)
            number, job = next(self._numbers), shard.left.popleft()
            self.jobs[number] = SentJob(shard, job)
            runs.append(messages.RunJob(number, job, more=True))
        if runs:
            if (newest := self._newest(self.shards[0].held.lease.fence)) != self._sent:
                # Between two shards a grant names no other devices, and this job needs their names.
                self._sent = newest
                sent.append(newest)
            last = runs.pop()
            self._link.send(*sent, *runs, messages.RunJob(last.number, last.planned))

    def is_silent(self, now: float) -> bool:
        """Return whether the process has given no sign of life for too long; `now` is monotonic time."""
        if self.plan is None:
            return False
        signs = [self._link.sign_s]
        with contextlib.suppress(OSError):
            changed = (self.plan.workers / str(self._number)).stat().st_mtime
            signs.append(now - max(0.0, time.time() - changed))
        return now > max(signs) + self.plan.most_silence_s

    def _beginning(self, shard: AssignedShard, plan: RunPlan, number: int) -> list[messages.ToDevice]:
        """Return the messages that begin the run of a shard, under its lease."""
        is_of_run = self._begun is not None and self._begun[0] == shard.held.run_id and not self._must_begin
        self._begun, self.plan, self._number, self._must_begin = shard.begun_as, plan, number, False
        if not is_of_run:
            # The count belongs to the worker that begins.
            self.outvoted = 0
        self._sent = self._newest(shard.held.lease.fence)
        return [self._sent] if is_of_run else [self._sent, messages.Begin(str(plan.path), number)]

    def _newest(self, fence: int | None, *, recover: bool = False, go: bool = True) -> messages.Grant:
        shard = self.shards[0] if self.shards else None
        return messages.Grant(
            go=go and fence is not None,
            fence=(shard.held.lease.fence if shard is not None else fence) or 0,
            until_s=self.until_s,
            recover=recover,
            outvoted=self.outvoted,
            others=self._others(shard.held) if shard is not None else (),
        )


class DeviceLink:
    """Belongs to the decision thread, but for `close`."""

    def __init__(
        self, device: Device, dispatcher: Dispatcher, on_message: Callable[[messages.FromDevice], None]
    ) -> None:
        """`on_message` gets the messages of the present process, in the decision thread."""
        self._device, self._dispatcher, self._on_message = device, dispatcher, on_message
        self._process: messages.ForkedProcess | None = None
        """Present process: messages of an earlier one are dropped."""
        self._grants_unanswered = 0
        """Number of ApplyGrant messages without an answer."""
        self.sign_s = time.monotonic()
        """Time of its last message."""

    @property
    def is_applying_grant(self) -> bool:
        """True if the answer to an ApplyGrant is due."""
        return self._process is not None and self._grants_unanswered > 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        return self._process is not None and self._process.is_stopped

    def start(self) -> None:
        """Start a process if there is none."""
        if self._process is not None:
            return
        process = self._process = self._dispatcher.process(self._device)
        self._grants_unanswered, self.sign_s = 0, time.monotonic()

        def answer(message: messages.FromDevice) -> None:
            self._dispatcher.post(lambda: self._take(process, message))

        try:
            process.start(answer)
        except FarmError as error:
            answer(messages.ProcessEnded(str(error)))

    def send(self, *sent: messages.ToDevice) -> None:
        """Send messages, to a new process if there is none."""
        self.start()
        if self._process is not None:
            self._process.send(*sent)

    def apply_grant(self, *sent: messages.ToDevice) -> None:
        """Send `sent` and an ApplyGrant; only the answer to the last ApplyGrant is passed on."""
        self.start()
        self._grants_unanswered += 1
        self.send(*sent, messages.ApplyGrant())

    def kill(self) -> None:
        """Kill the process; its end is heard."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and drop its messages. Takes up to some seconds; any thread may call it."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _take(self, process: messages.ForkedProcess, message: messages.FromDevice) -> None:
        if process is not self._process:
            return
        self.sign_s = time.monotonic()
        if isinstance(message, messages.ProcessEnded):
            self._process = None
        elif isinstance(message, messages.JobReturned) and message.number == messages.GRANT_APPLIED:
            self._grants_unanswered -= 1
            if self._grants_unanswered > 0:
                return
        self._on_message(message)


def own_fault(job_id: str, key: str, serial: str, reason: str, log: str) -> Attempt:
    """Return the attempt of a job that farm itself failed to run."""
    return Attempt(
        job_id,
        Verdict.INFRA,
        Stage.EXECUTE,
        reason_line(reason),
        device=serial,
        started_ms=time.time_ns() // 1_000_000,
        bundle_key=key,
        cause=Cause.WORKER,
        log=bounded_log(log),
    )
