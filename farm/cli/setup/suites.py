"""`farm suites` and `farm devices socs`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from farm.cli.options import ListingGroup, json_option
from farm.cli.output import echo, print_json, show, width
from farm.cli.setup.tune import tune_command
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from pathlib import Path

    from farm.suites.suite import Case


@click.group("suites", cls=ListingGroup, takes_names=True)
def suites_command() -> None:
    """List suites, or the cases of some; suggest limits.

    \b
    farm suites                           the suites that farm knows
    farm suites smoke ./my_suite          the cases of those suites
    farm suites tune my_suite/residual    limits from its measurements
    """


@suites_command.command("list")
@click.argument("suite_names", nargs=-1, metavar="[NAMES]...")
@json_option("Print JSON instead of a table.")
def list_command(suite_names: tuple[str, ...], config_file: Path | None, *, as_json: bool) -> None:
    """List the suites; with NAMES (or paths), the cases of those.

    The list has the jobs and precisions that a suite declares. Every case also
    runs on the CPU of any SoC: farm run --backend xnnpack.
    """
    from farm.base.backends.registry import cpu_backends
    from farm.base.config.settings import load_config
    from farm.suites.manifests import find_suites, load_suite, resolve_suite

    known = find_suites(load_config(config_file).suite_folders)
    suites = [resolve_suite(name, known) for name in suite_names] or [load_suite(path) for path in known.values()]
    if as_json:
        print_json({"suites": suites})
        return
    for suite in suites:
        jobs = sum(len(case.precisions) for case in suite.cases)
        echo(f"{suite.name}: {len(suite.cases)} cases, {jobs} jobs a SoC")
        echo(textwrap.fill(suite.description, min(width(), 100), initial_indent="  ", subsequent_indent="  "))
        if suite_names:
            echo(f"  {suite.path}")
            backends = {*suite.backends, *cpu_backends()}
            rows = [[case.name, f"{', '.join(case.precisions)}{_known_issues(case, backends)}"] for case in suite.cases]
            echo("\n".join(columns(rows, indent="    ")))


def _known_issues(case: Case, backends: set[str]) -> str:
    """Return the precisions of a case with known issues on these backends, with the number of SoCs; "" without any."""
    places = []
    for issue in case.known_issues:
        precisions = [
            precision
            for backend in issue.backends
            if backend in backends
            for precision in case.precisions_on(backend)
            if not issue.precisions or precision in issue.precisions
        ]
        if precisions:
            socs = f" on {len(issue.socs)} SoCs" if issue.socs else ""
            places.append(f"{', '.join(dict.fromkeys(precisions))}{socs}")
    return f"  (known issue: {'; '.join(places)})" if places else ""


suites_command.add_command(tune_command)


@click.command("socs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def socs_command(*, as_json: bool) -> None:
    """List the SoCs that farm knows, with their hardware and backends."""
    from farm.base.socs import load_socs

    socs = list(load_socs().values())
    rows = [["SoC", "id", "HTP", "VTCM", "LPAI", "backends", "product"]]
    for soc in socs:
        lpai = f"v{soc.lpai_version}" if soc.lpai_version else "-"
        cells = [f"V{soc.htp_arch}", f"{soc.vtcm_mb} MiB", lpai, ", ".join(soc.backends), soc.product]
        rows.append([soc.name, str(soc.soc_id), *cells])
    show({"socs": socs}, columns(rows, right=(1, 3)), as_json=as_json)
