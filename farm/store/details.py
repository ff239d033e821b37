"""Rows <-> the details of an attempt. SQLite stores NaN as NULL: this module defines the meaning of each NULL."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Row

from farm.results.attempt import Attempt, Comparison, LayerComparison, OperatorProfile, Verdict
from farm.store import values
from farm.store.attempt_fields import ATTEMPT_FIELDS, DETAIL_FIELDS
from farm.store.records import LastVerdict
from farm.store.statements import in_parts, statement, struct_of

_T = TypeVar("_T", bound=msgspec.Struct)


def bounded(attempt: Attempt) -> Attempt:
    """Return the attempt within the store's limits of rows and text lengths, in characters that both databases hold."""
    return msgspec.structs.replace(
        attempt,
        **{name: field.bounded(getattr(attempt, name)) for name, field in ATTEMPT_FIELDS.items()},
        device=values.clean(attempt.device, values.NAME_LIMIT),
        comparisons=_bounded(attempt.comparisons),
        measurements=tuple(
            msgspec.structs.replace(
                one,
                metric=values.clean(one.metric, values.METRIC_LIMIT),
                unit=values.clean(one.unit, values.UNIT_LIMIT),
            )
            for one in attempt.measurements
        ),
        operators=_bounded(attempt.operators[: values.OPERATORS_LIMIT]),
        layers=_bounded(attempt.layers[: values.LAYERS_LIMIT]),
    )


def _bounded(details: tuple[_T, ...]) -> tuple[_T, ...]:
    kinds = {name: field.kind.bounded for name, field in DETAIL_FIELDS[type(details[0])].items()} if details else {}
    texts = [(name, bound) for name, bound in kinds.items() if bound is not None]
    return tuple(
        msgspec.structs.replace(one, **{name: bound(getattr(one, name)) for name, bound in texts}) for one in details
    )


def detail_rows(
    attempt_id: int, details: Sequence[Comparison | OperatorProfile | LayerComparison]
) -> list[dict[str, Any]]:
    """Return the rows of details of an attempt."""
    columns = [field.column_name for field in DETAIL_FIELDS[type(details[0])].values()] if details else []
    rows = []
    for position, one in enumerate(details):
        row: dict[str, Any] = dict(zip(columns, msgspec.structs.astuple(one), strict=True))
        nan = [name for name, value in row.items() if isinstance(value, float) and math.isnan(value)]
        row |= {**dict.fromkeys(nan), "attempt_id": attempt_id, "position": position}
        if not isinstance(one, OperatorProfile):
            # NULL alone means "does not apply".
            row["nan_figures"] = nan
        rows.append(row)
    return rows


def operators_of(rows: Iterable[Sequence[Any]]) -> dict[int, tuple[OperatorProfile, ...]]:
    """Return profiles by attempt id; `rows` are ordered by position."""
    found: dict[int, list[OperatorProfile]] = {}
    # Unpacked, which is quicker than by name: a run may have a hundred thousand rows.
    for attempt_id, node, delegate, unit, n, p50, least, greatest, share, module, source in rows:
        if None in (p50, least, greatest, share):
            p50, least, greatest, share = (  # noqa: PLW2901 - here, NULL can only have been NaN
                math.nan if time is None else time for time in (p50, least, greatest, share)
            )
        row = OperatorProfile(node, delegate, unit, n, p50, least, greatest, share, module, source)
        found.setdefault(attempt_id, []).append(row)
    return {attempt_id: tuple(operators) for attempt_id, operators in found.items()}


def layers_of(rows: Iterable[Row[Any]]) -> dict[int, tuple[LayerComparison, ...]]:
    """Return comparisons layer by layer, by attempt id; `rows` are ordered by position."""
    return _details_of(LayerComparison, rows)


def comparisons_of(rows: Iterable[Row[Any]]) -> dict[int, tuple[Comparison, ...]]:
    """Return comparisons by attempt id; `rows` are ordered by position."""
    return _details_of(Comparison, rows)


def _details_of(kind: type[_T], rows: Iterable[Row[Any]]) -> dict[int, tuple[_T, ...]]:
    names = {field.column_name: name for name, field in DETAIL_FIELDS[kind].items()}
    found: dict[int, list[_T]] = {}
    for row in rows:
        facts = {name: getattr(row, column) for column, name in names.items()}
        facts |= dict.fromkeys(row.nan_figures, math.nan)
        found.setdefault(row.attempt_id, []).append(msgspec.convert(facts, kind, strict=False))
    return {attempt_id: tuple(details) for attempt_id, details in found.items()}


def verdict_of(row: Row[Any]) -> LastVerdict:
    """Return the verdict of a row of `run_job` with the attempt that decides it."""
    known = row.verdict == Verdict.FAILED and row.known_issue
    return struct_of(LastVerdict, row, outcome="known issue" if known else row.verdict)


def device_facts(build: str | None, runtime: Mapping[str, str] | None) -> dict[str, str]:
    """Return the conditions of numbers besides the run's fingerprint, name to value."""
    facts = dict(runtime or {})
    if "runner" in facts:
        # The device's own runner replaces the runner of the host.
        facts["native_runner"] = facts.pop("runner")
    return facts | ({"device_build": build} if build else {})


def fingerprints(connection: Connection, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return fingerprints by their hash."""
    rows = in_parts(connection, statement("history.fingerprints"), sorted(set(hashes)))
    return {row.hash: row.facts for row in rows}
