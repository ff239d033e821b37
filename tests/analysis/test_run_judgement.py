"""A whole nightly run: suspected regressions, and devices with a common shift."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from farm.results.analysis.confirmation import confirm, programs_are_cause
from farm.results.analysis.run_judgement import Observation, RunJudgement, judge_run
from farm.results.analysis.scale import Scale, Series
from farm.results.analysis.suspected import Finding
from farm.results.attempt import Direction

from .conftest import FALLBACK, LATENCY, SQNR, in_turns, noisy

SERIES = 40


def night(*, hot: float = 1.0, regressed: dict[int, float] | None = None, devices: int = 2) -> list[Observation]:
    """Return a nightly run with all times on device 0 multiplied by `hot`, and `regressed` series by their factor."""
    found = []
    for one in range(SERIES):
        history = noisy(22, level=1e6 * (one + 1), seed=one)
        value = history[-1] * (hot if one % devices == 0 else 1.0) * (regressed or {}).get(one, 1.0)
        series = msgspec.structs.replace(LATENCY, id=f"series {one}")
        found.append(Observation(series, f"device-{one % devices}", history[:-1], value))
    return found


def alarming(night: list[Observation]) -> set[str]:
    return {night[one].series.id for one in judge_run(night).suspected}


def test_a_regression_stands_out_of_a_quiet_night() -> None:
    quiet = night(regressed={7: 1.2})
    seen = judge_run(quiet)
    assert seen.shifts == ()
    assert quiet[seen.suspected[0]].series.id == "series 7", "the least probable comes first"
    assert len(seen.suspected) < 10


def test_a_hot_night_is_one_thing_and_not_twenty_and_hides_no_regression() -> None:
    hot = night(hot=1.1)
    [shift] = judge_run(hot).shifts
    assert (shift.device, shift.metric, shift.count) == ("device-0", "latency", 20)
    assert math.exp(shift.change) == pytest.approx(1.1, abs=0.02)
    assert shift.reason.startswith("latency of all 20 series of device-0 is off by +")
    assert alarming(hot) == alarming(night())
    regressed = night(hot=1.1, regressed={4: 1.2, 7: 1.2})
    assert alarming(regressed) >= {"series 4", "series 7"}
    assert math.exp(judge_run(regressed).judgements[4].change) == pytest.approx(1.2, abs=0.05)


def test_a_device_that_drifts_is_no_news_and_its_series_are_not_suspected() -> None:
    drifting = [
        msgspec.structs.replace(one, history=[value * math.exp(0.004 * at) for at, value in enumerate(one.history)])
        for one in night()
    ]
    tonight = [msgspec.structs.replace(one, value=one.value * math.exp(0.004 * len(one.history))) for one in drifting]
    seen = judge_run(tonight)
    assert seen.shifts == ()
    assert len(seen.suspected) < 4
    assert len(judge_run([msgspec.structs.replace(one, value=one.value * 1.1) for one in tonight]).shifts) == 2


@pytest.mark.parametrize(
    ("few", "suspected"),
    [
        (night(hot=1.1, devices=8), 5),
        # Half of the series of a device are not the device.
        (night(regressed=dict.fromkeys(range(0, SERIES, 4), 1.15)), 10),
    ],
)
def test_a_few_series_do_not_tell_a_hot_night(few: list[Observation], suspected: int) -> None:
    seen = judge_run(few)
    assert seen.shifts == ()
    assert len(seen.suspected) >= suspected


def test_pairs_tell_a_hot_night_from_a_change_that_slows_everything() -> None:
    everything = night(hot=1.1)
    assert len(judge_run(everything).shifts[0].representatives) == 3
    slower, as_fast = (
        [confirm(Scale.RATIO, in_turns(ratio, seed=seed), up=True) for seed in range(3)] for ratio in (1.1, 1.0)
    )
    assert programs_are_cause(slower)
    for others in (as_fast, [slower[0], *as_fast[:2]], []):
        assert not programs_are_cause(others)
    again = judge_run(everything, programs={("device-0", "latency")})
    assert again.shifts == ()
    assert len(again.suspected) >= 18, "each is a suspected change, to be confirmed and grouped"


def test_exact_metrics_and_figures_are_no_part_of_a_hot_night() -> None:
    exact = Observation(FALLBACK, "device-0", [0.0], 2.0)
    figure = Observation(SQNR, "device-0", [41.0] * 12, 39.0)
    seen = judge_run([*night(hot=1.1), exact, figure])
    assert (seen.shifts[0].count, seen.exact) == (20, (SERIES,))
    assert SERIES + 1 in seen.suspected
    assert seen.judgements[SERIES + 1].change == pytest.approx(-2.0)


def test_an_empty_night_and_young_series_have_nothing() -> None:
    assert judge_run([]) == RunJudgement((), (), (), ())
    young = judge_run([msgspec.structs.replace(one, history=one.history[:3]) for one in night(hot=1.3)])
    assert {one.finding for one in young.judgements} == {Finding.INSUFFICIENT_DATA}
    assert young.shifts == ()


def on_two_devices(count: int, *, apart: float, tonight: float = 1.0) -> list[Observation]:
    """Return series that ran on either of two devices, the second slower, and all on that one tonight."""
    found = []
    for number in range(count):
        devices = ["fast" if (7 * night + number) % 3 else "slow" for night in range(24)]
        values = [
            value * (1.0 + apart * (device == "slow"))
            for value, device in zip(noisy(24, seed=number), devices, strict=True)
        ]
        [value] = noisy(1, 1e6 * (1.0 + apart) * tonight, seed=1000 + number)
        series = Series(str(number), "latency", "ns", Direction.LOWER)
        found.append(Observation(series, "slow", values, value, [(device, "") for device in [*devices, "slow"]]))
    return found


def test_a_device_that_is_always_slower_is_no_shift_and_hides_nothing() -> None:
    quiet = judge_run(on_two_devices(30, apart=0.06))
    assert not quiet.shifts
    assert len(quiet.suspected) <= 5
    blind = judge_run([msgspec.structs.replace(one, places=()) for one in on_two_devices(30, apart=0.06)])
    assert len(blind.suspected) > len(quiet.suspected) or blind.shifts
    found = [judge_run([one]).suspected for one in on_two_devices(30, apart=0.06, tonight=1.08)]
    assert sum(map(len, found)) >= 27
    for one in on_two_devices(3, apart=0.0):
        assert one.past == one.history


def test_eight_phones_with_eight_builds_in_rotation_have_one_history() -> None:
    draw = np.random.default_rng(5)
    effects = draw.uniform(-0.1, 0.1, 8)
    places = [(f"phone-{night % 8}", f"build-{night % 8}") for night in range(41)]
    for tonight, finding in ((1.0, Finding.UNCHANGED), (1.1, Finding.REGRESSION)):
        values = [float(1e6 * np.exp(effects[night % 8] + 0.01 * draw.standard_normal())) for night in range(41)]
        one = Observation(LATENCY, places[-1][0], values[:-1], tonight * values[-1], places)
        [judged] = judge_run([one]).judgements
        assert judged.finding is finding
        assert judged.count == 21
    # A new phone has no effect before it has some values.
    [judged] = judge_run([msgspec.structs.replace(one, places=[*places[:-1], ("new", "build-0")])]).judgements
    assert judged.finding is Finding.INSUFFICIENT_DATA


def test_the_effect_of_a_build_is_known_from_another_phone() -> None:
    draw = np.random.default_rng(6)
    # Phone a got build 2 after 20 nights; phone b gets it tonight. Build 2 is 8 % slower.
    places = [("ab"[night % 2], "2" if night >= 20 and night % 2 == 0 else "1") for night in range(40)]
    values = [1e6 * (1.08 if build == "2" else 1.0) * float(1 + 0.01 * draw.standard_normal()) for _, build in places]
    for tonight, finding in ((1.08e6, Finding.UNCHANGED), (1.08 * 1.08e6, Finding.REGRESSION)):
        [judged] = judge_run([Observation(LATENCY, "b", values, tonight, [*places, ("b", "2")])]).judgements
        assert judged.finding is finding


def test_young_series_are_judged_without_numpy() -> None:
    """NumPy takes 0.1 s to load, and a run without comparable runs needs none of it."""
    code = (
        "import sys; from farm.results.analysis.run_judgement import Observation, judge_run;"
        "from farm.results.analysis.change_points import change_points;"
        "from farm.results.analysis.scale import Scale, Series; from farm.results.attempt import Direction;"
        "series = Series('job', 'latency', 'ns', Direction.LOWER, exact=False);"
        "night = judge_run([Observation(series, 'device', [5.0] * 7, 6.0), Observation(series, 'device', [], -1.0)]);"
        "assert [one.finding for one in night.judgements] == ['insufficient_data', 'undefined'], night;"
        "assert change_points(Scale.RATIO, [5.0] * 3) == ();"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
