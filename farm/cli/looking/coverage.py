"""`farm jobs coverage`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.cli.options import OUTPUT_FILE, branch_option, is_json, json_option, soc_option
from farm.cli.output import as_called, echo, echo_coloured, opened, print_json, width, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from farm.report.model.coverage.coverage import Coverage

_LEAST_WIDTH, _MOST_WIDTH = 60, 100


@click.command("coverage")
@soc_option("SoC of the results; otherwise the only SoC with results.")
@click.option("--backend", metavar="BACKEND", default=DEFAULT_BACKEND, show_default=True, help="Backend with QNN.")
@click.option("--suite", "suites", metavar="SUITE", multiple=True,
              help="Suite, repeatable; otherwise quantized_ops and fp_ops, or the suites of the runs.")  # fmt: skip
@click.option("--run", "runs", metavar="RUN", multiple=True,
              help="Run, repeatable; otherwise the newest result of every job, of any run.")  # fmt: skip
@branch_option()
@click.option("--markdown", type=OUTPUT_FILE, help="Write a page with the table here.")
@json_option("Print every cell as JSON instead of a table.")
def command(
    soc: str | None,
    backend: str,
    suites: tuple[str, ...],
    runs: tuple[str, ...],
    branch: str | None,
    markdown: Path | None,
) -> None:
    """Show every operator that ExecuTorch's Qualcomm backend builds, in every precision, and the results of its cases.

    Operators are the backend's builders (op_NAME.py). A job counts for the operator in its program with the fewest
    cases; a cell shows the worst state of its jobs, and how many have it. Above the table is the number of ATen
    operators of ExecuTorch's own tests with a case; below it are the operators whose tests consist of other operators.
    """
    from farm.report.model.coverage.query import read_coverage
    from farm.report.terminal.coverage import coverage_lines, coverage_markdown

    with opened(readonly=True) as (config, store):
        table, about = read_coverage(store, config.suite_folders, soc, backend, suites, runs, branch)
    if markdown is not None:
        write_file(markdown, coverage_markdown(table, about, as_called()))
    if is_json():
        print_json({"schema": 3, **_as_json(table, about)})
        return
    columns = max(_LEAST_WIDTH, min(_MOST_WIDTH, width()))
    echo_coloured("\n".join(coverage_lines(table, about, columns)))
    if markdown is not None:
        echo(f"written: {markdown}", err=True)


def _as_json(table: Coverage, about: Iterable[str]) -> Mapping[str, Any]:
    def rows(part: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": row.name,
                "operators": row.targets,
                "without": row.without,
                "cells": {
                    precision: {
                        "state": cell.state,
                        "count": cell.count,
                        "in_passing": cell.in_passing,
                        "jobs": [item.job_id for item in cell.items],
                    }
                    for precision, cell in row.cells.items()
                },
            }
            for row in part
        ]

    return {
        "soc": table.soc,
        "backend": table.backend,
        "about": list(about),
        "precisions": table.precisions,
        "counts": table.counts,
        "builders": rows(table.rows),
        "aten": {"tested": table.tested, "made_of_others": table.made_of_others, "without": table.untested},
        "beyond": rows(table.beyond),
        "jobs": table.items,
    }
