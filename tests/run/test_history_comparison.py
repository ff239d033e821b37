"""Weeks of nightly runs through the store, with the measurements after each, and the final alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from log_lines import LogLines
from pair_bench_stub import World

from farm.base.errors import DeviceGoneError, UsageError
from farm.base.log_setup import RecordHandler, begin_logging
from farm.dispatch.history_comparison import changed_programs, compare_with_history, compared_series, record_comparison
from farm.numbers.regressions import baseline
from farm.replay.stored_result import StoredResult
from farm.results.analysis.history import Point
from farm.results.analysis.statistics import Series
from farm.results.analysis.suspected import Finding, Judgement, judge
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.results.measurements import counted
from farm.store.queries.history import JobPast, SeriesPast
from farm.store.records import AlertRecord, AlertState, NewAlert, Remark
from farm.store.store import Store


def known(store: Store, world: World, number: int) -> list[AlertRecord]:
    """Return the confirmed and exact alerts of a job."""
    answer = (AlertState.CONFIRMED, AlertState.EXACT)
    return [one for one in store.alerts.of_jobs([world.jobs[number].id]) if one.state in answer]


def quiet(store: Store, jobs: int, nights: int, **facts: Any) -> World:
    """Return a world with nightly runs in which nothing changed."""
    world = World(store, jobs)
    for _ in range(nights):
        world.night(**facts)
    return world


def test_nights_give_one_alert_for_each_step_and_none_for_a_quiet_series(store: Store) -> None:
    world = quiet(store, 4, 7)
    for night in range(7, 22):
        stays, undone = 1.08 if night >= 12 else 1.0, 1.08 if 9 <= night < 16 else 1.0
        world.confirm(world.night({0: stays, 1: undone}))
    [step] = known(store, world, 0)
    assert (step.finding, step.last_good, step.first_bad) == ("regression", world.nights[11], world.nights[12])
    assert step.low < step.change < step.high
    assert step.change == pytest.approx(0.077, abs=0.02)
    there, back = known(store, world, 1)
    assert (there.finding, there.first_bad) == ("regression", world.nights[9])
    assert (back.finding, back.first_bad) == ("improvement", world.nights[16])
    assert known(store, world, 2) == known(store, world, 3) == []
    # The alert whose change was undone is closed.
    assert [one.id for one in store.alerts.open()] == [step.id]


def test_of_programs_that_step_together_few_are_measured_in_full_and_the_others_say_so(store: Store) -> None:
    world = quiet(store, 24, 10)
    found = world.confirm(world.night(dict.fromkeys(range(9), 1.12)))
    assert {one.job_id for one in found.regressions} == {job.id for job in world.jobs[:9]}
    assert {(one.last_good, one.first_bad) for one in found.regressions} == {tuple(world.nights[-2:])}
    looked_at = [one for one in found.regressions if "which stepped with it" in one.reason]
    assert len(looked_at) >= 4
    assert all(one.low < one.change < one.high for one in looked_at)


def test_a_step_is_told_once_however_late_its_first_run_is_looked_at(store: Store) -> None:
    world = quiet(store, 1, 12)
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
    assert not world.confirm(world.night({0: 1.12})).regressions


def test_what_is_confirmed_stays_so_where_the_device_goes_before_it_is_known_since_when(store: Store) -> None:
    world = quiet(store, 2, 12)
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
    world = quiet(store, 2, 12)
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
    world = quiet(store, 1, 12)
    slow = world.night({0: 1.3})

    def somebody(call: int) -> None:
        if call == 1:
            world.confirm(slow)

    world.before_pairs = somebody
    output = LogLines()
    world.confirm(slow)
    [one] = store.alerts.of_run(slow)
    assert one.state == "confirmed"
    assert [line for line in output if "its result is kept" in line]


def test_a_program_that_was_there_before_is_refuted_unless_the_one_before_it_is_gone(store: Store) -> None:
    world = quiet(store, 2, 12, keys={0: "same", 1: "old"})
    record_comparison(store, world.night(keys={0: "same", 1: "new"}))
    world.gone.add("old")
    # A noisy nightly run of both programs; one is newer than the level.
    found = world.confirm(world.night(keys={0: "same", 1: "new"}, all_by=1.3))
    output = {one.job_id: (one.state, one.reason) for one in found.alerts}
    assert output[world.jobs[0].id][0] == "refuted"
    assert "the program equals that of" in output[world.jobs[0].id][1]
    assert output[world.jobs[1].id] == ("unknown", "no bundle of the earlier runs exists now")
    assert world.pairs == 0
    # A user accepts the change without a measurement: it is a level from now on.
    [unknown] = [one for one in found.alerts if one.state == "unknown"]
    assert unknown.change > 0.2


def test_a_step_that_is_declared_is_as_great_as_it_is_off_the_level(store: Store) -> None:
    world = quiet(store, 1, 12)
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


def findings(kind: str, facts: dict[str, str], *series: tuple[Series, Sequence[float]]) -> dict[str, Judgement]:
    """Return the findings for the newest of some runs by metric."""
    count = len(series[0][1])
    runs = tuple(Point(f"run {n:02}", n, facts, kind, "v") for n in range(count))
    pasts = tuple(SeriesPast(number, one, tuple(values)) for number, (one, values) in enumerate(series))
    found = compared_series(JobPast("a job", runs, pasts), {})
    return {one.series.series.metric: judge(one.series.series, one.values[:-1], one.values[-1]) for one in found}


@pytest.mark.parametrize(("left", "suspected"), [(1, ["htp_cycles"]), (0, [])])
def test_cycles_of_a_program_that_delegates_more_are_not_compared(left: int, suspected: list[str]) -> None:
    """A fusion moves operators from the CPU to the backend: they take cycles that no earlier program took."""
    judged = findings(
        "hardware", {},
        (Series("1", "htp_cycles", "cycles", Direction.LOWER), (*(1e6 + n for n in range(12)), 1.3e6)),
        (Series("2", "fallback_ops", "count", Direction.LOWER, exact=True), (*[1.0] * 12, left)),
    )  # fmt: skip
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
    series = []
    for metric, (unit, was, now) in SLOWER_TEXT.items():
        better = Direction.NONE if unit == "C" else Direction.HIGHER if unit == "tokens/s" else Direction.LOWER
        series.append((Series(metric, metric, unit, better), (*(was * (1 + 0.004 * (n % 3)) for n in range(12)), now)))
    answers = findings(kind, {"seconds": "60"}, *series)
    # The curve over positions is of the steps that `latency` has.
    judged = [] if kind == "virtual" else [one for one in SLOWER_TEXT if one not in ("step_time[0-127]", "temperature")]
    assert list(answers) == judged
    assert {one.finding for one in answers.values()} <= {Finding.REGRESSION}


def heap_findings(kept: list[float]) -> dict[str, Judgement]:
    """Return the findings for the newest run; `kept` is the heap kept by the program in each run, among other users."""
    before = [928_212.0 + 65_536.0 * (n % 3) for n in range(len(kept))]
    before[-1] *= 3
    values = {
        "dsp_heap_before": before,
        "dsp_heap_after": [one + more for one, more in zip(before, kept, strict=True)],
        "dsp_heap_difference": kept,
    }
    rows = {metric: counted(metric, int(numbers[-1])) for metric, numbers in values.items()}
    series = {name: Series(name, name, row.unit, Direction(row.direction), row.exact) for name, row in rows.items()}
    return findings("hardware", {"heap": "measured"}, *((series[name], values[name]) for name in values))


def test_of_the_heap_only_the_part_that_the_program_kept_is_judged_and_its_noise_is_no_news() -> None:
    quiet = [0.0, 0.0, -4096.0, 0.0, 4096.0, 0.0, 0.0, -4096.0, 0.0]
    for kept, finding in (
        ([*quiet, 4096.0], "unchanged"),
        ([*quiet, 262_144.0], "regression"),
        ([*quiet[:5], 0.0], "insufficient_data"),
    ):
        # "before" and "after" contain the heap of all other programs on the DSP: neither is a property of the program.
        assert {metric: str(one.finding) for metric, one in heap_findings(kept).items()} == {
            "dsp_heap_difference": finding
        }


def test_a_run_that_is_resumed_has_the_numbers_of_its_last_attempt(store: Store) -> None:
    world = quiet(store, 1, 3, sizes={0: 1000})
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
    world = quiet(store, 1, 12, sizes={0: 1000}, noise=0.0)
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
    world = quiet(store, 2, 12)
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
    world = quiet(store, 1, 12, keys={0: "old"}, noise=0.05)
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
    world = quiet(store, 2, 1)
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
    world = quiet(store, 3, 1)
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


def test_a_program_that_comes_back_is_measured_though_another_one_was_in_between(store: Store) -> None:
    world = quiet(store, 1, 3, keys={0: "a"})
    world.confirm(world.night({0: 1.08}, keys={0: "b"}), budget_s=0.0)
    assert world.confirm(world.night(keys={0: "c"})).changed == 1
    [step] = world.confirm(world.night({0: 1.08}, keys={0: "b"})).regressions
    assert step.low < step.change < step.high
    assert step.change == pytest.approx(0.077, abs=0.02)


def test_programs_that_changed_take_nothing_from_what_stands_out(store: Store) -> None:
    world = quiet(store, 40, 9, noise=0.005)
    slow = world.night({0: 1.08}, noise=0.005)
    # The pairs are so few that a single program among 40 could not be distinguished from chance.
    pairs: list[int] = []
    world.before_pairs = lambda _: pairs.append(world.pairs)
    found = world.confirm(slow)
    assert pairs[:9] == [0, 4, 5, 6, 7, 8, 9, 10, 20], "ten, and ten in new processes"
    assert {one.job_id for one in found.regressions} == {world.jobs[0].id}


def test_a_level_that_was_declared_is_not_measured(store: Store) -> None:
    world = quiet(store, 1, 3, keys={0: "old"})
    slow = world.night({0: 1.08}, keys={0: "slow"})
    [declared] = baseline.accept(store, world.jobs[0].id, None, ["latency"], slow, user="ada", note="right")
    assert declared.declared
    assert world.confirm(slow).changed == 0
    assert world.pairs == 0


def test_a_program_that_cannot_be_measured_is_not_said_to_wait_for_a_device(store: Store) -> None:
    world = quiet(store, 1, 1)
    slow = world.night({0: 1.3})

    def require(_: StoredResult) -> None:
        raise UsageError("its suite is not here")

    world.require_job = require
    output = LogLines()
    found = world.confirm(slow)
    assert (found.changed, found.changed_not_measured) == (0, 0)
    assert output[-1] == "programs that changed and cannot be measured: 1: its suite is not here"


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
