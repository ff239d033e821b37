"""Histories of jobs -> facts of charts: series with levels, events and alerts. Pure; `reports/charts.js` draws them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from farm.devices.health import Event, HealthEvent
from farm.report.model.alerts import change_line
from farm.report.model.drift import health_check_p50
from farm.report.model.trends import level_steps
from farm.results.analysis.facts import changed_facts
from farm.results.analysis.history import fact_text
from farm.results.analysis.scale import scale_of
from farm.store.records import AlertRecord, HistoryPoint

# Units of axes: the factor of a stored value, and the name of the unit.
_AXES = {"ns": (1e-6, "ms"), "us": (1e-3, "ms"), "s": (1e3, "ms"), "bytes": (1 / 1024, "KiB"), "1": (1.0, "")}
# Facts of a commit, which every point names, and of the command.
_QUIET = frozenset({"commit", "dirty", "executorch_content", "native_runner", "profile", "heap", "seconds"})
_SDK = ("qnn", "skel", "runtime", "hexagon")


class PlotPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a series in a run."""

    run_id: str = ""
    time_ms: int
    value: float
    """In the unit of the plot."""
    n: int
    """Samples."""
    commit: str = ""
    device: str
    failed: bool
    local: bool = False
    """True for a local run, which is no part of the line."""


class PlotLevel(msgspec.Struct, frozen=True):
    """Level of a series between two changes."""

    from_ms: int
    to_ms: int
    value: float


class PlotSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Series of one job on one kind of device, oldest point first."""

    job_id: str
    device_kind: str
    points: list[PlotPoint]
    levels: list[PlotLevel]
    """Empty without a change of level."""


class PlotEvent(msgspec.Struct, frozen=True):
    """Something that changed beside the commit."""

    time_ms: int
    kind: str
    """`toolchain`, `SDK`, `firmware`, `device` or `case`."""
    text: str


class PlotAlert(msgspec.Struct, frozen=True):
    """Alert of a series."""

    id: int
    job_id: str
    run_id: str
    time_ms: int
    text: str


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Chart of one metric over time, of one or several jobs."""

    metric: str
    unit: str
    """Unit of the axis; empty for a plain number."""
    better: str
    """`lower`, `higher` or empty."""
    series: list[PlotSeries]
    events: list[PlotEvent]
    alerts: list[PlotAlert]

    @property
    def text(self) -> str:
        """Content in words, for readers without the image."""
        many = sum(len(one.points) for one in self.series)
        unit = f" in {self.unit}" if self.unit else ""
        return f"{self.metric}{unit} of {len(self.series)} series with {many} values; the table below has the numbers"


def plots_of(
    points: Iterable[HistoryPoint],
    facts: Mapping[str, Mapping[str, str]],
    alerts: Sequence[AlertRecord] = (),
    metrics: Sequence[str] = (),
) -> list[Plot]:
    """Return a plot for each metric with a value, in the order of `metrics`, without them by name.

    `facts` are fingerprints by their hash; series are drawn together where metric and unit agree.
    """
    known = [one for one in points if one.metric and one.value is not None and math.isfinite(one.value)]
    known.sort(key=lambda one: (one.metric, one.unit, one.job_id, one.device_kind, one.time_ms, one.run_id))
    found = []
    for (metric, unit), of_metric in groupby(known, key=lambda one: (one.metric, one.unit)):
        factor, shown = _AXES.get(unit, (1.0, unit))
        series: list[PlotSeries] = []
        events: set[PlotEvent] = set()
        times: dict[tuple[str, str], int] = {}
        for (job_id, kind), group in groupby(of_metric, key=lambda one: (one.job_id, one.device_kind)):
            listed = list(group)
            direction = listed[0].direction
            times |= {(job_id, one.run_id): one.time_ms for one in listed}
            series.append(_series(job_id, kind, listed, factor))
            events |= set(_events(listed, facts))
        marks = [
            PlotAlert(one.id, one.job_id, one.first_bad, times[one.job_id, one.first_bad], change_line(one))
            for one in alerts
            if one.metric == metric and one.unit == unit and (one.job_id, one.first_bad) in times
        ]
        found.append(
            Plot(
                metric=metric,
                unit=shown,
                better=direction if direction in ("lower", "higher") else "",
                series=series,
                events=sorted(events, key=lambda one: (one.time_ms, one.kind)),
                alerts=marks,
            )
        )
    place = {metric: number for number, metric in enumerate(metrics)}
    return sorted(found, key=lambda one: (place.get(one.metric, len(place)), one.metric))


def health_check_plots(events: Sequence[HealthEvent]) -> list[Plot]:
    """Return the times of a device's health check as a plot, from events, newest first; none with fewer than two."""
    points = [
        PlotPoint(
            time_ms=event.time_ms,
            value=median / 1e6,
            n=len(event.latency_ns),
            device=event.device,
            failed=event.event == Event.CHECK_FAILED,
        )
        for event in reversed(events)
        if (median := health_check_p50(event)) is not None
    ]
    if len(points) < 2:
        return []
    levels = _levels(points, "latency", "ns", 1e-6)
    series = PlotSeries(job_id="", device_kind="", points=points, levels=levels)
    marks = [
        PlotEvent(event.time_ms, "device", f"{event.event}: {event.reason}" if event.reason else event.event)
        for event in reversed(events)
        if event.event not in (Event.CHECK_PASSED, Event.JOB_DONE)
    ]
    return [Plot(metric="health check", unit="ms", better="lower", series=[series], events=marks, alerts=[])]


def _series(job_id: str, kind: str, points: Sequence[HistoryPoint], factor: float) -> PlotSeries:
    shown = [
        PlotPoint(
            run_id=one.run_id,
            time_ms=one.time_ms,
            value=(one.value or 0.0) * factor,
            n=one.n,
            commit=one.commit or "",
            device=one.device,
            failed=one.verdict == "failed",
            local=bool(one.local),
        )
        for one in points
    ]
    levels = _levels([one for one in shown if not one.local], points[0].metric, points[0].unit, factor)
    return PlotSeries(job_id=job_id, device_kind=kind, points=shown, levels=levels)


def _levels(points: Sequence[PlotPoint], metric: str, unit: str, factor: float) -> list[PlotLevel]:
    """Return the levels of a series with a change that matters."""
    cuts = [place for place, _ in level_steps(scale_of(metric, unit), [one.value / factor for one in points])]
    if not cuts:
        return []
    parts = [points[begin:end] for begin, end in pairwise([0, *cuts, len(points)])]
    return [
        PlotLevel(part[0].time_ms, part[-1].time_ms, statistics.median(one.value for one in part)) for part in parts
    ]


def _events(points: Sequence[HistoryPoint], facts: Mapping[str, Mapping[str, str]]) -> Iterable[PlotEvent]:
    branch = [one for one in points if not one.local]
    known = {branch[0].device, ""} if branch else set()
    for was, now in pairwise(branch):
        if was.case_version != now.case_version:
            yield PlotEvent(now.time_ms, "case", "another test under the same name")
        # Devices take turns from run to run; only the first run on a device is a mark.
        if now.device not in known:
            known.add(now.device)
            yield PlotEvent(now.time_ms, "device", f"first run on {now.device}")
        if was.fingerprint == now.fingerprint and was.device_facts == now.device_facts:
            continue
        sides = [{**facts.get(one.fingerprint, {}), **one.device_facts} for one in (was, now)]
        for name, (old, new) in changed_facts(*sides).items():
            if name not in _QUIET:
                kind = "firmware" if name == "device_build" else "SDK" if name.startswith(_SDK) else "toolchain"
                yield PlotEvent(now.time_ms, kind, fact_text(name, old or None, new or None))
