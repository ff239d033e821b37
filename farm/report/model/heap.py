"""DSP heap of a run's jobs beside earlier runs: by case, contexts, SDK and device. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farm.store.queries.history import JobPast
    from farm.store.view import RunView

_BEFORE, _AFTER, _KEPT = "dsp_heap_before", "dsp_heap_after", "dsp_heap_difference"


class HeapRow(msgspec.Struct, frozen=True):
    """Heap of one job on one device with one SDK over its runs: a baseline and its repeatability."""

    job_id: str
    contexts: int | None
    sdk: str
    device: str
    runs: int
    before: float
    """Median over the runs, in bytes, as in the next fields."""
    after: float
    kept: float
    least_kept: float
    """Least over all runs, and over all processes of this run."""
    most_kept: float
    now: tuple[float, ...] = ()
    """Bytes kept in this run, a sample per process; empty for a device or an SDK of earlier runs alone."""


def heap_rows(view: RunView, pasts: Iterable[JobPast]) -> tuple[HeapRow, ...]:
    """Return a row for each job, device and SDK of `pasts`, in the order of jobs; the row of this run is the first."""
    now = {
        job.id: attempt.measurements for job in view.jobs for attempt in job.attempts if attempt.measurements
    }  # fmt: skip
    rows = []
    for past in pasts:
        values = {one.series.metric: one.values for one in past.series}
        if _KEPT not in values:
            continue
        groups: dict[tuple[str, str], list[int]] = {}
        for place, point in enumerate(past.runs):
            # Runs that measured times have no heap, and an older version of the case is another test.
            if math.isfinite(values[_KEPT][place]) and point.case_version == past.runs[-1].case_version:
                groups.setdefault((point.device, point.facts.get("qnn", "")), []).append(place)
        samples = next((one.samples for one in now.get(past.job_id, ()) if one.metric == _KEPT), ())
        for (device, sdk), places in groups.items():
            is_now = past.runs[places[-1]].run_id == view.id
            rows.append(_row(past.job_id, device, sdk, values, places, samples if is_now else ()))
    return tuple(sorted(rows, key=lambda row: (row.job_id, not row.now, row.device, row.sdk)))


def _row(
    job_id: str,
    device: str,
    sdk: str,
    values: Mapping[str, tuple[float, ...]],
    places: list[int],
    now: tuple[float, ...],
) -> HeapRow:
    before, after, kept = ([values[name][place] for place in places] for name in (_BEFORE, _AFTER, _KEPT))
    spread = [*kept, *now]
    contexts = values.get("partitions", ())
    known = contexts[places[-1]] if contexts else math.nan
    return HeapRow(
        job_id, int(known) if math.isfinite(known) else None, sdk, device, len(places),
        statistics.median(before), statistics.median(after), statistics.median(kept), min(spread), max(spread), now,
    )  # fmt: skip
