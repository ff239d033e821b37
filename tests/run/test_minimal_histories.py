"""Shortest histories that once gave a wrong answer, each by name, through the store and the measurement of pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from pair_bench_stub import World

from farm.dispatch.history_comparison import record_comparison
from farm.numbers.regressions import baseline
from farm.store.records import Remark
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


def exact_nights(world: World, sizes: Sequence[int]) -> list[list[tuple[int, str]]]:
    """Return the open alerts on the size of one program after each night: id and reason."""
    found = []
    for size in sizes:
        record_comparison(world.store, world.night(sizes={0: size}))
        found.append([(one.id, one.reason) for one in world.store.alerts.open() if one.exact])
    return found


class TestExactMetrics:
    def test_an_exact_metric_that_regresses_again_has_an_open_alert_again(self, store: Store) -> None:
        found = exact_nights(World(store, jobs=1), [1, 6, 1, 6])
        assert [[reason for _, reason in one] for one in found] == [[], ["1 -> 6 bytes"], [], ["1 -> 6 bytes"]]
        assert found[1] != found[3], "another excursion"

    def test_a_program_that_is_larger_again_for_ten_nights_has_an_open_alert_in_all_of_them(self, store: Store) -> None:
        found = exact_nights(World(store, jobs=1), [1000, 1100, 1000, *[1100] * 10])
        assert [len(one) for one in found] == [0, 1, 0, *[1] * 10]

    def test_a_flipping_metric_has_one_alert_that_names_the_compiler(self, store: Store) -> None:
        world = World(store, jobs=1)
        found = exact_nights(world, [4, 4, 5, 4, 5, 4, 5, 4, 5, 5, 4])
        stable = {number for one in found[5:] for number, _ in one}
        assert len(stable) == 1, "one alert, whichever value it has tonight"
        assert all(
            "not deterministic with executorch 1.5.1, qnn 2.51" in reason for one in found[5:] for _, reason in one
        )
        assert [bool(world.confirm(night).regressions) for night in world.nights[6:]] == [False] * 5
        [(number, _)] = found[-1]
        store.alerts.remark(f"alert:{number}", Remark("accepted", "ada", "", "known"))
        assert exact_nights(world, [5, 4, 5]) == [[], [], []]

    def test_one_of_eight_values_has_few_alerts(self, store: Store) -> None:
        found = exact_nights(World(store, jobs=1), [3, 7, 1, 8, 2, 5, 4, 6, 1, 8, 3, 2, 7, 5, 1, 4])
        assert len({number for one in found for number, _ in one}) <= 2
        assert all(len(one) <= 1 for one in found)

    def test_eight_bytes_more_each_night_are_one_growing_alert(self, store: Store) -> None:
        found = exact_nights(World(store, jobs=1), [1000 + 8 * night for night in range(12)])
        assert [len(one) for one in found] == [0, *[1] * 11]
        assert found[-1] == [(found[1][0][0], "1000 -> 1088 bytes")]

    def test_acceptance_of_a_grown_alert_holds_for_all_of_its_steps(self, store: Store) -> None:
        world = World(store, jobs=1)
        [(number, _)] = exact_nights(world, [1000, 1100, 1200])[-1]
        store.alerts.remark(f"alert:{number}", Remark("accepted", "ada", "", "a table"))
        assert store.alerts.open() == []
        assert exact_nights(world, [1200, 1300])[-1][0][1] == "1200 -> 1300 bytes"
        baseline.accept(store, world.jobs[0].id, None, [], None, user="ada", note="a table")
        assert store.alerts.open() == []


class TestAlertsThatClose:
    @pytest.mark.parametrize("seed", range(1, 5))
    def test_a_step_of_5_per_cent_that_was_fixed_is_closed(self, store: Store, seed: int) -> None:
        world = World(store, jobs=2, seed=seed)
        opened = False
        for night in range(32):
            world.confirm(world.night({0: 1.06 if 14 <= night < 22 else 1.0}))
            opened = opened or bool(store.alerts.open())
        assert opened
        assert store.alerts.open() == []

    def test_an_alert_stays_open_with_what_is_left_of_it(self, store: Store) -> None:
        world = World(store, jobs=1)
        for night in range(22):
            world.confirm(world.night({0: 1.0 if night < 12 else 1.2 if night < 16 else 1.2 * 0.904}))
        [alert] = store.alerts.open()
        assert math.exp(alert.change) == pytest.approx(1.2 * 0.904, abs=0.02)
        assert alert.low < alert.change < alert.high

    def test_a_reverted_improvement_is_the_accepted_level(self, store: Store) -> None:
        world = World(store, jobs=1)
        for night in range(30):
            world.confirm(world.night({0: 0.85 if 12 <= night < 20 else 1.0}))
        assert [one.finding for one in store.alerts.of_jobs([world.jobs[0].id]) if one.state == "confirmed"] == [
            "improvement", "regression",
        ]  # fmt: skip
        assert store.alerts.open() == []

    def test_the_program_of_the_good_run_closes_the_alert_without_pairs(self, store: Store) -> None:
        world = World(store, jobs=1)
        for _ in range(12):
            world.confirm(world.night(keys={0: "old"}))
        world.confirm(world.night({0: 1.3}, keys={0: "slow"}))
        assert len(store.alerts.open()) == 1
        asked = world.pairs
        world.confirm(world.night(keys={0: "old"}))
        assert store.alerts.open() == []
        assert world.pairs == asked


class TestRepeatedChanges:
    def test_two_programs_in_turns_are_one_alert(self, store: Store) -> None:
        world = World(store, jobs=1)
        seen = set()
        for night in range(30):
            slow = night >= 12 and night % 2 == 0
            world.confirm(world.night({0: 1.12 if slow else 1.0}, keys={0: "slow" if slow else "fast"}))
            seen |= {one.id for one in store.alerts.open()}
        assert 1 <= len(seen) <= 2

    def test_creep_is_one_growing_alert_of_the_whole_distance(self, store: Store) -> None:
        world = World(store, jobs=2, seed=3)
        seen: set[int] = set()
        for night in range(40):
            world.confirm(world.night(dict.fromkeys(range(2), 1.003 ** max(0, night - 8))))
            seen |= {one.id for one in store.alerts.open()}
        assert len(seen) <= 2
        for alert in store.alerts.open():
            begun = world.nights.index(alert.last_good)
            assert alert.change == pytest.approx((39 - begun) * math.log(1.003), abs=0.035)
