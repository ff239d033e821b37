"""What a night would do, before anything of it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.errors import MissingToolError, NothingSelectedError, StoreError
from farm.nightly.text import Row
from farm.request.choose import narrow
from farm.request.selection import total_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.config.settings import Config
    from farm.nightly.plan import Cell, Plan
    from farm.store.store import Store
    from farm.suites.suite import Job


def matrix(config: Config, plan: Plan, jobs: Mapping[str, tuple[Job, ...]]) -> list[Row]:
    """Return the cells with their jobs and the time that they are expected to take; `jobs` is of `read_plan`."""
    from farm.store.store import open_store

    try:
        store = open_store(config.store_url, readonly=True)
    except StoreError:
        # None yet, or none that can be read, which a run will say: nothing is made here.
        return [_row(config, cell, jobs[cell.name], None) for cell in plan.cells]
    with store:
        return [_row(config, cell, jobs[cell.name], store) for cell in plan.cells]


def _row(config: Config, cell: Cell, jobs: tuple[Job, ...], store: Store | None) -> Row:
    request = cell.request
    if store is not None and request.last_failed and jobs:
        try:
            jobs = narrow(request, jobs, store, dict, lambda _: None)
        except NothingSelectedError:
            jobs = ()
    expected = None
    if store is not None:
        ids = [job.id for job in jobs]
        past = store.selection.expected(ids, request.device_kind)
        if past:
            seconds = total_seconds(ids, past)
            per_soc: dict[str, float] = {}
            for job in jobs:
                per_soc[job.target.soc] = per_soc.get(job.target.soc, 0.0) + seconds[job.id]
            # Devices of several SoCs work side by side.
            expected = max(per_soc.values()) / max(request.virtual, 1)
    return Row(
        name=cell.name,
        socs=request.socs,
        suites=request.suites,
        backend=request.backend,
        jobs=len(jobs),
        virtual=request.virtual,
        expected_s=expected,
        command=request.command,
        problem=_lacks(config, cell),
    )


def _lacks(config: Config, cell: Cell) -> str:
    """Return what this machine lacks for a cell; empty for nothing."""
    from farm.run.run import check_machine

    try:
        check_machine(config, cell.request)
    except MissingToolError as error:
        return str(error)
    return ""
