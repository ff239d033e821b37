"""Shards of a run: every job once, about a minute each, smaller where few are left, sessions and cold jobs apart."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.policy.divide import Part, divide
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Target


def job(number: int, expected_s: float = 0.2, soc: str = "SM8650") -> PlannedJob:
    case = Case("s", f"c{number}", "torch.nn:ReLU", (InputSpec((1,)),))
    return PlannedJob(Job(case, Target(soc, "htp", "8a8w")), f"key-{soc}-{number}", expected_s)


def keys(jobs: Sequence[PlannedJob]) -> set[str]:
    return {one.key for one in jobs}


def end_of(shards: Sequence[Part[PlannedJob]], devices: int) -> float:
    """When the last of `devices` ends that take one shard after the other."""
    ends = [0.0] * devices
    for shard in shards:
        soonest = ends.index(min(ends))
        ends[soonest] += shard.expected_s
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
        assert shard.jobs
        assert {one.job.target.soc for one in shard.jobs} == {shard.soc}
        assert len({one.key in cached for one in shard.jobs}) == 1
        assert abs(shard.expected_s - sum(one.expected_s for one in shard.jobs)) < 1e-9
        assert all(one.expected_s > 0 for one in shard.jobs)
        # About a minute, or one job that takes longer.
        assert len(shard.jobs) == 1 or shard.expected_s <= 60.0 + max(one.expected_s for one in shard.jobs) / 2


def test_a_long_run_is_made_of_shards_of_a_minute_and_its_devices_end_together() -> None:
    jobs = [job(number, 0.9) for number in range(4000)]
    shards = divide(jobs, devices={"SM8650": 8}, cached=keys(jobs), sessions={})
    assert all(55.0 <= shard.expected_s <= 61.0 for shard in shards[:30])
    assert end_of(shards, 8) <= 4000 * 0.9 / 8 * 1.02
    # The end costs few more than an even cut would.
    assert len(shards) <= 3600 / 60 + 8 * 10


def test_the_3000_jobs_of_200_ms_on_24_devices_end_within_three_hundredths_of_ideal() -> None:
    jobs = [job(number, 0.2) for number in range(3000)]
    shards = divide(jobs, devices={"SM8650": 24}, cached=keys(jobs), sessions={})
    assert end_of(shards, 24) <= 600 / 24 * 1.03
    assert len(shards) <= 200


def test_a_short_run_is_not_spread_over_more_devices_than_is_sensible() -> None:
    jobs = [job(number, 0.1) for number in range(30)]
    assert len(divide(jobs, devices={"SM8650": 500}, cached=keys(jobs), sessions={})) <= 3
    assert len(divide(jobs[:1], devices={"SM8650": 500}, cached=keys(jobs), sessions={})) == 1


def test_the_longest_first_and_what_is_compiled_before_what_is_not() -> None:
    jobs = [job(0, 0.2), job(1, 30.0), job(2, 5.0), job(3, 40.0), job(4, 0.3)]
    shards = divide(jobs, devices={"SM8650": 4}, cached=keys(jobs[:3]), sessions={})
    flat = [one.key for shard in shards for one in shard.jobs]
    assert flat == [jobs[n].key for n in (1, 2, 0, 3, 4)]


def test_what_is_to_come_first_comes_first() -> None:
    jobs = [job(number, 1.0 + number) for number in range(200)]
    shards = divide(jobs, devices={"SM8650": 4}, cached=keys(jobs), sessions={}, first={jobs[7].job.id})
    assert shards[0].jobs[0] == jobs[7]


def test_jobs_of_a_session_stand_together_and_a_shard_has_one_where_that_is_not_too_short() -> None:
    jobs = [job(number, 1.0) for number in range(900)]
    sessions = {one.job.id: number % 3 for number, one in enumerate(jobs)}
    shards = divide(jobs, devices={"SM8650": 2}, cached=keys(jobs), sessions=sessions)
    flat = [sessions[one.job.id] for shard in shards for one in shard.jobs]
    assert [session for session, _ in itertools.groupby(flat)] == [0, 1, 2]
    assert sum(len({sessions[one.job.id] for one in shard.jobs}) > 1 for shard in shards) == 0


def test_shards_of_jobs_that_are_to_be_compiled_hold_few_so_that_devices_begin_early() -> None:
    jobs = [job(number, 0.1) for number in range(392)]
    shards = divide(jobs, devices={"SM8650": 4}, cached=(), sessions={})
    assert max(len(shard.jobs) for shard in shards) <= 8
    assert len(shards) <= 80


def test_a_job_without_history_is_taken_for_a_usual_one() -> None:
    jobs = [job(0, 0.4), job(1, 0.4), job(2, 9.0), job(3, 0.0)]
    (shard,) = [
        one for one in divide(jobs, devices={}, cached=keys(jobs), sessions={}) if jobs[3].key in keys(one.jobs)
    ]
    assert {one.key: one.expected_s for one in shard.jobs}[jobs[3].key] == 0.4


def test_socs_take_turns_so_that_each_begins_early() -> None:
    jobs = [job(number, 50.0, soc) for soc in ("SM8650", "SM8850") for number in range(10)]
    shards = divide(jobs, devices={"SM8650": 1, "SM8850": 1}, cached=keys(jobs), sessions={})
    assert [shard.soc for shard in shards[:4]] == ["SM8650", "SM8850"] * 2
