"""Jobs of a run, their order, and the time that the run may take. Rules: docs/guides/selecting_jobs.md."""

from __future__ import annotations

import heapq
import logging
import re
import statistics
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.report.model.format import duration
from farm.store.records import ExpectedJob, LastVerdict, SkipReason
from farm.store.values import judged_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from farm.store.cluster.records import PlannedJob


logger = logging.getLogger(__name__)
_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


class Shard(msgspec.Struct, frozen=True):
    """Part of the jobs, with its number and the number of parts."""

    index: int
    """From 1."""
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class Version(msgspec.Struct, frozen=True):
    """Version of a job that a verdict belongs to."""

    bundle_key: str
    judged_by: str
    """Hash of limits and known issue: `farm.store.values.judged_by`."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Expected seconds of a job."""

    job_id: str
    soc: str
    bundle: str
    """Key of its bundle, which is compiled once for all jobs that have it."""
    build: float
    """0 for a bundle that is there."""
    run: float


def parse_shard(text: str) -> Shard:
    """Return what `2/8` means. Raises UsageError."""
    match = _SHARD.fullmatch(text.strip())
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise UsageError(f"--shard {text}: expected I/N, the part and how many there are, from 1/N to N/N, such as 2/8")
    return Shard(index, count)


def changed(now: Mapping[str, Version], then: Mapping[str, LastVerdict]) -> set[str]:
    """Return the jobs whose verdict of `then` does not hold `now`: there is none, or code or limits are others."""
    return {job_id for job_id, version in now.items() if not _holds(version, then.get(job_id))}


def _holds(version: Version, verdict: LastVerdict | None) -> bool:
    return verdict is not None and version == Version(verdict.bundle_key, verdict.judged_by)


def total_seconds(job_ids: Iterable[str], past: Mapping[str, ExpectedJob]) -> dict[str, float]:
    """Return the total seconds of each job; a job without a history gets the median of the others."""
    known = {job_id: past[job_id].total_seconds if job_id in past else None for job_id in job_ids}
    usual = _median([seconds for seconds in known.values() if seconds is not None])
    return {job_id: usual if seconds is None else seconds for job_id, seconds in known.items()}


def in_shard(seconds: Mapping[str, float], shard: Shard) -> set[str]:
    """Return the jobs of a shard: for equal `seconds` every job is in exactly one shard on every machine.

    The longest job goes first, each to the shard with the least work: shards differ by at most the longest job.
    """
    loads = [(0.0, 0, index) for index in range(1, shard.count + 1)]
    found = set()
    for job_id in sorted(seconds, key=lambda job_id: (-seconds[job_id], job_id)):
        load, jobs, index = heapq.heappop(loads)
        if index == shard.index:
            found.add(job_id)
        heapq.heappush(loads, (load + seconds[job_id], jobs + 1, index))
    return found


def by_value(now: Mapping[str, Version], past: Mapping[str, ExpectedJob], first: Collection[str] = ()) -> list[str]:
    """Return jobs, the most valuable first: new or changed jobs, then failed jobs, then the longest not run.

    Jobs in `first` come before all others; equal ones keep their order.
    """

    def rank(job_id: str) -> tuple[bool, int, int]:
        if job_id not in past:
            return job_id not in first, 0, 0
        last = past[job_id].last
        same, failed = _holds(now[job_id], last), last.outcome == "failed"
        return job_id not in first, (1 if failed else 2) if same else 0, last.time_ms

    return sorted(now, key=rank)


def costs(planned: Sequence[PlannedJob], past: Mapping[str, ExpectedJob]) -> list[Cost]:
    """Return the expected costs of jobs. An unknown cost is the median of the known ones, or 0 without any."""
    known = [past[one.job.id] for one in planned if one.job.id in past]
    usual_build = _median([one.build_seconds for one in known if one.build_seconds is not None])
    usual_run = _median([one.run_seconds for one in known])
    found = []
    for one in planned:
        before = past.get(one.job.id)
        build = before.build_seconds if before is not None and before.build_seconds is not None else usual_build
        build, run = 0.0 if one.cached else build, before.run_seconds if before is not None else usual_run
        found.append(Cost(job_id=one.job.id, soc=one.job.target.soc, bundle=one.key, build=build, run=run))
    return found


def schedule(ordered: Sequence[Cost], *, devices: Mapping[str, int], builders: int) -> dict[str, float]:
    """Return when each job is expected to end, in seconds from now, in the order in which they begin.

    Bundles are compiled in the order given. A device takes the first job whose bundle is there, and waits only when
    there is none. Jobs of an SoC without a device never begin, and are left out.
    """
    free = [0.0] * max(1, builders)
    built: dict[str, float] = {}
    waiting: dict[str, list[tuple[float, int]]] = {}
    for place, cost in enumerate(ordered):
        if cost.bundle not in built:
            begin = heapq.heappop(free) if cost.build else 0.0
            built[cost.bundle] = begin + cost.build
            if cost.build:
                heapq.heappush(free, begin + cost.build)
        waiting.setdefault(cost.soc, []).append((built[cost.bundle], place))
    spans = [span for soc, jobs in waiting.items() for span in _on_devices(jobs, ordered, devices.get(soc, 0))]
    return {ordered[place].job_id: end for _, place, end in sorted(spans)}


def _on_devices(
    waiting: list[tuple[float, int]], ordered: Sequence[Cost], devices: int
) -> Iterable[tuple[float, int, float]]:
    """Yield begin, place and end of the jobs of one SoC; `waiting` has when each can begin, and its place."""
    free = [0.0] * devices
    heapq.heapify(waiting)
    ready: list[int] = []
    while free and (waiting or ready):
        now = heapq.heappop(free)
        while waiting and waiting[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(waiting)[1])
        if not ready:
            # The other devices first, which may be free before that.
            heapq.heappush(free, waiting[0][0])
            continue
        place = heapq.heappop(ready)
        yield now, place, now + ordered[place].run
        heapq.heappush(free, now + ordered[place].run)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


class Budget:
    """Begins when it is made: waiting for devices and compiling take of it."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds` is None for as long as it takes."""
        length = float("inf") if seconds is None else seconds
        self._words = f"the budget of {duration(length)}"
        self.end_s = time.monotonic() + length
        """On the clock of `time.monotonic`."""
        self.seconds = seconds
        """Length of the budget; None for no limit."""
        self.is_over = False
        """True once the budget ended during jobs."""

    @property
    def left_s(self) -> float | None:
        """Remaining seconds; None for an unlimited budget."""
        return max(0.0, self.end_s - time.monotonic()) if self.seconds is not None else None

    def cut(
        self,
        planned: Sequence[PlannedJob],
        past: Mapping[str, ExpectedJob],
        *,
        devices: Mapping[str, int],
        builders: int,
        first: Collection[str] = (),
    ) -> tuple[list[PlannedJob], dict[str, SkipReason]]:
        """Return the jobs that fit, in the order to begin them, and the others with the reason.

        The most valuable fit first (`selection.by_value`); `devices` is how many there are of each SoC.
        """
        if self.seconds is None:
            return list(planned), {}
        left = self.end_s - time.monotonic()
        by_id = {one.job.id: one for one in planned}
        now = {one.job.id: Version(one.key, judged_by(one.job)) for one in planned}
        expected = costs([by_id[job_id] for job_id in by_value(now, past, first)], past)
        too_long = {cost.job_id: cost.build + cost.run for cost in expected if cost.build + cost.run > left}
        ends = schedule([cost for cost in expected if cost.job_id not in too_long], devices=devices, builders=builders)
        fitting = [by_id[job_id] for job_id, end in ends.items() if end <= left]
        kept = {one.job.id for one in fitting}
        skipped = {}
        for job_id in by_id.keys() - kept:
            reason = f"did not fit into {self._words}"
            if left <= 0:
                reason = f"{self._words} was over before anything could begin"
            elif job_id in too_long:
                reason = f"takes about {duration(too_long[job_id])}, more than the rest of {self._words}"
            skipped[job_id] = _skipped(reason, past.get(job_id))
        if skipped:
            logger.info("%s of %s jobs do not fit into the budget: skipped", len(skipped), len(planned))
        return fitting, skipped

    def unbegun(self, job_ids: Iterable[str], past: Mapping[str, ExpectedJob]) -> dict[str, SkipReason]:
        """Return why jobs had not begun at the end."""
        return {job_id: _skipped(f"had not begun when {self._words} was over", past.get(job_id)) for job_id in job_ids}

    @contextmanager
    def watched(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` at the end, from another thread, unless the body has ended by then."""

        def end() -> None:
            self.is_over = True
            stop()
            logger.info("%s is over: the running jobs are finished, and no further job starts", self._words)

        timer = threading.Timer(max(0.0, self.end_s - time.monotonic()), end)
        timer.daemon = True
        if self.seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _skipped(reason: str, past: ExpectedJob | None) -> SkipReason:
    """Return the reason of a skipped job, with its last known result."""
    if past is None:
        return SkipReason(reason)
    return SkipReason(reason, past.last.time_ms, past.last.outcome, past.last.run_id)
