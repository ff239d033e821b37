"""`farm history`."""

from __future__ import annotations

import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from farm.cli.options import config_option
from farm.config import load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.store.records import HistoryPoint

# What most people look for first; the rest is a --metric away.
_USUAL = ("latency", "htp_cycles", "pte_size", "sqnr_fp32[0]")


@click.command("history")
@click.argument("job")
@click.option("--soc", help="Only jobs for this SoC.")
@click.option("--metric", "metrics", multiple=True, help="Metric to show, repeatable; otherwise the usual ones.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest attempts of a job.")
@click.option("--json", "as_json", is_flag=True, help="Print every metric as JSON instead of a table.")
@config_option
def command(
    job: str, soc: str | None, metrics: tuple[str, ...], limit: int, config_file: Path | None, *, as_json: bool
) -> None:
    """Show what the numbers of JOB were, run by run, oldest first.

    JOB is suite/case, a whole job id, a suite, or a pattern with * and ?. Figures are medians of an attempt's
    samples. Virtual devices and hardware are never in one table.
    """
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        if metrics:
            points = [point for metric in metrics for point in store.history(job, metric, soc, limit)]
        else:
            points = store.history(job, None, soc, limit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"schema": 1, "points": points})).decode())
        return
    for text in _tables(points, metrics or _USUAL):
        click.echo(text)


def _tables(points: Sequence[HistoryPoint], wanted: Sequence[str]) -> list[str]:
    lines: list[str] = []
    ordered = sorted(points, key=lambda point: (point.job_id, point.device_kind, point.time_ms, point.run_id))
    for (job_id, kind), group in groupby(ordered, key=lambda point: (point.job_id, point.device_kind)):
        points_of_job = list(group)
        units = {point.metric: "ms" if point.unit == "ns" else point.unit for point in points_of_job}
        shown = [metric for metric in wanted if metric in units]
        table = [
            ["started", "run", "verdict", *shown, ""],
            ["", "", "", *("" if units[metric] == "1" else units[metric] for metric in shown), ""],
        ]
        previous = ""
        for _, attempt in groupby(points_of_job, key=lambda point: (point.time_ms, point.run_id)):
            values = {point.metric: point for point in attempt}
            first = next(iter(values.values()))
            figures = [_figure(values.get(metric)) for metric in shown]
            changed = "new toolchain" if previous not in ("", first.fingerprint) else ""
            previous = first.fingerprint
            verdict = "known issue" if first.known_issue else first.verdict
            table.append([_time(first.time_ms), first.run_id[-6:], verdict, *figures, changed])
        lines += [f"{job_id}  {f'{kind} device' if kind else 'no device'}", *_aligned(table, left=3)]
    return lines


def _aligned(table: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [
                "",
                *(
                    cell.ljust(width) if n < left else cell.rjust(width)
                    for n, (cell, width) in enumerate(zip(row, widths, strict=True))
                ),
            ]
        ).rstrip()
        for row in table
    ]


def _figure(point: HistoryPoint | None) -> str:
    if point is None or point.p50 is None:
        return "-"
    if point.unit == "ns":
        return f"{point.p50 / 1e6:.3f}"
    return f"{point.p50:.0f}" if point.exact or point.unit == "cycles" else f"{point.p50:.2f}"


def _time(epoch_ms: int) -> str:
    return datetime.datetime.fromtimestamp(epoch_ms / 1000, tz=datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M")
