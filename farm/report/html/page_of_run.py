"""Page of a run with its first screen: one self-contained HTML file without network, server or a second file."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from farm.base.files import write_atomically
from farm.base.grouping import grouped
from farm.report.formats.layers_csv import LayerPlace
from farm.report.html.templates import environment, render_page, shown_in_full
from farm.report.model import format as fmt
from farm.report.model.chart import SHOWN_STEPS, Trend, Trends
from farm.report.model.cross_target import cross_targets
from farm.report.model.sections import SHOWN_JOBS, HeapRow, frame_grids, generating, row_limit
from farm.report.model.status import Standing, alert_change, branch_name, is_confirmed, standing
from farm.report.model.summary import JobSummary, Outcome, RunSummary, summarize
from farm.results.heap import no_heap
from farm.store.artifacts import ArtifactStore
from farm.store.records import AlertRecord, Background, JobFile, JobStatus, RunStatus, RunView

# First screen of a report: jobs and numbers that need attention, in groups. Pure.


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


# RunView -> one self-contained HTML file: no network, no server, no second file.


class ReportContext(msgspec.Struct, frozen=True):
    """Facts from the store and its files beside the run."""

    status: RunStatus | None = None
    """Earlier results of each job; None: unknown, and no failure is called new."""
    alerts: tuple[AlertRecord, ...] | None = None
    """Suspected and confirmed regressions of this run; None: the numbers have not been compared yet."""
    background: Background = Background()
    links: dict[str, str] = {}
    """Links from the page to the artifacts on this machine, by hash."""
    heap: tuple[HeapRow, ...] = ()
    """DSP heap of the jobs of a run with --heap, and of their earlier runs."""
    places: dict[str, dict[str, LayerPlace]] = {}
    """Places of layers in the model and at run time by layer name, by job id."""


class File(msgspec.Struct, frozen=True):
    """Artifact of a job and its link."""

    artifact: JobFile
    link: str
    """Link relative to the page; empty when the file is not on this machine."""


def files_of(context: ReportContext, job_id: str) -> tuple[File, ...]:
    """Return the artifacts of a job."""
    records = context.background.artifacts.get(job_id, ())
    return tuple(File(record, context.links.get(record.sha256, "")) for record in records)


def artifact_links(background: Background, store: ArtifactStore, page: Path) -> dict[str, str]:
    """Return links from a page at `page` to artifacts on this machine; fetches artifacts from other hosts first."""
    everything = [record for records in background.artifacts.values() for record in records]
    store.bring(everything)
    return {
        sha256: quote(os.path.relpath(path.absolute(), page.parent.absolute()))
        for sha256 in {record.sha256 for record in everything}
        if (path := store.find(sha256))
    }


class MatrixColumn(msgspec.Struct, frozen=True):
    """Target of a matrix."""

    soc: str
    backend: str
    precision: str
    options: str
    kind: str
    """`virtual` or `hardware` when all its jobs ran on such devices, `mixed`, or "" when none ran."""


class MatrixRow(msgspec.Struct, frozen=True):
    """Case of a matrix; `cells` are in the order of the columns, and a target without a job has an empty cell."""

    case: str
    cells: tuple[tuple[JobSummary, ...], ...]


class Matrix(msgspec.Struct, frozen=True):
    """Matrix of one suite."""

    suite: str
    columns: tuple[MatrixColumn, ...]
    rows: tuple[MatrixRow, ...]

    @property
    def socs(self) -> tuple[tuple[str, int], ...]:
        """Return SoCs and the number of columns of each, in the order of the columns."""
        return tuple(Counter(column.soc for column in self.columns).items())


def matrices(summary: RunSummary) -> tuple[Matrix, ...]:
    """Return one matrix per suite, with only the targets of that suite; all in the order of the run."""
    suites = grouped((job.job.suite, job) for job in summary.jobs)
    return tuple(_matrix(suite, jobs) for suite, jobs in suites.items())


def _matrix(suite: str, jobs: list[JobSummary]) -> Matrix:
    with_target = [((job.job.soc, job.job.backend, job.job.precision, job.options), job) for job in jobs]
    by_target, cells = grouped(with_target), grouped(((job.job.case, target), job) for target, job in with_target)
    soc_order = list(dict.fromkeys(target[0] for target in by_target))
    targets = sorted(by_target, key=lambda target: soc_order.index(target[0]))
    return Matrix(
        suite=suite,
        columns=tuple(MatrixColumn(*target, kind=_kind(by_target[target])) for target in targets),
        rows=tuple(
            MatrixRow(case, tuple(tuple(cells.get((case, target), ())) for target in targets))
            for case in dict.fromkeys(case for case, _ in cells)
        ),
    )


def _kind(jobs: list[JobSummary]) -> str:
    kinds = {job.kind for job in jobs} - {""}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), "")


LOG_BUDGET = 1_500_000
"""Characters of log in a whole page, so that a run in which all jobs fail still opens at once."""
LOG_LIMITS = (600, 48_000)
"""Least and most characters of one log."""

# Jobs in one pack: unpacking as many is too fast to notice.
_AT_ONCE = 64

SHOWN_SKIPPED = 200
"""Skipped jobs that are listed by name; the table has all."""

SHOWN_OPEN = 12
"""Failures that are unfolded when the page opens; the others are one click away."""


class _Extra(NamedTuple):
    """Facts that the page of a job shows beside the job itself."""

    before: str
    alerts: tuple[AlertRecord, ...]
    trends: tuple[Trend, ...]
    files: tuple[File, ...]


def render_html(view: RunView, context: ReportContext | None = None, *, home: str = "") -> str:
    """Return the page of one run. All text in both is treated as hostile; `home` is the link of the page's logo."""
    context = context or ReportContext()
    summary = summarize(view)
    first = triage(summary, context.status, context.alerts)
    extras = _extras(summary, context, first)
    profiles = [job for job in summary.jobs if job.attempt and job.attempt.operators]
    layers = [job for job in summary.jobs if job.attempt and job.attempt.layers][:SHOWN_JOBS]
    generated = generating(summary)
    curves = [job for job, _ in generated[:SHOWN_JOBS]]
    linked = (("layers", "l", layers), ("profile", "p", profiles[:SHOWN_JOBS]), ("rates", "g", curves))
    places = grouped((job.index, (f"{prefix}{job.index}", what)) for what, prefix, jobs in linked for job in jobs)
    trends = [(job, trend) for job in summary.jobs for trend in extras[job.index].trends]
    stepped = [one for one in trends if one[1].stepped]
    alerts = sorted(context.alerts or (), key=lambda alert: not is_confirmed(alert))
    shared = {
        "view": view,
        "cross": cross_targets(summary),
        "extras": extras,
        "links": {index: dict(found) for index, found in places.items()},
        "row_limit": row_limit(len(profiles)),
    }
    lean = [job.index for job in summary.jobs if not shown_in_full(job)]
    page = environment().get_template("job.html.j2").make_module(shared).page  # type: ignore[attr-defined]
    return render_page(
        "run.html.j2",
        run=summary,
        triage=first,
        matrices=matrices(summary),
        frames=frame_grids(summary),
        profiled=profiles[:SHOWN_JOBS],
        more_profiles=len(profiles[SHOWN_JOBS:]),
        debugged=layers,
        generated=generated,
        shown_jobs=SHOWN_JOBS,
        layer_places=context.places,
        outcomes=list(Outcome),
        log_limit=_log_limit(summary),
        shown_open=SHOWN_OPEN,
        shown_skipped=SHOWN_SKIPPED,
        shown_steps=SHOWN_STEPS,
        alerts=alerts,
        places={job.job.id: job.index for job in summary.jobs},
        heap=context.heap,
        no_heap=Counter(filter(None, (no_heap(job.attempt) for job in summary.jobs if job.attempt))).most_common(),
        trends=bool(trends),
        stepped=sorted(stepped, key=lambda one: (one[1].tone != "worse", -abs(one[1].size))),
        pages=packed(lean, lambda index: page(summary.jobs[index], LOG_LIMITS[0])),
        **shared,
        home=home,
    )


def write_html(view: RunView, path: Path, context: ReportContext | None = None) -> None:
    """Write the page to `path` atomically; makes its folder. Raises OSError."""
    text = render_html(view, context)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def packed(numbers: Sequence[int], part: Callable[[int], str]) -> list[tuple[int, int, str]]:
    """Return packs of page parts that are shown on demand, each with the first and last number in it.

    `numbers` ascend. A pack is a JSON object of markup by number, in zlib's format and Base64, which browsers unpack.
    """
    packs = []
    for start in range(0, len(numbers), _AT_ONCE):
        chosen = numbers[start : start + _AT_ONCE]
        text = json.dumps({str(number): part(number) for number in chosen}, ensure_ascii=False)
        data = base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()
        packs.append((chosen[0], chosen[-1], data))
    return packs


def _extras(summary: RunSummary, context: ReportContext, first: Triage) -> list[_Extra]:
    alerts = grouped((alert.job_id, alert) for alert in context.alerts or ())
    kind = context.status.device_kind if context.status else summary.view.fingerprint.get("device_kind", "")
    trends = Trends(context.background)
    return [
        _Extra(
            before=first.standings.get(job.index, ""),
            alerts=tuple(alerts.get(job.job.id, ())),
            trends=trends.of_job(job.job.id, kind),
            files=files_of(context, job.job.id),
        )
        for job in summary.jobs
    ]


def _log_limit(summary: RunSummary) -> int:
    logs = sum(bool(attempt.log) for job in summary.jobs if shown_in_full(job) for attempt in job.job.attempts)
    least, most = LOG_LIMITS
    return max(least, min(most, LOG_BUDGET // max(logs, 1)))
