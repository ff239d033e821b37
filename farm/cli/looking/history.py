"""`farm history`."""

from __future__ import annotations

import datetime
import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json, wrapped
from farm.config.settings import load_config
from farm.report.model import format as fmt
from farm.report.model.alerts import change_of, word_of
from farm.report.model.history import USUAL, what_changed
from farm.report.terminal.plot import sparkline
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.analysis.flakiness import Record
    from farm.store.records import AlertRecord, HistoryPoint

_WIDTH = 80
_LEAST_ROOM = 24


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
    samples. Virtual devices and hardware are never in one table. What is different about a run from the one before is
    told beside it. Below, how often the job passed in its last 20 runs, and whether it is flaky; then a line for each
    metric that moved, from its least to its greatest, and its known steps. Runs of 'farm debug' are left out.
    """
    from farm.report.model.status_query import records_of, steps_of
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        if metrics:
            points = [point for metric in metrics for point in store.history.points(job, metric, soc, limit)]
        else:
            points = store.history.points(job, None, soc, limit)
        facts = store.history.fingerprints(point.fingerprint for point in points)
        records = records_of(store, points)
        alerts = steps_of(store, points, metrics)
    if as_json:
        listed = [{"job_id": job, "device_kind": kind, "record": one} for (job, kind), one in records.items()]
        print_json({"points": points, "reliability": listed, "alerts": alerts})
        return
    if not points:
        echo(f"farm: {job} has no history yet: no attempt, or of 'farm debug' alone", err=True)
    for text in _tables(points, metrics or USUAL, facts, records, alerts):
        echo(text)


def _tables(
    points: Sequence[HistoryPoint],
    wanted: Sequence[str],
    facts: Mapping[str, Mapping[str, str]],
    records: Mapping[tuple[str, str], Record],
    alerts: Sequence[AlertRecord],
) -> list[str]:
    lines: list[str] = []
    ordered = sorted(points, key=lambda point: (point.job_id, point.device_kind, point.time_ms, point.run_id))
    for (job_id, kind), group in groupby(ordered, key=lambda point: (point.job_id, point.device_kind)):
        points_of_job = list(group)
        units = {point.metric: "ms" if point.unit == "ns" else point.unit for point in points_of_job}
        shown = [metric for metric in wanted if metric in units]
        table = [
            ["started", "run", "verdict", *shown],
            ["", "", "", *("" if units[metric] == "1" else units[metric] for metric in shown)],
        ]
        changed = ["", ""]
        previous: HistoryPoint | None = None
        for _, attempt in groupby(points_of_job, key=lambda point: (point.time_ms, point.run_id)):
            values = {point.metric: point for point in attempt}
            first = next(iter(values.values()))
            figures = [_figure(values.get(metric)) for metric in shown]
            changed.append(what_changed(previous, first, facts) if previous else "")
            previous = first
            verdict = "known issue" if first.known_issue else first.verdict
            table.append([_time(first.time_ms), first.run_id[-6:], verdict, *figures])
        lines.append(f"{job_id}  {f'{kind} device' if kind else 'no device'}")
        for line, what in zip(_aligned(table, left=3), changed, strict=True):
            lines += _with_change(line, what)
        if (job_id, kind) in records:
            lines.append(f"  {fmt.record(records[job_id, kind])}")
        lines += _plots(points_of_job, shown)
        for one in alerts:
            if (one.job_id, one.device_kind) == (job_id, kind):
                lines += _step(one)
    return lines


def _step(one: AlertRecord) -> list[str]:
    """Return a step of a series: what is known to have moved its level."""
    return wrapped(f"  #{one.id} {one.metric} {word_of(one)} since {one.first_bad}: {change_of(one)}, {one.state}")


def _plots(points: Sequence[HistoryPoint], shown: Sequence[str]) -> list[str]:
    """Return a line for every metric that moved: oldest to newest, with its least and greatest."""
    lines = []
    width = max(map(len, shown), default=0)
    for metric in shown:
        found = [point for point in points if point.metric == metric]
        known = sorted((point for point in found if point.p50 is not None), key=_p50)
        if known and known[0].p50 != known[-1].p50:
            # The newest are the ones that somebody asks for.
            line = sparkline([point.p50 for point in found][-(_WIDTH - width - _LEAST_ROOM - 4) :])
            lines.append(f"  {metric.ljust(width)}  {line}  {_figure(known[0])} to {_figure(known[-1])}")
    return lines


def _p50(point: HistoryPoint) -> float:
    return math.nan if point.p50 is None else point.p50


def _with_change(line: str, what: str) -> list[str]:
    if not what:
        return [line]
    room = _WIDTH - len(line) - 2
    # Figures are not cut, and half a word says nothing.
    if len(what) > room and room < _LEAST_ROOM:
        return [f"  {_cut(f'from here: {what}', _WIDTH - 2)}", line]
    return [f"{line}  {_cut(what, room)}"]


def _cut(text: str, width: int) -> str:
    text = one_line(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


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
    return f"{point.p50:.0f}" if point.exact or point.unit in ("cycles", "bytes") else f"{point.p50:.2f}"


def _time(epoch_ms: int) -> str:
    return datetime.datetime.fromtimestamp(epoch_ms / 1000, tz=datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M")
