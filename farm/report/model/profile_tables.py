"""Tables of a profile and of layers: where the time of a program goes, which layer goes wrong first. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.program.layers import LayerStep
from farm.results.attempt import LayerComparison, OperatorProfile
from farm.results.profile.event_names import is_whole_call, sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.report.model.summary import JobSummary, RunSummary

SHOWN_JOBS = 200
"""Jobs of one kind whose profile or layers a page shows; `farm profile` shows the others."""
ROW_BUDGET = 6_000
"""Rows of profiles in a page in all."""
ROW_LIMITS = (5, 25)
"""Least and most rows that one table of a profile gets of it."""
LAYER_LIMIT = 2_000
"""Most layers of one job that a page shows."""

_UNITS = ("cycles", "us", "ns")


class OperatorTable(msgspec.Struct, frozen=True):
    """The nodes of a profile in one unit, the greatest shares first."""

    unit: str
    total: float
    count: int
    rows: tuple[OperatorProfile, ...]
    left_out: int
    left_out_total: float

    @property
    def left_out_share(self) -> float:
        """What the rows that are not shown take of the total, 0 to 1."""
        return self.left_out_total / self.total if self.total else 0.0


class LayerRow(msgspec.Struct, frozen=True):
    """One layer at every step that was compared; None for a step at which it was not."""

    layer: str
    operator: str
    steps: tuple[LayerComparison | None, ...]


class LayerTable(msgspec.Struct, frozen=True):
    """All layers of one job in the order of execution."""

    steps: tuple[LayerStep, ...]
    rows: tuple[LayerRow, ...]
    first: LayerComparison | None
    """Where it goes wrong first, and at which step; None when nothing diverges."""
    left_out: int


def profiled(summary: RunSummary) -> tuple[JobSummary, ...]:
    """Return the jobs whose final attempt has a profile."""
    return tuple(job for job in summary.jobs if job.attempt is not None and job.attempt.operators)


def debugged(summary: RunSummary) -> tuple[JobSummary, ...]:
    """Return the jobs whose final attempt was compared layer by layer."""
    return tuple(job for job in summary.jobs if job.attempt is not None and job.attempt.layers)


def row_limit(jobs: int) -> int:
    """Return how many rows of a table are shown where `jobs` have profiles."""
    least, most = ROW_LIMITS
    return max(least, min(most, ROW_BUDGET // max(1, min(jobs, SHOWN_JOBS))))


def operator_tables(operators: Sequence[OperatorProfile], limit: int) -> tuple[OperatorTable, ...]:
    """Return a table for each unit of a profile, what accelerators count first; `limit` rows of each."""
    tables = []
    for unit, total in by_unit(sums(operators)):
        rows = sorted((r for r in operators if r.unit == unit and not is_whole_call(r)), key=lambda r: -r.p50)
        rest = rows[limit:]
        left = sum(row.p50 for row in rest)
        tables.append(OperatorTable(unit, total, len(rows), tuple(rows[:limit]), len(rest), left))
    return tuple(tables)


def by_unit(totals: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return totals by unit, what accelerators count first."""
    order = {unit: number for number, unit in enumerate(_UNITS)}
    return sorted(totals.items(), key=lambda one: (order.get(one[0], len(order)), one[0]))


def layer_table(layers: Sequence[LayerComparison]) -> LayerTable:
    """Return the layers of one job, a row each."""
    steps = tuple(step for step in LayerStep if any(layer.step is step for layer in layers))
    by_layer: dict[str, dict[LayerStep, LayerComparison]] = {}
    for layer in layers:
        by_layer.setdefault(layer.layer, {})[layer.step] = layer
    rows = [
        LayerRow(name, next(iter(found.values())).operator, tuple(found.get(step) for step in steps))
        for name, found in by_layer.items()
    ]
    diverging = (one for row in rows for one in row.steps if one is not None and one.diverges)
    return LayerTable(steps, tuple(rows[:LAYER_LIMIT]), next(diverging, None), len(rows[LAYER_LIMIT:]))
