"""`farm suites`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from farm.cli.options import config_option
from farm.config import load_config
from farm.suites import find_suites, load_suite, resolve_suite


@click.command("suites")
@click.argument("names", nargs=-1)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(names: tuple[str, ...], config_file: Path | None, *, as_json: bool) -> None:
    """List the suites; with NAMES (or paths), the cases of those."""
    known = find_suites(load_config(config_file).suite_folders)
    suites = [resolve_suite(name, known) for name in names] or [load_suite(path) for path in known.values()]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"schema": 1, "suites": suites})).decode())
        return
    if not names:
        width = max(len(suite.name) for suite in suites)
        for suite in suites:
            jobs = sum(len(case.precisions) for case in suite.cases)
            click.echo(f"{suite.name:<{width}}  {len(suite.cases):>4} cases  {jobs:>4} jobs a SoC  {suite.description}")
        return
    for suite in suites:
        click.echo(f"{suite.name}: {suite.description} ({suite.path})")
        width = max(len(case.name) for case in suite.cases)
        for case in suite.cases:
            known_issue = "  (known issue)" if case.known_issues else ""
            click.echo(f"  {case.name:<{width}}  {', '.join(case.precisions)}{known_issue}")
