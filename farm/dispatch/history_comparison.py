"""Comparison of a run's numbers with earlier runs for suspected changes, without a device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from farm.base.grouping import grouped
from farm.report.model.format import first_of, plural
from farm.results.analysis import suspected
from farm.results.analysis.history import Point, changes, split
from farm.results.analysis.statistics import GATES, TURNS, difference, scaled
from farm.store.queries.alerts import Standing, standing
from farm.store.records import STEPS, AlertRecord, AlertState, NewAlert
from farm.suites.figures import VERIFICATION_TIME, counter_of, is_of_host

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from farm.store.queries.history import JobPast, SeriesPast
    from farm.store.store import Store

TIMES = ("htp_cycles", "latency")
"""Metrics of a program's time, the most informative first."""
TEXT_RATES = ("prefill_rate",)
"""Further rates of text generation, whose latency is the time of decode steps."""
COMPILER = ("executorch", "torch", "torchao", "qnn")
"""Facts that name the compiler of a program."""
_OF_ITS_SHARE, _LEFT = "htp_cycles", "fallback_ops"


# Numbers that are named in one line.
_NAMED = 3


class ComparedSeries(msgspec.Struct, frozen=True):
    """Number of the run, and the runs that it is compared with."""

    past: JobPast
    series: SeriesPast
    points: tuple[Point, ...]
    """Points comparable with the newest one, which is last, oldest first; their values are `values`."""
    values: tuple[float, ...]
    steps: dict[int, float]
    """Index of the first run on a new level, and the change."""
    known_findings: frozenset[str] = frozenset()
    """Findings that newer runs gave, as a step that came with this run or with one near it."""
    standing: Standing = Standing()
    """Distance from the accepted level, and the open alert, before the newest run."""

    @property
    def key(self) -> tuple[int, str]:
        """Key of its alerts: series and device kind."""
        return self.series.id, self.points[-1].device_kind

    @property
    def known(self) -> dict[int, float]:
        """Return the steps of earlier runs."""
        return {step: change for step, change in self.steps.items() if step < len(self.points) - 1}

    @property
    def first(self) -> int:
        """Return the index of the oldest run of the level, which a confirmation takes as the good run."""

        return suspected.reference(self.series.series, self.values[:-1], self.known)


class HistoryComparison(msgspec.Struct, frozen=True):
    """All numbers of a run, and the suspected regressions among them."""

    compared: tuple[ComparedSeries, ...]
    judged: suspected.RunJudgement
    """Judgement of the run, with indices into `compared`."""
    alerts: Mapping[tuple[int, str], Sequence[AlertRecord]]
    """Alerts of other runs, by series and device kind."""
    insufficient: int
    """Numbers that have too few runs to compare with."""
    private: str = ""
    """Id of a local run, whose findings are shown to its user alone; empty for a run of its branch."""

    def summary_lines(self, *, confirm: bool = False) -> list[str]:
        """Return the lines for the user, none for a quiet run. `confirm` is true if numbers are measured again."""
        lines = [shift.reason for shift in self.judged.shifts]
        exact, looks = len(self.judged.exact), len(self.judged.suspected)
        if exact:
            where = f"'farm report {self.private}' shows" if self.private else "'farm alerts list' lists"
            lines.append(f"{plural(exact, 'deterministic metric')} changed: {where} what got worse")
        if flipping := [self.compared[index] for index in self.judged.flipping]:
            names = [f"{one.series.series.metric} of {one.past.job_id}" for one in flipping]
            lines.append(f"not deterministic, one alert each: {first_of(names, _NAMED)}")
        if looks:
            what, other = plural(looks, "number looks", "numbers look"), "its branch" if self.private else "before"
            again = f"farm perf confirm --run {self.private}" if self.private else "farm perf confirm"
            lines.append(f"{what} different from {other}" + ("" if confirm else f": '{again}' measures again"))
        return lines


def is_judged(past: JobPast, one: SeriesPast) -> bool:
    """Return whether a number belongs to the program: times of a simulated device depend on this machine."""
    counter = counter_of(one.series.metric)
    if one.series.metric == VERIFICATION_TIME or (counter is not None and not counter.judged):
        return False
    return not is_of_host(one.series.metric, one.series.unit, past.runs[-1].device_kind)


def known_alerts(store: Store, pasts: Iterable[JobPast], branch: str) -> dict[tuple[int, str], list[AlertRecord]]:
    """Return all alerts of jobs on a branch, by series and device kind."""
    alerts = store.alerts.of_jobs((past.job_id for past in pasts), branch)
    return grouped(((alert.series_id, alert.device_kind), alert) for alert in alerts)


def compare_with_history(store: Store, run_id: str, *, programs: Collection[tuple[str, str]] = ()) -> HistoryComparison:
    """Judge every number of a run against earlier runs of its branch, without a record.

    A local run is judged as if it came after the runs of the branch; `programs` as in `judge_run`.
    """

    pasts = store.history.pasts_of_run(run_id)
    branch, private = store.runs.branch(run_id)
    alerts = known_alerts(store, pasts, branch)
    # Alerts of newer runs count as well: a run is judged again after a resume or a late import.
    known = {key: [one for one in found if one.run_id != run_id] for key, found in alerts.items()}
    compared = [one for past in pasts for one in compared_series(past, known)]
    judged = suspected.judge_run(
        [
            suspected.Observation(
                one.series.series,
                one.points[-1].device,
                _levelled(one),
                one.values[-1],
                [point.place for point in one.points],
                is_open=one.standing.alert is not None,
            )
            for one in compared
        ],
        programs=programs,
    )

    def is_new(index: int) -> bool:
        return judged.judgements[index].finding not in compared[index].known_findings

    judged = msgspec.structs.replace(
        judged, suspected=tuple(filter(is_new, judged.suspected)), exact=tuple(filter(is_new, judged.exact))
    )
    insufficient = sum(judgement.finding is suspected.Finding.INSUFFICIENT_DATA for judgement in judged.judgements)
    return HistoryComparison(tuple(compared), judged, known, insufficient, run_id if private else "")


def compared_series(past: JobPast, known: Mapping[tuple[int, str], Sequence[AlertRecord]]) -> Iterator[ComparedSeries]:
    """Yield the numbers of a job's newest run that are judged; `known` is of `known_alerts`. Pure."""

    # Runs are comparable or not for all numbers of a job alike.
    comparable = {point.run_id for point in split(past.runs).comparable()}
    indices = [index for index, run in enumerate(past.runs) if run.run_id in comparable]
    started_ms = {run.run_id: run.started_ms for run in past.runs}
    left = next((one.values for one in past.series if one.series.metric == _LEFT), None)
    for one in past.series:
        if math.isnan(one.values[-1]) or not is_judged(past, one):
            continue
        having = [index for index in indices if not math.isnan(one.values[index])]
        if left is not None and one.series.metric == _OF_ITS_SHARE:
            # A program that delegates more than those before has more cycles, and is no worse for it.
            having = [index for index in having if left[index] == left[-1] or math.isnan(left[-1])]
        points = tuple(past.runs[index] for index in having)
        values = tuple(one.values[index] for index in having)
        all_alerts = known.get((one.id, past.runs[-1].device_kind), ())
        alerts = [alert for alert in all_alerts if alert.state in STEPS]
        newest = points[-1].run_id
        one = _if_deterministic(one, points, values)  # noqa: PLW2901 - the same series
        found = frozenset(alert.finding for alert in alerts if alert.last_good < newest < alert.first_bad)
        before = standing((alert for alert in all_alerts if alert.first_bad < newest), started_ms)
        yield ComparedSeries(past, one, points, values, _steps(points, alerts), found, before)


def _if_deterministic(one: SeriesPast, points: Sequence[Point], values: Sequence[float]) -> SeriesPast:
    """Return the series as an exact one if it repeated to the last bit, on one device, and now does so or is beyond
    what pairs would confirm."""

    series = one.series
    if series.exact or not suspected.repeats(series, values[:-1]) or points[-1].place != points[-2].place:
        return one
    was, now = scaled(series.scale, values[-2:]).tolist()
    if 0.0 < abs(difference(now, was)) <= GATES[series.scale].confirmed:
        return one
    return msgspec.structs.replace(one, series=msgspec.structs.replace(series, exact=True))


def changed_programs(
    comparison: HistoryComparison, measured: Mapping[tuple[int, str], Collection[str]]
) -> list[ComparedSeries]:
    """Return the numbers to measure without a suspicion by history, the most suspicious first. Pure.

    These are times of jobs whose program differs from the program of the oldest comparable run, if the history does not
    exclude a regression. `measured` has the measured runs by series and device kind: a measured program is not measured
    again in later runs.
    """

    # Most informative time of each job and kind of device.
    best: dict[tuple[str, str], tuple[int, int]] = {}
    for index, one in enumerate(comparison.compared):
        metric, job = one.series.series.metric, (one.past.job_id, one.points[-1].device_kind)
        if metric in TIMES and not one.series.series.exact:
            best[job] = min(best.get(job, (len(TIMES), 0)), (TIMES.index(metric), index))
    found: list[tuple[float, ComparedSeries]] = []
    for _, index in best.values():
        one, judgement = comparison.compared[index], comparison.judged.judgements[index]
        # A step may be known that came with this run, or with one near it, as from a later run.
        is_known = len(one.points) - 1 in one.steps or suspected.Finding.REGRESSION in one.known_findings
        if suspected.may_hide_regression(one.series.series, judgement) and _is_new(one, measured) and not is_known:
            is_young = judgement.finding is suspected.Finding.INSUFFICIENT_DATA
            sign = 1.0 if one.series.series.direction == "lower" else -1.0
            found.append((0.0 if is_young else sign * judgement.sigmas, one))
    return [one for _, one in sorted(found, key=lambda item: -item[0])]


def _is_new(one: ComparedSeries, measured: Mapping[tuple[int, str], Collection[str]]) -> bool:
    """Return whether a program, or what executes it, has older ones to be compared with, and never was."""
    new = one.points[-1]
    runs = {point.run_id for point in one.points if point.side == new.side}
    return bool(new.bundle) and one.points[0].side != new.side and runs.isdisjoint(measured.get(one.key, ()))


def found_alerts(comparison: HistoryComparison) -> list[NewAlert]:
    """Return the alerts to record: suspected changes, and exact numbers that changed. Pure."""
    return [
        *(_alert(comparison, index, AlertState.EXACT) for index in comparison.judged.exact),
        *(_alert(comparison, index, AlertState.SUSPECTED) for index in comparison.judged.suspected),
        *(
            _alert(comparison, index, AlertState.REFUTED)
            for index in range(len(comparison.compared))
            if _returned(comparison, index)
        ),
    ]


def _returned(comparison: HistoryComparison, index: int) -> bool:
    """Return whether a number is back on the level before an open change that could not be measured."""

    one, judgement = comparison.compared[index], comparison.judged.judgements[index]
    alert = one.standing.alert
    if alert is None or alert.state != AlertState.UNKNOWN or judgement.finding is not suspected.Finding.UNCHANGED:
        return False
    bad = [point for point in one.points if point.run_id >= alert.first_bad]
    if 2 * len(bad) > judgement.count or bad[0].side[1:] == bad[-1].side[1:]:
        # Most runs are of the level before, so the median is too; and one runtime has one level.
        return False
    # The shift of a device, which is no part of the judged change, may be the very change.
    was, now = scaled(one.series.series.scale, [judgement.baseline, one.values[-1]])
    return bool(abs(now - was) < abs(alert.change) / 2.0)


def record_comparison(store: Store, run_id: str) -> HistoryComparison:
    """Judge every number of a run, record the alerts, and return the findings."""
    comparison = compare_with_history(store, run_id)
    store.alerts.record(run_id, found_alerts(comparison))
    return comparison


def _steps(points: Sequence[Point], alerts: Iterable[AlertRecord]) -> dict[int, float]:
    found: dict[int, float] = {}
    for alert in alerts:
        if not alert.exact and not math.isnan(alert.change):
            index = next((index for index, point in enumerate(points) if point.run_id >= alert.first_bad), 0)
            if 0 < index < len(points):
                found[index] = found.get(index, 0.0) + alert.change
    return found


def _levelled(one: ComparedSeries) -> list[float]:

    if one.series.series.exact:
        return list(one.values[:-1])
    # A step that came with this very run is taken out of all before it.
    return suspected.levelled(one.series.series.scale, one.values[:-1], one.steps)


def _alert(comparison: HistoryComparison, index: int, state: AlertState) -> NewAlert:

    one, judgement = comparison.compared[index], comparison.judged.judgements[index]
    exact = state is AlertState.EXACT
    good = one.points[-2 if exact else one.first]
    return NewAlert(
        series_id=one.series.id,
        device_kind=one.points[-1].device_kind,
        finding=judgement.finding,
        state=state,
        last_good=good.run_id,
        first_bad=one.points[-1].run_id,
        change=judgement.change,
        low=judgement.change if exact else math.nan,
        high=judgement.change if exact else math.nan,
        p_value=judgement.p_value,
        likely_cause=", ".join(text for text, _ in changes(good, one.points[-1])) if exact else "",
        reason=judgement.reason + (f" with {_compiler(one.points[-1])}" if judgement.turns >= TURNS else ""),
    )


def _compiler(point: Point) -> str:
    """Return the versions that compiled the program of a run."""
    return ", ".join(f"{name} {point.facts[name]}" for name in COMPILER if name in point.facts) or "an unknown compiler"
