"""`farm data export` and `farm data import`."""

from __future__ import annotations

import datetime
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.base.forms import OLDEST_S, in_seconds
from farm.cli.options import OUTPUT_FILE, is_json, json_option
from farm.cli.output import echo, notice, opened, print_json, show, standard_output, written
from farm.report.formats import DEFAULT, export_formats
from farm.report.model.format import plural

if TYPE_CHECKING:
    from pathlib import Path

    from farm.store.store import Store

_SHOWN = 8


@click.command("export")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--format", "name", type=click.Choice(tuple(export_formats())), default=DEFAULT, show_default=True,
              help="Format of the output; see above.")  # fmt: skip
@click.option("--output", "-o", type=OUTPUT_FILE, metavar="FILE",
              help="Write here instead of to standard output.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="All finished runs (jsonl).")
@click.option("--since", metavar="TIME", help="Runs that began since then: 12h, 7d, or a day, 2026-11-21 (jsonl).")
@click.option("--unfinished", is_flag=True, help="With --all or --since: unfinished runs as well.")
@json_option("With --output: print the written runs as JSON.")
def export_command(
    runs: tuple[str, ...], name: str, output: Path | None, since: str | None, *, everything: bool, unfinished: bool
) -> None:
    """Write the contents of RUN (an id, the start of one, latest, latest~1) for other tools; otherwise the latest."""
    form = export_formats()[name]
    if is_json() and output is None:
        raise UsageError("--json needs --output FILE: without it standard output has the runs themselves")
    if sum(map(bool, (runs, everything, since))) > 1:
        raise UsageError("name the runs: RUN..., or --all, or --since TIME")
    if unfinished and not (everything or since):
        raise UsageError("--unfinished needs --all or --since: a named run is written in its present state")
    if not form.several_runs and (everything or since or len(runs) > 1):
        raise UsageError(f"--format {name} is of one run: name one, or use --format {DEFAULT}")
    since_ms = _since_ms(since) if since else 0
    with opened(readonly=True) as (_, store):
        if everything or since:
            chosen = _chosen(store, since_ms, unfinished=unfinished)
        else:
            chosen = list(dict.fromkeys(store.runs.resolve(run) for run in runs or ("latest",)))
        with standard_output() if output is None else written(output) as file:
            file.writelines(form.write(store, chosen))
    if is_json():
        print_json({"output": str(output), "format": name, "runs": chosen})
    elif output is not None:
        echo(f"export: {output}", err=True)


_table = "\n".join(f"{one.name:<7}{one.about}" for one in export_formats().values())
export_command.help = f"{export_command.help}\n\n\b\n{_table}"


def _chosen(store: Store, since_ms: int, *, unfinished: bool) -> list[str]:
    found = store.transfer.runs(since_ms)
    left_out = [] if unfinished else [run.id for run in found if not run.finished]
    if left_out:
        names = ", ".join(left_out[:_SHOWN]) + (", ..." if len(left_out) > _SHOWN else "")
        notice(f"unfinished and left out: {names}; --unfinished writes them in their present state")
    chosen = [run.id for run in found if unfinished or run.finished]
    if not chosen:
        notice("no run matches: the export is empty")
    return chosen


def _since_ms(text: str) -> int:
    """Return an age or a day in this machine's zone as epoch milliseconds."""
    try:
        begin = datetime.datetime.combine(datetime.date.fromisoformat(text), datetime.time()).astimezone()
    except ValueError:
        seconds = in_seconds(text, OLDEST_S)
        if seconds is None:
            problem = "expected an age, such as 12h or 7d, or a day, such as 2026-11-21"
            raise UsageError(f"--since {text!r}: {problem}") from None
        begin = datetime.datetime.now().astimezone() - datetime.timedelta(seconds=seconds)
    return max(0, int(begin.timestamp() * 1000))


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option("Print the new runs as JSON.")
def import_command(files: tuple[str, ...]) -> None:
    """Read the runs in FILE, which 'farm data export --format jsonl' wrote, into this store; - is standard input.

    A run that the store already has stays unchanged. Every line is checked before the first run is imported: an
    invalid line stops the import. Kept files of attempts, such as ETDumps, are known by their hashes and are not
    imported.
    """
    from farm.store.transfer.runs import LineFile, import_runs, runs_in

    with ExitStack() as stack:
        found = runs_in([stack.enter_context(LineFile(name)) for name in files])
        with opened() as (_, store):
            added, present = import_runs(store.transfer, found)
    lines = [
        f"imported {run.id}: {plural(run.jobs, 'job')}, {plural(run.attempts, 'attempt')}"
        f"{'' if run.finished_ms is not None else ', not finished'}"
        for run in added
    ]
    lines += [f"skipped {run.id}: it is there already, and the same" for run in present]
    were = "was" if len(present) == 1 else "were"
    lines.append(f"{plural(len(added), 'run')} imported, {len(present)} {were} there already")
    show({"imported": [run.id for run in added], "present": [run.id for run in present]}, lines)
