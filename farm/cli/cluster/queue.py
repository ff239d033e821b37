"""`farm lab queue`: waiting runs and commands of a shared farm, with the reason and the expected time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from farm.base.text import one_line
from farm.cli.options import json_option
from farm.cli.output import reading, show, width
from farm.report.terminal.layout import LEAST_WIDTH, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.dispatch.cluster.queue import QueuedRun

# Names come last, since they are cut when the terminal is narrow.
_HEAD = ("run", "age", "runs on", "waiting", "builds", "begins", "ends", "user")
_INDENT = "    "


@click.command("queue")
@click.option("--mine", is_flag=True, help="Only your runs and commands.")
@json_option()
def command(*, mine: bool) -> None:
    """Show the unfinished runs on a shared farm, and other waiting commands.

    The jobs of a run are divided into shards of about a minute. For each run
    the table shows the number of devices at work, of waiting shards and of
    bundles to compile, and the estimated start of its next shard and end of the
    run, from earlier durations. Reasons for waiting stand below the run.
    Commands that wait for devices without a submitted run are listed last.

    A person comes before a nightly run; among users of the same urgency the
    user with the fewest devices is next: see docs/explanation/leases.md.
    farm lab quota limits the devices of a user.
    """
    from farm.cli.devices.devices import waiting_lines
    from farm.serve.pages.queue import QueueQuery, queue_page

    with reading() as reader:
        facts = reader.read(queue_page, QueueQuery(mine=mine))
    at_most, now_ms = max(width(), LEAST_WIDTH), time.time_ns() // 1_000_000
    lines = [*queue_lines(facts.runs, now_ms, at_most), *waiting_lines(facts.waiting, facts.wanted, at_most)]
    answer = {"runs": facts.runs, "waiting": facts.waiting}
    show({"schema": 2, **answer}, lines or ["nothing waits and nothing runs"])


def queue_lines(runs: Sequence[QueuedRun], now_ms: int, at_most: int) -> Iterator[str]:
    """Yield the lines about submitted runs, none longer than `at_most`."""

    if not runs:
        return
    head, *rows = columns([_HEAD, *(_cells(run, now_ms) for run in runs)])
    yield head[:at_most]
    for run, row in zip(runs, rows, strict=True):
        yield row if len(row) <= at_most else f"{row[: at_most - 1]}…"
        for why in run.why:
            yield from wrapped(f"{_INDENT}{one_line(why)}", at_most, _INDENT)


def _cells(run: QueuedRun, now_ms: int) -> list[str]:
    begins, ends = _about(run.starts_s), _about(run.ends_s)
    if run.cancelled:
        begins, ends = "-", "cancelled"
    elif run.running:
        begins = "runs"
    user = one_line(run.user)
    return [
        run.run_id,
        _about(max(0.0, (now_ms - run.submitted_ms) / 1000)),
        str(run.running),
        str(run.waiting),
        str(run.lacking),
        begins,
        ends,
        f"{user}, nightly run" if run.priority == "nightly" else user,
    ]


def _about(seconds: float | None) -> str:
    """Return a time as one rounded number, since it is an estimate."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return "now"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
