"""What an agent does with one device: claimed shards go to its slot job by job, and the device goes on without a pause.

All of it happens in the agent's one thread of decisions; what takes time is done elsewhere and comes back as a call.

idle      no shard, no lease: it is claimed for
working   a shard, and where that is about to end the next one: three jobs are with the slot, one of which runs
leaving   the slot finishes or breaks off what runs and lets go of the device; then the lease goes
mending   the slot brings the device back: no shard, but the lease stays
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from farm.cluster.agent.slot_protocol import (
    LOOKED,
    Back,
    Begin,
    Break,
    Broken,
    Died,
    Ended,
    Grant,
    Health,
    Look,
    Run,
    SlotTimes,
)
from farm.errors import FarmError
from farm.pool.worker_grant import WorkerGrant
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import ShardResult
from farm.system.text import bounded_log, reason_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.cluster.agent.slot_protocol import FromSlot, Slot, ToSlot
    from farm.devices.device import Device
    from farm.request.plan import PlannedJob, RunPlan
    from farm.store.cluster.records import HeldShard, ShardJob
    from farm.store.leases.registry import HealthEvent
    from farm.store.leases.rules import Lease

_IN_HAND = 3
"""Jobs that a slot has: one runs, the next is staged, and the third is known when the second begins."""

_SHARDS = 2
"""Which a device has at most: one that it runs, and the next."""

_AHEAD = 2
"""With so many jobs left the next shard is claimed."""

_MOST_DEATHS = 5
"""After so many deaths of its slot in a row, with no job done in between, a device rests."""

_JOB_DEATHS = 2
"""A job under which so many slots died is not tried again here."""

_REST_SECONDS = 60.0
_SILENCE_SECONDS = 900.0
"""A slot shows that it goes on whenever it waits for something; see farm.run.controller."""


class Phase(Enum):
    """What a device is used for now."""

    IDLE = "idle"
    WORKING = "working"
    LEAVING = "leaving"
    MENDING = "mending"


class Prepared(NamedTuple):
    """A shard whose bundles and runtime are on this machine."""

    plan: RunPlan
    planned: Sequence[PlannedJob]


class Office(Protocol):
    """What an agent does for its devices. No call waits."""

    def want(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device; `keep` is the lease under which it finishes another one."""

    def unwant(self, device: str) -> None:
        """Claim nothing for a device."""

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch what a shard needs, and call `done`."""

    def result(self, result: ShardResult) -> None:
        """Record a result."""

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Give back a shard with the jobs that are left, after its results are recorded."""

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, and call `done`."""

    def health(self, event: HealthEvent) -> None:
        """Record what happened to a device."""

    def slot(self, device: Device) -> Slot:
        """Return a new slot."""

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions, in a while."""

    def changed(self) -> None:
        """The agent's facts are others now: a device rests, or does not any more."""

    def note(self, line: str) -> None:
        """Write a line for people."""


class _Part:
    """A shard that was claimed."""

    def __init__(self, held: HeldShard) -> None:
        self.held = held
        self.left = deque(held.jobs)
        self.prepared: Prepared | None = None
        self.planned: dict[str, PlannedJob] = {}

    @property
    def begun_as(self) -> tuple[str, int]:
        """What a slot must have begun to run its jobs: the run, and the fence."""
        return self.held.run_id, self.held.lease.fence


class _InHand(NamedTuple):
    part: _Part
    job: ShardJob


class DeviceWork:
    """One device of an agent."""

    def __init__(
        self,
        device: Device,
        office: Office,
        *,
        linger_s: float = 0.5,
        times: SlotTimes = SlotTimes(),  # noqa: B008 - frozen
    ) -> None:
        """Without work a device keeps its lease, and its session, for `linger_s`."""
        self.device, self._office, self._linger_s, self._times = device, office, linger_s, times
        self.phase = Phase.IDLE
        self.resting = ""
        """Why it gets no work for a while; empty when it may."""
        self.is_open = False
        """Whether it may get work."""
        self.lease: Lease | None = None
        self.until_s: float | None = None
        """When the lease ends unless it is renewed, on the clock of `now_s`."""
        self._slot: Slot | None = None
        self._looks = 0
        """Which the slot has not answered yet."""
        self._life = 0
        """Of the slot: what a former one says is of no interest."""
        self._parts: list[_Part] = []
        self._in_hand: dict[int, _InHand] = {}
        self._numbers = itertools.count()
        self._begun: tuple[str, int] | None = None
        self._plan: RunPlan | None = None
        self._sent: WorkerGrant | None = None
        self._stalled = False
        """The slot has given everything back, as the lease is over for all that it knows."""
        self._trouble: Back | None = None
        self._why_leaving = ""
        self._is_lost = self._is_broken_off = False
        self._leaving_since_s = 0.0
        self._outvoted = 0
        self._must_mend = False
        self._deaths_of_job: Counter[tuple[int, str]] = Counter()
        self._deaths = 0
        self._idle_since_s: float | None = None
        self._sign_s = time.monotonic()
        self._wants: tuple[Lease | None] | None = None

    # What the agent decides or learns.

    def open(self) -> None:
        """Use the device from now on."""
        if self.is_open:
            return
        self.is_open = True
        if self._slot is None:
            self._start()
        self._want()

    def shut(self, why: str) -> None:
        """Use the device no more: what runs is finished."""
        if self.is_open:
            self.is_open = False
            self._unwant()
            if self.phase in (Phase.WORKING, Phase.MENDING):
                self._leave(why)

    @property
    def is_free(self) -> bool:
        """Whether nothing of the agent's is on the device, and no lease of it is the agent's."""
        return self.phase is Phase.IDLE and self.lease is None

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs whose shards it has."""
        return frozenset(part.held.run_id for part in self._parts)

    def claimed(self, held: HeldShard, until_s: float) -> None:
        """Take the shard that was claimed for the device, whose lease is the agent's `until_s`."""
        self._wants = None
        is_ending = self.phase is Phase.LEAVING and self.lease is None
        may = self.is_open and not self._must_mend and len(self._parts) < _SHARDS
        if is_ending or not may or self.phase not in (Phase.IDLE, Phase.WORKING):
            self._office.put_back(held, held.jobs, "the device is wanted for something else")
            if is_ending or self.phase is Phase.IDLE:
                self._office.release(held.lease, lambda: None)
            else:
                self.lease = held.lease
            return
        self.lease, self.until_s = held.lease, until_s
        part = _Part(held)
        self.phase = Phase.WORKING
        self._parts.append(part)
        self._idle_since_s = None
        self._office.prepare(held, self.device, lambda answer: self._prepared(part, answer))

    def renewed(self, until_s: float) -> None:
        """Note until when the lease is the agent's."""
        self.until_s = until_s
        self._stalled = False
        if self.phase is Phase.WORKING and self._begun is not None:
            self._grant()
            self._feed()
        elif self.phase is Phase.MENDING:
            self._grant()

    def lost(self) -> None:
        """Stop at once: the device is somebody else's."""
        if self.lease is not None:
            self._office.note(f"{self.device.called} is not ours any more: its lease was lost")
            self._is_lost, self.lease, self.until_s = True, None, None
            self._leave("its lease was lost", broken_off=True)

    def wanted(self, by: str) -> None:
        """Let somebody else have the device after the job that runs."""
        if self.phase in (Phase.WORKING, Phase.MENDING):
            self._office.note(f"{self.device.called} is given to {by}, who waits for it")
            self._leave(f"{by} waits for the device")

    def cancelled(self, run_id: str) -> None:
        """Stop what is done for a run, at once."""
        if self._parts and self._parts[0].held.run_id == run_id:
            self._leave("the run was cancelled", broken_off=True)
        elif run_id in self.runs:
            self._drop_next("the run was cancelled")

    def outvoted(self, times: int) -> None:
        """Let the device show that it works, on which jobs failed that passed on others."""
        # In a session that begins anew its canary runs first of all.
        if self.phase is Phase.WORKING and self._begun is not None:
            self._outvoted += times
            self._must_mend = True
            self._grant()
            self._look()

    def tick(self) -> None:
        """Look at what takes too long: called every second or so."""
        now = time.monotonic()
        if self.phase is Phase.WORKING and self._idle_since_s is not None and now > self._idle_since_s + self._linger_s:
            self._leave("there is nothing to do")
        if self._slot is None:
            return
        is_late = self._is_broken_off and now > self._leaving_since_s + self._times.break_s
        if self.phase is Phase.LEAVING and is_late:
            self._slot.kill()
        elif self._plan is not None and (self._in_hand or self.phase in (Phase.LEAVING, Phase.MENDING)):
            sign_s = max(self._sign_s, _changed_s(self._plan))
            if now > sign_s + _SILENCE_SECONDS + 2 * self._plan.timeout_s:
                self._office.note(f"the slot of {self.device.called} has not moved for long: it is ended")
                self._sign_s = now
                self._slot.kill()

    def close(self) -> None:
        """End the slot. May take some seconds: any thread may call it once nothing else happens."""
        slot, self._slot = self._slot, None
        self._life += 1
        if slot is not None:
            slot.close()

    # What comes of what was begun.

    def _prepared(self, part: _Part, answer: Prepared | FarmError) -> None:
        if part not in self._parts:
            return
        if isinstance(answer, FarmError):
            self._office.note(f"{self.device.called}: a shard of {part.held.run_id} cannot begin: {answer}")
            self._parts.remove(part)
            self._office.put_back(part.held, list(part.left), reason_line(str(answer)))
            self._rest(reason_line(str(answer)))
            return
        part.prepared = answer
        part.planned = {one.job.id: one for one in answer.planned}
        self._feed()

    def _heard(self, life: int, message: FromSlot) -> None:
        if life != self._life:
            return
        self._sign_s = time.monotonic()
        if isinstance(message, Health):
            self._office.health(message.event)
        elif isinstance(message, Died):
            self._died(message.reason)
        elif isinstance(message, Ended):
            self._ended(message)
        elif isinstance(message, Broken):
            self._broken(message)
        elif message.number == LOOKED:
            self._looked(message)
        else:
            self._came_back(message)

    def _ended(self, message: Ended) -> None:
        part, job = self._in_hand.pop(message.number)
        self._deaths = 0
        self._result(part, job, message)
        self._go_on()

    def _broken(self, message: Broken) -> None:
        part, job = self._in_hand.pop(message.number)
        lines = [line for line in message.text.splitlines() if line.strip()]
        reason = f"the worker broke down over this job: {lines[-1] if lines else 'it did not say why'}"
        self._fault(part, job, reason, message.text)
        self._go_on()

    def _result(self, part: _Part, job: ShardJob, ended: Ended) -> None:
        held = part.held
        self._office.result(
            ShardResult(
                held.id, self.device.id, held.lease.fence, job.job.id, ended.attempts, ended.artifacts, ended.repeat
            )
        )
        self._let_go_of(part)

    def _fault(self, part: _Part, job: ShardJob, reason: str, log: str = "") -> None:
        """Record a job that farm itself could not run."""
        attempt = Attempt(
            job.job.id,
            Verdict.INFRA,
            Stage.EXECUTE,
            reason_line(reason),
            device=self.device.serial,
            started_ms=time.time_ns() // 1_000_000,
            cause=Cause.WORKER,
            log=bounded_log(log),
        )
        self._result(part, job, Ended(0, (attempt,)))

    def _let_go_of(self, part: _Part) -> None:
        """Forget a shard of which nothing is left."""
        if not part.left and not any(one.part is part for one in self._in_hand.values()) and part in self._parts:
            self._parts.remove(part)

    def _came_back(self, message: Back) -> None:
        self._return(message.number)
        if self._trouble is None and (message.unfit or message.given_up or message.halt):
            self._trouble = message
        if self._in_hand or self.phase is not Phase.WORKING:
            return
        trouble, self._trouble = self._trouble, None
        if trouble is None and self._must_mend:
            self._mend()
        elif trouble is None:
            # Its lease is over for all that the slot knows: it goes on when that is renewed.
            self._stalled = True
        elif trouble.unfit:
            self._office.note(f"{self.device.called} is being brought back: {trouble.unfit}")
            self._put_back_all(f"{self.device.called} is being brought back: {trouble.unfit}")
            self._must_mend = True
            self._mend()
        elif trouble.given_up:
            self._put_back_all(trouble.given_up)
            self._rest(trouble.given_up)
        else:
            self._put_back_all(trouble.halt)
            self._rest(trouble.halt)

    def _looked(self, message: Back) -> None:
        self._looks -= 1
        if self._looks:
            # What it was asked for last is what counts.
            return
        if self.phase is Phase.LEAVING:
            self._left()
        elif self.phase is Phase.MENDING:
            self._mended(message)
        elif self._must_mend and not self._in_hand:
            self._mend()

    def _mended(self, message: Back) -> None:
        self._must_mend = False
        if message.recovered:
            self._office.note(f"{self.device.called} is back")
            self.phase = Phase.WORKING
            self._grant()
            self._idle_since_s = time.monotonic()
            self._go_on()
        else:
            why = message.given_up or message.halt or "it could not be brought back"
            self._office.note(f"{self.device.called} is not used: {why}")
            self._rest(why)

    def _died(self, reason: str) -> None:
        self._slot = None
        self._begun = self._sent = None
        self._stalled, self._looks = False, 0
        running = next(iter(self._in_hand), None)
        if running is not None and self.phase is Phase.WORKING:
            part, job = self._in_hand[running]
            self._deaths_of_job[part.held.id, job.job.id] += 1
            if self._deaths_of_job[part.held.id, job.job.id] >= _JOB_DEATHS:
                del self._in_hand[running]
                self._fault(part, job, f"the worker process died {_JOB_DEATHS} times while it ran this job: {reason}")
        for number in list(self._in_hand):
            self._return(number)
        self._deaths += 1
        if self.phase is Phase.LEAVING:
            self._left()
        elif self._deaths >= _MOST_DEATHS or self.phase is Phase.MENDING:
            why = f"its slot died {self._deaths} times in a row, the last time: {reason}"
            self._put_back_all(why)
            self._rest(why)
        else:
            self._office.note(f"the slot of {self.device.called} died ({reason}); another takes its place")
            self._go_on()

    # What is done about it.

    def _go_on(self) -> None:
        if self.phase is not Phase.WORKING:
            return
        if self._must_mend and not self._in_hand:
            self._mend()
            return
        self._feed()
        if not self._parts and self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
            self._office.later(self._linger_s, self.tick)

    def _feed(self) -> None:
        """Give the slot as many jobs as it has room for."""
        if self.phase is not Phase.WORKING or self._stalled or self._must_mend:
            return
        messages: list[ToSlot] = []
        while len(self._in_hand) < _IN_HAND:
            part = next((one for one in self._parts if one.left), None)
            if part is None or part.prepared is None:
                break
            if self._begun != part.begun_as:
                if self._in_hand:
                    # Of another run, or of another lease: it begins when the slot has nothing else.
                    break
                messages += self._beginning(part, part.prepared.plan)
            job = part.left.popleft()
            number = next(self._numbers)
            self._in_hand[number] = _InHand(part, job)
            messages.append(Run(number, part.planned[job.job.id], job.history))
        runs = [at for at, message in enumerate(messages) if isinstance(message, Run)]
        for at in runs[:-1]:
            run = messages[at]
            if isinstance(run, Run):
                messages[at] = Run(run.number, run.planned, run.history, more=True)
        if messages:
            self._send(*messages)
        if len(self._parts) <= 1 and sum(len(part.left) for part in self._parts) + len(self._in_hand) <= _AHEAD:
            self._want()

    def _beginning(self, part: _Part, plan: RunPlan) -> list[ToSlot]:
        """Return what lets a slot begin with a shard's run, under its lease."""
        of_run = self._begun is not None and self._begun[0] == part.held.run_id
        self._begun, self._plan = part.begun_as, plan
        messages: list[ToSlot] = [] if of_run else [Begin(str(plan.path))]
        if not of_run:
            # Of the worker that begins: what a former one made good for is over.
            self._outvoted = 0
        self._sent = self._newest_grant()
        return [Grant(self._sent), *messages]

    def _newest_grant(self) -> WorkerGrant:
        part = self._parts[0] if self._parts else None
        lease = part.held.lease if part is not None else self.lease
        others = part.held.others if part is not None else ()
        may_go = self.phase is Phase.WORKING and not self._must_mend and lease is not None
        return WorkerGrant(
            go=may_go,
            fence=lease.fence if lease is not None else 0,
            until_s=self.until_s,
            recover=self.phase is Phase.MENDING,
            outvoted=self._outvoted,
            others=others,
        )

    def _grant(self) -> None:
        grant = self._newest_grant()
        if grant != self._sent:
            self._sent = grant
            self._send(Grant(grant))

    def _mend(self) -> None:
        """Have the slot bring the device back; what was claimed is for others."""
        self._put_back_all("the device has to show that it works")
        self._unwant()
        self.phase = Phase.MENDING
        self._idle_since_s = None
        self._grant()
        self._look()

    def _look(self, *messages: ToSlot) -> None:
        """Have the slot do what the newest grant says, after `messages`."""
        self._looks += 1
        self._send(*messages, Look())

    def _rest(self, why: str) -> None:
        """Use the device no more for a while."""
        self.resting = why
        self._office.changed()
        self._office.later(_REST_SECONDS, self._rested)
        if self.phase is not Phase.IDLE:
            self._leave(why)

    def _rested(self) -> None:
        if self.resting:
            self.resting = ""
            self._deaths = 0
            self._office.changed()
            self._want()

    def _leave(self, why: str, *, broken_off: bool = False) -> None:
        """Let the slot finish, or break off, what runs; then others may have the device."""
        self._unwant()
        self._idle_since_s = None
        if self.phase is Phase.LEAVING and (not broken_off or self._is_broken_off):
            return
        is_new = self.phase is not Phase.LEAVING
        self.phase, self._why_leaving = Phase.LEAVING, why
        self._is_broken_off, self._leaving_since_s = broken_off, time.monotonic()
        if self._begun is None:
            self._left()
            return
        messages: list[ToSlot] = [Grant(WorkerGrant(go=False))]
        self._sent = None
        if broken_off:
            self._begun = None
            messages.append(Break())
            self._office.later(self._times.break_s + 1.0, self.tick)
        if is_new:
            self._look(*messages)
        else:
            self._send(*messages)

    def _left(self) -> None:
        """Go on after the slot has let go of the device."""
        for number in list(self._in_hand):
            self._return(number)
        if self._is_lost:
            self._parts.clear()
        else:
            self._put_back_all(self._why_leaving)
        self._is_lost = self._is_broken_off = self._stalled = False
        self._trouble = None
        self._release()

    def _release(self) -> None:
        lease, self.lease, self.until_s = self.lease, None, None
        # Until its lease has ended the device is not claimed for.
        self.phase = Phase.LEAVING

        def released() -> None:
            self.phase = Phase.IDLE
            self._want()

        if lease is None:
            released()
        else:
            self._office.release(lease, released)

    def _put_back_all(self, why: str) -> None:
        for part in self._parts:
            self._office.put_back(part.held, list(part.left), why)
        self._parts.clear()

    def _drop_next(self, why: str) -> None:
        for part in self._parts[1:]:
            self._office.put_back(part.held, list(part.left), why)
            self._parts.remove(part)
        self._go_on()

    def _return(self, number: int) -> None:
        """Take a job back that was not begun."""
        found = self._in_hand.pop(number, None)
        if found is None:
            return
        found.part.left.append(found.job)
        _restore_order(found.part)

    def _want(self) -> None:
        if self.is_open and not self.resting and self.phase in (Phase.IDLE, Phase.WORKING) and not self._must_mend:
            wants = (self.lease,)
            if self._wants != wants:
                self._wants = wants
                self._office.want(self.device.id, self.lease)

    def _unwant(self) -> None:
        self._wants = None
        self._office.unwant(self.device.id)

    def _send(self, *messages: ToSlot) -> None:
        if self._slot is None:
            self._start()
        if self._slot is not None:
            self._slot.send(*messages)

    def _start(self) -> None:
        self._life += 1
        life, office = self._life, self._office
        slot = office.slot(self.device)
        try:
            slot.start(lambda message: office.post(lambda: self._heard(life, message)))
        except FarmError as error:
            reason = str(error)
            office.post(lambda: self._heard(life, Died(reason)))
            return
        self._slot = slot
        self._sign_s = time.monotonic()


def _restore_order(part: _Part) -> None:
    """Bring the jobs that are left into the order of their shard."""
    position = {job.job.id: at for at, job in enumerate(part.held.jobs)}
    part.left = deque(sorted(part.left, key=lambda job: position[job.job.id]))


def _changed_s(plan: RunPlan) -> float:
    """Return when a slot last showed that it goes on, on the clock of `time.monotonic`."""
    try:
        changed = (plan.workers / "0").stat().st_mtime
    except OSError:
        return 0.0
    return time.monotonic() - max(0.0, time.time() - changed)
