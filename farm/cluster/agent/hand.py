"""The shards of one device, and which of their jobs are with its slot: values, nothing happens here."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.system.text import bounded_log, reason_line

if TYPE_CHECKING:
    from farm.cluster.agent.office import Prepared
    from farm.devices.device import Device
    from farm.request.plan import PlannedJob
    from farm.store.cluster.records import HeldShard, ShardJob

MOST_SHARDS = 2
"""Which a device has: one that it runs, and the next."""

_IN_HAND = 3
"""Jobs that a slot has: one runs, the next is staged, and the third is known when the second begins."""

_AHEAD = 2
"""With so many jobs left the next shard is claimed."""

_JOB_DEATHS = 2
"""A job under which so many slots died is not tried again here."""


class Part:
    """A shard that was claimed."""

    def __init__(self, held: HeldShard) -> None:
        self.held = held
        self.left = deque(held.jobs)
        """Jobs that the slot does not have."""
        self.prepared: Prepared | None = None
        self._planned: dict[str, PlannedJob] = {}
        self._position = {job.job.id: at for at, job in enumerate(held.jobs)}

    @property
    def begun_as(self) -> tuple[str, int]:
        """What a slot must have begun to run its jobs: the run, and the fence."""
        return self.held.run_id, self.held.lease.fence

    def ready(self, prepared: Prepared) -> None:
        """Note that all is here that its jobs need."""
        self.prepared = prepared
        self._planned = {one.job.id: one for one in prepared.planned}

    def planned(self, job: ShardJob) -> PlannedJob:
        """Return a job as a worker takes it."""
        return self._planned[job.job.id]

    def take_back(self, job: ShardJob) -> None:
        """Have a job again that was not begun, in its place."""
        self.left = deque(sorted((*self.left, job), key=lambda one: self._position[one.job.id]))


class InHand(NamedTuple):
    """A job that is with the slot."""

    part: Part
    job: ShardJob


class Hand:
    """What a device has to do."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        """What was claimed: the first is being run."""
        self.jobs: dict[int, InHand] = {}
        """With the slot, by their numbers, in their order: the first runs."""
        self._numbers = itertools.count()
        self._deaths: Counter[tuple[int, str]] = Counter()

    @property
    def runs(self) -> frozenset[str]:
        """Ids of the runs of its shards."""
        return frozenset(part.held.run_id for part in self.parts)

    def runs_now(self, run_id: str) -> bool:
        """Return whether its first shard is of a run."""
        return bool(self.parts) and self.parts[0].held.run_id == run_id

    @property
    def is_nearly_empty(self) -> bool:
        """Whether it is time to claim the next shard."""
        left = sum(len(part.left) for part in self.parts) + len(self.jobs)
        return len(self.parts) < MOST_SHARDS and left <= _AHEAD

    def next_part(self) -> Part | None:
        """Return the shard whose job is the next to be given to the slot; None where it has enough for now."""
        part = next((one for one in self.parts if one.left), None)
        return part if part is not None and part.prepared is not None and len(self.jobs) < _IN_HAND else None

    def give(self, part: Part) -> tuple[int, ShardJob]:
        """Return the next job of a shard, which is with the slot from now on, and its number."""
        number, job = next(self._numbers), part.left.popleft()
        self.jobs[number] = InHand(part, job)
        return number, job

    def ended(self, number: int) -> InHand:
        """Return a job that is done; with the last one its shard is forgotten."""
        done = self.jobs.pop(number)
        part = done.part
        if not part.left and part in self.parts and not any(one.part is part for one in self.jobs.values()):
            self.parts.remove(part)
        return done

    def take_back(self, number: int) -> None:
        """Note that a job was not begun."""
        if (found := self.jobs.pop(number, None)) is not None:
            found.part.take_back(found.job)

    def take_all_back(self) -> None:
        """Note that nothing of what is with the slot is done."""
        for number in list(self.jobs):
            self.take_back(number)

    def died(self) -> int | None:
        """Note that the slot died; return the number of the job that it ran where that is not to be tried again."""
        number = next(iter(self.jobs), None)
        if number is None:
            return None
        part, job = self.jobs[number]
        self._deaths[part.held.id, job.job.id] += 1
        return number if self._deaths[part.held.id, job.job.id] >= _JOB_DEATHS else None


def own_fault(job: ShardJob, device: Device, reason: str, log: str) -> Attempt:
    """Return the attempt of a job that farm itself could not run."""
    return Attempt(
        job.job.id,
        Verdict.INFRA,
        Stage.EXECUTE,
        reason_line(reason),
        device=device.serial,
        started_ms=time.time_ns() // 1_000_000,
        bundle_key=job.key,
        cause=Cause.WORKER,
        log=bounded_log(log),
    )
