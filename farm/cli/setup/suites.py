"""`farm suites`."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config
from farm.suites.manifests import find_suites, load_suite, resolve_suite

if TYPE_CHECKING:
    from farm.suites.suite import Case


@click.command("suites")
@click.argument("names", nargs=-1)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(names: tuple[str, ...], config_file: Path | None, *, as_json: bool) -> None:
    """List the suites; with NAMES (or paths), the cases of those.

    Jobs and precisions are those that a suite declares. Every case also runs
    on the CPU of any SoC: farm run --backend xnnpack.
    """
    known = find_suites(load_config(config_file).suite_folders)
    suites = [resolve_suite(name, known) for name in names] or [load_suite(path) for path in known.values()]
    if as_json:
        print_json({"suites": suites})
        return
    width = min(shutil.get_terminal_size().columns, 100)
    for suite in suites:
        jobs = sum(len(case.precisions) for case in suite.cases)
        echo(f"{suite.name}: {len(suite.cases)} cases, {jobs} jobs a SoC")
        echo(textwrap.fill(suite.description, width, initial_indent="  ", subsequent_indent="  "))
        if names:
            echo(f"  {suite.path}")
            column = max(len(case.name) for case in suite.cases)
            for case in suite.cases:
                echo(f"    {case.name:<{column}}  {', '.join(case.precisions)}{_known_issues(case)}")


def _known_issues(case: Case) -> str:
    """Return where the known issues of a case show, as far as what it runs at goes."""
    places = []
    for issue in case.known_issues:
        precisions = [
            precision
            for backend in issue.backends
            for precision in case.precisions_on(backend)
            if not issue.precisions or precision in issue.precisions
        ]
        if precisions:
            socs = f" on {len(issue.socs)} SoCs" if issue.socs else ""
            places.append(f"{', '.join(dict.fromkeys(precisions))}{socs}")
    return f"  (known issue: {'; '.join(places)})" if places else ""
