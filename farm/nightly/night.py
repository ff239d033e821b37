"""A night, from its plan to its exit code: one cell after the other, whatever becomes of each."""

from __future__ import annotations

import socket
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from farm.errors import FarmError, UsageError
from farm.nightly.harvest import Harvest
from farm.nightly.look_back import SHARE, look_back
from farm.nightly.record import NOTHING, CellResult, Findings, Night, cell_code, night_code
from farm.nightly.state import Nights, new_id
from farm.report.model.format import duration
from farm.request.ending import INTERRUPTED, Patience
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from farm.config.settings import Config
    from farm.nightly.notify import Secrets
    from farm.nightly.plan import Cell, Plan
    from farm.request.request import RunOutcome, RunRequest
    from farm.run.progress import Front


def run_night(
    config: Config,
    plan: Plan,
    secrets: Secrets,
    fronts: Callable[[], AbstractContextManager[Front]],
    say: Callable[[str], None],
    *,
    resume: bool = False,
) -> Night:
    """Run what `plan` asks for, write its reports and exports, tell people, and return what was found.

    `fronts` makes what shows one run. Ctrl-C and SIGTERM let the running jobs finish; the night is told as far as it
    came, and `resume` goes on with it. Raises UsageError while another night of this name runs, or when there is none
    to resume; InfraError when its own files cannot be written.
    """
    from farm.nightly.notify import notify
    from farm.nightly.page import write_pages

    nights = Nights(config.state_dir / "nightly" / plan.name)
    with nights.alone(), Patience(term=True) as patience:
        reports = plan.report_dir or nights.folder
        known = nights.all()
        night = nights.unfinished(plan.digest) if resume else _new_night(plan)
        harvest = Harvest(config, plan, reports / night.id)
        if not resume:
            harvest.clear_exports()
        night = _Night(config, plan, night, nights, harvest, patience, fronts, say).run()
        before = next((one for one in reversed(known) if one.started_ms < night.started_ms and one.is_done), None)
        write_pages(night, known, reports)
        # Nobody waits for a network beside an exit code that is known.
        night = msgspec.structs.replace(night, deliveries=notify(plan, secrets, night, before))
        for delivery in night.deliveries:
            if not delivery.ok:
                say(f"NOT NOTIFIED: {delivery.to}: {delivery.said}")
        nights.save(night)
        write_pages(night, known, reports)
        nights.forget(plan.keep, reports)
    return night


def _new_night(plan: Plan) -> Night:
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
    return Night(
        id=new_id(),
        name=plan.name,
        digest=plan.digest,
        user=user_name(),
        host=socket.gethostname(),
        started_ms=time.time_ns() // 1_000_000,
        cells=cells,
    )


class _Night:
    """The cells of a night, one after the other."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        night: Night,
        nights: Nights,
        harvest: Harvest,
        patience: Patience,
        fronts: Callable[[], AbstractContextManager[Front]],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._plan, self._nights, self._harvest = config, plan, nights, harvest
        self._patience, self._fronts, self._say = patience, fronts, say
        self._cells = {cell.name: cell for cell in night.cells}
        self._night = night
        self._end_s = None if plan.budget_s is None else time.monotonic() + plan.budget_s
        self._is_stopped = False

    def run(self) -> Night:
        """Run what is not done of the night and return it, with its exit code."""
        self._save()
        left = [cell for cell in self._plan.cells if not self._cells[cell.name].is_done]
        for number, cell in enumerate(left):
            seconds = self._seconds(cell, left[number:])
            self._say(f"{cell.name}: {cell.request.command}")
            try:
                self._cell(cell, seconds)
            except KeyboardInterrupt:
                self._is_stopped = True
            if self._is_stopped or self._patience.was_asked:
                break
        interrupted = self._is_stopped or self._patience.was_asked
        self._night = msgspec.structs.replace(
            self._night,
            code=night_code(tuple(self._cells.values()), interrupted=interrupted),
            finished_ms=time.time_ns() // 1_000_000,
            report=str(self._harvest.folder / "index.html"),
            report_url=self._plan.report_url,
        )
        self._save()
        return self._night

    def _seconds(self, cell: Cell, left: list[Cell]) -> float | None:
        """Return the time that a cell has: its share of what is left, so that what one leaves over others have."""
        if self._end_s is None:
            return None
        return max(0.0, self._end_s - time.monotonic()) * cell.share / sum(one.share for one in left)

    def _cell(self, cell: Cell, seconds: float | None) -> None:
        if seconds is not None and seconds < 1:
            self._note(cell, code=NOTHING, problem="the budget of the night was over before it could begin")
            return
        end_s = None if seconds is None else time.monotonic() + seconds
        code, problem = 0, ""
        try:
            outcome = self._run(cell, None if seconds is None else seconds * (1 - SHARE))
            code = outcome.exit_code
        except FarmError as error:
            code, problem = error.exit_code, str(error)
        except OSError as error:
            code, problem = 4, f"{error.filename or 'the system'}: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001 - one cell's bug is not to cost the other cells their night
            traceback.print_exc()
            code, problem = 4, f"this is a bug in farm: {type(error).__name__}: {error}"
        if problem:
            self._say(f"{cell.name}: {problem}")
        self._end(cell, code, problem, end_s)

    def _run(self, cell: Cell, seconds: float | None) -> RunOutcome:
        """Run a cell, or what is missing of its run."""
        from farm.run.run import resume, run

        request: RunRequest = msgspec.structs.replace(cell.request, budget_s=seconds)
        run_id = self._cells[cell.name].run_id
        with self._fronts() as front:
            if run_id:
                try:
                    return resume(self._config, run_id, front, seconds, patience=self._patience)
                except UsageError as error:
                    self._say(f"{cell.name}: begins anew: {error}")
            return run(
                self._config, request, front,
                patience=self._patience, begun=lambda run_id: self._note(cell, run_id=run_id),
            )  # fmt: skip

    def _look_back(self, run_id: str, end_s: float | None) -> Findings:
        left = None if end_s is None else max(0.0, end_s - time.monotonic())
        try:
            return look_back(self._config, run_id, self._say, left)
        except KeyboardInterrupt:
            # What the run found is told all the same.
            self._is_stopped = True
            return Findings()

    def _end(self, cell: Cell, code: int, problem: str, end_s: float | None) -> None:
        """Keep what a cell found."""
        result = msgspec.structs.replace(self._cells[cell.name], problem=problem)
        try:
            if result.run_id:
                if code != INTERRUPTED:
                    # First, as the report of the run tells of it.
                    result = msgspec.structs.replace(result, findings=self._look_back(result.run_id, end_s))
                result = self._cells[cell.name] = self._harvest.gather(result)
        except FarmError as error:
            self._say(f"{cell.name}: {error}")
            result = msgspec.structs.replace(result, problem=problem or str(error))
            # What cannot be read, or written, was not judged; a failure stays one.
            code = 4 if code in (0, NOTHING) else code
        result = msgspec.structs.replace(result, code=cell_code(code, result.findings))
        self._cells[cell.name] = result
        self._save()
        took = f" in {duration(result.seconds)}" if result.seconds else ""
        self._say(f"{cell.name}: {result.word}{took}")

    def _note(self, cell: Cell, **changes: object) -> None:
        self._cells[cell.name] = msgspec.structs.replace(self._cells[cell.name], **changes)
        self._save()

    def _save(self) -> None:
        self._night = msgspec.structs.replace(self._night, cells=tuple(self._cells.values()))
        self._nights.save(self._night)
