"""How the slot of a device gets its jobs: in a session of a run, under a grant, some of them ahead."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from farm.cluster.slots.slot_protocol import Begin, RunJob, SetGrant
from farm.pool.worker_grant import WorkerGrant

if TYPE_CHECKING:
    from farm.cluster.agent.hand import Hand, Part
    from farm.cluster.agent.slot_link import SlotLink
    from farm.cluster.slots.slot_protocol import ToSlot
    from farm.request.plan import RunPlan


class Feeding:
    """What a slot has begun and may do. Belongs to the thread of decisions."""

    def __init__(self, slot: SlotLink, hand: Hand) -> None:
        self._slot, self._hand = slot, hand
        self.until_s: float | None = None
        """When the lease ends unless it is renewed, on the clock of `now_s`."""
        self.outvoted = 0
        """How many jobs that failed on the device passed on others, in this session."""
        self.plan: RunPlan | None = None
        """Of the run that was begun last."""
        self._begun: tuple[str, int] | None = None
        self._must_begin = False
        """Nothing is left of the files of the run that was begun."""
        self._sent: WorkerGrant | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything of a run may be on the device."""
        return self._begun is not None

    def died(self) -> None:
        """Note that there is no slot any more."""
        self._begun = self._sent = None

    def forget(self, run_id: str) -> None:
        """Note that the files of a run are gone: where it goes on, it begins anew."""
        self._must_begin = self._must_begin or (self._begun is not None and self._begun[0] == run_id)

    def grant(self, fence: int | None, *, recover: bool = False, go: bool = True) -> None:
        """Let the slot know what it may do now, where that is new; without a `fence` it may do nothing."""
        newest = self._newest(fence, recover=recover, go=go)
        if newest != self._sent:
            self._sent = newest
            self._slot.send(SetGrant(newest))

    def revoked(self, *, broken_off: bool) -> SetGrant:
        """Return what ends the slot's use of the device; what is `broken_off` is begun anew the next time."""
        self._sent = None
        if broken_off:
            self._begun = None
        return SetGrant(WorkerGrant(go=False))

    def feed(self) -> None:
        """Give the slot as many jobs as it has room for."""
        messages: list[ToSlot] = []
        runs: list[RunJob] = []
        while (part := self._hand.next_part()) is not None and part.prepared is not None:
            if self._begun != part.begun_as or self._must_begin:
                if self._hand.jobs:
                    # Of another run, or under another lease: it begins when the slot has nothing else.
                    break
                messages += self._beginning(part, part.prepared.plan)
            number, job = self._hand.give(part)
            runs.append(RunJob(number, part.planned(job), job.history, more=True))
        if runs:
            if (newest := self._newest(self._hand.parts[0].held.lease.fence)) != self._sent:
                # Between two shards there are no other devices: whoever runs this job has to know of them.
                self._sent = newest
                messages.append(SetGrant(newest))
            last = runs.pop()
            self._slot.send(*messages, *runs, RunJob(last.number, last.planned, last.history))

    def is_silent(self, now: float) -> bool:
        """Return whether the slot has not shown for long that it goes on; `now` is monotonic time."""
        if self.plan is None:
            return False
        signs = [self._slot.sign_s]
        with contextlib.suppress(OSError):
            changed = (self.plan.workers / "0").stat().st_mtime
            signs.append(now - max(0.0, time.time() - changed))
        return now > max(signs) + self.plan.most_silence_s

    def _beginning(self, part: Part, plan: RunPlan) -> list[ToSlot]:
        """Return what lets a slot begin with a shard's run, under its lease."""
        is_of_run = self._begun is not None and self._begun[0] == part.held.run_id and not self._must_begin
        self._begun, self.plan, self._must_begin = part.begun_as, plan, False
        if not is_of_run:
            # Of the worker that begins: what a former one made good for is over.
            self.outvoted = 0
        self._sent = self._newest(part.held.lease.fence)
        return [SetGrant(self._sent)] if is_of_run else [SetGrant(self._sent), Begin(str(plan.path))]

    def _newest(self, fence: int | None, *, recover: bool = False, go: bool = True) -> WorkerGrant:
        part = self._hand.parts[0] if self._hand.parts else None
        return WorkerGrant(
            go=go and fence is not None,
            fence=(part.held.lease.fence if part is not None else fence) or 0,
            until_s=self.until_s,
            recover=recover,
            outvoted=self.outvoted,
            others=part.held.others if part is not None else (),
        )
