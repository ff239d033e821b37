"""The bench's farm in a small world: all four steps together, on numbers of which the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from regressions import STEPS, Farm, Score, World


@pytest.fixture(scope="module")
def farm() -> Farm:
    farm = Farm(World(seed=11, series=90, nights=36))
    farm.run()
    return farm


def test_large_steps_are_found_and_nearly_nothing_else(farm: Farm) -> None:
    score = Score()
    score.add(farm)
    assert score.planted[0.12] == 10
    assert score.in_two[0.12] >= 9
    assert score.false <= 1
    assert set(score.found) <= set(STEPS)


def test_the_first_bad_run_is_named_with_few_old_runs(farm: Farm) -> None:
    score = Score()
    score.add(farm)
    assert score.exact / score.found.total() > 0.9
    assert farm.spent["probes"] <= 4 * score.alerts


def test_a_step_is_told_once_although_it_stays(farm: Farm) -> None:
    answer = [alert.series for alerts in farm.alerts.values() for alert in alerts]
    assert len(answer) - len(set(answer)) <= 1


def test_hot_nights_are_told_of_devices(farm: Farm) -> None:
    nights = sum(night >= 8 for _, night in farm.world.hot)
    assert farm.spent["hot nights told"] >= 0.8 * nights
    assert farm.spent["hot nights told wrongly"] == 0
    assert farm.spent["devices whose programs were at fault"] == 0


def test_a_change_that_slows_everything_on_a_device_is_no_hot_night() -> None:
    world = World(seed=3, series=60, nights=24)
    world.slow_down(device=2, night=18, size=0.1)
    farm = Farm(world)
    farm.run()
    answer = {alert.series for night in (18, 19) for alert in farm.alerts[night]}
    hit = np.flatnonzero(world.device == 2)
    assert farm.spent["devices whose programs were at fault"] >= 1
    assert len(answer & set(hit.tolist())) >= 8
    first_bad = [alert.first_bad for night in (18, 19) for alert in farm.alerts[night] if alert.series in hit]
    assert first_bad.count(18) >= 8, "one cause: the same first bad run"


def test_the_same_seed_gives_the_same_world() -> None:
    one, other = World(5, 30, 20), World(5, 30, 20)
    assert (one.measured == other.measured).all()
    assert not (one.measured == World(6, 30, 20).measured).all()
