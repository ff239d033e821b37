"""Everything that is measured but does not decide: times, cycles, sizes and counts, as Measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from farm.execution.raw import ETDUMP_FILE
from farm.results.attempt import Direction, Measurement
from farm.results.etdump import ETDUMP_LIMIT, ETDumpError, node_cycles, read_etdump

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from farm.build.bundle import Manifest
    from farm.results.numerics import Figures
    from farm.results.runner_report import RunnerReport

# Beyond it, floats that hold a count lose their last digit; an hour at 3 GHz is a thousandth of it.
_GREATEST_CYCLES = 2**53


def bundle_measurements(manifest: Manifest) -> tuple[Measurement, ...]:
    """Return what is known from compiling alone; repeats exactly."""
    rows = (
        ("pte_size", "bytes", Direction.LOWER, manifest.pte_bytes),
        ("partitions", "count", Direction.LOWER, manifest.partitions),
        ("delegated_ops", "count", Direction.HIGHER, manifest.delegated_ops),
        ("fallback_ops", "count", Direction.LOWER, sum(manifest.fallback_ops.values())),
    )
    return tuple(Measurement(name, unit, way, (float(value),), exact=True) for name, unit, way, value in rows)


def time_measurements(report: RunnerReport) -> tuple[Measurement, ...]:
    """Return `latency`, one sample per iteration of every inference without warm-up, and the time of the load.

    That is `load_time` with the start of the backend in it, `warm_load_time` where the backend was up already.
    """
    latency = tuple(float(ns) for inference in report.inferences for ns in inference.iterations_ns)
    return (
        Measurement("latency", "ns", Direction.LOWER, latency),
        Measurement("warm_load_time" if report.warm else "load_time", "ns", Direction.LOWER, (float(report.load_ns),)),
    )


def cycle_measurements(folder: Path, report: RunnerReport) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return `htp_cycles`, one sample per sample of `latency`, and notes on why there is none.

    No measurement and no note where no profile was asked for.
    """
    try:
        with (folder / ETDUMP_FILE).open("rb") as file:
            cycles = node_cycles(read_etdump(file.read(ETDUMP_LIMIT + 1)))
    except FileNotFoundError:
        return (), ()
    except (ETDumpError, OSError) as error:
        return (), (f"no htp_cycles: {ETDUMP_FILE} is refused: {error}",)
    if not cycles:
        return (), ()
    measured, expected = _without_warm_up(cycles, report)
    if len(measured) != expected:
        return (), (f"no htp_cycles: {ETDUMP_FILE} has {len(cycles)} inferences that do not match {expected}",)
    if not all(0 < count <= _GREATEST_CYCLES for count in measured):
        return (), (f"no htp_cycles: {ETDUMP_FILE} claims {min(measured)} to {max(measured)} cycles per inference",)
    return (Measurement("htp_cycles", "cycles", Direction.LOWER, tuple(map(float, measured))),), ()


def _without_warm_up(cycles: Sequence[int], report: RunnerReport) -> tuple[list[int], int]:
    """Return the cycles of the iterations alone, and how many there should be. The tracer sees warm-ups too."""
    kept: list[int] = []
    position = 0
    for inference in report.inferences:
        position += len(inference.warm_up_ns)
        kept += cycles[position : position + len(inference.iterations_ns)]
        position += len(inference.iterations_ns)
    expected = sum(len(inference.iterations_ns) for inference in report.inferences)
    return (kept, expected) if position == len(cycles) else ([], expected)


def numeric_measurements(figures: Mapping[tuple[int, str], Iterable[Figures]]) -> tuple[Measurement, ...]:
    """Return SQNR against both references and cosine against FP32, one sample per inference.

    `figures` has, by output and reference, those of each inference. Equal outputs have an SQNR of inf. Where one
    inference has no figure, or -inf (its output is not finite), the metric is left out: the comparison shows it.
    """
    measured = []
    for (output, reference), rows in figures.items():
        rows = list(rows)  # noqa: PLW2901 - read twice
        wanted = {"sqnr": ("dB", [row.sqnr_db for row in rows])}
        if reference == "fp32":
            wanted["cosine"] = ("1", [row.cosine for row in rows])
        for name, (unit, values) in wanted.items():
            samples = tuple(value for value in values if value is not None and value > -math.inf)
            if samples and len(samples) == len(rows):
                measured.append(Measurement(f"{name}_{reference}[{output}]", unit, Direction.HIGHER, samples))
    return tuple(measured)
