"""Alerts of a run, their later states, and remarks of users, on both databases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from farm.base.errors import UnknownNameError
from farm.dispatch.history_comparison import record_comparison
from farm.results.analysis.history import split
from farm.results.attempt import Direction, Measurement, Verdict
from farm.store.records import AlertRecord, AlertState, NewAlert, Remark
from farm.store.store import Store
from farm.suites.suite import Job

from . import make

change = msgspec.structs.replace


def run(store: Store, days_ago: int, job: Job, *measured: Measurement, **more: Any) -> str:
    more = {"kind": "hardware", "executorch": "1.5.1", "qnn": "2.51", "priority": "nightly", **more}
    return make.run(store, 24 * days_ago, (job, Verdict.PASSED, {"measurements": measured}), **more)


def latency(value: float) -> Measurement:
    return make.latency(value * 0.99, value, value * 1.01)


def sqnr(value: float) -> Measurement:
    return Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (value,))


def nights(store: Store, job: Job) -> list[str]:
    """Record ten quiet nightly runs: about 1 ms, 1000 bytes, 40 dB."""
    levels = (1.0, 1.01, 0.99, 1.005, 0.995) * 2
    return [
        run(store, 30 - n, job, latency(1e6 * level), make.counter(1000), sqnr(40.0)) for n, level in enumerate(levels)
    ]


def compared(store: Store, days_ago: int, job: Job, *measured: Measurement, **more: Any) -> list[AlertRecord]:
    """Record a run, compare it with the runs before, and return its alerts."""
    run_id = run(store, days_ago, job, *measured, **more)
    record_comparison(store, run_id)
    return store.alerts.of_run(run_id)


def told(alerts: list[AlertRecord]) -> dict[str, tuple[str, str]]:
    return {one.metric: (one.finding, one.state) for one in alerts}


def confirmed(alert: AlertRecord, **changes: Any) -> NewAlert:
    step = math.copysign(math.log(1.12), alert.change)
    found = NewAlert(
        series_id=alert.series_id, device_kind=alert.device_kind, finding=alert.finding, state=AlertState.CONFIRMED,
        last_good=alert.last_good, first_bad=alert.first_bad, change=step,
        low=step - 0.02, high=step + 0.02, p_value=0.001, reason="+12.0 % in 10 pairs",
    )  # fmt: skip
    return change(found, **changes)


def test_a_slow_night_names_runs_and_exact_numbers_are_open_at_once(store: Store) -> None:
    job = make.job("conv")
    quiet = nights(store, job)
    assert record_comparison(store, quiet[-1]).judged.suspected == ()
    assert store.alerts.of_run(quiet[-1]) == []
    [alert] = compared(store, 3, job, latency(1.12e6), make.counter(1000), sqnr(40.0))
    assert (alert.metric, alert.finding, alert.state) == ("latency", "regression", "suspected")
    assert alert.last_good == quiet[0]
    assert math.exp(alert.change) == pytest.approx(1.12, rel=0.01)
    assert math.isnan(alert.low)
    # Before the measurement of pairs the alert is not open.
    assert store.alerts.open() == []
    # Trouble of the farm has no part in it.
    lost = make.run(store, 2, (job, Verdict.INFRA, {"measurements": (latency(9e6),)}), kind="hardware")
    assert record_comparison(store, lost).compared == ()

    worse = run(store, 1, job, latency(1e6), make.counter(1016), sqnr(38.0))
    record_comparison(store, worse)
    exact, figure = store.alerts.open()
    assert told([exact, figure]) == dict.fromkeys(("pte_size", "sqnr_fp32[0]"), ("regression", "exact"))
    assert (figure.reason, figure.change) == ("40 -> 38 dB", -2.0)
    assert (exact.last_good, exact.first_bad, exact.reason) == (alert.first_bad, worse, "1000 -> 1016 bytes")
    assert exact.low == exact.change == exact.high == pytest.approx(math.log(1.016))

    # The newest remark of a user counts, and all stay.
    subject = f"alert:{exact.id}"
    store.alerts.remark(subject, Remark("acknowledged", "ada", "grace", "looking\0at it"))
    seen = store.alerts.open()[0]
    assert (seen.owner, seen.note, seen.state) == ("grace", "looking␀at it", "exact")
    store.alerts.remark(subject, Remark("accepted", "grace", "", "a new header"))
    assert [one.id for one in store.alerts.open()] == [figure.id]
    assert store.alerts.get(exact.id).state == "accepted"
    remarks = store.alerts.remarks([subject])[subject]
    assert [(one.state, one.user) for one in remarks] == [("acknowledged", "ada"), ("accepted", "grace")]
    for number in (4711, 10**30):
        with pytest.raises(UnknownNameError, match="alert"):
            store.alerts.get(number)


def test_another_test_is_not_compared_and_a_new_compiler_or_sdk_is(sqlite_store: Store) -> None:
    store, job = sqlite_store, make.job("conv")
    nights(store, job)
    other_case = run(store, 2, make.job("conv", seed=7), latency(2e6), make.counter(2000))
    comparison = record_comparison(store, other_case)
    assert store.alerts.of_run(other_case) == []
    assert comparison.insufficient == len(comparison.compared) == 2
    for days_ago, facts in ((1, {"qnn": "2.52"}), (0, {"executorch": "1.6"})):
        alerts = compared(store, days_ago, job, latency(2e6), make.counter(2008 - 8 * days_ago), **facts)
        assert told(alerts) == {"latency": ("regression", "suspected"), "pte_size": ("regression", "exact")}


def test_another_skel_on_the_device_is_an_event_and_the_machines_runner_is_none(
    sqlite_store: Store,
) -> None:
    store, job = sqlite_store, make.job("conv")
    signed = {"runner": "r", "skel": "s1", "qnn": "2.51"}
    for day in (5, 4):
        # The machine's own build is another one each time: devices do not run it.
        run(store, day, job, latency(1e6), runtime=signed, native_runner=f"host-{day}")
    other = run(store, 3, job, latency(1e6), runtime={**signed, "skel": "s2"})
    [past] = store.history.pasts_of_jobs(job.id)
    events = split(past.runs).events
    assert [(event.text, event.run_id, event.parts) for event in events] == [("skel changed", other, False)]
    assert store.runs.view(other).devices[0].runtime == {**signed, "skel": "s2"}


def test_times_and_cycles_of_a_simulated_device_are_not_judged(sqlite_store: Store) -> None:
    job = make.job("conv")

    def cycles(value: float) -> Measurement:
        return Measurement("htp_cycles", "cycles", Direction.LOWER, (value,))

    for day in range(12, 2, -1):
        run(sqlite_store, day, job, latency(1e6), cycles(1e5 + day), kind="virtual")
    assert compared(sqlite_store, 1, job, latency(9e6), cycles(1.08e5), kind="virtual") == []


def test_a_confirmed_step_is_open_until_it_is_undone_and_an_accepted_one_is_the_new_level(
    store: Store,
) -> None:
    job = make.job("conv")
    nights(store, job)
    slow = run(store, 9, job, latency(1.12e6))
    record_comparison(store, slow)
    [alert] = store.alerts.of_run(slow)
    store.alerts.answer(alert.id, confirmed(alert), device="phone", pairs=[(1.0, 1.12), (1.0, math.inf)])
    [still] = store.alerts.open()
    assert (still.state, still.device, still.reason) == ("confirmed", "phone", "+12.0 % in 10 pairs")
    # A second look at the same run leaves the alert as it is.
    record_comparison(store, slow)
    assert store.alerts.open() == [still]
    # The next nightly run is on the new level, and quiet.
    assert compared(store, 8, job, latency(1.12e6)) == []
    [better] = compared(store, 7, job, latency(1.0e6))
    assert better.finding == "improvement"
    store.alerts.answer(better.id, confirmed(better), device="phone", pairs=None)
    assert store.alerts.open() == []
    assert [one.finding for one in store.alerts.of_jobs([job.id])] == ["regression", "improvement"]

    [meant] = compared(store, 3, job, latency(1.5e6))
    declared = confirmed(meant, state=AlertState.ACCEPTED, change=math.log(1.5))
    store.alerts.declare(meant.first_bad, declared, Remark("accepted", "ada", "", "meant so"))
    assert compared(store, 2, job, latency(1.5e6)) == []


def test_equal_outputs_that_are_not_any_more_are_a_step_of_infinite_size(store: Store) -> None:
    job = make.job("conv")
    for day in range(20, 10, -1):
        run(store, day, job, sqnr(140.0 if day == 12 else math.inf))
    [alert] = compared(store, 9, job, sqnr(60.0))
    assert (alert.finding, alert.change) == ("regression", -math.inf)
    endless = confirmed(alert, change=-math.inf, low=-math.inf, high=-math.inf)
    assert store.alerts.answer(alert.id, endless, device="phone", pairs=[(math.inf, 60.0)])
    [answer] = store.alerts.open()
    assert (answer.low, answer.high) == (-math.inf, -math.inf)
    # A second process measured the alert too, and comes later.
    assert not store.alerts.answer(alert.id, confirmed(alert), device="phone", pairs=None)
    assert store.alerts.open() == [answer]
    # Numbers before the step belong to another level.
    same = run(store, 8, job, sqnr(61.0))
    assert record_comparison(store, same).insufficient == 1
    assert store.alerts.of_run(same) == []
