"""Nightly run, from its plan to its exit code: one cell after the other, also after a failed cell.

Failed notifications do not change the exit code.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.user import user_name
from farm.dispatch.nightly.collect_results import collect_results, export_files
from farm.dispatch.nightly.plan import MailTable, WebhookTable
from farm.dispatch.nightly.record import (
    NOTHING,
    CellResult,
    DebuggedJob,
    Findings,
    NightlyRun,
    cell_code,
    has_changed,
    nightly_code,
)
from farm.dispatch.nightly.render import write_pages
from farm.dispatch.nightly.state import NightlyRuns, new_id
from farm.dispatch.nightly.templates import render, subject
from farm.dispatch.notify.delivery import GRACE_S, Delivery, Notice, find_receivers, send_notices
from farm.report.model.format import duration
from farm.store.messages.notices import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.dispatch.nightly.plan import Plan, PlannedCell, When
    from farm.dispatch.progress import ProgressListener
    from farm.dispatch.request.request import RunOutcome, RunRequest

logger = logging.getLogger(__name__)


def due_notices(plan: Plan, nightly_run: NightlyRun, before: NightlyRun | None) -> tuple[list[Notice], list[Delivery]]:
    """Return the due notices, and the failures of those without a text; `before` is the previous nightly run."""
    about = f"nightly run {nightly_run.name} {nightly_run.id}, exit code {nightly_run.code}, {nightly_run.finished_ms}"
    notices, failed = [], []
    for one in find_receivers(plan.webhooks, plan.mail):
        assert isinstance(one.table, WebhookTable | MailTable)  # noqa: S101 - of nightly.toml
        if not _is_due(one.table.when, nightly_run, before):
            continue
        try:
            notices.append(Notice(one, _message(one.table, nightly_run), about))
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


class CellWork:
    """Steps of each cell of a nightly run; `confirm` and `debug` come from packages above this one."""

    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        config: Config,
        plan: Plan,
        confirm: Callable[..., Findings],
        debug: Callable[..., tuple[DebuggedJob, ...]],
    ) -> None:
        self._config, self._plan = config, plan
        self._confirm, self._debug = confirm, debug

    def run(
        self, request: RunRequest, front: ProgressListener, interrupts: InterruptHandler, begun: Callable[[str], None]
    ) -> RunOutcome:
        """Run a cell; `begun` is called with the run's id."""
        from farm.dispatch.cluster.client.anywhere import run

        return run(self._config, request, front, interrupts=interrupts, begun=begun)

    def resume(
        self, run_id: str, front: ProgressListener, interrupts: InterruptHandler, budget_s: float | None
    ) -> RunOutcome:
        """Run the missing jobs of a cell's run. Raises UsageError if the run cannot go on."""
        from farm.dispatch.cluster.client.anywhere import resume

        return resume(self._config, run_id, front, budget_s, interrupts=interrupts)

    def confirm_suspected(self, run_id: str, budget_s: float | None) -> Findings:
        """Measure the suspected regressions of a run."""
        return self._confirm(self._config, run_id, budget_s)

    def debug_failures(self, cell: CellResult, folder: Path, budget_s: float | None) -> tuple[DebuggedJob, ...]:
        """Debug the jobs of a cell that newly fail by numerics, within a time; pages and pictures go into `folder`."""
        request = next(one.request for one in self._plan.cells if one.name == cell.name)
        end_s = None if budget_s is None else time.monotonic() + budget_s
        return self._debug(self._config, request, self._plan.debug, folder, cell, end_s)

    def collect_results(self, cell: CellResult, folder: Path) -> CellResult:
        """Return `cell` with the results of its run; pages go into `folder`."""
        return collect_results(self._config, self._plan, folder, cell)


def run_nightly(
    config: Config,
    plan: Plan,
    fronts: Callable[[], AbstractContextManager[ProgressListener]],
    work: CellWork,
    *,
    resume: bool = False,
) -> NightlyRun:
    """Run the cells of `plan`, write reports and exports, send notifications, and return the nightly run.

    `fronts` makes the display of one run. Ctrl-C and SIGTERM let the running jobs finish; the results so far are
    reported, and `resume` goes on with the rest. Raises UsageError while another nightly run of this name runs, or
    without one to resume; InfraError for failed writes of its own files.
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
            nightly_run = _Cells(plan, nightly_run, nightly_runs, folder, interrupts, fronts, work).run()
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
            socs=cell.request.socs,
            suites=cell.request.suites,
            backend=cell.request.backend,
            virtual=cell.request.virtual > 0,
        )
        for cell in plan.cells
    )
    return NightlyRun(
        id=new_id(),
        name=plan.name,
        digest=plan.digest,
        user=user_name(),
        host=socket.gethostname(),
        started_ms=time.time_ns() // 1_000_000,
        cells=cells,
    )


class _Cells:
    """Cells of a nightly run, executed one after the other; the nightly run is saved after each step."""

    def __init__(
        self,
        plan: Plan,
        nightly_run: NightlyRun,
        nightly_runs: NightlyRuns,
        folder: Path,
        interrupts: InterruptHandler,
        fronts: Callable[[], AbstractContextManager[ProgressListener]],
        work: CellWork,
    ) -> None:
        self._plan, self._nightly_runs, self._folder, self._work = plan, nightly_runs, folder, work
        self._interrupts, self._fronts = interrupts, fronts
        self._results = {cell.name: cell for cell in nightly_run.cells}
        self._nightly_run = nightly_run
        self._end_s = None if plan.budget_s is None else work.clock() + plan.budget_s
        self._is_stopped = False

    def run(self) -> NightlyRun:
        """Run the unfinished cells and return the nightly run, with its exit code."""
        self._save()
        left = [cell for cell in self._plan.cells if not self._results[cell.name].is_done]
        for number, cell in enumerate(left):
            logger.info("%s: %s", cell.name, cell.request.command)
            try:
                self._cell(cell, self._seconds(cell, left[number:]))
            except KeyboardInterrupt:
                self._is_stopped = True
            if self._is_stopped or self._interrupts.was_interrupted:
                break
        self._save(
            code=nightly_code(
                tuple(self._results.values()), interrupted=self._is_stopped or self._interrupts.was_interrupted
            ),
            finished_ms=time.time_ns() // 1_000_000,
            is_unnotified=True,
            report=str(self._folder / "index.html"),
            report_url=self._plan.report_url,
        )
        return self._nightly_run

    def _seconds(self, cell: PlannedCell, left: list[PlannedCell]) -> float | None:
        """Return the time of a cell: its share of the remaining time, with the unused time of earlier cells."""
        if self._end_s is None:
            return None
        return max(0.0, self._end_s - self._work.clock()) * cell.share / sum(one.share for one in left)

    def _cell(self, cell: PlannedCell, seconds: float | None) -> None:
        if seconds is not None and seconds < 1:
            self._keep(cell, code=NOTHING, problem="the budget of the nightly run was over before it could begin")
            return
        end_s = None if seconds is None else self._work.clock() + seconds
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

        with self._fronts() as front:
            if run_id:
                try:
                    return self._work.resume(run_id, front, self._interrupts, seconds)
                except UsageError as error:
                    logger.warning("%s: begins anew: %s", cell.name, error)
            request: RunRequest = msgspec.structs.replace(
                cell.request, budget_s=seconds, name=f"{self._plan.name}/{cell.name}", nightly_run=self._nightly_run.id
            )
            return self._work.run(request, front, self._interrupts, begun)

    def _collect(self, cell: PlannedCell, code: int, problem: str, end_s: float | None) -> None:
        """Debug new failures, confirm suspected regressions until `end_s`, and keep the results of a cell."""
        result = self._keep(cell, problem=problem)
        try:
            if result.run_id:
                if code != INTERRUPTED:
                    # Debugging gets half of the time at most: the rest is for suspected regressions.
                    result = self._keep(cell, debugged=self._debugged(result, end_s))
                    # Confirm before the report of the run, which shows the findings.
                    result = self._keep(cell, findings=self._confirmed(result.run_id, end_s))
                result = self._results[cell.name] = self._work.collect_results(result, self._folder)
        except FarmError as error:
            logger.warning("%s: %s", cell.name, error)
            result = self._keep(cell, problem=problem or str(error))
            # Results that could not be read or written are no success; a failure stays a failure.
            code = ExitCode.INFRA if code in (0, NOTHING) else code
        result = self._keep(cell, code=cell_code(code, result.findings))
        took = f" in {duration(result.seconds)}" if result.seconds else ""
        logger.info("%s: %s%s", cell.name, result.word, took)

    def _debugged(self, result: CellResult, end_s: float | None) -> tuple[DebuggedJob, ...]:
        try:
            left = None if end_s is None else max(0.0, end_s - self._work.clock()) * DEBUG_SHARE
            return self._work.debug_failures(result, self._folder, left)
        except KeyboardInterrupt:
            # The results of the run are reported all the same.
            self._is_stopped = True
            return result.debugged

    def _confirmed(self, run_id: str, end_s: float | None) -> Findings:
        if self._is_stopped:
            return Findings()
        try:
            left = None if end_s is None else max(0.0, end_s - self._work.clock())
            return self._work.confirm_suspected(run_id, left)
        except KeyboardInterrupt:
            # The results of the run are reported all the same.
            self._is_stopped = True
            return Findings()

    def _keep(self, cell: PlannedCell, **changes: object) -> CellResult:
        """Change and save the result of a cell, and return it."""
        result = self._results[cell.name] = msgspec.structs.replace(self._results[cell.name], **changes)
        self._save()
        return result

    def _save(self, **changes: object) -> None:
        self._nightly_run = msgspec.structs.replace(self._nightly_run, cells=tuple(self._results.values()), **changes)
        self._nightly_runs.save(self._nightly_run)
