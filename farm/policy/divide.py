"""Order of the jobs of a run, and its division into shards: jobs that one device runs under one lease. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from farm.base.grouping import grouped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.suites.suite import Job


def dispatch_order(
    job_ids: Sequence[str],
    *,
    cached: Mapping[str, bool],
    expected_seconds: Mapping[str, float],
    sessions: Mapping[str, Hashable],
    first: Collection[str] = (),
) -> list[str]:
    """Return the order in which jobs are built and handed out. Pure.

    Jobs in `first` come before all others. Compiled jobs go next, so that devices work while
    the builders warm up; among those, jobs of the same session (by `sessions`) stand together, as
    every change starts a runner; then the longest expected first, which leaves no long job for the end. Otherwise the
    order given.
    """
    position = {job_id: n for n, job_id in enumerate(job_ids)}
    group: dict[Hashable, int] = {}
    for job_id in job_ids:
        group.setdefault(sessions[job_id], len(group))
    return sorted(
        job_ids,
        key=lambda job: (
            job not in first,
            not cached.get(job, False),
            group[sessions[job]],
            -expected_seconds.get(job, 0.0),
            position[job],
        ),
    )


class PlannedJob(Protocol):
    """Job with the key of its bundle and its expected time, a struct of msgspec."""

    @property
    def job(self) -> Job:
        """The job."""

    @property
    def key(self) -> str:
        """Key of its bundle."""

    @property
    def expected_s(self) -> float:
        """Wall time on a device by its history; 0 is unknown."""


J = TypeVar("J", bound=PlannedJob)


class Part(NamedTuple, Generic[J]):
    """Jobs that one device runs one after the other."""

    soc: str
    jobs: tuple[J, ...]
    expected_s: float
    position: int


# A minute: a claim costs one transaction, and the jobs of a dead host run again.
_LONGEST_S = 60.0
# Shorter shards cost more in claims and device preparation than they gain at the end of a run.
_SHORTEST_S = 1.0
# The rows of a shard are read and written as a whole.
_MOST_JOBS = 200
# A build takes seconds and an execution a fraction of one: a device waits for at most this many builds.
_MOST_COLD_JOBS = 8
# Expected seconds of a job if no job of the run has a history.
_UNKNOWN_S = 1.0
# Part of its share of the remaining work that a device takes: shards shrink, so that devices end together.
_PART = 0.5
# Least part of the share of all work in a shard: smaller ones cost more claims than they save time.
_LAST_PART = 0.02


def divide(
    jobs: Sequence[J],
    *,
    devices: Mapping[str, int],
    cached: Collection[str],
    sessions: Mapping[str, Hashable],
    first: Collection[str] = (),
) -> list[Part[J]]:
    """Return the shards of a run, by position; every job is in exactly one.

    `devices` counts by SoC the devices that the run may use at once, `cached` has the keys of existing bundles,
    `sessions` maps job ids to the runner session that can take them, and `first` has ids of jobs that go before all
    others. `dispatch_order` sorts the jobs of a SoC: compiled jobs first, jobs of a session together, longest first.
    A shard takes about a minute, less if few jobs are left for many devices, and has few jobs if they need a build.
    """
    by_soc = grouped((job.job.target.soc, job) for job in _with_expectations(jobs))
    cold = {job.job.id for job in jobs if job.key not in cached}
    shards = []
    for soc, mine in sorted(by_soc.items()):
        ordered = _ordered(mine, cold, sessions, first)
        for rank, part in enumerate(_cut(ordered, max(1, devices.get(soc, 1)), cold, sessions)):
            shards.append((rank, Part(soc, tuple(part), sum(job.expected_s for job in part), 0)))
    # SoCs take turns, so that none waits for the bundles of all others.
    shards.sort(key=lambda ranked: (ranked[0], ranked[1].soc))
    return [shard._replace(position=position) for position, (_, shard) in enumerate(shards)]


def _with_expectations(jobs: Sequence[J]) -> list[J]:
    known = [job.expected_s for job in jobs if job.expected_s > 0]
    usual = statistics.median(known) if known else _UNKNOWN_S
    return [
        job if job.expected_s > 0 else msgspec.structs.replace(job, expected_s=usual)  # type: ignore[type-var]
        for job in jobs
    ]


def _ordered(
    jobs: Sequence[J], cold: Collection[str], sessions: Mapping[str, Hashable], first: Collection[str]
) -> list[J]:
    # The session with the longest job comes first, so that short jobs remain for the end.
    longest: dict[Hashable, float] = {}
    for job in jobs:
        session = sessions.get(job.job.id)
        longest[session] = max(longest.get(session, 0.0), job.expected_s)
    rank = {session: n for n, session in enumerate(sorted(longest, key=lambda session: -longest[session]))}
    by_id = {job.job.id: job for job in sorted(jobs, key=lambda job: rank[sessions.get(job.job.id)])}
    order = dispatch_order(
        list(by_id),
        cached={job_id: job_id not in cold for job_id in by_id},
        expected_seconds={job_id: job.expected_s for job_id, job in by_id.items()},
        sessions={job_id: sessions.get(job_id) for job_id in by_id},
        first=first,
    )
    return [by_id[job_id] for job_id in order]


def _cut(
    ordered: Sequence[J], devices: int, cold: Collection[str], sessions: Mapping[str, Hashable]
) -> Iterator[list[J]]:
    """Yield parts of `ordered`, with sizes that shrink as the remaining work does."""
    left_s = sum(job.expected_s for job in ordered)

    def size_now_s() -> float:
        return min(_LONGEST_S, max(least_s, _PART * left_s / devices))

    least_s = min(_LONGEST_S, max(_SHORTEST_S, _LAST_PART * left_s / devices))
    part: list[J] = []
    took_s, size_s = 0.0, size_now_s()
    for job in ordered:
        if part and _ends(part, took_s, size_s, job, cold, sessions):
            yield part
            left_s -= took_s
            part, took_s, size_s = [], 0.0, size_now_s()
        part.append(job)
        took_s += job.expected_s
    if part:
        yield part


def _ends(
    part: Sequence[J],
    took_s: float,
    size_s: float,
    following: J,
    cold: Collection[str],
    sessions: Mapping[str, Hashable],
) -> bool:
    last, job_id = part[-1].job.id, following.job.id
    if (last in cold) != (job_id in cold):
        return True
    if len(part) >= (_MOST_COLD_JOBS if job_id in cold else _MOST_JOBS):
        return True
    # Another session starts another runner: a shard that is half full ends there.
    is_full_at_s = size_s if sessions.get(last) == sessions.get(job_id) else size_s / 2
    return took_s + following.expected_s / 2 > is_full_at_s
