"""`farm report`, `farm diff` and `farm serve`: runs as pages, two runs side by side, the store in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import OUTPUT_FILE, configured, is_json, json_option, limit_option
from farm.cli.output import deliver, echo, opened, show, width, write_file


@click.command("report")
@click.argument("run", default="latest")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here instead.")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@json_option("Print the run as JSON instead of a summary.")
def report_command(run: str, html: Path | None, junitxml: Path | None) -> None:
    """Write the HTML report of RUN (an id, the start of one, latest, latest~1) and print its summary."""
    from farm.dispatch.request.ending import write_report

    with opened(readonly=True) as (config, store):
        view = store.runs.view(store.runs.resolve(run, unbegun_named=True))
        folder = html.parent if html else config.run_folder(view.id)
        folder.mkdir(parents=True, exist_ok=True)
        report = write_report(view, html or folder / "report.html", store, config)
    deliver(view, report=report, html=None, junitxml=junitxml)


@click.command("diff")
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="[RUN]", default="latest")
@limit_option("Most jobs of a group.", 10)
@click.option("--html", type=OUTPUT_FILE, help="Write a page of all jobs here as well.")
@json_option("Print every job as JSON.")
def diff_command(before: str, after: str, limit: int, html: Path | None) -> None:
    """Compare two runs: new failures, missing jobs, fixed, slower, faster, other counters.

    RUN is an id, the start of one, latest or latest~1; the second is latest if left out. A time counts as slower
    when no sample of one side is within the range of the other and the medians are more than 2 % apart. Two runs are
    two samples: a difference is a hint, no regression.
    """
    from farm.report.model.diff import read_diff
    from farm.report.terminal.diff import diff_lines

    with opened(readonly=True) as (_, store):
        diff, virtual = read_diff(store, before, after)
    if html is not None:
        from farm.report.html.page import render_diff

        write_file(html, render_diff(diff, virtual=virtual))
    simulated = ["VIRTUAL: two runs of one program on the simulator often differ by half."]
    show({"diff": diff}, [*diff_lines(diff, limit, width()), *(simulated if virtual and diff.has_times else [])])


@click.command("serve")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True, help="0 takes a free one.")
@click.option("--demo", is_flag=True, help="Show made-up data of 60 nights from a temporary store.")
@json_option("Print the address as JSON.")
def serve_command(*, host: str, port: int, demo: bool) -> None:
    """Show the store in a browser: status, runs, devices, history, live.

    Without accounts only this machine can open the pages, and they are
    read-only. farm lab accounts makes accounts with roles; then every request
    needs one, and pages have actions.
    """
    from functools import partial

    from farm.serve.server import listen, serve, url_of

    config = configured()
    with listen(host, port) as bound:
        show_address = partial(_show_address, url_of(bound))
        if demo:
            from farm.serve.demo import demo_config

            with demo_config(config) as config:
                serve(config, bound, show_address, demo=True)
        else:
            serve(config, bound, show_address)


def _show_address(url: str) -> None:
    import json

    # On one line, so that a script can read it while the server runs.
    echo(json.dumps({"schema": 2, "url": url}) if is_json() else f"farm: {url} (Ctrl-C ends it)")
