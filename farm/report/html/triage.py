"""First screen of a report: jobs and numbers that need attention, in groups. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from farm.report.model import format as fmt
from farm.report.model.alerts import alert_change, is_confirmed
from farm.report.model.commits import branch_name
from farm.report.model.status import Standing, standing
from farm.report.model.summary import JobSummary, Outcome, RunSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from farm.store.records import AlertRecord, JobStatus, RunStatus


class TriageEntry(NamedTuple):
    """Job and the reason why it is listed."""

    job_id: str
    link: int | None
    """Place of the job in the run; None for a job of another run."""
    text: str


class TriageGroup(NamedTuple):
    """Jobs that are listed for the same reason."""

    key: str
    title: str
    section: str
    """Id of the section of the page with all entries."""
    entries: list[TriageEntry]


class Triage(NamedTuple):
    """Groups that need attention."""

    sentence: str
    groups: list[TriageGroup]
    """Groups with at least one job."""
    quiet: list[str]
    """Titles of the groups without a job."""
    standings: dict[int, str]
    """Earlier result of each job in words, by its place in the run."""


def triage(run: RunSummary, status: RunStatus | None = None, alerts: Sequence[AlertRecord] | None = None) -> Triage:
    """Return the groups of jobs that need attention; without a status no failure is called new."""
    before = {job.job_id: job for job in status.jobs} if status else {}
    links = {item.job.id: item.index for item in run.jobs}
    groups = list(_groups(run, before, alerts, links))
    fixed = [job for job in before.values() if job.job_id in links and standing(job) is Standing.FIXED]
    return Triage(
        _sentence(groups, len(fixed), run),
        [group for group in groups if group.entries],
        [group.title.lower() for group in groups if not group.entries],
        {links[name]: words for name, job in before.items() if name in links and (words := _before(job, run))},
    )


def _groups(
    run: RunSummary,
    before: Mapping[str, JobStatus],
    alerts: Sequence[AlertRecord] | None,
    links: Mapping[str, int],
) -> Iterator[TriageGroup]:
    def entries(items: Iterable[JobSummary]) -> list[TriageEntry]:
        return [
            TriageEntry(item.job.id, item.index, item.reason or f"at first: {item.job.attempts[0].reason}")
            for item in items
        ]

    failed = run.having(Outcome.FAILED)
    if before:
        still = {name for name, job in before.items() if standing(job) is Standing.STILL_FAILING}
        new, old = ([one for one in failed if (one.job.id in still) is known] for known in (False, True))
        yield TriageGroup("new", "New failures", "failures", entries(new))
        yield TriageGroup("still", "Still failing", "failures", entries(old))
    else:
        yield TriageGroup("failed", "Failures", "failures", entries(failed))
    if alerts is not None:
        worse = [
            TriageEntry(alert.job_id, links.get(alert.job_id), f"{alert.metric} {alert_change(alert)}")
            for alert in alerts
            if is_confirmed(alert)
        ]
        yield TriageGroup("regressions", "Confirmed regressions", "regressions", worse)
    yield TriageGroup("skipped", "Skipped", "skipped", entries(run.out_of_time))
    if run.finished and run.counts[Outcome.NOT_RUN]:
        yield TriageGroup("not_run", "Not run", "jobs", entries(run.having(Outcome.NOT_RUN)))
    yield TriageGroup("infra", "Infrastructure trouble", "infra", entries(run.having(Outcome.INFRA) + run.recovered))


def _sentence(groups: Sequence[TriageGroup], fixed: int, run: RunSummary) -> str:
    words = {
        "new": ("new failure", "new failures"),
        "still": ("job still fails", "jobs still fail"),
        "failed": ("failure", "failures"),
        "regressions": ("confirmed regression", "confirmed regressions"),
        "skipped": ("job was skipped", "jobs were skipped"),
        "not_run": ("job was not run", "jobs were not run"),
        "infra": ("job could not be judged", "jobs could not be judged"),
        "recovered": ("job needed another attempt", "jobs needed another attempt"),
        "fixed": ("job is fixed", "jobs are fixed"),
    }
    counts = {group.key: len(group.entries) for group in groups}
    counts |= {"infra": run.counts[Outcome.INFRA], "recovered": len(run.recovered), "fixed": fixed}
    parts = [f"{fmt.count(count)} {words[key][count != 1]}" for key, count in counts.items() if count]
    if not parts:
        return "Nothing needs a look." if run.jobs else ""
    return f"{', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def _before(job: JobStatus, run: RunSummary) -> str:
    if job.before is None:
        return f"never had a verdict in {branch_name(run.view.toolchain)} before"
    verdict = "known issue" if job.before.known_issue else job.before.verdict
    return f"{verdict} in {job.before.run_id}, {fmt.days((run.view.started_ms - job.before.time_ms) / 1000)} before"
