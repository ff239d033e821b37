"""Jobs of a run and their order. Pure. Rules: docs/guides/selecting_jobs.md."""

from __future__ import annotations

import heapq
import re
import statistics
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.store.records import ExpectedJob, LastVerdict

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


def costs(
    jobs: Sequence[tuple[str, str, str]], past: Mapping[str, ExpectedJob], cached: Mapping[str, bool]
) -> tuple[Cost, ...]:
    """Return the expected costs of jobs; `jobs` has id, SoC and bundle of each, `cached` is by bundle.

    An unknown cost is the median of the known ones, or 0 without any.
    """
    known = [past[job_id] for job_id, _, _ in jobs if job_id in past]
    usual_build = _median([one.build_seconds for one in known if one.build_seconds is not None])
    usual_run = _median([one.run_seconds for one in known])
    found = []
    for job_id, soc, bundle in jobs:
        one = past.get(job_id)
        build = one.build_seconds if one is not None and one.build_seconds is not None else usual_build
        run = one.run_seconds if one is not None else usual_run
        found.append(Cost(job_id=job_id, soc=soc, bundle=bundle, build=0.0 if cached[bundle] else build, run=run))
    return tuple(found)


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
