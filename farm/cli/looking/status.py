"""`farm status`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config


@click.command("status")
@click.argument("run", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Most jobs of a kind.")
@click.option("--json", "as_json", is_flag=True, help="Print every job as JSON.")
@config_option
def command(run: str | None, limit: int, config_file: Path | None, *, as_json: bool) -> None:
    """Show how things stand: newly red, regressions, not tested, infra trouble.

    Then what is fixed, newly flaky and healed, and devices that are not fit.

    Without RUN it is about the newest nightly run of the last eight days, or
    else the newest run. A failure is new when the job did not fail the last
    time that it had a verdict on this kind of device. Regressions are all
    that are open, of whatever run: see farm triage.
    """
    from farm.report.model.status_query import how_things_stand
    from farm.report.terminal.status import status_lines
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        status = how_things_stand(store, run)
    if as_json:
        print_json({"status": status})
        return
    now_ms = time.time_ns() // 1_000_000
    echo("\n".join(status_lines(status, now_ms, limit, shutil.get_terminal_size().columns)))
