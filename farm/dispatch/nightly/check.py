"""Forecast of a nightly run, with its expected time: `farm nightly --check`. It creates no file."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.toolchains import DEFAULT
from farm.base.errors import MissingToolError, StoreError
from farm.base.socs import find_soc
from farm.base.text import one_line
from farm.devices.device import common_kind
from farm.dispatch.nightly.render import LEAST_WIDTH
from farm.dispatch.request.selection import total_seconds
from farm.report.model import format as fmt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.dispatch.nightly.plan import Plan, PlannedCell
    from farm.store.store import Store
    from farm.suites.suite import Job


class CellForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a cell."""

    name: str
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str
    jobs: int
    virtual: int
    expected_s: float | None
    """Expected time from past runs, on one device of each SoC or on the virtual devices; None without past runs."""
    command: str
    problem: str = ""
    """Missing tools of this machine for the cell; empty for none."""


def matrix(config: Config, plan: Plan, jobs: Mapping[str, tuple[Job, ...]]) -> list[CellForecast]:
    """Return the cells with their jobs and expected time; `jobs` comes from `read_plan`."""
    from farm.store.store import open_store

    try:
        store = open_store(config.store_url, readonly=True)
    except StoreError:
        # The store does not exist yet, or cannot be read, which a run will report: a check creates nothing.
        return [_forecast(config, cell, jobs[cell.name], None) for cell in plan.cells]
    with store:
        return [_forecast(config, cell, jobs[cell.name], store) for cell in plan.cells]


def matrix_lines(name: str, rows: Sequence[CellForecast], budget_s: float | None, width: int = 80) -> list[str]:
    """Return the forecast of a nightly run as lines of text, with a paragraph for each cell."""
    width = max(width, LEAST_WIDTH)
    jobs = sum(row.jobs for row in rows)
    budget = f"within {fmt.duration(budget_s)}" if budget_s is not None else "without a budget"
    lines = [f"nightly run {name}: runs: {len(rows)}, jobs: {jobs}, {budget}"]
    for row in rows:
        on = f"virtual devices, {row.virtual} of each SoC" if row.virtual else "attached devices"
        expected = (
            "no earlier run for an estimate" if row.expected_s is None else f"about {fmt.duration(row.expected_s)}"
        )
        if row.expected_s is not None and not row.virtual:
            expected += " on one device a SoC"
        lines += ["", one_line(row.name, width)]
        for text in (
            f"{', '.join(row.socs)}; {row.backend}; {', '.join(one_line(suite) for suite in row.suites)}",
            f"{fmt.plural(row.jobs, 'job')} on {on}; {expected}",
            *([f"CANNOT RUN HERE: {one_line(row.problem)}"] if row.problem else []),
        ):
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _forecast(config: Config, cell: PlannedCell, jobs: tuple[Job, ...], store: Store | None) -> CellForecast:
    from farm.builds.toolchains.prepare import branch_of
    from farm.builds.toolchains.select import toolchain_of

    request = cell.request
    branch = branch_of(config, toolchain_of(config, request.toolchain or DEFAULT))
    if store is not None and request.last_failed and jobs:
        failed = store.selection.failed_last(
            [job.id for job in jobs], _kind_of(cell, store), store.user, branch, private=False
        )
        jobs = tuple(job for job in jobs if job.id in failed) or jobs
    expected = None
    if store is not None:
        ids = [job.id for job in jobs]
        past = store.selection.expected(ids, _kind_of(cell, store), branch)
        if past:
            seconds = total_seconds(ids, past)
            per_soc: dict[str, float] = {}
            for job in jobs:
                per_soc[job.target.soc] = per_soc.get(job.target.soc, 0.0) + seconds[job.id]
            # Devices of several SoCs work side by side.
            expected = max(per_soc.values()) / max(request.virtual, 1)
    return CellForecast(
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


def _kind_of(cell: PlannedCell, store: Store) -> str:
    """Return the kind of a cell's devices from the store: looking for the devices could start an adb server."""
    if cell.request.virtual:
        return "virtual"
    socs = {find_soc(name).name for name in cell.request.socs}
    kind = common_kind(known.kind for known in store.devices.all() if known.soc in socs and known.last_seen_ms)
    return kind if kind == "virtual" else "hardware"


def _lacks(config: Config, cell: PlannedCell) -> str:
    """Return the missing tools of this machine for a cell; empty for none."""
    from farm.dispatch.request.choose import check_machine

    try:
        check_machine(config, cell.request)
    except MissingToolError as error:
        return str(error)
    return ""
