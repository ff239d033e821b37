"""`farm diff`."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config


@click.command("diff")
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="[RUN]", default="latest")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Most jobs of a group.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page of all jobs here as well.")
@click.option("--json", "as_json", is_flag=True, help="Print every job as JSON.")
@config_option
def command(before: str, after: str, limit: int, html: Path | None, config_file: Path | None, *, as_json: bool) -> None:
    """Compare two runs: new failures, what is missing, fixed, slower, faster, other counters.

    RUN is an id, the start of one, latest or latest~1; the second is latest if left out. A time counts as slower
    when no sample of one side is within the range of the other and the medians are more than 2 % apart. Two runs are
    two samples: that is a hint, no regression.
    """
    from farm.report.model.diff import diff_runs
    from farm.report.terminal.diff import diff_lines
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        views = [store.runs.view(store.runs.resolve(run)) for run in (before, after)]
    diff = diff_runs(*views)
    virtual = any(device.kind == "virtual" for view in views for device in view.devices)
    if html is not None:
        from farm.cli.output import write_file
        from farm.report.html.page import render_diff

        write_file(html, render_diff(diff, virtual=virtual))
    if as_json:
        print_json({"diff": diff})
        return
    echo("\n".join(diff_lines(diff, limit, shutil.get_terminal_size().columns)))
    if virtual and any(change.is_time for job in diff.jobs for change in job.changes):
        echo("VIRTUAL: two runs of one program on the simulator often differ by half.")
