"""Layers of a `farm debug` as rows: plain values for JSON, and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.results.layers import Diagnosis
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord

CSV_KIND = "layers.csv"
"""Kind of artifact with these rows."""

_TENSOR = ("handle", "output", "partition", "shape", "dtype", "scale", "zero_point")
_FIGURES = ("mse", "sqnr_db", "cosine", "steps", "problem")
# Room for ten thousand layers.
_SHOWN_BYTES = 8 << 20
# Columns of the comparison by ExecuTorch's Inspector.
_INSPECTOR = "inspector"


def layer_rows(layers: Sequence[Layer], diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the layers in the order of execution: facts of each layer, and its figures by step or None."""
    rows = []
    for row in layers:
        tensor = {name: getattr(row.tensor, name) for name in _TENSOR}
        line: dict[str, Any] = {"layer": row.name, "operator": row.operator, "inputs": row.inputs, **tensor}
        line |= {name: getattr(row, name) for name in LayerPlace._fields}
        for step in LayerStep:
            found = diagnosis.steps.get(step)
            line[step.value] = _gap(row.gaps.get(step), diverges=found is not None and found.layer == row.name)
        line[_INSPECTOR] = _gap(row.inspector)
        rows.append(line)
    return rows


def layers_csv(layers: Sequence[Layer], diagnosis: Diagnosis) -> str:
    """Return the rows as CSV: a column for each figure of each step."""
    groups = (*(step.value for step in LayerStep), _INSPECTOR)
    columns = [
        f"{group}_{name}" for group in groups for name in (*_FIGURES, *(("diverges",) if group != _INSPECTOR else ()))
    ]
    text = io.StringIO()
    heads = ["layer", "operator", "inputs", *_TENSOR, *LayerPlace._fields, *columns]
    writer = csv.DictWriter(text, heads, restval="", lineterminator="\n")
    writer.writeheader()
    for row in layer_rows(layers, diagnosis):
        line = {name: "" if row[name] is None else row[name] for name in ("layer", "operator", *_TENSOR)}
        line |= {"inputs": " ".join(row["inputs"]), "shape": "x".join(str(size) for size in row["shape"])}
        line |= {"module": row["module"], "source": row["source"]}
        line |= {name: " ".join(row[name]) for name in ("exported", "ran")}
        for group in groups:
            figures = row[group] or {}
            line |= {f"{group}_{name}": "" if value is None else value for name, value in figures.items()}
        writer.writerow(line)
    return text.getvalue()


class LayerPlace(NamedTuple):
    """Place of a layer in the model, and its operators ahead of time and at run time."""

    module: str
    source: str
    exported: str
    ran: str


def read_places(text: str) -> dict[str, LayerPlace]:
    """Return the places of layers by name from the text of `layers_csv`; empty for a file without these columns."""
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
    except csv.Error:
        return {}
    columns = ("layer", *LayerPlace._fields)
    return {
        row["layer"]: LayerPlace(*(row[name] for name in LayerPlace._fields))
        for row in rows
        if all(isinstance(row.get(name), str) for name in columns)
    }


def shown_places(
    artifacts: Mapping[str, Iterable[ArtifactRecord]], store: ArtifactStore
) -> dict[str, dict[str, LayerPlace]]:
    """Return the places of layers by job id, from layer files on this machine of up to 8 MiB."""
    found = {}
    for job_id, records in artifacts.items():
        for record in records:
            path = store.find(record.sha256) if record.kind == CSV_KIND and record.size <= _SHOWN_BYTES else None
            if path is not None and path.stat().st_size <= _SHOWN_BYTES:
                found[job_id] = read_places(path.read_text(encoding="utf-8", errors="replace"))
    return found


def _gap(gap: Gap | None, *, diverges: bool | None = None) -> dict[str, Any] | None:
    if gap is None:
        return None
    figures = {name: _plain(getattr(gap, name)) for name in _FIGURES}
    extra = {} if diverges is None else {"diverges": diverges}
    return {**figures, **extra}


def _plain(value: float | str | None) -> float | str | None:
    """Return a figure as a JSON value: non-finite numbers become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
