"""About when runs on the shared farm begin and end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.policy.situation import Priority
from farm.policy.waits import Expected, Work, expect

EIGHT = {"SM8650": 8}


def work(
    number: int, user: str, shards: int, *, priority: Priority = Priority.PERSON, devices: int = 8, **more: float | str
) -> Work:
    facts = {"soc": "SM8650", "waiting_s": 60.0 * shards, "waiting": shards, **more}
    return Work(run_id=f"run{number}", user=user, priority=priority, since_ms=number, devices=devices, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runs", "devices", "quotas", "expected"),
    [
        ([work(1, "ada", 80)], EIGHT, {}, [(0, 600)]),
        ([work(1, "ada", 4)], EIGHT, {}, [(0, 60)]),
        ([work(1, "ada", 80, devices=2)], EIGHT, {}, [(0, 2400)]),
        ([work(1, "ada", 80)], EIGHT, {"user:ada": 2}, [(0, 2400)]),
        # Two users share, and the shorter run ends first.
        ([work(1, "ada", 80), work(2, "bob", 40)], EIGHT, {}, [(0, 900), (0, 600)]),
        # A nightly run waits for a person, and runs of one user for each other.
        (
            [work(1, "ci", 8, priority=Priority.NIGHTLY), work(2, "ada", 80), work(3, "ada", 8)],
            EIGHT,
            {},
            [(660, 720), (0, 600), (600, 660)],
        ),
        ([work(n, f"user{n}", 2) for n in range(1, 5)], {"SM8650": 2}, {}, [(30 * n, 240) for n in range(1, 5)]),
        ([work(1, "ada", 8, devices=0)], {}, {}, [(math.inf, math.inf)]),
        # A run begins when the bundles of its first shard are made, unless that is executed already.
        ([work(1, "ada", 8, builds_s=900.0)], EIGHT, {}, [(0, 900)]),
        ([work(1, "ada", 8, first_build_s=25.0, builds_s=200.0)], EIGHT, {}, [(25, 200)]),
        ([work(1, "ada", 8, first_build_s=25.0, held=1, held_s=30.0)], EIGHT, {}, [(0, 63.75)]),
        # A run of two SoCs ends with the later.
        (
            [work(1, "ada", 8), work(1, "ada", 16, soc="SM8850", devices=1)],
            {"SM8650": 8, "SM8850": 1},
            {},
            [(0, 960)],
        ),
    ],
)
def test_expected_begin_and_end(
    runs: list[Work], devices: dict[str, int], quotas: dict[str, int], expected: list[tuple[float, float]]
) -> None:
    found = expect(runs, devices, quotas)
    assert [found[f"run{n}"] for n in range(1, len(expected) + 1)] == [Expected(*one) for one in expected]


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
    assert {run_id: math.isinf(one.ends_s) for run_id, one in found.items()} == {
        one.run_id: one.devices == 0 for one in runs
    }
    able = [one for one in runs if one.devices]
    if able:
        total_s = sum(one.waiting_s + one.held_s for one in able)
        assert max(found[one.run_id].ends_s for one in able) >= total_s / devices - 1e-3
