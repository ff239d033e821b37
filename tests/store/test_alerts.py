"""Alerts of a run, their later states, and remarks of users, on both databases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from farm.base.errors import UnknownNameError
from farm.dispatch.history_comparison import record_comparison
from farm.results.analysis.history import split
from farm.results.attempt import Direction, Measurement, Verdict
from farm.store.records import AlertRecord, AlertState, NewAlert, Remark, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

DAY = 86_400_000
FACTS = {"executorch": "1.5.1", "qnn": "2.51"}


def run(
    store: Store,
    make: Make,
    days_ago: int,
    job: Job,
    *measured: Measurement,
    kind: str = "hardware",
    runtime: dict[str, str] | None = None,
    **facts: str,
) -> str:
    started_ms = now_ms() - days_ago * DAY
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {**FACTS, **facts}, started_ms, "nightly"))
    store.plan_jobs(run_id, [job])
    store.record_device(run_id, make.device(kind=kind, build=facts.get("build", "b1")), runtime)
    store.record_attempt(run_id, make.attempt(job, started_ms=started_ms, measurements=measured))
    store.finish_run(run_id, 0)
    return run_id


def latency(value: float) -> Measurement:
    return Measurement("latency", "ns", Direction.LOWER, (value * 0.99, value, value * 1.01))


def size(value: int) -> Measurement:
    return Measurement("pte_size", "bytes", Direction.LOWER, (float(value),), exact=True)


def sqnr(value: float) -> Measurement:
    return Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (value,))


def nights(store: Store, make: Make, job: Job, count: int = 10, first: int = 30, **facts: str) -> list[str]:
    """Record quiet nightly runs: about 1 ms, 1000 bytes, 40 dB."""
    wobble = (1.0, 1.01, 0.99, 1.005, 0.995)
    return [
        run(store, make, first - n, job, latency(1e6 * wobble[n % 5]), size(1000), sqnr(40.0), **facts)
        for n in range(count)
    ]


def told(alerts: list[AlertRecord]) -> dict[str, tuple[str, str]]:
    return {one.metric: (one.finding, one.state) for one in alerts}


def test_a_quiet_night_says_nothing_and_a_slow_one_names_runs(store: Store, make: Make) -> None:
    job = make.job("conv")
    quiet = nights(store, make, job)
    assert record_comparison(store, quiet[-1]).judged.suspected == ()
    assert store.alerts.of_run(quiet[-1]) == []
    slow = run(store, make, 1, job, latency(1.12e6), size(1000), sqnr(40.0))
    record_comparison(store, slow)
    [alert] = store.alerts.of_run(slow)
    assert (alert.metric, alert.finding, alert.state) == ("latency", "regression", "suspected")
    assert alert.first_bad == slow
    assert alert.last_good == quiet[0]
    assert math.exp(alert.change) == pytest.approx(1.12, rel=0.01)
    assert math.isnan(alert.low)
    # Before the measurement of pairs the alert is not open.
    assert store.alerts.open() == []


def test_an_exact_number_and_accuracy_are_told_although_the_job_passes(store: Store, make: Make) -> None:
    job = make.job("conv")
    before = nights(store, make, job)[-1]
    worse = run(store, make, 1, job, latency(1e6), size(1016), sqnr(38.0))
    record_comparison(store, worse)
    assert told(store.alerts.of_run(worse)) == {
        "pte_size": ("regression", "exact"),
        "sqnr_fp32[0]": ("regression", "exact"),
    }
    exact, figure = store.alerts.open()
    assert (figure.reason, figure.change) == ("40 -> 38 dB", -2.0)
    assert (exact.last_good, exact.first_bad, exact.reason) == (before, worse, "1000 -> 1016 bytes")
    assert exact.low == exact.change == exact.high == pytest.approx(math.log(1.016))


def test_another_test_is_not_compared_and_a_new_compiler_or_sdk_is(store: Store, make: Make) -> None:
    job = make.job("conv")
    nights(store, make, job)
    changed = make.job("conv", seed=7)
    other_case = run(store, make, 2, changed, latency(2e6), size(2000))
    comparison = record_comparison(store, other_case)
    assert store.alerts.of_run(other_case) == []
    assert comparison.insufficient == len(comparison.compared) == 2
    for days_ago, facts in ((1, {"qnn": "2.52"}), (0, {"executorch": "1.6"})):
        other = run(store, make, days_ago, job, latency(2e6), size(2000 + 8 * (1 - days_ago)), **facts)
        record_comparison(store, other)
        assert told(store.alerts.of_run(other)) == {
            "latency": ("regression", "suspected"), "pte_size": ("regression", "exact"),
        }  # fmt: skip


def test_another_skel_on_the_device_is_an_event_and_the_runner_is_that_of_the_device(store: Store, make: Make) -> None:
    job = make.job("conv")
    signed = {"runner": "r", "skel": "s1", "qnn": "2.51"}
    for day in (5, 4):
        # The machine's own build is another one each time: devices do not run it.
        run(store, make, day, job, latency(1e6), runtime=signed, native_runner=f"host-{day}")
    other = run(store, make, 3, job, latency(1e6), runtime={**signed, "skel": "s2"})
    [past] = store.history.pasts_of_jobs(job.id)
    history = split(past.runs)
    assert [(event.text, event.run_id, event.parts) for event in history.events] == [("skel changed", other, False)]
    assert store.runs.view(other).devices[0].runtime == {**signed, "skel": "s2"}


def test_times_and_cycles_of_a_simulated_device_are_not_judged(store: Store, make: Make) -> None:
    job = make.job("conv")

    def cycles(value: float) -> Measurement:
        return Measurement("htp_cycles", "cycles", Direction.LOWER, (value,))

    for day in range(12, 2, -1):
        run(store, make, day, job, latency(1e6), cycles(1e5 + day), kind="virtual")
    slow = run(store, make, 1, job, latency(9e6), cycles(1.08e5), kind="virtual")
    record_comparison(store, slow)
    assert told(store.alerts.of_run(slow)) == {}


def confirmed(alert: AlertRecord) -> NewAlert:
    change = math.copysign(math.log(1.12), alert.change)
    return NewAlert(
        series_id=alert.series_id, device_kind=alert.device_kind, finding=alert.finding, state=AlertState.CONFIRMED,
        last_good=alert.last_good, first_bad=alert.first_bad, change=change,
        low=change - 0.02, high=change + 0.02, p_value=0.001, reason="+12.0 % in 10 pairs",
    )  # fmt: skip


def test_a_confirmed_step_is_open_until_it_is_accepted_or_undone_and_is_not_told_twice(
    store: Store, make: Make
) -> None:
    job = make.job("conv")
    nights(store, make, job)
    slow = run(store, make, 9, job, latency(1.12e6))
    record_comparison(store, slow)
    [alert] = store.alerts.of_run(slow)
    store.alerts.answer(alert.id, confirmed(alert), device="phone", pairs=[(1.0, 1.12), (1.0, math.inf)])
    [still] = store.alerts.open()
    assert (still.state, still.device, still.reason) == ("confirmed", "phone", "+12.0 % in 10 pairs")
    # A second look at the same run leaves the alert as it is.
    record_comparison(store, slow)
    assert store.alerts.open() == [still]
    # The next nightly run is on the new level, and quiet.
    same = run(store, make, 8, job, latency(1.12e6))
    record_comparison(store, same)
    assert store.alerts.of_run(same) == []
    back = run(store, make, 7, job, latency(1.0e6))
    record_comparison(store, back)
    [better] = store.alerts.of_run(back)
    assert better.finding == "improvement"
    store.alerts.answer(better.id, confirmed(better), device="phone", pairs=None)
    assert store.alerts.open() == []
    assert [one.finding for one in store.alerts.of_jobs([job.id])] == ["regression", "improvement"]


def test_what_people_say_stays_and_the_newest_counts(store: Store, make: Make) -> None:
    job = make.job("conv")
    nights(store, make, job)
    worse = run(store, make, 1, job, size(1016))
    record_comparison(store, worse)
    [alert] = store.alerts.open()
    subject = f"alert:{alert.id}"
    store.alerts.remark(subject, Remark("acknowledged", "ada", "grace", "looking\0at it"))
    [seen] = store.alerts.open()
    assert (seen.owner, seen.note, seen.state) == ("grace", "looking␀at it", "exact")
    store.alerts.remark(subject, Remark("accepted", "grace", "", "a new header"))
    assert store.alerts.open() == []
    assert store.alerts.get(alert.id).state == "accepted"
    assert [(one.state, one.user) for one in store.alerts.remarks([subject])[subject]] == [
        ("acknowledged", "ada"), ("accepted", "grace"),
    ]  # fmt: skip
    for number in (4711, 10**30):
        with pytest.raises(UnknownNameError, match="alert"):
            store.alerts.get(number)


def test_a_declared_step_is_the_new_level(store: Store, make: Make) -> None:
    job = make.job("conv")
    nights(store, make, job)
    slow = run(store, make, 3, job, latency(1.5e6))
    comparison = record_comparison(store, slow)
    [alert] = store.alerts.of_run(slow)
    declared = confirmed(alert)
    declared = NewAlert(**{**{name: getattr(declared, name) for name in declared.__struct_fields__},
                           "state": AlertState.ACCEPTED, "change": math.log(1.5)})  # fmt: skip
    store.alerts.declare(slow, declared, Remark("accepted", "ada", "", "meant so"))
    same = run(store, make, 2, job, latency(1.5e6))
    record_comparison(store, same)
    assert store.alerts.of_run(same) == []
    assert comparison.judged.suspected


def test_an_attempt_that_the_farm_lost_has_no_part_in_it(store: Store, make: Make) -> None:
    job = make.job("conv")
    nights(store, make, job)
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", FACTS, now_ms()))
    store.plan_jobs(run_id, [job])
    store.record_device(run_id, make.device(kind="hardware", build="b1"))
    store.record_attempt(run_id, make.attempt(job, verdict=Verdict.INFRA, reason="gone", measurements=(latency(9e6),)))
    assert record_comparison(store, run_id).compared == ()


def test_equal_outputs_that_are_not_any_more_are_a_step_of_infinite_size(store: Store, make: Make) -> None:
    job = make.job("conv")
    for day in range(20, 10, -1):
        run(store, make, day, job, sqnr(140.0 if day == 12 else math.inf))
    off = run(store, make, 9, job, sqnr(60.0))
    record_comparison(store, off)
    [alert] = store.alerts.of_run(off)
    assert (alert.finding, alert.change) == ("regression", -math.inf)
    new = NewAlert(**{**{name: getattr(confirmed(alert), name) for name in NewAlert.__struct_fields__},
                      "change": -math.inf, "low": -math.inf, "high": -math.inf})  # fmt: skip
    assert store.alerts.answer(alert.id, new, device="phone", pairs=[(math.inf, 60.0)])
    [answer] = store.alerts.open()
    assert (answer.low, answer.high) == (-math.inf, -math.inf)
    # A second process measured the alert too, and comes later.
    assert not store.alerts.answer(alert.id, confirmed(alert), device="phone", pairs=None)
    assert store.alerts.open() == [answer]
    same = run(store, make, 8, job, sqnr(61.0))
    assert record_comparison(store, same).insufficient == 1
    # Numbers before the step belong to another level.
    assert store.alerts.of_run(same) == []
