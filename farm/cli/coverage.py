"""`farm coverage`."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farm.cli.options import config_option
from farm.config import load_config
from farm.errors import IllegalTargetError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.report.coverage import Coverage
    from farm.store.records import ListedJob
    from farm.store.store import Store
    from farm.suites import Job, Suite

# The suites of single operators.
_USUAL = ("quantized_ops", "fp_ops")
_LEAST_WIDTH, _MOST_WIDTH = 60, 100


@click.command("coverage")
@click.option("--soc", required=True, help="SoC whose results are shown.")
@click.option("--backend", default="htp", show_default=True, help="htp, lpai or gpu.")
@click.option("--suite", "suites", multiple=True,
              help="Suite, repeatable; otherwise quantized_ops and fp_ops, or those of the runs.")  # fmt: skip
@click.option("--run", "runs", multiple=True,
              help="Run, repeatable; otherwise the newest result of every job, whichever run it is of.")  # fmt: skip
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with the table here.")
@click.option("--json", "as_json", is_flag=True, help="Print every cell as JSON instead of a table.")
@config_option
def command(
    soc: str,
    backend: str,
    suites: tuple[str, ...],
    runs: tuple[str, ...],
    markdown: Path | None,
    config_file: Path | None,
    *,
    as_json: bool,
) -> None:
    """Show every operator that ExecuTorch's Qualcomm backend builds, in every precision, and how its cases do.

    Operators are the backend's builders (op_NAME.py). A job counts for the operator in its program that the fewest
    cases have; a cell has the worst of its jobs, and how many are so.
    """
    from farm.cli.output import print_json, write_file
    from farm.report.coverage_text import coverage_lines, coverage_markdown
    from farm.store.store import open_store

    config = load_config(config_file)
    with open_store(config.store_url, readonly=True) as store:
        table, about = _table(store, config.suite_folders, soc, backend, suites, runs)
    if markdown is not None:
        write_file(markdown, coverage_markdown(table, about, _command(soc, backend, suites, runs, markdown)))
    if as_json:
        print_json(_as_json(table, about))
        return
    from rich.console import Console

    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, shutil.get_terminal_size().columns))
    color = sys.stdout.isatty()
    console = Console(width=width, force_terminal=color, highlight=False, color_system="standard" if color else None)
    for line in coverage_lines(table, about, width):
        console.print(line, soft_wrap=True)
    if markdown is not None:
        click.echo(f"written: {markdown}", err=True)


def _table(
    store: Store, folders: Iterable[Path], soc_name: str, backend: str, names: tuple[str, ...], refs: tuple[str, ...]
) -> tuple[Coverage, list[str]]:
    from farm.builders import installed_builders, suite_operators
    from farm.profiles import BACKEND_PRECISIONS, CPU_BACKENDS, find_soc
    from farm.report.coverage import coverage, items_of, listed
    from farm.report.coverage_text import facts
    from farm.store.store import case_versions
    from farm.suites import plan

    soc = find_soc(soc_name)
    if backend in CPU_BACKENDS:
        raise IllegalTargetError(f"{backend} has none of the operators of ExecuTorch's Qualcomm backend: name another")
    if backend not in soc.backends:
        if backend not in BACKEND_PRECISIONS:
            raise UnknownNameError("backend", backend, BACKEND_PRECISIONS)
        raise IllegalTargetError(f"{soc.name} has no {backend} backend: legal are {', '.join(soc.backends)}")
    run_ids = [store.resolve_run(ref) for ref in refs] or None
    planned = store.planned_jobs(run_ids, soc.name, backend) if run_ids else []
    if run_ids and not planned:
        raise UsageError(f"{', '.join(refs)}: no job for {soc.name} and {backend}: name another run, SoC or backend")
    suites = _suites(folders, names, backend, planned)
    jobs: tuple[Job, ...] = plan(suites, [soc], backend) if suites else ()
    shown = {job.job_id: job for job in (*map(listed, jobs), *planned)}
    results = {found.result.job_id: found for found in store.job_results(shown, run_ids)}
    tools = store.fingerprints(found.fingerprint for found in results.values())
    declared: dict[tuple[str, str], tuple[str, ...]] = {}
    without: dict[str, str] = {}
    for folder in dict.fromkeys(job.case.folder for job in jobs):
        said = suite_operators(Path(folder))
        without |= said.without
        declared |= {
            (job.case.module, job.case.name): said.cases[job.case.name]
            for job in jobs
            if job.case.folder == folder and job.case.name in said.cases
        }
    # What somebody asks of a run is what it said, of whatever the case was then.
    items = items_of(shown.values(), results, {} if run_ids else case_versions(jobs), declared)
    table = coverage(soc.name, backend, BACKEND_PRECISIONS[backend], items, installed_builders(), without)
    return table, facts(table.items, tools.values())


def _suites(folders: Iterable[Path], names: tuple[str, ...], backend: str, planned: Sequence[ListedJob]) -> list[Suite]:
    """Return the suites that are named, else those of planned jobs, else the usual ones."""
    from farm.suite_files import find_suites, resolve_suite

    known = find_suites(tuple(folders))
    if names:
        return [resolve_suite(name, known) for name in dict.fromkeys(names)]
    # A suite of a run that was named by its path may be anywhere, or gone: its jobs are in the store.
    wanted = dict.fromkeys(job.job_id.partition("/")[0] for job in planned) or dict.fromkeys(_USUAL)
    found = [resolve_suite(name, known) for name in wanted if name in known]
    usable = [suite for suite in found if backend in suite.backends]
    if not usable and not planned:
        raise UsageError(f"no suite of operators is made for {backend}: name one with --suite (farm suites lists them)")
    return usable


def _command(soc: str, backend: str, suites: Iterable[str], runs: Iterable[str], markdown: Path) -> str:
    words = ["farm", "coverage", "--soc", soc]
    words += ["--backend", backend] if backend != "htp" else []
    for option, values in (("--suite", suites), ("--run", runs)):
        for value in values:
            words += [option, value]
    return shlex.join([*words, "--markdown", str(markdown)])


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
        "beyond": rows(table.beyond),
        "jobs": table.items,
    }
