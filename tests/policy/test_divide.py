"""Shards of a run, and the order of its jobs: compiled jobs first, the longest first, sessions together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.policy.divide import Part, dispatch_order, divide
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Target


def job(number: int, expected_s: float = 0.2, soc: str = "SM8650") -> PlannedJob:
    case = Case("s", f"c{number}", "torch.nn:ReLU", (InputSpec((1,)),))
    return PlannedJob(Job(case, Target(soc, "htp", "8a8w")), f"key-{soc}-{number}", expected_s)


def jobs_of(count: int, expected_s: float) -> list[PlannedJob]:
    return [job(number, expected_s) for number in range(count)]


def keys(jobs: Sequence[PlannedJob]) -> set[str]:
    return {one.key for one in jobs}


def cut(jobs: Sequence[PlannedJob], devices: int) -> list[Part[PlannedJob]]:
    """Divide compiled jobs among `devices`."""
    return divide(jobs, devices={"SM8650": devices}, cached=keys(jobs), sessions={})


def end_of(shards: Sequence[Part[PlannedJob]], devices: int) -> float:
    """Return when the last of `devices` ends that take one shard after the other."""
    ends = [0.0] * devices
    for shard in shards:
        ends[ends.index(min(ends))] += shard.expected_s
    return max(ends)


jobs_of_two_socs = st.lists(
    st.tuples(st.sampled_from([0.0, 0.05, 0.2, 3.0, 90.0]), st.sampled_from(["SM8650", "SM8850"])), max_size=60
).map(lambda drawn: [job(number, took, soc) for number, (took, soc) in enumerate(drawn)])


@settings(deadline=None)
@given(jobs_of_two_socs, st.integers(1, 30), st.data())
def test_every_job_is_in_one_shard_and_a_shard_is_of_one_soc_and_cold_or_not(
    jobs: list[PlannedJob], devices: int, data: st.DataObject
) -> None:
    cached = {one.key for one in jobs if data.draw(st.booleans())}
    sessions = {one.job.id: data.draw(st.integers(0, 2)) for one in jobs}
    most = {"SM8650": devices, "SM8850": 1}
    shards = divide(jobs, devices=most, cached=cached, sessions=sessions)
    assert Counter(one.job.id for shard in shards for one in shard.jobs) == Counter(one.job.id for one in jobs)
    assert [shard.position for shard in shards] == list(range(len(shards)))
    assert divide(jobs, devices=most, cached=cached, sessions=sessions) == shards
    for shard in shards:
        assert {one.job.target.soc for one in shard.jobs} == {shard.soc}
        assert len({one.key in cached for one in shard.jobs}) == 1
        assert abs(shard.expected_s - sum(one.expected_s for one in shard.jobs)) < 1e-9
        assert all(one.expected_s > 0 for one in shard.jobs)
        # About a minute, or one job that takes longer.
        assert len(shard.jobs) == 1 or shard.expected_s <= 60.0 + max(one.expected_s for one in shard.jobs) / 2


def test_shards_take_a_minute_and_devices_end_together() -> None:
    long = cut(jobs_of(4000, 0.9), 8)
    assert all(55.0 <= shard.expected_s <= 61.0 for shard in long[:30])
    assert end_of(long, 8) <= 4000 * 0.9 / 8 * 1.02
    # The end costs few more than an even cut would.
    assert len(long) <= 3600 / 60 + 8 * 10
    quick = cut(jobs_of(3000, 0.2), 24)
    assert end_of(quick, 24) <= 600 / 24 * 1.03
    assert len(quick) <= 200
    # A short run is not spread over more devices than is sensible.
    assert len(cut(jobs_of(30, 0.1), 500)) <= 3
    # Devices begin early where jobs are to be compiled.
    cold = divide(jobs_of(392, 0.1), devices={"SM8650": 4}, cached=(), sessions={})
    assert max(len(shard.jobs) for shard in cold) <= 8
    assert len(cold) <= 80


def test_compiled_jobs_come_before_others_and_the_longest_first() -> None:
    jobs = [job(0, 0.2), job(1, 30.0), job(2, 5.0), job(3, 40.0), job(4, 0.3)]
    shards = divide(jobs, devices={"SM8650": 4}, cached=keys(jobs[:3]), sessions={})
    assert [one.key for shard in shards for one in shard.jobs] == [jobs[n].key for n in (1, 2, 0, 3, 4)]
    first = divide(jobs, devices={"SM8650": 4}, cached=keys(jobs[:3]), sessions={}, first={jobs[4].job.id})
    assert first[0].jobs[0] == jobs[4]


def test_jobs_of_a_session_stand_together_and_a_shard_has_one_where_that_is_not_too_short() -> None:
    jobs = jobs_of(900, 1.0)
    sessions = {one.job.id: number % 3 for number, one in enumerate(jobs)}
    shards = divide(jobs, devices={"SM8650": 2}, cached=keys(jobs), sessions=sessions)
    flat = [sessions[one.job.id] for shard in shards for one in shard.jobs]
    assert [session for session, _ in itertools.groupby(flat)] == [0, 1, 2]
    assert all(len({sessions[one.job.id] for one in shard.jobs}) == 1 for shard in shards)


def test_a_job_without_history_is_expected_to_take_the_usual_time() -> None:
    jobs = [job(0, 0.4), job(1, 0.4), job(2, 9.0), job(3, 0.0)]
    shards = divide(jobs, devices={}, cached=keys(jobs), sessions={})
    assert {one.key: one.expected_s for shard in shards for one in shard.jobs}[jobs[3].key] == 0.4


def test_socs_take_turns_so_that_each_begins_early() -> None:
    jobs = [job(number, 50.0, soc) for soc in ("SM8650", "SM8850") for number in range(10)]
    shards = divide(jobs, devices={"SM8650": 1, "SM8850": 1}, cached=keys(jobs), sessions={})
    assert [shard.soc for shard in shards[:4]] == ["SM8650", "SM8850"] * 2


def test_jobs_of_one_machine_go_by_first_then_compiled_then_session_then_length() -> None:
    cached = {"a": False, "b": True, "c": True, "d": False}
    for ids in itertools.permutations("abcd"):
        order = dispatch_order(
            ids, cached=cached, expected_seconds={"c": 2.0, "b": 1.0}, sessions=dict.fromkeys(ids, "")
        )
        assert order == ["c", "b", *(job for job in ids if job in "ad")]
    sessions = {"a": "burst", "b": "balanced", "c": "burst", "d": "balanced"}
    seconds = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0}
    warm = dict.fromkeys(sessions, True)
    assert dispatch_order("abcd", cached=warm, expected_seconds=seconds, sessions=sessions) == list("cabd")
    first = dispatch_order("abcd", cached=cached, expected_seconds={}, sessions=dict.fromkeys("abcd", ""), first={"d"})
    assert first == ["d", "b", "c", "a"]
