"""What an agent does with one device: claimed shards go to its slot job by job, and the device goes on without a pause.

All of it happens in the agent's thread of decisions; what takes time is done elsewhere and comes back as a call.

idle      no shard, no lease: it is claimed for
working   a shard, and where that is about to end the next one
leaving   the slot finishes or breaks off what runs and lets go of the device; then the lease goes
mending   the slot brings the device back: no shard, but the lease stays
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING

from farm.cluster.agent.feeding import Feeding
from farm.cluster.agent.hand import MOST_SHARDS, Hand, Part, own_fault
from farm.cluster.agent.slot_link import SlotLink
from farm.cluster.slots.slot_protocol import LOOKED, Back, Break, Broken, DeviceEvent, Died, Ended, SlotTimes
from farm.errors import FarmError
from farm.store.cluster.records import ShardResult
from farm.system.text import reason_line

if TYPE_CHECKING:
    from farm.cluster.agent.hand import InHand
    from farm.cluster.agent.office import Office, Prepared
    from farm.cluster.slots.slot_protocol import FromSlot, ToSlot
    from farm.devices.device import Device
    from farm.store.cluster.records import HeldShard
    from farm.store.leases.rules import Lease

_MOST_DEATHS = 5
"""After so many deaths of its slot in a row, with no job done in between, a device rests."""


class Phase(Enum):
    """What a device is used for now."""

    IDLE = "idle"
    WORKING = "working"
    LEAVING = "leaving"
    MENDING = "mending"


class DeviceWork:
    """One device of an agent."""

    def __init__(
        self,
        device: Device,
        office: Office,
        *,
        linger_s: float = 0.5,
        rest_s: float = 60.0,
        times: SlotTimes = SlotTimes(),  # noqa: B008 - frozen
    ) -> None:
        """Without work a device keeps its lease, and its session, for `linger_s`; after trouble it rests `rest_s`."""
        self.device, self._office, self._times = device, office, times
        self._linger_s, self._rest_s = linger_s, rest_s
        self.phase = Phase.IDLE
        self.resting = ""
        """Why it gets no work for a while; empty when it may."""
        self.is_open = False
        """Whether it may get work."""
        self.lease: Lease | None = None
        self._slot = SlotLink(device, office, self._heard)
        self._hand = Hand()
        self._feeding = Feeding(self._slot, self._hand)
        self._is_stalled = False
        """The slot has given everything back, as the lease is over for all that it knows."""
        self._trouble: Back | None = None
        self._why_leaving, self._is_broken_off, self._leaving_since_s = "", False, 0.0
        self._must_mend = self._has_left = False
        self._deaths = 0
        self._idle_since_s: float | None = None
        self._wants: tuple[Lease | None] | None = None

    # What the agent decides or learns.

    def open(self) -> None:
        """Use the device from now on."""
        if not self.is_open:
            self.is_open = True
            self._slot.start()
            self._want()

    def shut(self, why: str) -> None:
        """Use the device no more: what runs is finished."""
        if self.is_open:
            self.is_open = False
            self._unwant()
            if self.phase in (Phase.WORKING, Phase.MENDING):
                self._leave(why)

    def hurry(self, why: str) -> None:
        """Break off what runs, and let go of the device."""
        if self.phase is not Phase.IDLE:
            self._leave(why, broken_off=True)

    @property
    def is_free(self) -> bool:
        """Whether nothing of the agent's is on the device, and no lease of it is the agent's."""
        return self.phase is Phase.IDLE

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs whose shards it has."""
        return self._hand.runs

    def claimed(self, held: HeldShard, until_s: float) -> None:
        """Take the shard that was claimed for the device, whose lease is the agent's `until_s`."""
        self._wants = None
        is_used = self.phase is not Phase.IDLE and self.lease is not None
        may = self.is_open and not self.resting and not self._must_mend and len(self._hand.parts) < MOST_SHARDS
        if not may or self.phase in (Phase.LEAVING, Phase.MENDING):
            # It was on its way when that was decided.
            self._office.put_back(held, held.jobs, "the device is wanted for something else")
            if is_used:
                self.lease = held.lease
            else:
                self._office.release(held.lease, lambda: None)
            return
        self.lease, self._feeding.until_s = held.lease, until_s
        part = Part(held)
        self.phase = Phase.WORKING
        self._hand.parts.append(part)
        self._idle_since_s = None
        self._office.prepare(held, self.device, lambda answer: self._prepared(part, answer))

    def renewed(self, until_s: float) -> None:
        """Note until when the lease is the agent's."""
        self._feeding.until_s = until_s
        self._is_stalled = False
        if self.phase is Phase.WORKING and self._feeding.has_begun:
            self._grant()
            self._feed()
        elif self.phase is Phase.MENDING:
            self._grant()

    def lost(self) -> None:
        """Stop at once: the device is somebody else's."""
        if self.lease is not None:
            self._office.note(f"{self.device.called} is not ours any more: its lease was lost")
            self.lease = self._feeding.until_s = None
            self._leave("its lease was lost", broken_off=True)

    def wanted(self, by: str) -> None:
        """Let somebody else have the device after the job that runs."""
        if self.phase in (Phase.WORKING, Phase.MENDING):
            self._office.note(f"{self.device.called} is given to {by}, who waits for it")
            self._leave(f"{by} waits for the device")

    def cancelled(self, run_id: str) -> None:
        """Stop what is done for a run, at once."""
        if self._hand.runs_now(run_id):
            self._leave("the run was cancelled", broken_off=True)
        elif run_id in self.runs:
            for part in self._hand.parts[1:]:
                self._put_back(part, "the run was cancelled")
            self._go_on()

    def stopped(self, run_id: str) -> None:
        """Begin nothing more of a run: its time is over, or too much of it has failed."""
        if self._hand.runs_now(run_id) and self.phase is Phase.WORKING:
            self._leave("nothing more of the run may begin")

    def forget(self, run_id: str) -> None:
        """Note that the files of a run are gone: where it goes on, it begins anew."""
        self._feeding.forget(run_id)

    def outvoted(self, times: int) -> None:
        """Let the device show that it works, on which jobs failed that passed on others."""
        # In a session that begins anew its canary runs first of all.
        if self.phase is Phase.WORKING and self._feeding.has_begun:
            self._feeding.outvoted += times
            self._must_mend = True
            self._grant()
            self._slot.look()

    def tick(self) -> None:
        """Look at what takes too long: called every second or so."""
        now = time.monotonic()
        if self.phase is Phase.WORKING and self._idle_since_s is not None and now > self._idle_since_s + self._linger_s:
            self._leave("there is nothing to do")
        if self.phase is Phase.LEAVING and self._is_broken_off and now > self._leaving_since_s + self._times.break_s:
            self._slot.kill()
        elif (self._hand.jobs or self._slot.is_asked) and self._feeding.is_silent(now):
            self._office.note(f"the slot of {self.device.called} has not moved for long: it is ended")
            self._slot.kill()

    def close(self) -> None:
        """End the slot, which may take some seconds. Any thread may call it once nothing else happens."""
        self._slot.close()

    # What comes of what was begun.

    def _prepared(self, part: Part, answer: Prepared | FarmError) -> None:
        if part not in self._hand.parts:
            return
        if isinstance(answer, FarmError):
            why = reason_line(str(answer))
            self._office.note(f"{self.device.called}: a shard of {part.held.run_id} cannot begin: {why}")
            self._put_back(part, why)
            self._rest(why)
            return
        part.ready(answer)
        self._feed()

    def _heard(self, message: FromSlot) -> None:
        if isinstance(message, DeviceEvent):
            self._office.health(message.event)
        elif isinstance(message, Died):
            self._died(message.reason)
        elif isinstance(message, Ended):
            self._deaths = 0
            self._record(self._hand.ended(message.number), message)
            self._go_on()
        elif isinstance(message, Broken):
            last = message.text.strip().rpartition("\n")[2] or "it did not say why"
            self._record_own_fault(message.number, f"the worker broke down over this job: {last}", message.text)
            self._go_on()
        elif message.number == LOOKED:
            self._looked(message)
        else:
            self._came_back(message)

    def _record(self, done: InHand, ended: Ended) -> None:
        held, job_id, files = done.part.held, done.job.job.id, ended.artifacts
        result = ShardResult(held.id, self.device.id, held.lease.fence, job_id, ended.attempts, files, ended.repeat)
        self._office.result(result)

    def _record_own_fault(self, number: int, reason: str, log: str = "") -> None:
        """Record a job that farm itself could not run."""
        done = self._hand.ended(number)
        attempt = own_fault(done.job, self.device, reason, log)
        self._record(done, Ended(number, (attempt,)))

    def _came_back(self, message: Back) -> None:
        self._hand.take_back(message.number)
        if self._trouble is None and (message.unfit or message.given_up or message.halt):
            self._trouble = message
        if self._hand.jobs or self.phase is not Phase.WORKING:
            return
        trouble, self._trouble = self._trouble, None
        if trouble is None and not self._must_mend:
            # Its lease is over for all that the slot knows: it goes on when that is renewed.
            self._is_stalled = True
        elif trouble is None or trouble.unfit:
            why = trouble.unfit if trouble is not None else "jobs that failed on it passed on other devices"
            self._mend(why)
        else:
            self._rest(trouble.given_up or trouble.halt)

    def _looked(self, message: Back) -> None:
        if self.phase is Phase.LEAVING:
            self._left()
        elif self.phase is Phase.MENDING:
            self._mended(message)
        else:
            self._go_on()

    def _mended(self, message: Back) -> None:
        self._must_mend = False
        if not message.recovered:
            self._rest(message.given_up or message.halt or "it could not be brought back")
            return
        self._office.note(f"{self.device.called} is back")
        self.phase = Phase.WORKING
        self._grant()
        self._go_on()

    def _died(self, reason: str) -> None:
        self._feeding.died()
        self._is_stalled = False
        if self.phase is Phase.WORKING and (number := self._hand.died()) is not None:
            self._record_own_fault(number, f"the worker process died twice while it ran this job: {reason}")
        self._hand.take_all_back()
        self._deaths += 1
        if self.phase is Phase.LEAVING:
            self._left()
        elif self._deaths >= _MOST_DEATHS or self.phase is Phase.MENDING:
            self._rest(f"its slot died {self._deaths} times in a row, the last time: {reason}")
        else:
            self._office.note(f"the slot of {self.device.called} died ({reason}); another takes its place")
            self._go_on()

    # What is done about it.

    def _go_on(self) -> None:
        if self.phase is not Phase.WORKING:
            return
        if self._must_mend:
            if not self._hand.jobs:
                self._mend("jobs that failed on it passed on other devices")
            return
        self._feed()
        if not self._hand.parts and self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
            self._want()
            self._office.later(self._linger_s + 0.01, self.tick)

    def _feed(self) -> None:
        """Give the slot as many jobs as it has room for, and claim what comes next."""
        if self.phase is not Phase.WORKING or self._is_stalled or self._must_mend:
            return
        self._feeding.feed()
        if self._hand.is_nearly_empty:
            self._want()

    def _grant(self) -> None:
        fence = self.lease.fence if self.lease is not None else None
        may_go = self.phase is Phase.WORKING and not self._must_mend
        self._feeding.grant(fence, recover=self.phase is Phase.MENDING, go=may_go)

    def _mend(self, why: str) -> None:
        """Have the slot bring the device back; what was claimed is for others."""
        self._office.note(f"{self.device.called} is being brought back: {why}")
        self._put_back_all(f"{self.device.called} is being brought back: {why}")
        self._unwant()
        self.phase, self._must_mend, self._idle_since_s = Phase.MENDING, True, None
        self._grant()
        self._slot.look()

    def _rest(self, why: str) -> None:
        """Use the device no more for a while."""
        self._office.note(f"{self.device.called} is not used for a while: {why}")
        self._unwant()
        self.resting = why
        self._office.changed()
        self._office.later(self._rest_s, self._rested)
        if self.phase is not Phase.IDLE:
            self._leave(why)

    def _rested(self) -> None:
        if self.resting:
            self.resting, self._deaths = "", 0
            self._office.changed()
            self._want()

    def _leave(self, why: str, *, broken_off: bool = False) -> None:
        """Let the slot finish, or break off, what runs; then others may have the device."""
        self._unwant()
        self._idle_since_s = None
        is_new = self.phase is not Phase.LEAVING
        if not is_new and (not broken_off or self._is_broken_off):
            return
        self.phase, self._why_leaving, self._must_mend = Phase.LEAVING, why, False
        self._has_left = self._has_left and not is_new
        self._is_broken_off, self._leaving_since_s = broken_off, time.monotonic()
        if is_new and not self._feeding.has_begun:
            self._left()
            return
        messages: list[ToSlot] = [self._feeding.revoked(broken_off=broken_off)]
        if broken_off:
            messages.append(Break())
            self._office.later(self._times.break_s + 0.1, self.tick)
        if is_new:
            self._slot.look(*messages)
        else:
            self._slot.send(*messages)

    def _left(self) -> None:
        """Go on after the slot has let go of the device."""
        if self._has_left:
            return
        self._has_left = True
        self._hand.take_all_back()
        self._put_back_all(self._why_leaving)
        self._is_broken_off = self._is_stalled = False
        self._trouble = None
        lease, self.lease, self._feeding.until_s = self.lease, None, None
        # Until its lease has ended the device is not claimed for.
        if lease is not None:
            self._office.release(lease, self._released)
        else:
            self._released()

    def _released(self) -> None:
        if self.phase is Phase.LEAVING:
            self.phase = Phase.IDLE
            self._want()

    def _put_back_all(self, why: str) -> None:
        for part in list(self._hand.parts):
            self._put_back(part, why)

    def _put_back(self, part: Part, why: str) -> None:
        self._hand.parts.remove(part)
        self._office.put_back(part.held, tuple(part.left), why)

    def _want(self) -> None:
        may = self.is_open and not self.resting and not self._must_mend and self.phase in (Phase.IDLE, Phase.WORKING)
        if may and self._wants != (self.lease,):
            self._wants = (self.lease,)
            self._office.want(self.device.id, self.lease)

    def _unwant(self) -> None:
        self._wants = None
        self._office.unwant(self.device.id)
