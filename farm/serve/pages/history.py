"""Numbers run by run, as `farm history`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farm.report.model.chart import Plot, plots_of
from farm.report.model.history import USUAL, tables
from farm.results.analysis.history import Record
from farm.serve.page import Facts, PageNumber, Text
from farm.store.records import STEPS, AlertRecord, HistoryPoint
from farm.store.values import branch_text

if TYPE_CHECKING:
    from farm.store.store import Store

_MOST_CASES = 1000
# A larger page would have several megabytes and take seconds.
_MOST_ATTEMPTS = 3_000


class HistoryQuery(msgspec.Struct, frozen=True):
    """Jobs and metrics of a history."""

    job: Text = ""
    """Pattern of jobs."""
    soc: Text = ""
    metric: Text = ""
    """Metrics, separated by commas; empty for all."""
    branch: Text = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=200, description="Attempts of a job.")] = 60
    jobs: Annotated[int, msgspec.Meta(ge=1, le=200, description="Jobs of a page, fewer with many attempts.")] = 8
    page: PageNumber = 1
    local: bool = True
    """With the local runs of the user."""
    charts: bool = True
    """With the facts of the charts."""


class Reliability(msgspec.Struct, frozen=True):
    """Record of passes and failures of a job on one kind of device."""

    job_id: str
    device_kind: str
    record: Record


class HistoryFacts(Facts, frozen=True, kw_only=True):
    """Histories of the jobs of a page."""

    path: ClassVar[str] = "/history"
    template: ClassVar[str] = "history.html.j2"
    schema: int = 2
    points: list[HistoryPoint]
    reliability: list[Reliability]
    alerts: list[AlertRecord]
    branch: str
    query: HistoryQuery
    jobs: int
    """Jobs that match."""
    number: int
    pages: int
    metrics: dict[str, list[str]]
    """All metrics of each job."""
    fingerprints: dict[str, dict[str, str]]
    commit_url: str
    branches: list[str]
    cases: list[str]
    socs: list[str]
    plots: list[Plot]
    """Plots of the chosen or usual metrics, all jobs of the page in each."""

    def shown(self) -> dict[str, Any]:
        """Return the tables of the page."""
        asked = self.query
        chosen = tuple(one.strip() for one in asked.metric.split(",") if one.strip())
        return {
            "pattern": asked.job,
            "soc": asked.soc,
            "metric": ", ".join(chosen),
            "limit": asked.limit,
            "branch": branch_text(self.branch),
            "tables": tables(self.points, chosen or USUAL, self.fingerprints),
            "records": {(one.job_id, one.device_kind): one.record for one in self.reliability},
            "steps": self.alerts,
        }


def history_page(store: Store, query: HistoryQuery) -> HistoryFacts:
    """Return numbers run by run, as `farm history`."""
    branch = store.status.branch_to_show(query.branch or None)
    names: list[str] = store.history.job_names(query.job, query.soc or None) if query.job else []
    jobs = max(1, min(query.jobs, _MOST_ATTEMPTS // query.limit))
    shown = names[(query.page - 1) * jobs : query.page * jobs]
    asked = [query.job] if len(shown) == len(names) and shown else shown
    found = [point for name in asked for point in _points(store, name, None, query, branch)]
    metrics = {name: sorted({point.metric for point in found if point.job_id == name} - {""}) for name in shown}
    chosen = tuple(one.strip() for one in query.metric.split(",") if one.strip())
    points = found
    if chosen:
        # A metric is unknown if no job of the pattern has it, even if the jobs of this page lack it.
        of_metric = [_points(store, query.job, metric, query, branch) for metric in chosen]
        points = [point for part in of_metric for point in part if point.job_id in shown]
    usual = chosen or USUAL
    facts = store.history.fingerprints(point.fingerprint for point in points)
    alerts = store.alerts.of_jobs({point.job_id for point in points}, branch)
    steps = [one for one in alerts if one.state in STEPS and (not chosen or one.metric in chosen)]
    return HistoryFacts(
        title=f"History of {query.job}" if query.job else "History",
        points=points,
        reliability=_reliability(store, points, branch),
        alerts=steps,
        branch=branch,
        query=query,
        jobs=len(names),
        number=query.page,
        pages=max(1, -(-len(names) // jobs)),
        metrics=metrics,
        fingerprints=facts,
        commit_url=store.status.newest_toolchain(branch).commit_url,
        branches=list(map(branch_text, store.status.branches())),
        cases=store.browse.cases(_MOST_CASES),
        plots=plots_of([one for one in points if one.metric in usual], facts, steps, usual) if query.charts else [],
        socs=list(store.browse.known().socs),
    )


def _reliability(store: Store, points: list[HistoryPoint], branch: str) -> list[Reliability]:
    found = []
    for kind in sorted({point.device_kind for point in points}):
        jobs = {point.job_id for point in points if point.device_kind == kind}
        records = store.history.reliability(jobs, kind, branch=branch)
        found += [Reliability(job, kind, record) for job, record in records.items()]
    return found


def _points(store: Store, pattern: str, metric: str | None, query: HistoryQuery, branch: str) -> list[HistoryPoint]:
    user = store.user if query.local else ""
    return store.history.points(pattern, metric, query.soc or None, query.limit, branch, local_runs_of=user)
