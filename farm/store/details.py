"""Profiles and layers of an attempt <-> rows. SQLite makes NULL of NaN: what a NULL means is told here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from farm.program.layers import LayerStep
from farm.results.attempt import Attempt, LayerComparison, OperatorProfile
from farm.store import values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Row

_TIMES = ("p50", "least", "greatest", "share")
_FIGURES = ("mse", "sqnr_db", "cosine")


def bounded_details(attempt: Attempt) -> Attempt:
    """Return the attempt with as many rows, and with texts as long, as the store keeps."""
    replace = msgspec.structs.replace
    operators = [
        replace(
            row,
            node=values.clean(row.node, values.NAME_LIMIT),
            delegate=values.clean(row.delegate, values.NAME_LIMIT),
            unit=values.clean(row.unit, values.UNIT_LIMIT),
        )
        for row in attempt.operators[: values.OPERATORS_LIMIT]
    ]
    layers = [
        replace(
            row,
            layer=values.clean(row.layer, values.NAME_LIMIT),
            operator=values.clean(row.operator, values.NAME_LIMIT),
        )
        for row in attempt.layers[: values.LAYERS_LIMIT]
    ]
    return replace(attempt, operators=tuple(operators), layers=tuple(layers))


def operator_rows(attempt_id: int, operators: Sequence[OperatorProfile]) -> list[dict[str, Any]]:
    """Return the rows of a profile."""
    return [
        {"attempt_id": attempt_id, "position": position, **msgspec.structs.asdict(row), **_nulls(row, _TIMES)}
        for position, row in enumerate(operators)
    ]


def layer_rows(attempt_id: int, layers: Sequence[LayerComparison]) -> list[dict[str, Any]]:
    """Return the rows of a comparison layer by layer."""
    rows = []
    for position, layer in enumerate(layers):
        nulls = _nulls(layer, _FIGURES)
        # Here NULL means "does not apply".
        row = {"attempt_id": attempt_id, "position": position, **msgspec.structs.asdict(layer), **nulls}
        rows.append({**row, "step": layer.step.value, "nan_figures": list(nulls)})
    return rows


def operators_of(rows: Iterable[Sequence[Any]]) -> dict[int, tuple[OperatorProfile, ...]]:
    """Return profiles by attempt id; `rows` are ordered by position."""
    found: dict[int, list[OperatorProfile]] = {}
    # Unpacked, which is quicker than by name: a run may have a hundred thousand rows.
    for attempt_id, node, delegate, unit, n, p50, least, greatest, share in rows:
        if None in (p50, least, greatest, share):
            p50, least, greatest, share = (  # noqa: PLW2901 - here, NULL can only have been NaN
                math.nan if time is None else time for time in (p50, least, greatest, share)
            )
        found.setdefault(attempt_id, []).append(OperatorProfile(node, delegate, unit, n, p50, least, greatest, share))
    return {attempt_id: tuple(operators) for attempt_id, operators in found.items()}


def layers_of(rows: Iterable[Row[Any]]) -> dict[int, tuple[LayerComparison, ...]]:
    """Return comparisons layer by layer, by attempt id; `rows` are ordered by position."""
    found: dict[int, list[LayerComparison]] = {}
    for row in rows:
        figures = {
            "mse": row.mse,
            "sqnr_db": row.sqnr_db,
            "cosine": row.cosine,
            **dict.fromkeys(row.nan_figures, math.nan),
        }
        found.setdefault(row.attempt_id, []).append(
            LayerComparison(row.layer, row.operator, LayerStep(row.step), diverges=row.diverges, **figures)
        )
    return {attempt_id: tuple(layers) for attempt_id, layers in found.items()}


def _nulls(row: OperatorProfile | LayerComparison, names: Iterable[str]) -> dict[str, None]:
    figures = ((name, getattr(row, name)) for name in names)
    return {name: None for name, figure in figures if figure is not None and math.isnan(figure)}
