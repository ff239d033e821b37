"""`farm runs list` and `farm runs remove`: the runs of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.cli.options import branch_option, json_option, limit_option, yes_option
from farm.cli.output import opened, reading, require_consent, show, width

if TYPE_CHECKING:
    from pathlib import Path

    from farm.store.queries.browse import ListedRun


_HEAD = ("run", "purpose", "age", "user", "exit", "jobs", "name")


@click.command("list")
@click.option("--user", default="", metavar="NAME", help="Only runs of this user.")
@click.option(
    "--purpose",
    type=click.Choice(["local", "nightly", "manual"]),
    help="Only runs with this purpose: local is a local run, manual a run of an older farm.",
)
@branch_option()
@limit_option("Most runs.")
@json_option()
def list_command(
    user: str, purpose: str | None, branch: str | None, limit: int, config_file: Path | None, *, as_json: bool
) -> None:
    """List the runs, newest first: name, purpose and result.

    A run that ended without a device, or before anything was executed, never
    began: it appears in this list alone.
    """
    from farm.report.terminal.layout import LEAST_WIDTH, columns
    from farm.serve.pages.runs import RunsQuery, runs_page

    with reading(config_file) as reader:
        facts = reader.read(runs_page, RunsQuery(user=user, purpose=purpose or "", branch=branch or "", limit=limit))
    runs, total = facts.runs, facts.total
    lines = columns([_HEAD, *map(_cells, runs)]) if runs else ["no run matches" if total else "no run"]
    lines += [f"and {total - len(runs)} more: --limit"] if total > len(runs) else []
    # Names come last, since they are cut when the terminal is narrow.
    at_most = max(width(), LEAST_WIDTH)
    cut = (text if len(text) <= at_most else f"{text[: at_most - 1]}…" for text in lines)
    show({"runs": runs, "total": total}, cut, as_json=as_json)


def _cells(run: ListedRun) -> list[str]:
    from farm.base.text import one_line
    from farm.report.model.format import short_age

    done = run.progress
    red = done.counts.get("failed", 0)
    jobs = f"{done.planned}, {red} failed" if red else f"{done.planned}"
    if not run.began:
        jobs = "NEVER BEGAN"
    elif done.finished_ms is None:
        jobs = f"{done.done} of {done.planned} done"
    code = "-" if done.exit_code is None else f"{done.exit_code}"
    return [run.run_id, run.purpose, short_age(run.started_ms), one_line(run.user, 12), code, jobs, one_line(run.name)]


@click.command("remove")
@click.argument("run")
@yes_option
@json_option()
def remove_command(run: str, config_file: Path | None, *, yes: bool, as_json: bool) -> None:
    """Remove RUN: its rows in the store, files that no other run has, its folder here.

    Unfinished runs and runs named by an open alert are not removed: see farm
    alerts list. The numbers of a run of a branch leave its history and baselines.
    Files that were kept in the last ten minutes stay until
    farm runs prune --orphans. farm runs prune removes many old runs at once.
    """
    from farm.dispatch.request.pruning import remove_run, require_removable
    from farm.report.model.format import size

    with opened(config_file, existing=True) as (config, store):
        view = store.runs.view(store.runs.resolve(run, unbegun=True))
        require_removable(config, store, view)
        branch, private = store.runs.branch(view.id)
        about = [f"{view.id}{f' {view.name}' if view.name else ''}: {view.purpose} of {view.user}", f"  {view.command}"]
        if not private:
            about.append(f"  its numbers leave the history and the baselines of branch {branch or 'default'}")
        require_consent(f"run {view.id} of {view.user}", about, yes=yes)
        freed = remove_run(config, store, view.id)
    lines = [
        f"removed run {view.id}",
        f"  artifacts    {freed.artifacts:,} on this machine, {size(freed.artifact_bytes)}",
        f"  folders      {freed.folders:,} on this machine, {size(freed.folder_bytes)}",
    ]
    show({"schema": 2, "removed": view.id, "freed": freed}, lines, as_json=as_json)
