"""Shortest histories that once gave a wrong answer, each by name, through the store and the measurement of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from pair_bench_stub import FACTS, World

from farm.dispatch.history_comparison import record_comparison
from farm.numbers.regressions import baseline
from farm.report.model.status import change_line, change_of
from farm.store.records import Remark
from farm.store.store import Store


def exact_nights(world: World, sizes: Sequence[int]) -> list[list[tuple[int, str]]]:
    """Return the open alerts on the size of one program after each night: id and reason."""
    found = []
    for size in sizes:
        record_comparison(world.store, world.night(sizes={0: size}))
        found.append([(one.id, one.reason) for one in world.store.alerts.open() if one.exact])
    return found


def confirmed(store: Store, *factors: float) -> World:
    """Return a world with a nightly run for each factor of its job, with the measurements after each."""
    world = World(store, jobs=1)
    for factor in factors:
        world.confirm(world.night({0: factor}))
    return world


class TestExactMetrics:
    @pytest.mark.parametrize(
        ("sizes", "changes"),
        [
            pytest.param([1, 6, 1, 6], ["", "1 -> 6", "", "1 -> 6"], id="regresses again"),
            pytest.param([1000, 1008, 1016], ["", "1000 -> 1008", "1000 -> 1016"], id="grows each night"),
            pytest.param(
                [1000, 1000, 2000, 2200, 2000, 1000],
                ["", "", *(f"1000 -> {size}" for size in (2000, 2200, 2000)), ""],
                id="is not closed by a small way back",
            ),
        ],
    )
    def test_an_exact_metric_has_one_alert_of_its_distance(
        self, store: Store, sizes: list[int], changes: list[str]
    ) -> None:
        world = World(store, jobs=1)
        found = exact_nights(world, sizes)
        assert [[reason for _, reason in one] for one in found] == [[f"{one} bytes"] if one else [] for one in changes]
        assert len({number for one in found for number, _ in one}) == 1
        [level] = baseline.levels(store, world.jobs[0].id, None, ["pte_size"])
        # An exact number is compared with the run before, and with nothing else.
        assert (level.runs, level.since, level.enough) == (1, world.nights[-1], True)

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

    def test_acceptance_of_a_grown_alert_holds_for_all_of_its_steps(self, store: Store) -> None:
        world = World(store, jobs=1)
        [(number, _)] = exact_nights(world, [1000, 1100, 1200])[-1]
        store.alerts.remark(f"alert:{number}", Remark("accepted", "ada", "", "a table"))
        assert store.alerts.open() == []
        assert exact_nights(world, [1200, 1300])[-1][0][1] == "1200 -> 1300 bytes"
        baseline.accept(store, world.jobs[0].id, None, [], None, user="ada", note="a table")
        assert store.alerts.open() == []


class TestDeterministicFigures:
    """Figure of outputs that is equal to the last bit in three runs."""

    def nights(self, world: World, *values: float, torch: str = "2.9") -> list[list[str]]:
        """Return the changes of figures that are open after each night."""
        found = []
        for value in values:
            world.confirm(world.night(sqnr=value, facts=FACTS | {"torch": torch}))
            found.append([change_of(one) for one in world.store.alerts.open() if one.metric == "sqnr_fp32[0]"])
        return found

    def test_a_change_needs_no_pairs_and_names_the_facts_that_changed(self, store: Store) -> None:
        world = World(store, jobs=1)
        assert self.nights(world, 41.25, 41.25, 41.25) == [[], [], []]
        assert self.nights(world, 40.5, torch="2.10") == [["41.25 -> 40.5 dB"]]
        [alert] = store.alerts.open()
        assert (alert.state, alert.finding, alert.device) == ("exact", "regression", ""), "no device was needed"
        assert alert.likely_cause == "torch 2.9 -> 2.10"
        assert self.nights(world, 40.5, 40.5, torch="2.10") == [["41.25 -> 40.5 dB"]] * 2
        [sqnr] = [one for one in baseline.levels(store, world.jobs[0].id, None, ()) if one.unit == "dB"]
        assert (sqnr.deterministic, sqnr.enough, sqnr.median, sqnr.runs) == (True, True, 40.5, 3)

    def test_acceptance_makes_the_new_value_the_level(self, store: Store) -> None:
        world = World(store, jobs=1)
        self.nights(world, 41.25, 41.25, 41.25, 40.5)
        [done] = baseline.accept(store, world.jobs[0].id, None, [], None, user="ada", note="a coarser table")
        assert (done.metric, done.declared) == ("sqnr_fp32[0]", False)
        assert self.nights(world, 40.5, 40.5, 40.5) == [[], [], []]
        assert self.nights(world, 39.0) == [["40.5 -> 39 dB"]]
        assert self.nights(world, 39.0, 39.0, 40.5) == [["40.5 -> 39 dB"], ["40.5 -> 39 dB"], []]

    @pytest.mark.parametrize("values", [(41.25, 41.25, 41.25, 41.2, 41.2), (41.25, 41.26, 41.25, 40.5)])
    def test_small_differences_and_varying_figures_are_no_change(self, store: Store, values: tuple[float, ...]) -> None:
        assert self.nights(World(store, jobs=1), *values) == [[]] * len(values)


class TestAlertsThatClose:
    def test_an_alert_stays_open_with_what_is_left_of_it(self, store: Store) -> None:
        confirmed(store, *[1.0] * 6, *[1.2] * 3, *[1.2 * 0.904] * 5)
        [alert] = store.alerts.open()
        assert math.exp(alert.change) == pytest.approx(1.2 * 0.904, abs=0.02)
        assert alert.low < alert.change < alert.high

    def test_a_reverted_improvement_is_the_accepted_level(self, store: Store) -> None:
        [job] = confirmed(store, *[1.0] * 6, *[0.85] * 5, *[1.0] * 5).jobs
        found = [one.finding for one in store.alerts.of_jobs([job.id]) if one.state == "confirmed"]
        assert (found, store.alerts.open()) == (["improvement", "regression"], [])

    def test_the_program_of_the_good_run_closes_the_alert_without_pairs(self, store: Store) -> None:
        world = World(store, jobs=1)
        for _ in range(12):
            world.night(keys={0: "old"})
        world.confirm(world.night({0: 1.3}, keys={0: "slow"}))
        assert len(store.alerts.open()) == 1
        asked = world.pairs
        world.confirm(world.night(keys={0: "old"}))
        assert store.alerts.open() == []
        assert world.pairs == asked


class TestSlowInferences:
    """12 % of the inferences take 80 % longer: no median shows it."""

    def test_slow_inferences_are_found_by_the_tail_of_latencies(self, store: Store) -> None:
        world = World(store, jobs=2)
        world.inferences = 20
        for night in range(16):
            slow = {0: f"slow-{night}"} if night >= 12 else {}
            world.tailed |= {*slow.values()}
            world.confirm(world.night(keys=slow))
        [alert] = store.alerts.open()
        assert (alert.job_id, alert.metric) == (world.jobs[0].id, "latency_tail")
        assert world.nights.index(alert.first_bad) in (12, 13)
        assert 0.3 < alert.change < 1.0
        assert change_line(alert).startswith("latency_tail worse: +")
        assert "% of the median (" in change_line(alert)


class TestRepeatedChanges:
    def test_two_programs_in_turns_are_one_alert(self, store: Store) -> None:
        world = World(store, jobs=1)
        seen = set()
        for night in range(20):
            slow = night >= 8 and night % 2 == 0
            world.confirm(world.night({0: 1.12 if slow else 1.0}, keys={0: "slow" if slow else "fast"}))
            seen |= {one.id for one in store.alerts.open()}
        assert len(seen) == 1

    def test_creep_is_one_growing_alert_of_the_whole_distance(self, store: Store) -> None:
        world = World(store, jobs=1, seed=3)
        seen: set[int] = set()
        for night in range(24):
            world.confirm(world.night({0: 1.006 ** max(0, night - 8)}))
            seen |= {one.id for one in store.alerts.open()}
        assert len(seen) == 1
        [alert] = store.alerts.open()
        begun = max(8, world.nights.index(alert.last_good))
        assert alert.change == pytest.approx((23 - begun) * math.log(1.006), abs=0.035)


class TestRunners:
    """Runner, runtime libraries and QNN are part of a side."""

    def grown(self, store: Store, *, kept: bool) -> World:
        """Return a world with eight good runs; then a new ExecuTorch brings another runner."""
        world = World(store, jobs=2)
        world.kept = kept
        for _ in range(8):
            world.night()
        world.runners["r2"] = 1.1
        return world

    def test_a_slower_runner_is_confirmed_with_the_old_runner_on_the_old_side(self, store: Store) -> None:
        world = self.grown(store, kept=True)
        found = world.confirm(world.night())
        assert {one.job_id for one in found.regressions} == {job.id for job in world.jobs}
        assert all(one.change == pytest.approx(math.log(1.1), abs=0.03) for one in found.regressions)
        assert len(store.alerts.open()) == 2

    def test_without_the_old_runner_the_program_is_cleared_and_the_series_stays_listed(self, store: Store) -> None:
        world = self.grown(store, kept=False)
        for _ in range(3):
            found = world.confirm(world.night())
            assert not found.regressions
            listed = store.alerts.open()
            assert {one.job_id for one in listed} == {job.id for job in world.jobs}
            assert {(one.state, one.likely_cause) for one in listed} == {
                ("unknown", "not the program; runner r1 -> r2 was not measured")
            }
            assert {one.first_bad for one in listed} == {world.nights[8]}
        first, second = store.alerts.open()
        store.alerts.remark(f"alert:{first.id}", Remark("accepted", "ada", "", "meant so"))
        assert [one.id for one in store.alerts.open()] == [second.id]
        # Their level returns.
        world.runners["r3"] = 1.0
        world.confirm(world.night())
        assert store.alerts.open() == []

    @pytest.mark.parametrize(("kept", "state"), [(True, "confirmed"), (False, "unknown")])
    def test_one_program_with_another_runner_is_not_refuted(self, store: Store, kept: bool, state: str) -> None:
        world = World(store, jobs=1, seed=2)
        world.kept = kept
        for _ in range(8):
            world.night(keys={0: "same"})
        world.runners["r2"] = 1.1
        assert [one.state for one in world.confirm(world.night(keys={0: "same"})).alerts] == [state]

    def test_a_runner_with_other_bytes_each_night_hides_no_slowdown(self, store: Store) -> None:
        world = World(store, jobs=1)
        for night in range(10):
            world.runners[f"build-{night}"] = 1.0
            world.night()
        world.runners["build-10"] = 1.3
        [alert] = world.confirm(world.night()).regressions
        assert alert.change == pytest.approx(math.log(1.3), abs=0.04)


class TestPrunedBundles:
    def test_a_bundle_that_is_itself_slow_refutes_nothing(self, store: Store) -> None:
        world = World(store, jobs=1)
        for night in range(12):
            world.night({0: 1.15 if night >= 10 else 1.0})
        # Retention leaves the bundles of the slow nights only.
        world.gone |= {f"0-{run_id}" for run_id in world.nights[:10]}
        for _ in range(2):
            found = world.confirm(world.night({0: 1.15}))
            assert {one.state for one in found.alerts} == {"unknown"}
            assert "may be as slow itself" in found.alerts[0].reason
