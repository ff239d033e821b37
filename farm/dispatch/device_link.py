"""Link of a device runner to its device process, and the jobs and grants that are sent by it.

The process is started when it is needed, and again after it exited. It gets jobs in a session of a run, under a lease,
some of them ahead.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.dispatch.messages import (
    GRANT_APPLIED,
    ApplyGrant,
    Begin,
    DeviceProcess,
    FromDevice,
    Grant,
    JobReturned,
    ProcessEnded,
    RunJob,
    SetGrant,
    ToDevice,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.device import Device
    from farm.dispatch.assigned import AssignedJobs, AssignedShard
    from farm.dispatch.job_source import Host
    from farm.dispatch.request.plan import RunPlan
    from farm.store.cluster.records import HeldShard


class Feed:
    """Begun run and present grant of a device process. Belongs to the decision thread."""

    def __init__(
        self, link: DeviceLink, assigned: AssignedJobs, others: Callable[[HeldShard], tuple[str, ...]]
    ) -> None:
        """`others` returns the devices that could try a failed job of a shard."""
        self._link, self._assigned, self._others = link, assigned, others
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
        self._sent: Grant | None = None

    @property
    def has_begun(self) -> bool:
        """True if files or processes of a run may be on the device."""
        return self._begun is not None

    def exited(self) -> None:
        """Forget the session of a process that has exited."""
        self._begun = self._sent = None

    def forget(self, run_id: str) -> None:
        """Begin a run anew, if it goes on: its files are removed."""
        self._must_begin = self._must_begin or (self._begun is not None and self._begun[0] == run_id)

    def grant(self, fence: int | None, *, recover: bool = False, go: bool = True) -> None:
        """Send the present grant if it has changed; without a `fence` it permits nothing."""
        newest = self._newest(fence, recover=recover, go=go)
        if newest != self._sent:
            self._sent = newest
            self._link.send(SetGrant(newest))

    def revoked(self, *, aborted: bool) -> SetGrant:
        """Return the message that ends the use of the device; a run that is `aborted` begins anew the next time."""
        self._sent = None
        if aborted:
            self._begun = None
        return SetGrant(Grant(go=False))

    def recovering_again(self, fence: int) -> list[ToDevice]:
        """Return the messages that let a new process recover the device."""
        if self.plan is None:
            return []
        self._begun = self.plan.run_id, fence
        self._sent = self._newest(fence, recover=True, go=False)
        return [SetGrant(self._sent), Begin(str(self.plan.path), self._number)]

    def feed(self) -> None:
        """Send as many jobs as the device process has room for."""
        messages: list[ToDevice] = []
        runs: list[RunJob] = []
        while (shard := self._assigned.next_shard()) is not None and shard.prepared is not None:
            if self._begun != shard.begun_as or self._must_begin:
                if self._assigned.jobs:
                    # A shard of another run, or under another lease, begins after all jobs before it.
                    break
                messages += self._beginning(shard, shard.prepared.plan, shard.prepared.number)
            number, job = self._assigned.send(shard)
            runs.append(RunJob(number, job, more=True))
        if runs:
            if (newest := self._newest(self._assigned.shards[0].held.lease.fence)) != self._sent:
                # Between two shards a grant names no other devices, and this job needs their names.
                self._sent = newest
                messages.append(SetGrant(newest))
            last = runs.pop()
            self._link.send(*messages, *runs, RunJob(last.number, last.planned))

    def is_silent(self, now: float) -> bool:
        """Return whether the process has given no sign of life for too long; `now` is monotonic time."""
        if self.plan is None:
            return False
        signs = [self._link.sign_s]
        with contextlib.suppress(OSError):
            changed = (self.plan.workers / str(self._number)).stat().st_mtime
            signs.append(now - max(0.0, time.time() - changed))
        return now > max(signs) + self.plan.most_silence_s

    def _beginning(self, shard: AssignedShard, plan: RunPlan, number: int) -> list[ToDevice]:
        """Return the messages that begin the run of a shard, under its lease."""
        is_of_run = self._begun is not None and self._begun[0] == shard.held.run_id and not self._must_begin
        self._begun, self.plan, self._number, self._must_begin = shard.begun_as, plan, number, False
        if not is_of_run:
            # The count belongs to the worker that begins.
            self.outvoted = 0
        self._sent = self._newest(shard.held.lease.fence)
        return [SetGrant(self._sent)] if is_of_run else [SetGrant(self._sent), Begin(str(plan.path), number)]

    def _newest(self, fence: int | None, *, recover: bool = False, go: bool = True) -> Grant:
        shard = self._assigned.shards[0] if self._assigned.shards else None
        return Grant(
            go=go and fence is not None,
            fence=(shard.held.lease.fence if shard is not None else fence) or 0,
            until_s=self.until_s,
            recover=recover,
            outvoted=self.outvoted,
            others=self._others(shard.held) if shard is not None else (),
        )


class DeviceLink:
    """Belongs to the decision thread, but for `close`."""

    def __init__(self, device: Device, host: Host, on_message: Callable[[FromDevice], None]) -> None:
        """`on_message` gets the messages of the present process, in the decision thread."""
        self._device, self._host, self._on_message = device, host, on_message
        self._process: DeviceProcess | None = None
        self._generation = 0
        """Number of the process: messages of an earlier process are dropped."""
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
        self._generation += 1
        generation = self._generation
        process = self._host.process(self._device)
        try:
            process.start(lambda message: self._host.post(lambda: self._take(generation, message)))
        except FarmError as error:
            reason = str(error)
            self._host.post(lambda: self._take(generation, ProcessEnded(reason)))
            return
        self._process, self._grants_unanswered = process, 0
        self.sign_s = time.monotonic()

    def send(self, *messages: ToDevice) -> None:
        """Send messages, to a new process if there is none."""
        self.start()
        if self._process is not None:
            self._process.send(*messages)

    def apply_grant(self, *messages: ToDevice) -> None:
        """Send `messages` and an ApplyGrant; only the answer to the last ApplyGrant is passed on."""
        self.start()
        self._grants_unanswered += 1
        self.send(*messages, ApplyGrant())

    def kill(self) -> None:
        """Kill the process; its end is heard."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and drop its messages. Takes up to some seconds; any thread may call it."""
        process, self._process = self._process, None
        self._generation += 1
        if process is not None:
            process.close()

    def _take(self, generation: int, message: FromDevice) -> None:
        if generation != self._generation:
            return
        self.sign_s = time.monotonic()
        if isinstance(message, ProcessEnded):
            self._process, self._grants_unanswered = None, 0
        elif isinstance(message, JobReturned) and message.number == GRANT_APPLIED:
            self._grants_unanswered -= 1
            if self._grants_unanswered > 0:
                return
        self._on_message(message)
