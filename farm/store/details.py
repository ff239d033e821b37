"""Rows -> what they say, and the details of an attempt -> rows. SQLite makes NULL of NaN: here is what a NULL means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from farm.builds.program.layers import LayerStep
from farm.results.attempt import Attempt, Comparison, LayerComparison, OperatorProfile, Verdict
from farm.store import values
from farm.store.records import ArtifactRecord, JobFile, LastVerdict
from farm.store.statements import chunks, statement
from farm.suites.figures import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import Connection, Row

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
            module=values.clean(row.module, values.NAME_LIMIT),
            source=values.clean(row.source, values.NAME_LIMIT),
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


def comparisons_of(rows: Iterable[Row[Any]]) -> dict[int, tuple[Comparison, ...]]:
    """Return comparisons by attempt id; `rows` are ordered by position."""
    found: dict[int, tuple[Comparison, ...]] = {}
    for row in rows:
        figures = {name: getattr(row, name) for name in COLUMNS} | dict.fromkeys(row.nan_figures, math.nan)
        facts = {"output": row.output, "reference": row.reference, "name": row.output_name}
        one = Comparison(violations=tuple(row.violations), **facts, **figures)
        found[row.attempt_id] = (*found.get(row.attempt_id, ()), one)
    return found


def artifact_of(row: Row[Any]) -> ArtifactRecord:
    """Return the artifact of a row."""
    return ArtifactRecord(row.sha256, row.size, row.kind)


def job_file_of(row: Row[Any]) -> JobFile:
    """Return the artifact of a row with the number of its attempt."""
    return JobFile(row.sha256, row.size, row.kind, row.number)


def verdict_of(row: Row[Any]) -> LastVerdict:
    """Return the verdict of a row of `run_job` with the attempt that decides it."""
    known = row.verdict == Verdict.FAILED and row.known_issue
    return LastVerdict(
        run_id=row.run_id,
        time_ms=row.recorded_ms,
        outcome="known issue" if known else row.verdict,
        bundle_key=row.bundle_key or "",
        judged_by=row.judged_by or "",
    )


def device_facts(build: str | None, runtime: Mapping[str, str] | None) -> dict[str, str]:
    """Return what numbers depend on besides the run's fingerprint, name to value."""
    facts = dict(runtime or {})
    if "runner" in facts:
        # In place of that of the machine which the device is attached to.
        facts["native_runner"] = facts.pop("runner")
    return facts | ({"device_build": build} if build else {})


def fingerprints(connection: Connection, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return fingerprints by their hash."""
    found: dict[str, dict[str, str]] = {}
    for part in chunks(sorted(set(hashes))):
        for row in connection.execute(statement("history.fingerprints"), {"hashes": part}):
            found[row.hash] = row.facts
    return found


def _nulls(row: OperatorProfile | LayerComparison, names: Iterable[str]) -> dict[str, None]:
    figures = ((name, getattr(row, name)) for name in names)
    return {name: None for name, figure in figures if figure is not None and math.isnan(figure)}
