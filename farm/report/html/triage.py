"""First screen of a report: jobs and numbers that need attention, in groups. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.report.model import format as fmt
from farm.report.model.alerts import alert_change, is_confirmed
from farm.report.model.commits import branch_name
from farm.report.model.status import Standing, standing
from farm.report.model.summary import JobSummary, Outcome, RunSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.report.html.context import ReportContext
    from farm.store.records import AlertRecord, JobStatus

SHOWN = 4
"""Jobs of a group on the first screen; the section has all."""


class TriageEntry(msgspec.Struct, frozen=True):
    """Job and the reason why it is listed."""

    job_id: str
    link: int | None
    """Place of the job in the run; None for a job of another run."""
    text: str


class TriageGroup(msgspec.Struct, frozen=True):
    """Jobs that are listed for the same reason."""

    key: str
    title: str
    entries: tuple[TriageEntry, ...]
    """First entries of the group."""
    total: int
    section: str
    """Id of the section of the page with all entries."""


class Triage(msgspec.Struct, frozen=True):
    """Groups that need attention."""

    sentence: str
    groups: tuple[TriageGroup, ...]
    """Groups with at least one job."""
    quiet: tuple[str, ...]
    """Titles of the groups without a job."""
    standings: dict[int, str]
    """Earlier result of each job in words, by its place in the run."""


def triage(run: RunSummary, context: ReportContext) -> Triage:
    """Return the groups of jobs that need attention."""
    before = {} if context.status is None else {job.job_id: job for job in context.status.jobs}
    links = {item.job.id: item.index for item in run.jobs}
    groups = [group for group in _groups(run, before, context.alerts, links) if group is not None]
    fixed = [job for job in before.values() if job.job_id in links and standing(job) is Standing.FIXED]
    return Triage(
        sentence=_sentence(groups, len(fixed), run),
        groups=tuple(group for group in groups if group.total),
        quiet=tuple(group.title.lower() for group in groups if not group.total),
        standings={
            links[name]: words for name, job in before.items() if name in links and (words := _before(job, run))
        },
    )


def _groups(
    run: RunSummary,
    before: Mapping[str, JobStatus],
    alerts: Sequence[AlertRecord] | None,
    links: Mapping[str, int],
) -> Iterable[TriageGroup | None]:
    failed = run.having(Outcome.FAILED)
    if before:
        still = {name for name, job in before.items() if standing(job) is Standing.STILL_FAILING}
        yield _of_jobs("new", "New failures", [one for one in failed if one.job.id not in still], "failures")
        yield _of_jobs("still", "Still failing", [one for one in failed if one.job.id in still], "failures")
    else:
        yield _of_jobs("failed", "Failures", failed, "failures")
    if alerts is not None:
        worse = [alert for alert in alerts if is_confirmed(alert)]
        entries = [
            TriageEntry(alert.job_id, links.get(alert.job_id), f"{alert.metric} {alert_change(alert)}")
            for alert in worse
        ]
        yield TriageGroup("regressions", "Confirmed regressions", tuple(entries[:SHOWN]), len(entries), "regressions")
    yield _of_jobs("skipped", "Skipped", run.out_of_time, "skipped")
    if run.view.finished_ms is not None and run.counts[Outcome.NOT_RUN]:
        yield _of_jobs("not_run", "Not run", run.having(Outcome.NOT_RUN), "jobs")
    trouble = (*run.having(Outcome.INFRA), *run.recovered)
    yield _of_jobs("infra", "Infrastructure trouble", trouble, "infra")


def _of_jobs(key: str, title: str, items: Sequence[JobSummary], section: str) -> TriageGroup:
    entries = tuple(
        TriageEntry(item.job.id, item.index, item.reason or f"at first: {item.job.attempts[0].reason}")
        for item in items[:SHOWN]
    )
    return TriageGroup(key, title, entries, len(items), section)


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
    counts = {group.key: group.total for group in groups}
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
