"""`farm runs list`, `farm runs remove` and `farm runs prune`: the runs of the store."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.config.retention import KeepReason, RetentionConfig, Rules, age_ms
from farm.base.config.settings import Config
from farm.base.errors import StoreError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import branch_option, configured, is_json, json_option, limit_option, yes_option
from farm.cli.output import as_called, opened, reading, require_consent, show, width
from farm.report.model.format import short_age, size
from farm.report.terminal.layout import LEAST_WIDTH, columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.dispatch.request.pruning import Freed
    from farm.store.queries.browse import ListedRun
    from farm.store.store import Store

_HEAD = ("run", "purpose", "age", "user", "exit", "jobs", "name")
_WHY = {
    KeepReason.AGE: "not older than the limit",
    KeepReason.NEWEST: "among the newest",
    KeepReason.RESULTS: "with one of the newest results of a job",
    KeepReason.GOING_ON: "going on, or written to today",
    KeepReason.ALERT: "named by an alert",
}


@click.command("list")
@click.option("--user", default="", metavar="NAME", help="Only runs of this user.")
@click.option("--purpose", type=click.Choice(["local", "nightly", "manual"]),
              help="Only runs with this purpose: local is a local run, manual a run of an older farm.")  # fmt: skip
@branch_option()
@limit_option("Most runs.")
@json_option()
def list_command(user: str, purpose: str | None, branch: str | None, limit: int) -> None:
    """List the runs, newest first: name, purpose and result.

    A run that ended without a device, or before anything was executed, never
    began: it appears in this list alone.
    """
    from farm.serve.pages.runs import RunsQuery, runs_page

    with reading() as reader:
        facts = reader.read(runs_page, RunsQuery(user=user, purpose=purpose or "", branch=branch or "", limit=limit))
    runs, total = facts.runs, facts.total
    lines = columns([_HEAD, *map(_cells, runs)]) if runs else ["no run matches" if total else "no run"]
    lines += [f"and {total - len(runs)} more: --limit"] if total > len(runs) else []
    # Names come last, since they are cut when the terminal is narrow.
    at_most = max(width(), LEAST_WIDTH)
    cut = (text if len(text) <= at_most else f"{text[: at_most - 1]}…" for text in lines)
    show({"runs": runs, "total": total}, cut)


def _cells(run: ListedRun) -> list[str]:

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
def remove_command(run: str, *, yes: bool) -> None:
    """Remove RUN: its rows in the store, files that no other run has, its folder here.

    Unfinished runs and runs named by an open alert are not removed: see farm
    alerts list. The numbers of a run of a branch leave its history and baselines.
    Files that were kept in the last ten minutes stay until
    farm runs prune --orphans. farm runs prune removes many old runs at once.
    """
    from farm.dispatch.request.pruning import remove_run, require_removable

    with opened(existing=True) as (config, store):
        view = store.runs.view(store.runs.resolve(run, unbegun=True))
        require_removable(config, store, view)
        branch, private = store.runs.branch(view.id)
        about = [f"{view.id}{f' {view.name}' if view.name else ''}: {view.purpose} of {view.user}", f"  {view.command}"]
        if not private:
            about.append(f"  its numbers leave the history and the baselines of branch {branch or 'default'}")
        require_consent(f"run {view.id} of {view.user}", about, yes=yes)
        freed = remove_run(config, store, view.id)
    show({"schema": 2, "removed": view.id, "freed": freed}, [f"removed run {view.id}", *_freed_lines(freed)])


def _freed_lines(freed: Freed) -> list[str]:
    return [
        f"  artifacts    {freed.artifacts:,} on this machine, {size(freed.artifact_bytes)}",
        f"  folders      {freed.folders:,} on this machine, {size(freed.folder_bytes)}",
    ]


class PruneAnswer(msgspec.Struct):
    """Removed runs and files, or a preview of them."""

    freed: Freed
    runs: dict[str, KeepReason | None]
    """Reason why each run stays, newest first; None for a run to remove."""
    removed: bool = False
    rows: int = 0
    database_bytes: int = 0
    """Approximate bytes of the removed rows in the database; only in a preview."""
    not_shrunk: str = ""
    """Reason why the file of the database keeps its size."""
    stopped: bool = False

    @property
    def old(self) -> list[str]:
        """Return the runs to remove, newest first."""
        return [run_id for run_id, why in self.runs.items() if why is None]


def _age(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and age_ms(value) is None:
        raise click.BadParameter(f"{value!r}: expected an age such as 90d, 12w or 36h", context, option)
    return value


@click.command("prune")
@click.option("--keep", callback=_age, metavar="AGE", help="Keep runs up to this age: 90d, 12w, 36h.")
@click.option("--keep-nightly", callback=_age, metavar="AGE", help="Keep nightly runs up to this age.")
@click.option("--keep-runs", type=click.IntRange(min=1), metavar="N", help="Keep the N newest runs.")
@click.option("--keep-results", type=click.IntRange(min=1), metavar="N",
              help="Keep runs with the N newest results of any job.")  # fmt: skip
@click.option("--orphans", is_flag=True, help="Also files in the state folder of runs that this store does not have.")
@click.option("--yes", is_flag=True, help="Remove; otherwise only list the runs to remove.")
@json_option()
def prune_command(*, orphans: bool, yes: bool, **given: str | int | None) -> None:
    """Remove old runs: their rows, files that no other run has, their folders; comparisons and searches of that age.

    A run stays for any one reason: its age, its place among the newest, a result among the 30 newest of a job,
    an unfinished state, an alert that names it. Values that are not given come from [retention] in farm.toml. Without
    --yes nothing is removed. Compiled bundles have a command of their own: 'farm setup cache prune'.
    """
    named = {name: value for name, value in given.items() if value is not None}
    config = configured()
    rules = _rules(config.retention, named, orphans=orphans)
    with opened(readonly=not yes, existing=True) as (_, store):
        answer = (_remove if yes else _plan)(config, store, rules, orphans=orphans)
    show({"schema": 2, "prune": answer}, _lines(answer, "" if yes else f"{as_called()} --yes"))
    if answer.stopped and not is_json():
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)


def _rules(config: RetentionConfig, given: Mapping[str, str | int], *, orphans: bool) -> Rules | None:
    """Return the conditions under which runs stay; None to remove no run. Raises UsageError."""
    asked = msgspec.structs.replace(config, **given)
    if asked.keep is None and asked.keep_runs is None:
        if orphans and asked.keep_nightly is None:
            return None
        raise UsageError(
            "no rule for runs to keep: give --keep 90d or --keep-runs 500, or set [retention] keep in farm.toml"
        )
    return Rules(
        None if asked.keep is None else age_ms(asked.keep),
        None if asked.keep_nightly is None else age_ms(asked.keep_nightly),
        asked.keep_runs,
        asked.keep_results,
    )


def _plan(config: Config, store: Store, rules: Rules | None, *, orphans: bool) -> PruneAnswer:
    from farm.dispatch.request.pruning import Remains

    remains = Remains(config, store)
    answer = PruneAnswer(remains.freed, store.pruning.decide(rules) if rules else {})
    holding = store.pruning.holding(answer.old)
    answer.rows, answer.database_bytes = holding.rows, holding.database_bytes
    remains.measure(map(remains.find_folder, answer.old), holding.artifacts)
    remains.freed.runs = len(answer.old)
    if orphans:
        remains.measure(*remains.orphans())
    if rules:
        remains.measure(remains.evidence(rules.keep_ms))
    if config.is_shared:
        remains.measure_shared(holding.artifacts)
    return answer


def _remove(config: Config, store: Store, rules: Rules | None, *, orphans: bool) -> PruneAnswer:
    from farm.dispatch.request.pruning import Remains

    remains = Remains(config, store)
    answer = PruneAnswer(remains.freed, store.pruning.decide(rules) if rules else {}, removed=True)
    try:
        # Oldest first: after an interruption the newest of the old runs remain.
        for run_id in reversed(answer.old):
            with suppress(UsageError):
                remains.remove(run_id)
        store.pruning.sweep()
        if rules:
            remains.remove_folders(remains.evidence(rules.keep_ms))
        if orphans:
            folders, artifacts = remains.orphans()
            remains.remove_folders(folders)
            remains.discard(artifacts)
        if config.is_shared:
            remains.remove_shared()
        try:
            answer.not_shrunk = store.pruning.shrink()
        except StoreError as error:
            answer.not_shrunk = str(error)
    except KeyboardInterrupt:
        answer.stopped = True
    return answer


def _lines(answer: PruneAnswer, again: str) -> list[str]:
    """Return the answer as text; `again` is the command that removes, empty after a removal."""
    freed, old = answer.freed, answer.old
    verb = "removed" if answer.removed else "would remove"
    span = f", {old[-1]} to {old[0]}" if old else ""
    lines = [f"{verb} {freed.runs} of {len(answer.runs)} runs{span}"]
    if not answer.removed:
        lines.append(f"  rows         {answer.rows:,}, about {size(answer.database_bytes)} of the database")
    lines += _freed_lines(freed)
    if freed.shared:
        lines.append(f"  shared       {freed.shared:,} files that no run has, of all hosts, {size(freed.shared_bytes)}")
    for why, count in Counter(why for why in answer.runs.values() if why is not None).items():
        lines.append(f"kept {count}: {_WHY[why]}")
    if answer.not_shrunk:
        lines.append(f"the database keeps its size, and uses the room again: {answer.not_shrunk}")
    if answer.stopped:
        lines.append("stopped: every run is complete or removed; the same command continues")
    if again and (freed.runs or freed.artifacts or freed.folders or freed.shared):
        lines.append(f"nothing was removed: {again}")
    return lines
