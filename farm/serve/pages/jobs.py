"""Job of a run: attempts, numbers, profile, layers, files, commands, history."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from farm.report.model.chart import Plot, plots_of
from farm.report.model.cross_target import cross_targets
from farm.report.model.sections import row_limit
from farm.report.model.summary import WORDS, summarize, ways_again
from farm.serve.page import Facts, Text
from farm.store.queries.browse import JobRun
from farm.store.records import AlertRecord, HistoryPoint, JobFile, RunView
from farm.store.store import Store

_METRICS = ("latency", "htp_cycles", "sqnr_fp32[0]")
_RUNS = 60


class JobQuery(msgspec.Struct, frozen=True):
    """A job in a run, or in a nightly run; its newest run with a result without either."""

    job: Text
    """Id of the job, or a pattern that one job matches."""
    run: Text = ""
    nightly_run: Text = ""
    own: bool = False
    """As `farm show`: `latest` is a run of the user, and runs of `farm debug` count."""
    charts: bool = True
    """With the facts of the charts."""
    runs: Annotated[int, msgspec.Meta(ge=1, le=400, description="Runs of the history.")] = 40


class JobFacts(Facts, frozen=True, kw_only=True):
    """Job of a run."""

    path: ClassVar[str] = "/jobs/{job:path}"
    template: ClassVar[str] = "job_page.html.j2"
    schema: int = 2
    job: str
    outcome: str
    run: RunView
    """The run with this job alone."""
    nightly_run: str
    """Id of the nightly run that the run is a cell of; empty without."""
    runs: list[JobRun]
    """Newest runs of the job, newest first."""
    alerts: list[AlertRecord]
    files: list[JobFile]
    plots: list[Plot]
    commands: list[tuple[str, str]]
    """Title and text of each command to repeat the job."""

    def shown(self) -> dict[str, Any]:
        """Return the values of the job's template."""
        summary = summarize(self.run)
        return {
            "view": self.run,
            "item": summary.jobs[0],
            "cross": cross_targets(summary),
            "extras": (),
            "links": {},
            "row_limit": row_limit(1),
        }


def job_page(store: Store, query: JobQuery) -> JobFacts:
    """Return a job of a run with its history."""
    job, run_id = _chosen(store, query)
    runs = store.browse.job_runs(job, query.runs)
    run_id = run_id or next((one for one in runs if one.outcome != "not_run"), runs[0]).run_id
    view = store.runs.view_of_job(run_id, job)
    summary = summarize(view).jobs[0]
    here = next((one for one in runs if one.run_id == view.id), None)
    branch = view.toolchain.branch if view.toolchain else ""
    points: list[HistoryPoint] = []
    if query.charts:
        points = store.history.points(job, None, None, _RUNS, branch, local_runs_of=store.user)
        points = [one for one in points if one.metric in _METRICS]
    alerts = store.alerts.of_jobs([job], branch)
    facts = store.history.fingerprints(point.fingerprint for point in points)
    return JobFacts(
        title=f"{WORDS[summary.outcome]}: {job} in {view.name or view.id}",
        job=job,
        outcome=str(summary.outcome),
        run=view,
        nightly_run=here.nightly_run if here else query.nightly_run,
        runs=runs,
        alerts=alerts,
        files=store.runs.artifacts(view.id, job),
        plots=plots_of(points, facts, alerts, _METRICS),
        commands=ways_again(summary.job, summary.rerun, view.id),
    )


def _chosen(store: Store, query: JobQuery) -> tuple[str, str]:
    """Return the job and its run; "" for the newest run with a result."""
    if query.nightly_run:
        return query.job, store.browse.run_of_nightly(query.job, query.nightly_run)
    if query.own or not store.browse.has_job(query.job):
        from farm.replay.stored_result import find_recorded_job

        run, job = find_recorded_job(store, query.job, query.run or None, "shown", own=query.own)
        return job.id, run.id
    return query.job, store.runs.resolve(query.run, own=False) if query.run else ""
