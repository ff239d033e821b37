"""`farm report`, `farm diff` and `farm serve`: runs as pages, two runs side by side, the store in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import OUTPUT_FILE, json_option, limit_option
from farm.cli.output import deliver, echo, opened, print_json, width, write_file


@click.command("report")
@click.argument("run", default="latest")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here instead.")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@json_option("Print the run as JSON instead of a summary.")
def report_command(
    run: str, html: Path | None, junitxml: Path | None, config_file: Path | None, *, as_json: bool
) -> None:
    """Write the HTML report of RUN (an id, the start of one, latest, latest~1) and print its summary."""
    from farm.dispatch.request.ending import write_report

    with opened(config_file, readonly=True) as (config, store):
        view = store.runs.view(store.runs.resolve(run, unbegun_named=True))
        folder = html.parent if html else config.run_folder(view.id)
        folder.mkdir(parents=True, exist_ok=True)
        report = write_report(view, html or folder / "report.html", store, config)
    deliver(view, report=report, html=None, junitxml=junitxml, as_json=as_json)


@click.command("diff")
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="[RUN]", default="latest")
@limit_option("Most jobs of a group.", 10)
@click.option("--html", type=OUTPUT_FILE, help="Write a page of all jobs here as well.")
@json_option("Print every job as JSON.")
def diff_command(
    before: str, after: str, limit: int, html: Path | None, config_file: Path | None, *, as_json: bool
) -> None:
    """Compare two runs: new failures, missing jobs, fixed, slower, faster, other counters.

    RUN is an id, the start of one, latest or latest~1; the second is latest if left out. A time counts as slower
    when no sample of one side is within the range of the other and the medians are more than 2 % apart. Two runs are
    two samples: a difference is a hint, no regression.
    """
    from farm.report.model.diff import read_diff
    from farm.report.terminal.diff import diff_lines

    with opened(config_file, readonly=True) as (_, store):
        diff, virtual = read_diff(store, before, after)
    if html is not None:
        from farm.report.html.page import render_diff

        write_file(html, render_diff(diff, virtual=virtual))
    if as_json:
        print_json({"diff": diff})
        return
    echo("\n".join(diff_lines(diff, limit, width())))
    if virtual and diff.has_times:
        echo("VIRTUAL: two runs of one program on the simulator often differ by half.")


@click.command("serve")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True, help="0 takes a free one.")
@click.option("--demo", is_flag=True, help="Show made-up data of 60 nights from a temporary store.")
@json_option("Print the address as JSON.")
def serve_command(*, host: str, port: int, demo: bool, as_json: bool, config_file: Path | None) -> None:
    """Show the store in a browser: status, runs, devices, history, live.

    Without accounts only this machine can open the pages, and they are
    read-only. farm lab accounts makes accounts with roles; then every request
    needs one, and pages have actions.
    """
    from functools import partial

    from farm.base.config.settings import load_config
    from farm.serve.server import listen, serve, url_of

    config = load_config(config_file)
    with listen(host, port) as bound:
        show_address = partial(_show_address, url_of(bound), as_json=as_json)
        if demo:
            from farm.serve.demo import demo_config

            with demo_config(config) as config:
                serve(config, bound, show_address, demo=True)
        else:
            serve(config, bound, show_address)


def _show_address(url: str, *, as_json: bool) -> None:
    import json

    # On one line, so that a script can read it while the server runs.
    echo(json.dumps({"schema": 2, "url": url}) if as_json else f"farm: {url} (Ctrl-C ends it)")
