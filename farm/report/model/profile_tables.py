"""Tables of a profile and of layers: time by node and module, and the first diverging layer. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.builds.program.layers import LayerStep
from farm.results.attempt import LayerComparison, OperatorProfile
from farm.results.profile.event_names import is_whole_call, sums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SHOWN_JOBS = 200
"""Jobs of one kind whose profile or layers a page shows; `farm jobs profile` shows the others."""
ROW_BUDGET = 6_000
"""Rows of all profiles in a page."""
ROW_LIMITS = (5, 25)
"""Least and most rows of one table of a profile."""
MODULE_ROWS = 12
"""Rows up to which a table of modules in a page goes deeper."""
LAYER_LIMIT = 2_000
"""Most layers of one job that a page shows."""

MODEL = "the model itself"
"""Name of nodes outside of any submodule, such as code of the model's `forward`."""

_UNITS = ("cycles", "us", "ns")


class OperatorTable(msgspec.Struct, frozen=True):
    """Nodes of a profile in one unit, the greatest shares first."""

    unit: str
    total: float
    count: int
    rows: tuple[OperatorProfile, ...]
    left_out: int
    left_out_total: float

    @property
    def left_out_share(self) -> float:
        """Return the share of the hidden rows in the total, 0 to 1."""
        return self.left_out_total / self.total if self.total else 0.0


class OriginSum(msgspec.Struct, frozen=True):
    """Total of all nodes of one module, or of one line of code, in one unit."""

    name: str
    """`layers.3.conv` or `models/text.py:42`; MODEL for nodes outside of any module, "" when it is not known."""
    unit: str
    nodes: int
    p50: float
    """Sum of the medians."""
    share: float


class LayerRow(msgspec.Struct, frozen=True):
    """Layer at every step that was compared; None for a step at which it was not."""

    layer: str
    operator: str
    steps: tuple[LayerComparison | None, ...]


class LayerTable(msgspec.Struct, frozen=True):
    """Layers of one job in the order of execution."""

    steps: tuple[LayerStep, ...]
    rows: tuple[LayerRow, ...]
    first: LayerComparison | None
    """First diverging layer and its step; None when no layer diverges."""
    left_out: int


def row_limit(jobs: int) -> int:
    """Return the number of rows of a table when `jobs` have profiles."""
    least, most = ROW_LIMITS
    return max(least, min(most, ROW_BUDGET // max(1, min(jobs, SHOWN_JOBS))))


def operator_tables(operators: Sequence[OperatorProfile], limit: int) -> tuple[OperatorTable, ...]:
    """Return a table for each unit of a profile, units of accelerators first; at most `limit` rows each."""
    tables = []
    for unit, total in by_unit(sums(operators)):
        rows = sorted((r for r in operators if r.unit == unit and not is_whole_call(r)), key=lambda r: -r.p50)
        rest = rows[limit:]
        left = sum(row.p50 for row in rest)
        tables.append(OperatorTable(unit, total, len(rows), tuple(rows[:limit]), len(rest), left))
    return tuple(tables)


def origin_sums(
    operators: Iterable[OperatorProfile], *, by_line: bool = False, depth: int = 0
) -> tuple[OriginSum, ...]:
    """Return the total of each module, or with `by_line` of each line of code, the greatest first, by unit.

    `depth` is the number of names to which modules are shortened, which sums their submodules; 0 keeps the full names.
    A unit without a known origin has no sums.
    """
    sums_of: dict[tuple[str, str], list[float]] = {}
    for row in operators:
        if not is_whole_call(row):
            parts = row.module.split(".")
            module = ".".join(parts[:depth] if depth else parts) or (MODEL if row.source else "")
            one = sums_of.setdefault((row.unit, row.source if by_line else module), [0, 0.0, 0.0])
            sums_of[row.unit, row.source if by_line else module] = [one[0] + 1, one[1] + row.p50, one[2] + row.share]
    known = {unit for unit, name in sums_of if name}
    found = [
        OriginSum(name, unit, int(nodes), p50, share)
        for (unit, name), (nodes, p50, share) in sums_of.items()
        if unit in known
    ]
    order = {unit: number for number, (unit, _) in enumerate(by_unit(dict.fromkeys(known, 0.0)))}
    return tuple(sorted(found, key=lambda one: (order[one.unit], -one.p50, one.name)))


def module_sums(operators: Iterable[OperatorProfile]) -> tuple[OriginSum, ...]:
    """Return totals of modules at the greatest depth with a short table; a table that is long at depth 1 is cut."""
    rows = tuple(operators)
    found: tuple[OriginSum, ...] = ()
    for depth in range(1, 1 + max((row.module.count(".") + 1 for row in rows), default=0)):
        deeper = origin_sums(rows, depth=depth)
        if found and len(deeper) > MODULE_ROWS:
            break
        found = deeper
    return found[: ROW_LIMITS[1]]


def by_unit(totals: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return totals by unit, units of accelerators first."""
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
