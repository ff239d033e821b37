"""`farm baseline`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.system.text import one_line
from farm.system.user import user_name


@click.group("baseline")
def command() -> None:
    """Show what numbers are compared with, or say that a new level is right."""


@command.command("show")
@click.argument("job")
@click.option("--soc", help="Only jobs for this SoC.")
@click.option("--metric", "metrics", multiple=True, help="Only this metric; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@config_option
def show(job: str, soc: str | None, metrics: tuple[str, ...], config_file: Path | None, *, as_json: bool) -> None:
    """Show what the next run of JOB is compared with.

    JOB is as for 'farm history'. That is the median of at most 21 runs that
    can be compared with the newest, on its level; 8 are needed.
    """
    from farm.regressions.baseline import levels
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        found = levels(store, job, soc, metrics)
    if as_json:
        print_json({"levels": found})
        return
    width = max(40, shutil.get_terminal_size().columns)
    last = None
    for level in found:
        if (level.job_id, level.device_kind) != last:
            last = level.job_id, level.device_kind
            echo(one_line(f"{level.job_id}  {level.device_kind} device", width))
        unit = "" if level.unit in ("1", "count") else level.unit
        value = "-" if math.isnan(level.median) else f"{level.median:,.6g} {unit}"
        runs = f"{level.runs} run{'' if level.runs == 1 else 's'} since {level.since}"
        few = "" if level.enough else ", too few to judge"
        echo("  " + one_line(f"{level.metric}: {value.strip()}, {runs}{few}", width - 2))
    if not found:
        _require(job, metrics)
        echo(f"farm: {job} has no number that is judged yet", err=True)


@command.command("accept")
@click.argument("job")
@click.option("--soc", help="Only jobs for this SoC.")
@click.option("--metric", "metrics", multiple=True,
              help="Only this metric, repeatable; and also where nothing stands out.")  # fmt: skip
@click.option("--run", "ref", metavar="RUN", help="The level of this run; otherwise of the newest of each job.")
@click.option("--note", required=True, metavar="TEXT", help="Why it is right.")
@click.option("--json", "as_json", is_flag=True, help="Print what was accepted as JSON.")
@config_option
def accept(
    job: str,
    soc: str | None,
    metrics: tuple[str, ...],
    ref: str | None,
    note: str,
    config_file: Path | None,
    *,
    as_json: bool,
) -> None:
    """Say that the new level of JOB's numbers is right.

    Its open regressions are told of no more, and the next runs are compared
    with the new level. Who said so, when and why stays in the store. JOB is
    as for 'farm history': a suite, or a pattern, accepts all that stands out
    there.
    """
    from farm.regressions import baseline
    from farm.store.store import open_store

    if not note.strip():
        raise UsageError("--note says why the level is right: somebody will ask")
    with open_store(load_config(config_file).store_url, existing=True) as store:
        run_id = None if ref is None else store.runs.resolve(ref)
        done = baseline.accept(store, job, soc, metrics, run_id, user=user_name(), note=note)
    if as_json:
        print_json({"accepted": done})
        return
    if not done:
        _require(job, metrics, "" if run_id is None else f" in {run_id}")
    for one in done:
        echo(f"#{one.alert} {one.job_id}: {one.metric}{', a step without an alert' if one.declared else ''}")
    if not done:
        where = "" if run_id is None else f" in {run_id}"
        echo(f"nothing of {job} stands out{where}: --metric names a number whose level is right all the same")


def _require(job: str, metrics: tuple[str, ...], where: str = "") -> None:
    """Raise UsageError for metrics that somebody named, and that no job has."""
    if metrics:
        names = " or ".join(map(one_line, metrics))
        raise UsageError(
            f"{one_line(job)} has no judged number {names}{where}: 'farm baseline show' lists those it has"
        )
