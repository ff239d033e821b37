"""What a run in the store gives to the night: how its jobs ended, its page, its exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.errors import InfraError
from farm.nightly.record import CellResult, Told
from farm.nightly.state import write_whole
from farm.report.formats import export_formats
from farm.report.html.page_of_run import render_html
from farm.report.model.status import Standing, standing
from farm.report.model.summary import summarize
from farm.request.ending import report_context
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from farm.config.settings import Config
    from farm.nightly.plan import Plan
    from farm.store.records import JobStatus
    from farm.store.store import Store
    from farm.store.view import RunView

_SAID_CHARS = 300


class Harvest:
    """Brings runs in."""

    def __init__(self, config: Config, plan: Plan, folder: Path) -> None:
        self._config, self._plan = config, plan
        self.folder = folder
        """Where the pages of the night are."""

    def clear_exports(self) -> None:
        """Remove what earlier nights exported under the names of this one: a cell without a run has no file."""
        if self._plan.export_dir is not None:
            for cell in self._plan.cells:
                for form in self._plan.formats:
                    self._export_file(cell.name, form).unlink(missing_ok=True)

    def gather(self, cell: CellResult) -> CellResult:
        """Return `cell` with what its run found; its page and exports are written. Raises InfraError."""
        from farm.report.model.context import artifact_links
        from farm.store.artifacts import ArtifactStore
        from farm.store.store import open_store

        page, artifacts = self.folder / f"{cell.name}.html", ArtifactStore(self._config.state_dir / "artifacts")
        with open_store(self._config.store_url, readonly=True) as store:
            view = store.runs.view(cell.run_id)
            jobs = store.status.of_run(cell.run_id).jobs
            exports = self._export(cell.name, store, view)
            context = report_context(store, cell.run_id, lambda known: artifact_links(known, artifacts, page))
        write_whole(page, render_html(view, context).encode())
        summary = summarize(view)
        by_kind: dict[Standing, list[JobStatus]] = {}
        for job in jobs:
            by_kind.setdefault(standing(job), []).append(job)
        return msgspec.structs.replace(
            cell,
            problem=cell.problem or _left_out(view),
            counts={str(outcome): count for outcome, count in summary.counts.items() if count},
            seconds=summary.seconds or 0.0,
            new_failures=_told(by_kind.get(Standing.NEW_FAILURE, ())),
            still_failing=_told(by_kind.get(Standing.STILL_FAILING, ())),
            fixed=tuple(job.job_id for job in by_kind.get(Standing.FIXED, ())),
            infra=_told(by_kind.get(Standing.INFRA, ())),
            not_tested=len(by_kind.get(Standing.STALE, ())),
            report=f"{cell.name}.html",
            exports=exports,
        )

    def _export(self, name: str, store: Store, view: RunView) -> tuple[str, ...]:
        found = []
        if self._plan.export_dir is not None:
            for form in self._plan.formats:
                data = b"".join(export_formats()[form].write(store, [view.id], view))
                write_whole(self._export_file(name, form), data)
                found.append(str(self._export_file(name, form)))
        return tuple(found)

    def _export_file(self, name: str, form: str) -> Path:
        assert self._plan.export_dir is not None  # noqa: S101 - asked before
        return self._plan.export_dir / f"{name}.{export_formats()[form].suffix}"


def _left_out(view: RunView) -> str:
    """Return which SoCs had no device in a run that came to its end; empty for none."""
    if view.finished_ms is None or view.exit_code != InfraError.exit_code:
        return ""
    left = [job for job in view.jobs if not job.attempts and job.stale is None]
    with_device = {job.soc for job in view.jobs if job.attempts}
    socs = sorted({job.soc for job in left} - with_device)
    were = "1 job was" if len(left) == 1 else f"{len(left)} jobs were"
    return f"no device of {', '.join(socs)}: {were} not run" if socs else ""


def _told(jobs: Iterable[JobStatus]) -> tuple[Told, ...]:
    return tuple(
        Told(job.job_id, one_line(f"{job.stage}: {job.reason}" if job.stage else job.reason, _SAID_CHARS))
        for job in jobs
    )
