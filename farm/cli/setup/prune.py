"""`farm runs prune`."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.config.retention import KeepReason, RetentionConfig, Rules, age_ms
from farm.base.config.settings import Config, load_config
from farm.base.errors import StoreError, UsageError
from farm.base.exit_codes import ExitCode
from farm.cli.options import json_option
from farm.cli.output import opened, show
from farm.report.model.format import size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.dispatch.request.pruning import Freed
    from farm.store.store import Store

_WHY = {
    KeepReason.AGE: "not older than the limit",
    KeepReason.NEWEST: "among the newest",
    KeepReason.RESULTS: "with one of the newest results of a job",
    KeepReason.GOING_ON: "going on, or written to today",
    KeepReason.ALERT: "named by an alert",
}


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
@click.option(
    "--keep-results", type=click.IntRange(min=1), metavar="N", help="Keep runs with the N newest results of any job."
)
@click.option("--orphans", is_flag=True, help="Also files in the state folder of runs that this store does not have.")
@click.option("--yes", is_flag=True, help="Remove; otherwise only list the runs to remove.")
@json_option()
def command(config_file: Path | None, *, orphans: bool, yes: bool, as_json: bool, **given: str | int | None) -> None:
    """Remove old runs: their rows, files that no other run has, their folders; comparisons and searches of that age.

    A run stays for any one reason: its age, its place among the newest, a result among the 30 newest of a job,
    an unfinished state, an alert that names it. Values that are not given come from [retention] in farm.toml. Without
    --yes nothing is removed. Compiled bundles have a command of their own: 'farm setup cache prune'.
    """
    named = {name: value for name, value in given.items() if value is not None}
    config = load_config(config_file)
    rules = _rules(config.retention, named, orphans=orphans)
    with opened(config_file, readonly=not yes, existing=True) as (_, store):
        answer = (_remove if yes else _plan)(config, store, rules, orphans=orphans)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()]
    again = shlex.join(["farm", "runs", "prune", *arguments, *(["--orphans"] if orphans else []), "--yes"])
    show({"schema": 2, "prune": answer}, _lines(answer, "" if yes else again), as_json=as_json)
    if answer.stopped and not as_json:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)


def _rules(config: RetentionConfig, given: Mapping[str, str | int], *, orphans: bool) -> Rules | None:
    """Return the conditions under which runs stay; None to remove no run. Raises UsageError."""
    asked = msgspec.structs.replace(config, **given)
    if asked.keep is None and asked.keep_runs is None:
        if orphans and asked.keep_nightly is None:
            return None
        raise UsageError(
            "no rule says which runs to keep: give --keep 90d or --keep-runs 500, or set [retention] keep in farm.toml"
        )
    return Rules(
        None if asked.keep is None else age_ms(asked.keep),
        None if asked.keep_nightly is None else age_ms(asked.keep_nightly),
        asked.keep_runs,
        asked.keep_results,
    )


def _plan(config: Config, store: Store, rules: Rules | None, *, orphans: bool) -> PruneAnswer:
    from farm.dispatch.request.pruning import Freed, Remains
    from farm.dispatch.request.shared_pruning import SharedRemains

    remains, freed = Remains(config, store.pruning), Freed()
    decided = store.pruning.decide(rules) if rules else {}
    answer = PruneAnswer(freed, decided)
    holding = store.pruning.holding(answer.old)
    answer.rows, answer.database_bytes = holding.rows, holding.database_bytes
    remains.measure(answer.old, holding.artifacts, freed)
    freed.runs = len(answer.old)
    if orphans:
        remains.measure(*remains.orphans(), freed)
    if rules:
        remains.measure_folders(remains.evidence(rules.keep_ms), freed)
    if config.is_shared:
        SharedRemains(config, store).measure(holding.artifacts, freed)
    return answer


def _remove(config: Config, store: Store, rules: Rules | None, *, orphans: bool) -> PruneAnswer:
    from farm.dispatch.request.pruning import Freed, Remains
    from farm.dispatch.request.shared_pruning import SharedRemains

    remains, freed = Remains(config, store.pruning), Freed()
    answer = PruneAnswer(freed, store.pruning.decide(rules) if rules else {}, removed=True)
    try:
        # Oldest first: after an interruption the newest of the old runs remain.
        for run_id in reversed(answer.old):
            remains.remove(run_id, freed)
        store.pruning.sweep()
        if rules:
            remains.remove_evidence(remains.evidence(rules.keep_ms), freed)
        if orphans:
            folders, artifacts = remains.orphans()
            remains.remove_folders(folders, freed)
            remains.discard(artifacts, freed)
        if config.is_shared:
            SharedRemains(config, store).remove(freed)
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
    lines += [
        f"  artifacts    {freed.artifacts:,} on this machine, {size(freed.artifact_bytes)}",
        f"  folders      {freed.folders:,} on this machine, {size(freed.folder_bytes)}",
    ]
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
