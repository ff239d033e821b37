"""`farm report`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import config_option
from farm.config.settings import load_config


@click.command("report")
@click.argument("run", default="latest")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here instead.")
@click.option("--junitxml", type=click.Path(path_type=Path, dir_okay=False), help="Write a JUnit XML file as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as JSON instead of a summary.")
@config_option
def command(run: str, html: Path | None, junitxml: Path | None, config_file: Path | None, *, as_json: bool) -> None:
    """Write the HTML report of RUN (an id, the start of one, latest, latest~1) and print its summary."""
    from farm.cli.output import deliver
    from farm.request.ending import write_report
    from farm.store.store import open_store

    config = load_config(config_file)
    with open_store(config.store_url, readonly=True) as store:
        view = store.runs.view(store.runs.resolve(run))
        folder = html.parent if html else config.run_folder(view.id)
        folder.mkdir(parents=True, exist_ok=True)
        report = write_report(view, html or folder / "report.html", store, config.state_dir)
    deliver(view, report=report, html=None, junitxml=junitxml, as_json=as_json)
