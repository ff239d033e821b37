"""Results of a cell, from its run in the store: outcomes of jobs, page and exports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.dispatch.nightly.record import CellResult, JobNote
from farm.dispatch.nightly.state import write_whole
from farm.dispatch.request.ending import report_context
from farm.report.formats import export_formats
from farm.report.formats.spans import send_spans
from farm.report.html.page_of_run import render_html
from farm.report.model.status import Standing, standing
from farm.report.model.summary import summarize

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.dispatch.nightly.plan import Plan
    from farm.store.records import JobStatus
    from farm.store.view import RunView

logger = logging.getLogger(__name__)

_REASON_CHARS = 300


def collect_results(config: Config, plan: Plan, folder: Path, cell: CellResult) -> CellResult:
    """Return `cell` with the results of its run; writes its page into `folder`, and its exports. Raises InfraError."""
    from farm.store.store import open_store

    page = folder / f"{cell.name}.html"
    with open_store(config.store_url, readonly=True) as store:
        view = store.runs.view(cell.run_id)
        jobs = store.status.of_run(cell.run_id).jobs
        exports = export_files(plan, cell.name)
        for name, path in exports.items():
            write_whole(path, b"".join(export_formats()[name].write(store, [view.id], view)))
    write_page(config, cell.run_id, page)
    if problem := send_spans(view):
        logger.warning(problem)
    summary = summarize(view)
    by_kind: dict[Standing, list[JobStatus]] = {kind: [] for kind in Standing}
    for job in jobs:
        by_kind[standing(job)].append(job)

    def notes(kind: Standing) -> tuple[JobNote, ...]:
        return tuple(
            JobNote(job.job_id, one_line(f"{job.stage}: {job.reason}" if job.stage else job.reason, _REASON_CHARS))
            for job in by_kind[kind]
        )

    return msgspec.structs.replace(
        cell,
        problem=cell.problem or _without_device(view),
        counts={str(outcome): count for outcome, count in summary.counts.items() if count},
        seconds=summary.seconds or 0.0,
        new_failures=notes(Standing.NEW_FAILURE),
        still_failing=notes(Standing.STILL_FAILING),
        fixed=tuple(job.job_id for job in by_kind[Standing.FIXED]),
        infra=notes(Standing.INFRA),
        not_tested=len(by_kind[Standing.NOT_TESTED]),
        report=page.name,
        exports=tuple(map(str, exports.values())),
    )


def write_page(config: Config, run_id: str, page: Path) -> None:
    """Write the page of a run into the file `page`. Raises InfraError, StoreError."""
    from farm.report.html.context import artifact_links
    from farm.store.artifacts import open_artifacts
    from farm.store.store import open_store

    artifacts = open_artifacts(config)
    with open_store(config.store_url, readonly=True) as store:
        view = store.runs.view(run_id)
        context = report_context(store, view, artifacts, lambda known: artifact_links(known, artifacts, page))
    write_whole(page, render_html(view, context).encode())


def export_files(plan: Plan, cell: str) -> dict[str, Path]:
    """Return the files of a cell's exports by format; none for a plan without exports."""
    if plan.export_dir is None:
        return {}
    return {name: plan.export_dir / f"{cell}.{export_formats()[name].suffix}" for name in plan.formats}


def _without_device(view: RunView) -> str:
    """Return a line about the SoCs that had no device in a finished run; empty for none."""
    if view.finished_ms is None or view.exit_code != ExitCode.INFRA:
        return ""
    left = [job for job in view.jobs if not job.attempts and job.skipped is None]
    socs = sorted({job.soc for job in left} - {job.soc for job in view.jobs if job.attempts})
    were = "1 job was" if len(left) == 1 else f"{len(left)} jobs were"
    return f"no device of {', '.join(socs)}: {were} not run" if socs else ""
