"""`farm import`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from farm.cli.options import config_option
from farm.cli.output import count, echo, print_json
from farm.config.settings import load_config


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print which runs are new as JSON.")
@config_option
def command(files: tuple[str, ...], config_file: Path | None, *, as_json: bool) -> None:
    """Read the runs in FILE, which 'farm export --format jsonl' wrote, into this store; - is standard input.

    A run that is there already is left as it is. Every line is checked before the first run is imported: when one
    cannot be, nothing is. Files that were kept of an attempt, such as ETDumps, are known by their hashes, and do not
    come along.
    """
    from farm.store.store import open_store
    from farm.store.transfer.line_files import LineFile, import_runs, runs_in

    with ExitStack() as stack:
        found = runs_in([stack.enter_context(LineFile(name)) for name in files])
        with open_store(load_config(config_file).store_url) as store:
            added, present = import_runs(store.transfer, found)
    if as_json:
        print_json({"imported": [run.id for run in added], "present": [run.id for run in present]})
        return
    for run in added:
        state = "" if run.finished_ms is not None else ", not finished"
        echo(f"imported {run.id}: {count(run.jobs, 'job')}, {count(run.attempts, 'attempt')}{state}")
    for run in present:
        echo(f"skipped {run.id}: it is there already, and the same")
    echo(f"{count(len(added), 'run')} imported, {len(present)} {'was' if len(present) == 1 else 'were'} there already")
