"""Device runner: claimed shards go to the process of a device job by job, without a pause between shards.

Everything happens in the decision thread; slow work is done elsewhere and comes back as a call.

idle        no shard, no lease: a shard is claimed for the device
working     a shard, and near its end the next one
leaving     the device process finishes or breaks off its job and leaves the device; then the lease ends
recovering  the device process recovers the device: no shard, but the lease stays
"""

from __future__ import annotations

import logging
import math
import time
from enum import Enum
from typing import TYPE_CHECKING

from farm.base.errors import FarmError, UnreadableRowError
from farm.base.text import reason_line
from farm.dispatch import messages
from farm.dispatch.device_link import MOST_SHARDS, AssignedShard, DeviceJobs, DeviceLink, SentJob, own_fault
from farm.store.cluster.records import HeldShard, ShardResult

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.dispatch.dispatcher import Dispatcher, JobSource, Prepared
    from farm.policy.situation import Lease

logger = logging.getLogger(__name__)

MOST_EXITS = 5
"""After so many exits of its process in a row, without a finished job between them, a device rests."""
ABORT_SECONDS = 10.0
"""Time of a device process to break off a job; then it is killed."""
_STOPPED_SECONDS = 60.0
"""A device process that is stopped (SIGSTOP, a debugger) for so long is killed."""


class Phase(Enum):
    """Present use of a device."""

    IDLE = "idle"
    WORKING = "working"
    LEAVING = "leaving"
    RECOVERING = "recovering"


class DeviceRunner:
    """Runner of one device."""

    def __init__(
        self,
        device: Device,
        source: JobSource,
        dispatcher: Dispatcher,
        *,
        linger_s: float = 0.5,
        rest_s: float = 60.0,
    ) -> None:
        """Without jobs a device keeps lease and session for `linger_s`; after a fault it rests for `rest_s`."""
        self.device, self._source, self._dispatcher = device, source, dispatcher
        self._log = logging.LoggerAdapter(logger, {"device": device.called})
        self._linger_s, self._rest_s = linger_s, rest_s
        self.phase = Phase.IDLE
        self.resting = ""
        """Reason for giving the device no jobs for a while; empty if it may have jobs."""
        self.is_open = False
        """True if the device may have jobs."""
        self.lease: Lease | None = None
        self._link = DeviceLink(device, dispatcher, self._on_message)
        self._jobs = DeviceJobs(self._link, source.others)
        self._is_stalled = False
        """The process has returned every job, as the lease is over as far as it knows."""
        self._why_leaving, self._is_aborted, self._leaving_since_s = "", False, 0.0
        self._must_recover = self._has_left = False
        self._exits = 0
        self._rest_until_s = math.inf
        self._idle_since_s: float | None = None
        self._stopped_since_s: float | None = None
        self._requested: tuple[Lease | None] | None = None

    # Decisions of others.

    def open(self) -> None:
        """Use the device from now on."""
        if not self.is_open:
            self.is_open = True
            self._link.start()
            self._request_shard()

    def drain(self, why: str) -> None:
        """End the use of the device after the running job."""
        if self.is_open:
            self.is_open = False
            self._cancel_request()
            if self.phase in (Phase.WORKING, Phase.RECOVERING):
                self._leave(why)

    def abort(self, why: str) -> None:
        """Break off the running job, and leave the device."""
        if self.phase is not Phase.IDLE:
            self._leave(why, aborted=True)

    @property
    def is_free(self) -> bool:
        """True if nothing of the dispatcher is on the device, and its lease is not held."""
        return self.phase is Phase.IDLE

    @property
    def has_left(self) -> bool:
        """True if nothing of the dispatcher is on the device; its lease may still be held."""
        return self.phase is Phase.IDLE or (self.phase is Phase.LEAVING and self._has_left)

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs of its shards."""
        return self._jobs.runs

    @property
    def running_job(self) -> str:
        """Id of the running job; empty without one."""
        return next((one.job.job.id for one in self._jobs.jobs.values()), "")

    def claimed(self, held: HeldShard, until_s: float | None) -> None:
        """Take a shard that was claimed for the device, whose lease is held `until_s`."""
        self._requested = None
        is_used = self.phase is not Phase.IDLE and self.lease is not None
        may = self.is_open and not self.resting and not self._must_recover and len(self._jobs.shards) < MOST_SHARDS
        if not may or self.phase in (Phase.LEAVING, Phase.RECOVERING):
            # The claim was on its way when the device left.
            self._source.put_back(held, held.jobs, "the device is wanted for something else")
            if is_used:
                self.lease = held.lease
            else:
                self._source.release(held.lease, lambda: None)
            return
        self.lease, self._jobs.until_s = held.lease, until_s
        shard = AssignedShard(held)
        self.phase = Phase.WORKING
        self._jobs.shards.append(shard)
        self._idle_since_s = None
        self._source.prepare(held, self.device, lambda answer: self._prepared(shard, answer))

    def renewed(self, until_s: float | None) -> None:
        """Continue under a lease that is held `until_s`."""
        if until_s == self._jobs.until_s:
            return
        self._jobs.until_s = until_s
        self._is_stalled = False
        if self.phase is Phase.WORKING and self._jobs.has_begun:
            self._grant()
            self._feed()
        elif self.phase is Phase.RECOVERING:
            self._grant()

    def lease_lost(self) -> None:
        """Stop at once: another process has the lease."""
        if self.lease is not None:
            self.lease = self._jobs.until_s = None
            self._leave("its lease was lost", aborted=True)

    def wanted(self, by: str) -> None:
        """Leave the device to `by` after the running job."""
        if self.phase in (Phase.WORKING, Phase.RECOVERING):
            self._log.info("%s is given to %s, who waits for it", self.device.called, by)
            self._leave(f"{by} waits for the device")

    def cancelled(self, run_id: str) -> None:
        """Break off the jobs of a run."""
        if self._jobs.runs_now(run_id):
            self._leave("the run was cancelled", aborted=True)
        elif run_id in self.runs:
            for shard in self._jobs.shards[1:]:
                self._put_back(shard, "the run was cancelled")
            self._continue()

    def stopped(self, run_id: str) -> None:
        """Begin no other job of a run: its time is over, or too many of its jobs have failed."""
        if self._jobs.runs_now(run_id) and self.phase is Phase.WORKING:
            self._leave("no other job of the run may begin")

    def forget(self, run_id: str) -> None:
        """Begin a run anew, if it goes on: its files are removed."""
        self._jobs.forget(run_id)

    def outvoted(self, times: int) -> None:
        """Recover the device before its next job: jobs failed on it that passed on others."""
        # A session that begins later starts with the health check.
        if self.phase is Phase.WORKING and self._jobs.has_begun:
            self._jobs.outvoted += times
            self._must_recover = True
            self._grant()
            self._continue()

    def tick(self) -> None:
        """Look for what takes too long, or is long enough: called four times a second."""
        now = time.monotonic()
        if self.resting and now > self._rest_until_s:
            self._rested()
        if self.phase is Phase.WORKING and self._idle_since_s is not None and now > self._idle_since_s + self._linger_s:
            self._leave("there is nothing to do")
        if self.phase is Phase.LEAVING and self._is_aborted and now > self._leaving_since_s + ABORT_SECONDS:
            self._link.kill()
        elif self._link.is_stopped:
            self._stopped_since_s = self._stopped_since_s or now
            if now > self._stopped_since_s + _STOPPED_SECONDS:
                self._link.kill()
        else:
            self._stopped_since_s = None
            if (self._jobs.jobs or self._link.is_applying_grant) and self._jobs.is_silent(now):
                self._log.warning("the device process of %s gives no sign of life: it is killed", self.device.called)
                self._link.kill()

    def close(self) -> None:
        """End the device process, which may take some seconds. Any thread may call it once nothing else happens."""
        self._link.close()

    # Answers.

    def _prepared(self, shard: AssignedShard, answer: Prepared | FarmError) -> None:
        if shard not in self._jobs.shards:
            return
        if isinstance(answer, FarmError):
            why = reason_line(str(answer))
            self._log.warning("%s: a shard of %s cannot begin: %s", self.device.called, shard.held.run_id, why)
            self._put_back(shard, why)
            if isinstance(answer, UnreadableRowError):
                # No fault of this machine: the run was refused.
                self._continue()
            else:
                self._rest(why)
            return
        shard.ready(answer)
        self._feed()

    def _on_message(self, message: messages.FromDevice) -> None:
        if isinstance(message, messages.DeviceEvent):
            self._source.health(message.event)
        elif isinstance(message, messages.ProcessEnded):
            self._exited(message.reason, message.log)
        elif isinstance(message, messages.JobBegun):
            self._jobs.running = message.number
        elif isinstance(message, messages.JobEnded):
            self._exits = 0
            if message.number in self._jobs.jobs:
                self._record(self._jobs.ended(message.number), message)
            # Else it was taken back, and is put back: a renewed lease let it begin after the fault of another job.
            self._continue()
        elif message.number == messages.GRANT_APPLIED:
            self._grant_applied(message)
        else:
            self._job_returned(message)

    def _record(self, done: SentJob, ended: messages.JobEnded) -> None:
        held, job_id = done.shard.held, done.job.job.id
        fields = {"run": held.run_id, "job": job_id, "device": self.device.called}
        logger.debug("%s on %s: %s", job_id, self.device.called, ended.attempts[-1].verdict, extra=fields)
        self._source.result(
            ShardResult(
                held.id, self.device.id, held.lease.fence, job_id, ended.attempts, ended.artifacts, ended.repeat,
                ended.avoid, ended.outvoted,
            )
        )  # fmt: skip

    def _job_returned(self, message: messages.JobReturned) -> None:
        self._jobs.take_back(message.number)
        if self.phase is not Phase.WORKING:
            return
        if message.unfit or message.given_up or message.halt:
            # The process returns its other jobs as well.
            self._jobs.take_all_back()
        if message.unfit:
            self._recover(message.unfit)
        elif message.given_up or message.halt:
            self._rest(message.given_up or message.halt, halts=bool(message.halt))
        elif self._must_recover:
            self._continue()
        elif not self._jobs.jobs:
            # The lease is over as far as the process knows: it goes on when the lease is renewed.
            self._is_stalled = True

    def _grant_applied(self, message: messages.JobReturned) -> None:
        if self.phase is Phase.LEAVING:
            self._left()
        elif self.phase is Phase.RECOVERING:
            self._recovered(message)
        else:
            self._continue()

    def _recovered(self, message: messages.JobReturned) -> None:
        self._must_recover = False
        if not message.recovered:
            why = message.given_up or message.halt or "it could not be brought back"
            self._rest(why, halts=bool(message.halt))
            return
        self._log.info("%s is back", self.device.called)
        self.phase = Phase.WORKING
        self._grant()
        self._continue()

    def _exited(self, reason: str, log: str) -> None:
        self._is_stalled = False
        self._stopped_since_s = None
        number = self._jobs.exited(aborted=self._is_aborted)
        if self.phase is Phase.WORKING and number is not None:
            done = self._jobs.ended(number)
            why = f"the device process exited twice while it ran this job: {reason}"
            fault = own_fault(done.job.job.id, done.job.key, self.device.serial, why, log)
            self._record(done, messages.JobEnded((fault,)))
        self._jobs.take_all_back()
        self._exits += 1
        if self.phase is Phase.LEAVING:
            self._left()
        elif self._exits >= MOST_EXITS:
            self._rest(f"its device process exited {self._exits} times in a row, the last time: {reason}")
        else:
            self._log.warning(
                "the device process of %s exited (%s); another takes its place", self.device.called, reason
            )
            if self.phase is Phase.RECOVERING and self.lease is not None:
                self._link.apply_grant(*self._jobs.recovering_again(self.lease.fence))
            else:
                self._continue()

    # Effects.

    def _continue(self) -> None:
        if self.phase is not Phase.WORKING:
            return
        if self._must_recover:
            if not self._jobs.jobs:
                self._recover("jobs that failed on it passed on other devices")
            return
        self._feed()
        if not self._jobs.shards and self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
            self._request_shard()

    def _feed(self) -> None:
        """Send as many jobs as the device process has room for, and claim the next shard in time."""
        if self.phase is not Phase.WORKING or self._is_stalled or self._must_recover:
            return
        self._jobs.feed()
        if self._jobs.is_nearly_empty:
            self._request_shard()

    def _grant(self) -> None:
        fence = self.lease.fence if self.lease is not None else None
        may_go = self.phase is Phase.WORKING and not self._must_recover
        self._jobs.grant(fence, recover=self.phase is Phase.RECOVERING, go=may_go)

    def _recover(self, why: str) -> None:
        """Let the process recover the device; its shards are for other devices."""
        self._log.warning("%s is being brought back: %s", self.device.called, why)
        self._put_back_all(f"{self.device.called} is being brought back: {why}")
        self._cancel_request()
        self.phase, self._must_recover, self._idle_since_s = Phase.RECOVERING, True, None
        self._grant()
        self._link.apply_grant()

    def _rest(self, why: str, *, halts: bool = False) -> None:
        """End the use of the device for a while."""
        self._cancel_request()
        self.resting, self._rest_until_s = why, time.monotonic() + self._rest_s
        self._source.resting(self.device.id, why, halts=halts)
        if self.phase is not Phase.IDLE:
            self._leave(why)

    def _rested(self) -> None:
        self.resting, self._exits = "", 0
        self._source.resting(self.device.id, "", halts=False)
        self._request_shard()

    def _leave(self, why: str, *, aborted: bool = False) -> None:
        """Let the process finish, or break off, its job; then others may have the device."""
        self._cancel_request()
        self._idle_since_s = None
        is_new = self.phase is not Phase.LEAVING
        if not is_new and (not aborted or self._is_aborted):
            return
        self.phase, self._why_leaving, self._must_recover = Phase.LEAVING, why, False
        self._has_left = self._has_left and not is_new
        self._is_aborted, self._leaving_since_s = aborted, time.monotonic()
        if is_new and not self._jobs.has_begun:
            self._left()
            return
        sent: list[messages.ToDevice] = [self._jobs.revoked(aborted=aborted)]
        if aborted:
            sent.append(messages.Abort())
        if is_new:
            self._link.apply_grant(*sent)
        else:
            self._link.send(*sent)

    def _left(self) -> None:
        """Go on after the process has left the device."""
        if self._has_left:
            return
        self._has_left = True
        self._jobs.take_all_back()
        self._put_back_all(self._why_leaving)
        self._is_aborted = self._is_stalled = False
        lease, self.lease, self._jobs.until_s = self.lease, None, None
        # The device is claimed for again when its lease has ended.
        if lease is not None:
            self._source.release(lease, self._released)
        else:
            self._released()

    def _released(self) -> None:
        if self.phase is Phase.LEAVING:
            self.phase = Phase.IDLE
            self._request_shard()

    def _put_back_all(self, why: str) -> None:
        for shard in list(self._jobs.shards):
            self._put_back(shard, why)

    def _put_back(self, shard: AssignedShard, why: str) -> None:
        self._jobs.shards.remove(shard)
        self._source.put_back(shard.held, tuple(shard.left), why)

    def _request_shard(self) -> None:
        is_usable = self.phase in (Phase.IDLE, Phase.WORKING) and not self._must_recover
        if self.is_open and not self.resting and is_usable and self._requested != (self.lease,):
            self._requested = (self.lease,)
            self._source.request(self.device.id, self.lease)

    def _cancel_request(self) -> None:
        self._requested = None
        self._source.cancel_request(self.device.id)
