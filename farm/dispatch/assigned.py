"""The shards of one device and their jobs in its device process: values without effects."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from farm.base.text import bounded_log, reason_line
from farm.results.attempt import Attempt, Cause, Stage, Verdict

if TYPE_CHECKING:
    from farm.dispatch.job_source import Prepared
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


class AssignedJobs:
    """Shards and jobs of one device."""

    def __init__(self) -> None:
        self.shards: list[AssignedShard] = []
        """Claimed; the first is running."""
        self.jobs: dict[int, SentJob] = {}
        """In the device process, by number, in order: the first is running."""
        self._numbers = itertools.count()
        self._begun: int | None = None
        """Number of the job that the device process works on."""
        self._exits: Counter[tuple[int, str]] = Counter()

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

    def next_shard(self) -> AssignedShard | None:
        """Return the shard with the next job for the device process; None if the process has enough for now."""
        shard = next((one for one in self.shards if one.left), None)
        return shard if shard is not None and shard.prepared is not None and len(self.jobs) < _MOST_SENT else None

    def send(self, shard: AssignedShard) -> tuple[int, PlannedJob]:
        """Return the next job of a shard and its number; from now on the job is in the device process."""
        number, job = next(self._numbers), shard.left.popleft()
        self.jobs[number] = SentJob(shard, job)
        return number, job

    def begun(self, number: int) -> None:
        """Take note that the device process works on a job."""
        self._begun = number

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

    def exited(self) -> int | None:
        """Count an exit of the device process; return the number of its job if that is not to be tried again."""
        number, self._begun = self._begun, None
        if number not in self.jobs:
            return None
        shard, job = self.jobs[number]
        self._exits[shard.held.id, job.job.id] += 1
        return number if self._exits[shard.held.id, job.job.id] >= _MOST_EXITS else None


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
