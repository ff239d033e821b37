"""Nightly run, from its plan to its exit code: one cell after the other, also after a failed cell.

Failed notifications do not change the exit code.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time_ns
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import ExitCode, FarmError, UsageError
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.machine import user_name
from farm.base.text import one_line
from farm.dispatch.cluster.client import anywhere
from farm.dispatch.nightly.plan import MailTable, Plan, PlannedCell, WebhookTable, When
from farm.dispatch.nightly.record import (
    NOTHING,
    CellResult,
    DebuggedJob,
    Findings,
    JobNote,
    NightlyRun,
    NightlyRuns,
    cell_code,
    has_changed,
    new_id,
    nightly_code,
    write_whole,
)
from farm.dispatch.nightly.render import render, subject, write_pages
from farm.dispatch.notify.delivery import GRACE_S, Delivery, Notice, find_receivers, send_notices
from farm.dispatch.request.records import report_context
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.report.formats import export_formats
from farm.report.formats.spans import send_spans
from farm.report.html.page_of_run import artifact_links, render_html
from farm.report.model.format import duration, plural
from farm.report.model.status import Standing, standing
from farm.report.model.summary import summarize
from farm.store.messages.messages import Message, NoticeArguments

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from farm.dispatch.dispatcher import ProgressListener
    from farm.store.records import JobStatus, RunView


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
    were = plural(len(left), "job was", "jobs were")
    return f"no device of {', '.join(socs)}: {were} not run" if socs else ""


def due_notices(plan: Plan, nightly_run: NightlyRun, before: NightlyRun | None) -> tuple[list[Notice], list[Delivery]]:
    """Return the due notices, and the failures of those without a text; `before` is the previous nightly run."""
    about = f"nightly run {nightly_run.name} {nightly_run.id}, exit code {nightly_run.code}, {nightly_run.finished_ms}"
    notices, failed = [], []
    for one in find_receivers(plan.webhooks, plan.mail):
        assert isinstance(one.table, WebhookTable | MailTable)  # noqa: S101 - of nightly.toml
        if not _is_due(one.table.when, nightly_run, before):
            continue
        try:
            notices.append(Notice(one, NoticeArguments(_message(one.table, nightly_run), about)))
        except UsageError as error:
            failed.append(Delivery(one.to, ok=False, problem=str(error)))
    return notices, failed


def _message(table: WebhookTable | MailTable, nightly_run: NightlyRun) -> Message:
    """Return the text for a receiver. Raises UsageError for a template that fails."""
    if isinstance(table, WebhookTable):
        return Message(render(table.template, "json", nightly_run))
    text, html = render(table.template, "text", nightly_run), render(table.html_template, "html", nightly_run)
    return Message(text, subject(nightly_run), html)


def notify(config: Config, notices: Sequence[Notice], queued: Callable[[], None]) -> list[Delivery]:
    """Send notices, and return their deliveries; `queued` is called once a shared farm has them in its queue."""
    from farm.store.store import open_store

    with contextlib.ExitStack() as stack:
        messages, elsewhere = None, []
        if config.is_shared and notices:
            try:
                messages = stack.enter_context(open_store(config.store_url)).messages
                keys = messages.defer_notices([one.queued() for one in notices], GRACE_S)
            except FarmError as error:
                messages = None
                logger.warning("notices are sent without a queue, and not again if that fails: %s", error)
            else:
                elsewhere = [one for one in notices if one.key not in keys]
                notices = [one for one in notices if one.key in keys]
        queued()
        why = "it was queued before; agents send it"
        left = [Delivery(one.receiver.to, ok=False, problem=why) for one in elsewhere]
        return [*send_notices(notices, messages), *left]


def _is_due(when: When, nightly_run: NightlyRun, before: NightlyRun | None) -> bool:
    if when == "always":
        return True
    return nightly_run.code != 0 if when == "failure" else has_changed(nightly_run, before)


SUSPECTED_SHARE = 0.2
"""Part of a cell's time for confirming suspected regressions: docs/explanation/statistics.md has their cost."""


DEBUG_SHARE = 0.5
"""Part of the time after a cell's run for debugging its new numeric failures."""


Confirm = Callable[[Config, str, float | None], Findings]
"""Measures the suspected regressions of a run, by its id, within some seconds; None for no limit."""
Debug = Callable[[Config, RunRequest, int, Path, CellResult, float | None], tuple[DebuggedJob, ...]]
"""Debugs at most some new numeric failures of a cell until a time of `monotonic`; files go into a folder."""


def run_nightly(
    config: Config,
    plan: Plan,
    fronts: Callable[[], AbstractContextManager[ProgressListener]],
    confirm: Confirm,
    debug: Debug,
    *,
    resume: bool = False,
) -> NightlyRun:
    """Run the cells of `plan`, write reports and exports, send notifications, and return the nightly run.

    `fronts` makes the display of one run; `confirm` and `debug` come from packages above this one. Ctrl-C and SIGTERM
    let the running jobs finish; the results so far are reported, and `resume` goes on with the rest. Raises UsageError
    while another nightly run of this name runs, or without one to resume; InfraError for failed writes of its own
    files.
    """
    nightly_runs = NightlyRuns(config.state_dir / "nightly" / plan.name)
    with nightly_runs.alone(), InterruptHandler(term=True) as interrupts:
        reports = plan.report_dir or nightly_runs.folder
        known = nightly_runs.all()
        nightly_run = nightly_runs.unfinished(plan.digest) if resume else _new_nightly_run(plan)
        if not resume:
            # Remove earlier exports, so that a cell without a run does not show results of an earlier nightly run.
            for cell in plan.cells:
                for path in export_files(plan, cell.name).values():
                    path.unlink(missing_ok=True)
        if not nightly_run.is_done:
            folder = reports / nightly_run.id
            nightly_run = _Cells(
                config, plan, nightly_run, nightly_runs, folder, interrupts, fronts, confirm, debug
            ).run()
        before = next((one for one in reversed(known) if one.started_ms < nightly_run.started_ms and one.is_done), None)
        write_pages(nightly_run, known, reports)
        # Notify after the exit code is saved: it does not wait for a network.
        notices, failed = due_notices(plan, nightly_run, before)
        nightly_run = msgspec.structs.replace(nightly_run, is_unnotified=False)
        deliveries = notify(config, notices, partial(nightly_runs.save, nightly_run))
        nightly_run = msgspec.structs.replace(nightly_run, deliveries=(*failed, *deliveries))
        for delivery in nightly_run.undelivered:
            logger.warning("NOT NOTIFIED: %s: %s", delivery.to, delivery.problem)
        nightly_runs.save(nightly_run)
        write_pages(nightly_run, known, reports)
        nightly_runs.forget(plan.keep, reports)
    return nightly_run


def _new_nightly_run(plan: Plan) -> NightlyRun:
    cells = tuple(
        CellResult(
            name=cell.name,
            virtual=cell.request.virtual > 0,
            **{name: getattr(cell.request, name) for name in ("socs", "suites", "backend")},
        )
        for cell in plan.cells
    )
    return NightlyRun(
        id=new_id(),
        name=plan.name,
        digest=plan.digest,
        user=user_name(),
        host=socket.gethostname(),
        started_ms=time_ns() // 1_000_000,
        cells=cells,
    )


@dataclass
class _Cells:
    """Cells of a nightly run, executed one after the other; the nightly run is saved after each step."""

    config: Config
    plan: Plan
    nightly_run: NightlyRun
    nightly_runs: NightlyRuns
    folder: Path
    interrupts: InterruptHandler
    fronts: Callable[[], AbstractContextManager[ProgressListener]]
    confirm: Confirm
    debug: Debug

    def __post_init__(self) -> None:
        self._results = {cell.name: cell for cell in self.nightly_run.cells}
        self._end_s = None if self.plan.budget_s is None else monotonic() + self.plan.budget_s
        self._is_stopped = False

    def run(self) -> NightlyRun:
        """Run the unfinished cells and return the nightly run, with its exit code."""
        self._save()
        left = [cell for cell in self.plan.cells if not self._results[cell.name].is_done]
        for number, cell in enumerate(left):
            logger.info("%s: %s", cell.name, cell.request.command)
            try:
                self._cell(cell, self._seconds(cell, left[number:]))
            except KeyboardInterrupt:
                self._is_stopped = True
            if self._is_stopped or self.interrupts.was_interrupted:
                break
        self._save(
            code=nightly_code(
                tuple(self._results.values()), interrupted=self._is_stopped or self.interrupts.was_interrupted
            ),
            finished_ms=time_ns() // 1_000_000,
            is_unnotified=True,
            report=str(self.folder / "index.html"),
            report_url=self.plan.report_url,
        )
        return self.nightly_run

    def _seconds(self, cell: PlannedCell, left: list[PlannedCell]) -> float | None:
        """Return the time of a cell: its share of the remaining time, with the unused time of earlier cells."""
        if self._end_s is None:
            return None
        return max(0.0, self._end_s - monotonic()) * cell.share / sum(one.share for one in left)

    def _cell(self, cell: PlannedCell, seconds: float | None) -> None:
        if seconds is not None and seconds < 1:
            self._keep(cell, code=NOTHING, problem="the budget of the nightly run was over before it could begin")
            return
        end_s = None if seconds is None else monotonic() + seconds
        code, problem = 0, ""
        try:
            code = self._run(cell, None if seconds is None else seconds * (1 - SUSPECTED_SHARE)).exit_code
        except FarmError as error:
            code, problem = error.exit_code, str(error)
        except OSError as error:
            code, problem = ExitCode.INFRA, f"{error.filename or 'the system'}: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001 - a bug that one cell meets does not end the nightly run
            traceback.print_exc()
            code, problem = ExitCode.INFRA, f"this is a bug in farm: {type(error).__name__}: {error}"
        if problem:
            logger.warning("%s: %s", cell.name, problem)
        self._collect(cell, code, problem, end_s)

    def _run(self, cell: PlannedCell, seconds: float | None) -> RunOutcome:
        """Run a cell, or the missing jobs of its run."""
        run_id = self._results[cell.name].run_id

        def begun(run_id: str) -> None:
            self._keep(cell, run_id=run_id)

        with self.fronts() as front:
            if run_id:
                try:
                    return anywhere.resume(self.config, run_id, front, seconds, interrupts=self.interrupts)
                except UsageError as error:
                    logger.warning("%s: begins anew: %s", cell.name, error)
            request = msgspec.structs.replace(
                cell.request, budget_s=seconds, name=f"{self.plan.name}/{cell.name}", nightly_run=self.nightly_run.id
            )
            return anywhere.run(self.config, request, front, interrupts=self.interrupts, begun=begun)

    def _collect(self, cell: PlannedCell, code: int, problem: str, end_s: float | None) -> None:
        """Keep the results of a cell, after a closer look at them until `end_s`."""
        result = self._keep(cell, problem=problem)
        try:
            if result.run_id:
                if code != INTERRUPTED:
                    self._examine(cell, result, end_s)
                result = collect_results(self.config, self.plan, self.folder, self._results[cell.name])
                self._results[cell.name] = result
        except FarmError as error:
            logger.warning("%s: %s", cell.name, error)
            result = self._keep(cell, problem=problem or str(error))
            # Results that could not be read or written are no success; a failure stays a failure.
            code = ExitCode.INFRA if code in (0, NOTHING) else code
        result = self._keep(cell, code=cell_code(code, result.findings))
        took = f" in {duration(result.seconds)}" if result.seconds else ""
        logger.info("%s: %s%s", cell.name, result.word, took)

    def _examine(self, cell: PlannedCell, result: CellResult, end_s: float | None) -> None:
        """Debug new failures of a run, then confirm its suspected regressions, for the report that follows."""
        try:
            # Debugging gets half of the time at most: the rest is for suspected regressions.
            debug_s = None if end_s is None else monotonic() + max(0.0, end_s - monotonic()) * DEBUG_SHARE
            debugged = self.debug(self.config, cell.request, self.plan.debug, self.folder, result, debug_s)
            self._keep(cell, debugged=debugged)
            left_s = None if end_s is None else max(0.0, end_s - monotonic())
            self._keep(cell, findings=self.confirm(self.config, result.run_id, left_s))
        except KeyboardInterrupt:
            # The results of the run are reported all the same.
            self._is_stopped = True

    def _keep(self, cell: PlannedCell, **changes: object) -> CellResult:
        """Change and save the result of a cell, and return it."""
        result = self._results[cell.name] = msgspec.structs.replace(self._results[cell.name], **changes)
        self._save()
        return result

    def _save(self, **changes: object) -> None:
        self.nightly_run = msgspec.structs.replace(self.nightly_run, cells=tuple(self._results.values()), **changes)
        self.nightly_runs.save(self.nightly_run)
