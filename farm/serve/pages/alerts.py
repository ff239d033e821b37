"""Alerts about changed numbers, and one with its chart and remarks."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farm.report.model import format as fmt
from farm.report.model.chart import Plot, plots_of
from farm.report.model.status import by_range, change_line
from farm.serve.page import Facts, Text, has_words, one_of
from farm.store.records import AlertRecord, AlertState, Remark, RemarkState

if TYPE_CHECKING:
    from farm.store.store import Store

_RUNS = 80
OPEN = "open"
_STATES = (OPEN, *map(str, AlertState))


class AlertsQuery(msgspec.Struct, frozen=True):
    """Filter of alerts."""

    state: Text = OPEN
    """`open` for unsettled regressions, a state of alerts, or `all`."""
    q: Text = ""
    """Words of job, metric and cause."""


class AlertsFacts(Facts, frozen=True, kw_only=True):
    """Alerts by the range of runs in which the number changed, the newest range first."""

    path: ClassVar[str] = "/alerts"
    template: ClassVar[str] = "alerts.html.j2"
    alerts: list[AlertRecord]
    counts: dict[str, int]
    """Alerts by state."""
    query: AlertsQuery

    def shown(self) -> dict[str, Any]:
        """Return the ranges of the page."""
        return {"ranges": by_range(self.alerts)}


class AlertQuery(msgspec.Struct, frozen=True):
    """An alert."""

    alert: Annotated[int, msgspec.Meta(ge=0, lt=2**53, description="Number of the alert.")]


class AlertFacts(Facts, frozen=True, kw_only=True):
    """Alert with the history of its number."""

    path: ClassVar[str] = "/alerts/{alert:int}"
    template: ClassVar[str] = "alert.html.j2"
    alert: AlertRecord
    unsettled: bool
    """True for a regression that is neither accepted nor fixed."""
    remarks: list[Remark]
    """Remarks, oldest first."""
    together: list[AlertRecord]
    """Other alerts of the same range of runs."""
    plots: list[Plot]
    commands: list[tuple[str, str]]
    """Title and text of commands about the alert."""

    def shown(self) -> dict[str, Any]:
        """Return the choices of a form."""
        return {"remark_states": tuple(RemarkState)}


def alerts_page(store: Store, query: AlertsQuery) -> AlertsFacts:
    """Return alerts."""
    state = one_of("state", query.state, (*_STATES, "all"))
    known = store.alerts.all()
    opened = {one.id for one in store.alerts.open()}
    found = [
        one
        for one in known
        if (state in ("", "all", one.state) or (state == OPEN and one.id in opened))
        and has_words(query.q, one.job_id, one.metric, one.likely_cause)
    ]
    counts = {name: sum(one.state == name for one in known) for name in _STATES[1:]}
    return AlertsFacts(
        title=f"{fmt.plural(len(opened), 'open regression')}",
        alerts=found,
        counts={OPEN: len(opened), **{name: count for name, count in counts.items() if count}},
        query=query,
    )


def alert_page(store: Store, query: AlertQuery) -> AlertFacts:
    """Return an alert with the history of its number."""
    alert = store.alerts.get(query.alert)
    branch = alert.branch or ""
    points = store.history.points(alert.job_id, alert.metric, None, _RUNS, branch)
    points = [one for one in points if one.device_kind == alert.device_kind]
    facts = store.history.fingerprints(point.fingerprint for point in points)
    same = [one for one in store.alerts.all() if (one.last_good, one.first_bad) == (alert.last_good, alert.first_bad)]
    return AlertFacts(
        title=f"Alert {alert.id}: {change_line(alert)}, {alert.job_id}",
        alert=alert,
        unsettled=any(one.id == alert.id for one in store.alerts.open()),
        remarks=store.alerts.remarks([f"alert:{alert.id}"]).get(f"alert:{alert.id}", []),
        together=[one for one in same if one.id != alert.id],
        plots=plots_of(points, facts, [alert]),
        commands=_commands(alert),
    )


def _commands(alert: AlertRecord) -> list[tuple[str, str]]:
    number = str(alert.id)
    ways = (
        ("Assign it", ["alerts", "assign", number, "--owner", "NAME"]),
        ("Accept the new level", ["alerts", "accept", number, "--note", "REASON"]),
        ("Measure it again", ["perf", "confirm", "--run", alert.run_id]),
        ("Run by run", ["history", alert.job_id, "--metric", alert.metric]),
    )
    return [(title, shlex.join(["farm", *words])) for title, words in ways]
