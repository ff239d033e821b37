"""Weeks of nightly runs through the store, with the measurements after each, and the final alerts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from log_lines import LogLines
from pair_bench_stub import World

from farm.base.errors import DeviceGoneError, UsageError
from farm.base.log_setup import RecordHandler, begin_logging
from farm.dispatch.history_comparison import changed_programs, compare_with_history, compared_series, record_comparison
from farm.numbers.regressions import baseline
from farm.replay.stored_result import StoredResult
from farm.results.analysis.history import Point
from farm.results.analysis.scale import Series
from farm.results.analysis.suspected import Finding, judge
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.results.measurements import counted
from farm.store.queries.points import JobPast, SeriesPast
from farm.store.records import AlertRecord, AlertState, NewAlert, Remark
from farm.store.store import Store, open_store


def known(store: Store, world: World, number: int) -> list[AlertRecord]:
    """Return the confirmed and exact alerts of a job."""
    answer = (AlertState.CONFIRMED, AlertState.EXACT)
    return [one for one in store.alerts.of_jobs([world.jobs[number].id]) if one.state in answer]


def test_forty_nights_give_one_alert_for_each_step_and_none_for_a_quiet_series(store: Store) -> None:
    world = World(store, jobs=6)
    for night in range(40):
        stays, undone = 1.08 if night >= 20 else 1.0, 1.08 if 15 <= night < 28 else 1.0
        world.confirm(world.night({0: stays, 1: undone}))
    [step] = known(store, world, 0)
    assert (step.finding, step.last_good, step.first_bad) == ("regression", world.nights[19], world.nights[20])
    assert step.low < step.change < step.high
    assert step.change == pytest.approx(0.077, abs=0.02)
    there, back = known(store, world, 1)
    assert (there.finding, there.first_bad) == ("regression", world.nights[15])
    assert (back.finding, back.first_bad) == ("improvement", world.nights[28])
    for quiet in range(2, 6):
        assert known(store, world, quiet) == []
    # The alert whose change was undone is closed.
    assert [one.id for one in store.alerts.open()] == [step.id]


@pytest.mark.whole
def test_intervals_of_95_per_cent_hold_the_truth_about_so_often(tmp_path: Path) -> None:
    held = []
    for seed in range(1, 13):
        with open_store(tmp_path / f"{seed}.db") as opened:
            world = World(opened, jobs=6, seed=seed)
            same = {job: f"same-{job}" for job in range(6)}
            for _ in range(10):
                record_comparison(opened, world.night(keys=same))
            world.confirm(world.night({0: 1.08}, keys={**same, 0: "slower"}))
            held += [step.low < math.log(1.08) < step.high for step in known(opened, world, 0)[:1]]
    assert len(held) >= 11
    # A smaller number has a probability of at most one in a hundred.
    assert sum(held) >= len(held) - 3


def test_a_hot_night_is_one_shift_and_a_slower_compiler_is_found_in_all(store: Store) -> None:
    world = World(store, jobs=10)
    for _ in range(10):
        record_comparison(store, world.night())
    hot_run = world.night(all_by=1.15)
    shift, *_ = record_comparison(store, hot_run).summary_lines()
    assert "off by" in shift
    hot = world.confirm(hot_run)
    assert len(hot.shifts) == 1
    assert not hot.regressions
    slower = dict.fromkeys(range(10), 1.12)
    found = world.confirm(world.night(slower))
    assert {one.job_id for one in found.regressions} == {job.id for job in world.jobs}
    after = world.confirm(world.night(slower))
    assert not after.shifts
    assert {one.state for one in after.alerts} <= {"refuted"}


def test_of_programs_that_step_together_few_are_measured_in_full_and_the_others_say_so(store: Store) -> None:
    world = World(store, jobs=24)
    for _ in range(10):
        record_comparison(store, world.night())
    found = world.confirm(world.night(dict.fromkeys(range(9), 1.12)))
    assert {one.job_id for one in found.regressions} == {job.id for job in world.jobs[:9]}
    assert {(one.last_good, one.first_bad) for one in found.regressions} == {tuple(world.nights[-2:])}
    looked_at = [one for one in found.regressions if "which stepped with it" in one.reason]
    assert len(looked_at) >= 4
    assert all(one.low < one.change < one.high for one in looked_at)


def test_a_step_is_told_once_however_late_its_first_run_is_looked_at(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(12):
        record_comparison(store, world.night())
    first, second = world.night({0: 1.12}), world.night({0: 1.12})
    # The first slow nightly run was never judged, and its bundle is away for some time: it is part of the range.
    world.gone.add(f"0-{first}")
    world.confirm(second)
    world.gone.clear()
    [step] = store.alerts.open()
    assert (step.last_good, step.first_bad) == (world.nights[11], second)
    assert world.confirm(first).alerts == ()
    asked = world.pairs
    # The measured nightly run is not measured again.
    world.confirm(second)
    assert store.alerts.open() == [step]
    assert world.pairs == asked
    quiet = world.confirm(world.night({0: 1.12}))
    assert not quiet.regressions


def test_what_is_confirmed_stays_so_where_the_device_goes_before_it_is_known_since_when(store: Store) -> None:
    world = World(store, jobs=2)
    for _ in range(12):
        record_comparison(store, world.night())
    slow = world.night({0: 1.3, 1: 1.2})
    comparison = record_comparison(store, slow)
    assert comparison.summary_lines() == ["2 numbers look different from before: 'farm perf confirm' measures again"]
    assert comparison.summary_lines(confirm=True) == ["2 numbers look different from before"]

    def gone(call: int) -> None:
        # Seven times until ten pairs confirm the first one, and ten in new processes.
        if call > 8:
            raise DeviceGoneError("phone", "no device")

    world.before_pairs = gone
    output = LogLines()
    found = world.confirm(slow)
    states = {one.job_id: one.state for one in found.alerts}
    assert sorted(states.values()) == ["confirmed", "suspected"]
    assert found.not_measured == len(found.problems) == 1
    [step] = store.alerts.open()
    assert (step.last_good, step.first_bad) == (world.nights[0], slow)
    assert [line for line in output if "since when" in line]
    # The other job is measured when the device is back.
    world.before_pairs = lambda _: None
    assert {one.state for one in world.confirm(slow).alerts} == {"confirmed"}


def test_ctrl_c_keeps_what_is_known(store: Store) -> None:
    world = World(store, jobs=2)
    for _ in range(12):
        record_comparison(store, world.night())
    slow = world.night({0: 1.3, 1: 1.2}, noise=0.0)

    output: list[str] = []

    def interrupt(text: str) -> None:
        output.append(text)
        if len(output) == 3:
            raise KeyboardInterrupt

    begin_logging(RecordHandler(interrupt))
    with pytest.raises(KeyboardInterrupt):
        world.confirm(slow)
    [known_by_then] = store.alerts.open()
    assert known_by_then.job_id in output[1]
    assert sorted(one.state for one in store.alerts.of_run(slow)) == ["confirmed", "suspected"]


def test_two_who_measure_the_same_do_not_overwrite_each_other(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(12):
        record_comparison(store, world.night())
    slow = world.night({0: 1.3})

    def somebody(call: int) -> None:
        if call == 1:
            world.confirm(slow)

    world.before_pairs = somebody
    output = LogLines()
    world.confirm(slow)
    [one] = store.alerts.of_run(slow)
    assert one.state == "confirmed"
    assert [line for line in output if "theirs stays" in line]


def test_a_program_that_was_there_before_is_refuted_unless_the_one_before_it_is_gone(store: Store) -> None:
    world = World(store, jobs=2)
    for _ in range(12):
        record_comparison(store, world.night(keys={0: "same", 1: "old"}))
    record_comparison(store, world.night(keys={0: "same", 1: "new"}))
    world.gone.add("old")
    # A noisy nightly run of both programs; one is newer than the level.
    found = world.confirm(world.night(keys={0: "same", 1: "new"}, all_by=1.3))
    output = {one.job_id: (one.state, one.reason) for one in found.alerts}
    assert output[world.jobs[0].id][0] == "refuted"
    assert "the program is that of" in output[world.jobs[0].id][1]
    assert output[world.jobs[1].id] == ("unknown", "no bundle of the runs before is there any more")
    assert world.pairs == 0
    # A user accepts the change without a measurement: it is a level from now on.
    [unknown] = [one for one in found.alerts if one.state == "unknown"]
    assert unknown.change > 0.2


def test_a_great_step_is_not_closed_by_a_small_way_back(store: Store) -> None:
    world = World(store, jobs=1)
    sizes = [1000] * 8 + [2000, 2200, 2300, 2000, 1000]
    still = []
    for size in sizes:
        record_comparison(store, world.night(sizes={0: size}))
        still.append([one.reason for one in store.alerts.open() if one.exact])
    open_of = [[f"1000 -> {size} bytes"] for size in (2000, 2200, 2300, 2000)]
    assert still[7:] == [[], *open_of, []], "one alert, of the whole distance from the level before its first step"
    [level] = baseline.levels(store, world.jobs[0].id, None, ["pte_size"])
    # An exact number is compared with the run before, and with nothing else.
    assert (level.median, level.runs, level.since, level.enough) == (1000, 1, world.nights[-1], True)


def test_a_step_that_is_declared_is_as_great_as_it_is_off_the_level(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(12):
        record_comparison(store, world.night())
    world.confirm(world.night({0: 1.5}))
    [step] = store.alerts.open()
    job = world.jobs[0].id
    for _ in range(2):
        # The step is recorded already: it gets a remark, and no second step is declared.
        [one] = baseline.accept(store, job, None, ["latency"], step.run_id, user="ada", note="right")
        assert (one.alert, one.declared) == (step.id, False)
    small = world.night({0: 1.5}, noise=0.0)
    record_comparison(store, small)
    [one] = baseline.accept(store, job, None, ["latency"], small, user="ada", note="a new clock")
    assert one.declared
    assert abs(store.alerts.get(one.alert).change) < 0.06
    [kept] = [alert for alert in store.alerts.of_jobs([job]) if alert.id == step.id]
    assert kept.device == "phone"


@pytest.mark.parametrize(("left", "suspected"), [(1, ["htp_cycles"]), (0, [])])
def test_cycles_of_a_program_that_delegates_more_are_not_compared_with_those_before(
    left: int, suspected: list[str]
) -> None:
    """A fusion moves operators from the CPU to the backend: they take cycles that no earlier program took."""
    runs = tuple(Point(f"run {n}", n, math.nan, {}, "hardware", "v") for n in range(13))
    cycles = SeriesPast(1, Series("1", "htp_cycles", "cycles", Direction.LOWER), (*(1e6 + n for n in range(12)), 1.3e6))
    fallback = SeriesPast(2, Series("2", "fallback_ops", "count", Direction.LOWER, exact=True), (*[1.0] * 12, left))
    found = list(compared_series(JobPast("a job", "device", runs, (cycles, fallback)), {}))
    judged = {one.series.series.metric: judge(one.series.series, one.values[:-1], one.values[-1]) for one in found}
    assert [metric for metric, one in judged.items() if one.finding is Finding.REGRESSION] == suspected
    assert (judged["fallback_ops"].finding is Finding.IMPROVEMENT) == (not left)


SLOWER_TEXT = {
    "latency": ("ns", 4e7, 5e7),
    "decode_rate": ("tokens/s", 25.0, 20.0),
    "prefill_rate": ("tokens/s", 4000.0, 862.0),
    "first_token_time[512]": ("ns", 1.28e8, 5.9e8),
    "sustained_rate": ("tokens/s", 24.0, 19.0),
    "sustained_fall": ("1", 0.02, 0.2),
    "method_load_time[kv_forward]": ("ns", 1e9, 2e9),
    "step_time[0-127]": ("ns", 4e7, 5e7),
    "temperature": ("C", 30.0, 45.0),
}
"""Metrics of a program that generates text and got slower: unit, before, after."""


@pytest.mark.parametrize("kind", ["hardware", "virtual"])
def test_text_that_comes_slower_is_a_regression_of_devices_and_no_news_of_a_simulators_host(kind: str) -> None:
    runs = tuple(Point(f"run {n:02}", n, math.nan, {"seconds": "60"}, kind, "v") for n in range(13))
    series = []
    for number, (metric, (unit, was, now)) in enumerate(SLOWER_TEXT.items()):
        better = Direction.NONE if unit == "C" else Direction.HIGHER if unit == "tokens/s" else Direction.LOWER
        values = (*(was * (1 + 0.004 * (n % 3)) for n in range(12)), now)
        series.append(SeriesPast(number, Series(str(number), metric, unit, better), values))
    found = compared_series(JobPast("a job", "device", runs, tuple(series)), {})
    answers = {one.series.series.metric: judge(one.series.series, one.values[:-1], one.values[-1]) for one in found}
    # The curve over positions is of the steps that `latency` has.
    judged = [] if kind == "virtual" else [one for one in SLOWER_TEXT if one not in ("step_time[0-127]", "temperature")]
    assert [metric for metric, one in answers.items() if one.finding is Finding.REGRESSION] == judged
    assert list(answers) == judged
    if judged:
        assert answers["prefill_rate"].reason.startswith("-78.5 % against the median of 12 runs")


def heap_findings(kept: list[float]) -> dict[str, tuple[str, bool, str]]:
    """Return the findings for the newest run; `kept` is the heap kept by the program in each run, among other users."""
    runs = tuple(Point(f"run {n:02}", n, math.nan, {"heap": "measured"}, "hardware", "v") for n in range(len(kept)))
    before = [928_212.0 + 65_536.0 * (n % 3) for n in range(len(kept))]
    before[-1] *= 3
    values = {
        "dsp_heap_before": before,
        "dsp_heap_after": [one + more for one, more in zip(before, kept, strict=True)],
        "dsp_heap_difference": kept,
    }
    series = []
    for number, (metric, numbers) in enumerate(values.items()):
        row = counted(metric, int(numbers[-1]))
        kind = Series(str(number), metric, row.unit, Direction(row.direction), row.exact)
        series.append(SeriesPast(number, kind, tuple(numbers)))
    found = compared_series(JobPast("a job", "phone", runs, tuple(series)), {})
    answers = [(one.series.series, judge(one.series.series, one.values[:-1], one.values[-1])) for one in found]
    return {one.metric: (str(by.finding), one.exact, by.reason) for one, by in answers}


def test_of_the_heap_only_what_the_program_kept_is_judged_and_its_noise_is_none_of_its_news() -> None:
    quiet = [0.0, 0.0, -4096.0, 0.0, 4096.0, 0.0, 0.0, -4096.0, 0.0]
    # "before" and "after" contain the heap of all other programs on the DSP: neither is a property of the program.
    assert {metric: finding for metric, (finding, _, _) in heap_findings([*quiet, 4096.0]).items()} == {
        "dsp_heap_difference": "unchanged"
    }
    [(finding, exact, reason)] = heap_findings([*quiet, 262_144.0]).values()
    assert (finding, exact) == ("regression", False), "it is measured again before anybody is told"
    assert reason.startswith("+262,144 bytes against")
    [(finding, _, _)] = heap_findings([*quiet[:5], 0.0]).values()
    assert finding == "insufficient_data"


def test_a_run_that_is_resumed_has_the_numbers_of_its_last_attempt(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(3):
        record_comparison(store, world.night(sizes={0: 1000}))
    worse = world.night(sizes={0: 1016})
    record_comparison(store, worse)
    [first] = store.alerts.of_run(worse)
    later = Attempt(
        world.jobs[0].id, Verdict.PASSED, Stage.DONE, "", "phone", first.found_ms, 0.2, bundle_key="b",
        measurements=(Measurement("pte_size", "bytes", Direction.LOWER, (1032.0,), exact=True),),
    )  # fmt: skip
    store.record_attempt(worse, later)
    record_comparison(store, worse)
    [again] = store.alerts.of_run(worse)
    assert (again.id, again.reason) == (first.id, "1000 -> 1032 bytes")


def test_remarks_are_of_the_alert_that_they_were_made_of(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(12):
        record_comparison(store, world.night(sizes={0: 1000}, noise=0.0))
    slow = world.night({0: 1.3}, sizes={0: 1016})
    record_comparison(store, slow)
    exact, suspected = sorted(store.alerts.of_run(slow), key=lambda one: one.exact, reverse=True)
    for one in (exact, suspected):
        store.alerts.remark(f"alert:{one.id}", Remark("accepted", "ada", "", "right"))
    # An accepted change stays a level, also if a later judgement does not find it.
    store.alerts.record(slow, [])
    assert [one.id for one in store.alerts.of_run(slow)] == [suspected.id]
    new = NewAlert(
        series_id=exact.series_id, device_kind="hardware", finding="regression", state=AlertState.EXACT,
        last_good=world.nights[-2], first_bad=slow, change=0.1, low=0.1, high=0.1, p_value=0.0, reason="another",
    )  # fmt: skip
    store.alerts.record(slow, [new])
    [still] = store.alerts.open()
    assert (still.reason, still.remark) == ("another", None)


def test_a_job_that_is_gone_does_not_keep_others_from_being_measured(store: Store) -> None:
    world = World(store, jobs=2)
    for _ in range(12):
        record_comparison(store, world.night())
    slow = world.night({0: 1.3, 1: 1.2}, noise=0.0)

    gone: list[str] = []

    def require(past: StoredResult) -> None:
        if past.view.id in (gone or [past.view.id]):
            gone.append(past.view.id)
            raise UsageError("its suite is not here")

    world.require_job = require
    found = world.confirm(slow)
    assert len(found.alerts) == 2
    assert {one.job_id: one.reason for one in found.alerts if one.state == "unknown"} == {
        gone[0]: "its suite is not here"
    }
    assert [one.job_id for one in found.regressions] == [job.id for job in world.jobs if job.id != gone[0]]


def test_a_program_that_is_slower_in_a_lucky_night_is_found_the_same_night(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(12):
        record_comparison(store, world.night(keys={0: "old"}, noise=0.05))
    assert world.confirm(world.nights[-1]).changed == 0
    # The slower program measures as before, by luck.
    lucky = world.night({0: 1.08}, all_by=1 / 1.08, noise=0.0)
    assert not record_comparison(store, lucky).judged.suspected
    found = world.confirm(lucky)
    assert (found.changed, found.changed_not_measured) == (1, 0)
    [step] = found.regressions
    assert (step.job_id, step.first_bad, step.state) == (world.jobs[0].id, lucky, "confirmed")
    assert step.low < step.change < step.high
    assert step.change == pytest.approx(0.077, abs=0.02)
    assert found.alerts == (step,)
    assert store.alerts.open() == [step]


def test_a_program_is_compared_with_the_one_before_it_from_its_second_night_on(store: Store) -> None:
    world = World(store, jobs=2)
    world.night()
    second = world.night({0: 1.08})
    found = world.confirm(second)
    assert [(one.job_id, one.finding) for one in found.regressions] == [(world.jobs[0].id, "regression")]
    # Pairs leave the other program unchanged: it gives no alert, and is not measured again in any run of it.
    assert found.changed == 2
    assert found.alerts == found.regressions
    asked = world.pairs
    assert world.confirm(second).changed == 0
    world.confirm(world.night({0: 1.08}, keys={0: f"0-{second}", 1: f"1-{second}"}))
    assert world.pairs == asked


def test_programs_that_changed_are_measured_in_the_time_that_is_left(store: Store) -> None:
    world = World(store, jobs=3)
    world.night()
    world.gone.add(f"2-{world.nights[0]}")
    slow = world.night({0: 1.3, 1: 1.3, 2: 1.3})
    found = world.confirm(slow, budget_s=0.0)
    # The third has nothing that it could be compared with.
    assert (found.changed, found.changed_not_measured, found.problems, found.regressions) == (0, 2, (), ())

    def gone(call: int) -> None:
        if call == 1:
            raise DeviceGoneError("phone", "no device")

    world.before_pairs = gone
    found = world.confirm(slow)
    # A device that is away is no trouble where nothing stands out.
    assert (found.changed, found.changed_not_measured, found.problems) == (0, 2, ())
    assert "2 programs that changed were not measured" in found.not_all_changed
    assert len(world.confirm(slow).regressions) == 2


def test_a_step_that_a_later_run_told_of_is_not_told_again_of_its_first_run(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(7):
        record_comparison(store, world.night(keys={0: "old"}))
    first = world.night({0: 1.08}, keys={0: "slow"})
    assert world.confirm(first, budget_s=0.0).changed_not_measured == 1
    later = world.night({0: 1.08}, keys={0: "slow"})
    [step] = world.confirm(later).regressions
    assert step.first_bad == first
    again = world.confirm(first)
    assert (again.changed, again.changed_not_measured) == (0, 0)
    assert [one.id for one in store.alerts.open()] == [step.id]


def test_a_program_that_comes_back_is_measured_though_another_one_was_in_between(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(3):
        world.night(keys={0: "a"})
    world.confirm(world.night({0: 1.08}, keys={0: "b"}), budget_s=0.0)
    assert world.confirm(world.night(keys={0: "c"})).changed == 1
    [step] = world.confirm(world.night({0: 1.08}, keys={0: "b"})).regressions
    assert step.low < step.change < step.high
    assert step.change == pytest.approx(0.077, abs=0.02)


def test_programs_that_changed_take_nothing_from_what_stands_out(store: Store) -> None:
    world = World(store, jobs=40)
    for _ in range(9):
        record_comparison(store, world.night(noise=0.005))
    slow = world.night({0: 1.08}, noise=0.005)
    # The pairs are so few that a single program among 40 could not be distinguished from chance.
    pairs: list[int] = []
    world.before_pairs = lambda _: pairs.append(world.pairs)
    found = world.confirm(slow)
    assert pairs[:9] == [0, 4, 5, 6, 7, 8, 9, 10, 20], "ten, and ten in new processes"
    assert {one.job_id for one in found.regressions} == {world.jobs[0].id}


def test_what_was_measured_before_it_stood_out_is_seen_when_it_does(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(2):
        world.night(keys={0: "old"}, noise=0.0)
    slow = world.night({0: 1.3}, keys={0: "slow"}, noise=0.0)
    [series] = [one.id for past in store.history.pasts_of_run(slow) for one in past.series]
    hidden = NewAlert(
        series_id=series, device_kind="hardware", finding="unchanged", state=AlertState.UNKNOWN,
        last_good=world.nights[0], first_bad=slow, change=0.1, low=0.0, high=0.2, p_value=0.02, reason="measured",
    )  # fmt: skip
    store.alerts.add(slow, hidden)
    assert store.alerts.of_run(slow) == []
    # The runs of another machine come later.
    for _ in range(8):
        world.night(keys={0: "old"}, noise=0.0, days_ago=200)
    record_comparison(store, slow)
    [seen] = store.alerts.of_run(slow)
    assert (seen.finding, seen.state, seen.reason) == ("regression", "unknown", "measured")


def test_a_level_that_was_declared_is_not_measured(store: Store) -> None:
    world = World(store, jobs=1)
    for _ in range(3):
        world.night(keys={0: "old"})
    slow = world.night({0: 1.08}, keys={0: "slow"})
    [declared] = baseline.accept(store, world.jobs[0].id, None, ["latency"], slow, user="ada", note="right")
    assert declared.declared
    assert world.confirm(slow).changed == 0
    assert world.pairs == 0


def test_a_program_that_cannot_be_measured_is_not_said_to_wait_for_a_device(store: Store) -> None:
    world = World(store, jobs=1)
    world.night()
    slow = world.night({0: 1.3})

    def require(_: StoredResult) -> None:
        raise UsageError("its suite is not here")

    world.require_job = require
    output = LogLines()
    found = world.confirm(slow)
    assert (found.changed, found.changed_not_measured) == (0, 0)
    assert output[-1] == "programs that changed and cannot be measured: 1: its suite is not here"


def test_the_alerts_of_a_ramp_add_up_to_the_ramp(store: Store) -> None:
    world = World(store, jobs=3, seed=4)
    for night in range(34):
        world.confirm(world.night(dict.fromkeys(range(3), 1.015 ** min(max(night - 11, 0), 12))))
    answer = [sum(one.change for one in known(store, world, job)) for job in range(3)]
    assert sum(answer) / 3 == pytest.approx(12 * math.log(1.015), rel=0.12)


def test_changed_programs_are_measured_in_the_order_of_their_suspicion(store: Store) -> None:
    world = World(store, jobs=3)
    for night in range(12):
        is_last = night == 11
        jobs = None if night >= 9 else [0, 1]
        world.night({0: 1.03 if is_last else 1.0, 1: 0.98 if is_last else 1.0}, noise=0.06, jobs=jobs)
    comparison = compare_with_history(store, world.nights[-1])
    findings = {
        one.past.job_id: answer.finding
        for one, answer in zip(comparison.compared, comparison.judged.judgements, strict=True)
    }
    slower, faster, young = (job.id for job in world.jobs)
    assert findings == {slower: Finding.UNCHANGED, faster: Finding.UNCHANGED, young: Finding.INSUFFICIENT_DATA}
    # A program with too little history comes after slower-looking programs and before faster-looking ones.
    assert [one.past.job_id for one in changed_programs(comparison, {})] == [slower, young, faster]
