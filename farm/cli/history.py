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
_USUAL = ("htp_cycles", "latency", "load_time", "pte_size", "sqnr_fp32[0]")


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
        rows = list(group)
        shown = [metric for metric in wanted if any(row.metric == metric for row in rows)]
        lines += [f"{job_id}  {f'{kind} device' if kind else 'no device'}"]
        heading = "".join(f"{_heading(metric, rows):>16}" for metric in shown)
        lines += [f"  {'started':<17}{'run':<7}{'verdict':<12}{heading}".rstrip()]
        previous = ""
        for (_, run_id), attempt in groupby(rows, key=lambda row: (row.time_ms, row.run_id)):
            cells = list(attempt)
            values, first = {row.metric: row for row in cells}, cells[0]
            verdict = "known issue" if first.known_issue else first.verdict
            figures = "".join(f"{_figure(values.get(metric)):>16}" for metric in shown)
            changed = "  (new toolchain)" if previous not in ("", first.fingerprint) else ""
            previous = first.fingerprint
            lines.append(f"  {_time(first.time_ms):<17}{run_id[-6:]:<7}{verdict:<12}{figures}{changed}".rstrip())
    return lines


def _heading(metric: str, rows: Sequence[HistoryPoint]) -> str:
    unit = next(row.unit for row in rows if row.metric == metric)
    return f"{metric} {'ms' if unit == 'ns' else unit}" if unit not in ("cycles", "count", "1") else metric


def _figure(point: HistoryPoint | None) -> str:
    if point is None or point.p50 is None:
        return "-"
    if point.unit == "ns":
        return f"{point.p50 / 1e6:.3f}"
    return f"{int(point.p50)}" if point.exact else f"{point.p50:.2f}"


def _time(epoch_ms: int) -> str:
    return datetime.datetime.fromtimestamp(epoch_ms / 1000, tz=datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M")
