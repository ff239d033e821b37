"""`farm export`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo, standard_output, written
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.system.durations import in_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.store.store import Store

_LINES = "jsonl"
_SHOWN = 8


@click.command("export")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--format", "form", type=click.Choice([_LINES, "ctrf", "junit", "hud", "trace"]), default=_LINES,
              show_default=True, help="What is written; see above.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write here instead of to standard output.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="All runs that are finished (jsonl).")
@click.option("--since", metavar="TIME", help="Those that began since then: 12h, 7d, or a day, 2026-11-21 (jsonl).")
@click.option("--unfinished", is_flag=True, help="With --all or --since: also those that are not finished.")
@config_option
def command(
    runs: tuple[str, ...],
    form: str,
    output: Path | None,
    since: str | None,
    config_file: Path | None,
    *,
    everything: bool,
    unfinished: bool,
) -> None:
    """Write what RUN (an id, the start of one, latest, latest~1) holds, for other tools; otherwise the latest.

    \b
    jsonl  everything that the store has, also of several runs: for 'farm import'
           and for programs
    ctrf   Common Test Report Format
    junit  JUnit XML
    hud    records of PyTorch's benchmark database, for ExecuTorch's dashboard
    trace  the timeline, a row for each device, for ui.perfetto.dev or
           chrome://tracing
    """
    from farm.report.formats.exports import rendered
    from farm.store.store import open_store

    if sum(map(bool, (runs, everything, since))) > 1:
        raise UsageError("say which runs: RUN..., or --all, or --since TIME")
    if unfinished and not (everything or since):
        raise UsageError("--unfinished goes with --all or --since: a run that is named is written as it stands")
    if form != _LINES and (everything or since or len(runs) > 1):
        raise UsageError(f"--format {form} is of one run: name one, or use --format {_LINES}")
    since_ms = _since_ms(since) if since else 0
    with open_store(load_config(config_file).store_url, readonly=True) as store:
        if everything or since:
            chosen = _chosen(store, since_ms, unfinished=unfinished)
        else:
            chosen = list(dict.fromkeys(store.runs.resolve(run) for run in runs or ("latest",)))
        data = store.transfer.export(chosen) if form == _LINES else [rendered(store.runs.view(chosen[0]), form)]
        _write(data, output)
    if output is not None:
        echo(f"export: {output}", err=True)


def _chosen(store: Store, since_ms: int, *, unfinished: bool) -> list[str]:
    found = store.transfer.runs(since_ms)
    left_out = [] if unfinished else [run.id for run in found if not run.finished]
    if left_out:
        names = ", ".join(left_out[:_SHOWN]) + (", ..." if len(left_out) > _SHOWN else "")
        echo(f"farm: not finished, and left out: {names}; --unfinished writes them as they stand", err=True)
    chosen = [run.id for run in found if unfinished or run.finished]
    if not chosen:
        echo("farm: there is no such run: the export is empty", err=True)
    return chosen


def _write(data: Iterable[bytes], output: Path | None) -> None:
    with standard_output() if output is None else written(output) as file:
        for part in data:
            file.write(part)


def _since_ms(text: str) -> int:
    """Return an age or a day in this machine's zone as epoch milliseconds."""
    now = datetime.datetime.now().astimezone()
    try:
        begin = datetime.datetime.combine(datetime.date.fromisoformat(text), datetime.time()).astimezone()
    except ValueError:
        seconds = in_seconds(text)
        if seconds is None:
            problem = "expected an age of at most 30 days, such as 12h or 7d, or a day, such as 2026-11-21"
            raise UsageError(f"--since {text!r}: {problem}") from None
        begin = now - datetime.timedelta(seconds=seconds)
    return max(0, int(begin.timestamp() * 1000))
