"""Level that a number is compared with, and acceptance of a new level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

import msgspec
import numpy as np

from farm.base.errors import UsageError
from farm.dispatch.history_comparison import compared_series, is_judged, known_alerts
from farm.results.analysis.history import SeriesEvent, split
from farm.results.analysis.statistics import difference, median, scaled
from farm.results.analysis.suspected import BASELINE, LEAST_BASELINE, Finding, levelled, repeats, way
from farm.store.queries.history import JobPast, SeriesPast
from farm.store.records import STEPS, AlertRecord, AlertState, NewAlert, Remark, RemarkState
from farm.store.store import Store
from farm.store.values import branch_text

_UNDECIDED = frozenset({AlertState.SUSPECTED, AlertState.UNKNOWN})


class Level(msgspec.Struct, frozen=True):
    """Level that the next run of a number is compared with."""

    job_id: str
    metric: str
    unit: str
    device_kind: str
    runs: int
    """Comparable ones, of the 21 that count."""
    enough: bool
    """True if the runs suffice for a judgement."""
    deterministic: bool
    """True for an exact metric, and for a figure of outputs that repeats to the last bit."""
    median: float
    """On the level of the newest run; NaN without runs."""
    since: str
    """The first run of the level: of the class, or the newest step."""
    events: tuple[SeriesEvent, ...]
    """Events that parted or moved the series, oldest first."""


class Accepted(msgspec.Struct, frozen=True):
    """A number whose new level is right from now on."""

    job_id: str
    metric: str
    alert: int
    declared: bool
    """True for a step without an alert, known from a user alone."""


def levels(store: Store, pattern: str, soc: str | None, metrics: Collection[str], branch: str = "") -> list[Level]:
    """Return the levels of the numbers of jobs in a branch. Raises UnknownNameError."""
    found = []
    pasts = store.history.pasts_of_jobs(pattern, soc, branch=branch)
    alerts = known_alerts(store, pasts, branch)
    for past in pasts:
        events = split(past.runs).events
        for compared in compared_series(past, alerts):
            if metrics and compared.series.series.metric not in metrics:
                continue
            first = max([0, *compared.steps])
            series, exact = compared.series.series, repeats(compared.series.series, compared.values)
            if exact:
                # An exact metric is compared with the run before alone.
                first = len(compared.values) - len(
                    list(takewhile(compared.values[-1].__eq__, reversed(compared.values)))
                )
            values = compared.values[first:][-BASELINE:]
            enough = exact or len(compared.points) >= LEAST_BASELINE
            found.append(
                Level(
                    past.job_id, series.metric, series.unit, past.runs[-1].device_kind, len(values),
                    enough, exact, statistics.median(values) if values else math.nan, compared.points[first].run_id,
                    events,
                )
            )  # fmt: skip
    return found


def accept(
    store: Store,
    pattern: str,
    soc: str | None,
    metrics: Collection[str],
    run_id: str | None,
    *,
    user: str,
    note: str,
    branch: str = "",
) -> list[Accepted]:
    """Say that the level that numbers of a branch have in a run of it, or in their newest, is right; return which.

    Without `metrics` all of which an alert is open, or that are suspected in that run. A number that is named and
    has no alert gets a step there, as great as it is off the level before. Raises UnknownNameError, and UsageError for
    a run that does not belong to the branch.
    """
    if run_id is not None:
        _require_in_branch(store, run_id, branch)
    remark = Remark(RemarkState.ACCEPTED, user, "", note)
    still_open = {alert.id for alert in store.alerts.open(branch=branch)}
    done = []
    pasts = store.history.pasts_of_jobs(pattern, soc, branch=branch)
    known = known_alerts(store, pasts, branch)
    for past in pasts:
        until = past.runs[-1].run_id if run_id is None else run_id
        for one in past.series:
            if (metrics and one.series.metric not in metrics) or not is_judged(past, one):
                continue
            alerts = [
                alert
                for alert in known.get((one.id, past.runs[-1].device_kind), ())
                if (alert.id in still_open and alert.first_bad <= until)
                or (alert.run_id == until and alert.state in _UNDECIDED and alert.finding != Finding.UNCHANGED)
                or (metrics and alert.first_bad == until and alert.state in STEPS)
            ]
            for alert in alerts:
                store.alerts.remark(f"alert:{alert.id}", remark)
                done.append(Accepted(past.job_id, one.series.metric, alert.id, declared=False))
            if not alerts and metrics and (step := _step(past, one, until, known)):
                number = store.alerts.declare(until, step, remark)
                done.append(Accepted(past.job_id, one.series.metric, number, declared=True))
    return done


def _require_in_branch(store: Store, run_id: str, branch: str) -> None:
    of_run, private = store.runs.branch(run_id)
    if private:
        raise UsageError(
            f"run {run_id} was only compared with branch {branch_text(of_run)}: its numbers are in no baseline"
        )
    if of_run != branch:
        raise UsageError(
            f"run {run_id} is of branch {branch_text(of_run)}: name it with --branch {branch_text(of_run)}"
        )


def _step(
    past: JobPast, one: SeriesPast, until: str, known: Mapping[tuple[int, str], Sequence[AlertRecord]]
) -> NewAlert | None:
    """Return the step that a number makes in a run, however small; None where it has no value then, or none before."""
    runs = [run.run_id for run in past.runs]
    if until not in runs:
        return None
    count = runs.index(until) + 1
    then = msgspec.structs.replace(one, values=one.values[:count])
    [*found] = compared_series(msgspec.structs.replace(past, runs=past.runs[:count], series=(then,)), known)
    if not found:
        return None
    [compared] = found
    scale, points = one.series.scale, compared.points
    level = scaled(scale, levelled(scale, compared.values[:-1], compared.steps))
    level = level[~np.isnan(level)][-BASELINE:]
    now = float(scaled(scale, compared.values[-1:])[0])
    if not len(level) or math.isnan(now):
        return None
    change = difference(now, median(level))
    return NewAlert(
        series_id=one.id,
        device_kind=points[-1].device_kind,
        finding=way(one.series.direction, change),
        state=AlertState.ACCEPTED,
        last_good=points[-2].run_id,
        first_bad=until,
        change=change,
        reason="declared, not measured",
    )
