"""About when runs on the shared farm begin and end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.policy.estimate import Expected, Work, expect
from farm.policy.situation import Priority

PERSON, NIGHTLY = Priority.PERSON, Priority.NIGHTLY


def work(
    number: int, user: str, shards: int, *, priority: Priority = PERSON, devices: int = 8, **more: float | str
) -> Work:
    facts = {"soc": "SM8650", "waiting_s": 60.0 * shards, "waiting": shards, **more}
    return Work(run_id=f"run{number}", user=user, priority=priority, since_ms=number, devices=devices, **facts)  # type: ignore[arg-type]


def test_a_run_alone_has_all_devices() -> None:
    assert expect([work(1, "ada", 80)], {"SM8650": 8}) == {"run1": Expected(0.0, 600.0)}
    assert expect([work(1, "ada", 4)], {"SM8650": 8}) == {"run1": Expected(0.0, 60.0)}
    assert expect([work(1, "ada", 80, devices=2)], {"SM8650": 8}) == {"run1": Expected(0.0, 2400.0)}


def test_two_users_share_and_the_shorter_run_ends_first() -> None:
    found = expect([work(1, "ada", 80), work(2, "bob", 40)], {"SM8650": 8})
    assert found["run2"] == Expected(0.0, 600.0)
    assert found["run1"] == Expected(0.0, 900.0)


def test_a_nightly_run_waits_for_a_person_and_runs_of_one_user_for_each_other() -> None:
    runs = [work(1, "ci", 8, priority=NIGHTLY), work(2, "ada", 80), work(3, "ada", 8)]
    found = expect(runs, {"SM8650": 8})
    assert found["run2"] == Expected(0.0, 600.0)
    assert found["run3"] == Expected(600.0, 660.0)
    assert found["run1"] == Expected(660.0, 720.0)


def test_more_users_than_devices_take_turns() -> None:
    runs = [work(n, f"user{n}", 2) for n in range(4)]
    found = expect(runs, {"SM8650": 2})
    assert [found[f"run{n}"].starts_s for n in range(4)] == [30.0, 60.0, 90.0, 120.0]
    assert all(one.ends_s == pytest.approx(240.0) for one in found.values())


def test_a_quota_bounds_what_a_user_has() -> None:
    found = expect([work(1, "ada", 80)], {"SM8650": 8}, {"user:ada": 2})
    assert found["run1"].ends_s == 2400.0


def test_what_no_device_runs_never_ends_and_bundles_may_take_longer_than_devices() -> None:
    assert expect([work(1, "ada", 8, devices=0)], {}) == {"run1": Expected(math.inf, math.inf)}
    assert expect([work(1, "ada", 8, builds_s=900.0)], {"SM8650": 8})["run1"].ends_s == 900.0


def test_a_run_begins_when_the_bundles_of_its_first_shard_are_made() -> None:
    cold = work(1, "ada", 8, first_build_s=25.0, builds_s=200.0)
    assert expect([cold], {"SM8650": 8}) == {"run1": Expected(25.0, 200.0)}
    # The first shard of the run is executed already.
    assert expect([work(1, "ada", 8, first_build_s=25.0, held=1, held_s=30.0)], {"SM8650": 8})["run1"].starts_s == 0.0


def test_a_run_of_two_socs_ends_with_the_later() -> None:
    runs = [work(1, "ada", 8), work(1, "ada", 16, soc="SM8850", devices=1)]
    assert expect(runs, {"SM8650": 8, "SM8850": 1}) == {"run1": Expected(0.0, 960.0)}


works = st.lists(
    st.builds(
        work,
        st.integers(0, 10_000),
        st.sampled_from("abcd"),
        st.integers(0, 30),
        priority=st.sampled_from(Priority),
        devices=st.integers(0, 10),
        held=st.integers(0, 3),
        held_s=st.floats(0, 100),
    ),
    max_size=12,
    unique_by=lambda one: one.run_id,
)


@settings(deadline=None)
@given(works, st.integers(1, 10))
def test_every_run_with_a_device_ends_and_no_more_is_done_than_devices_can(runs: list[Work], devices: int) -> None:
    found = expect(runs, {"SM8650": devices})
    assert set(found) == {one.run_id for one in runs}
    for one in runs:
        assert math.isinf(found[one.run_id].ends_s) == (one.devices == 0)
    able = [one for one in runs if one.devices]
    if able:
        total_s = sum(one.waiting_s + one.held_s for one in able)
        assert max(found[one.run_id].ends_s for one in able) >= total_s / devices - 1e-3
