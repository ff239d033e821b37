"""`farm runs`, `farm diff` and `farm serve`: list, reports, following, cancellation and removal of runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.config.runs import KeepReason, RetentionConfig, Rules, age_ms
from farm.base.config.settings import Config
from farm.base.errors import ExitCode, StoreError, UsageError
from farm.base.interrupts import INTERRUPTED
from farm.base.text import one_line
from farm.cli.options import OUTPUT_FILE, branch_option, configured, is_json, json_option, limit_option, yes_option
from farm.cli.output import (
    as_called,
    asked_server,
    deliver,
    echo,
    notice,
    opened,
    print_json,
    reading,
    require_consent,
    show,
    width,
    write_file,
)
from farm.report.model.format import short_age, size
from farm.report.terminal.layout import LEAST_WIDTH, columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.follow import InterruptChoice
    from farm.dispatch.request.pruning import Freed
    from farm.dispatch.request.request import RunOutcome
    from farm.serve.client import Server
    from farm.store.queries.browse import ListedRun
    from farm.store.store import Store


# `farm runs list`, `farm runs remove` and `farm runs prune`: the runs of the store.


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


# `farm report`, `farm diff` and `farm serve`: runs as pages, two runs side by side, the store in a browser.


@click.command("report")
@click.argument("run", default="latest")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here instead.")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@json_option("Print the run as JSON instead of a summary.")
def report_command(run: str, html: Path | None, junitxml: Path | None) -> None:
    """Write the HTML report of RUN (an id, the start of one, latest, latest~1) and print its summary."""
    from farm.dispatch.request.records import write_report

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
    from farm.report.terminal.compare import diff_lines

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
    import json

    from farm.serve.server import listen, serve, url_of

    config = configured()
    with listen(host, port) as bound, ExitStack() as stack:
        url = url_of(bound)
        # On one line, so that a script can read it while the server runs.
        shown = json.dumps({"schema": 2, "url": url}) if is_json() else f"farm: {url} (Ctrl-C ends it)"
        if demo:
            from farm.serve.demo import demo_config

            config = stack.enter_context(demo_config(config))
        serve(config, bound, partial(echo, shown), demo=demo)


# `farm runs watch` and `farm runs cancel`: follow or end a submitted run of a shared farm.


# Seconds within which even a busy agent ends the running jobs of a cancelled run.
_AWAIT_SECONDS = 15.0
_LOOK_S = 2.0


@click.command("watch")
@click.argument("run", default="latest")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here as well.")
@json_option("Print the run as JSON instead of a summary.")
def watch_command(run: str, *, html: Path | None, junitxml: Path | None) -> int:
    """Follow RUN on a shared farm until it ends, like the command that submitted it.

    Without RUN it is your newest. Ctrl-C asks whether to leave it running or
    to cancel it. The exit code is the run's, as of farm run; 130 for a run
    that was left or cancelled.
    """
    server = asked_server()
    if server is not None:
        return follow_there(server, run, html=html, junitxml=junitxml)
    from farm.cli.progress import make_front
    from farm.dispatch.cluster.client.devices import require_shared
    from farm.dispatch.cluster.client.submit import attach

    config = configured()
    require_shared(config.is_shared)
    with make_front() as front:
        outcome = attach(config, run, front, asking(front))
    if outcome.left:
        return show_left(outcome)
    deliver(outcome.view, report=outcome.report, html=html, junitxml=junitxml)
    if outcome.exit_code == INTERRUPTED:
        notice(f"cancelled: 'farm run --resume {outcome.view.id}' executes the missing jobs")
    return outcome.exit_code


@click.command("cancel")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Cancel a run of another user as well.")
@json_option()
def cancel_command(*, runs: tuple[str, ...], force: bool) -> None:
    """Cancel RUN on a shared farm: its jobs end at once, and its devices are free.

    Results so far are kept, and farm run --resume RUN executes the missing
    jobs. A run outside of a shared farm ends by Ctrl-C.
    """
    server = asked_server()
    if server is not None:
        done = {run: server.act("cancel", run=run, force=force) for run in dict.fromkeys(runs)}
        answer = [{"run": one.run_id} for one in done.values()]
        show({"cancelled": answer}, [one.done for one in done.values()])
        return
    from farm.dispatch.cluster.client.devices import require_shared
    from farm.dispatch.cluster.client.follow import await_end, cancel

    require_shared(configured().is_shared)
    with opened(existing=True) as (_, store):
        users = {}
        for run_id in dict.fromkeys(store.runs.resolve(run, own=not force) for run in runs):
            users[run_id] = user = cancel(store, run_id, store.user, force=force).user
            if not is_json():
                echo(f"run {run_id}{f' of {user}' if user != store.user else ''} is cancelled")
        ended = {run_id: await_end(store, run_id, _AWAIT_SECONDS) for run_id in users}
    for run_id in (run_id for run_id, has_ended in ended.items() if not has_ended):
        notice(f"run {run_id}: an agent does not answer: its devices are free once its leases are over")
    if is_json():
        print_json({"cancelled": [{"run": run, "user": users[run], "ended": ended[run]} for run in ended]})


def asking(front: Front) -> Callable[[], InterruptChoice] | None:
    """Return the function that asks the user about Ctrl-C; None without a terminal."""
    return partial(_ask, front) if sys.stdin.isatty() and sys.stderr.isatty() else None


def _ask(front: Front) -> InterruptChoice:
    """Ask whether to leave the run running. A second Ctrl-C raises KeyboardInterrupt, which leaves it as well."""
    from farm.dispatch.cluster.client.follow import InterruptChoice

    meanings = {"l": InterruptChoice.LEAVE, "c": InterruptChoice.CANCEL, "f": InterruptChoice.FOLLOW}
    with front.paused():
        while True:
            echo("farm: [l]eave it running, [c]ancel it, or [f]ollow on? (Ctrl-C leaves) ", err=True, nl=False)
            line = sys.stdin.readline()
            if not line:
                return InterruptChoice.LEAVE
            if (first := line.strip().casefold()[:1]) in meanings:
                return meanings[first]


def show_left(outcome: RunOutcome) -> int:
    """Print the id of a submitted run for scripts, unless Ctrl-C left the run; return the exit code."""
    if outcome.exit_code == 0:
        run_id = outcome.view.id
        if is_json():
            print_json({"run": run_id})
        else:
            notice(f"'farm runs watch {run_id}' follows it, 'farm runs cancel {run_id}' ends it; see 'farm lab queue'")
            echo(run_id)
    return outcome.exit_code


def follow_there(server: Server, run: str, *, html: Path | None, junitxml: Path | None) -> int:
    """Follow a run on the server of $FARM_SERVER until it ends, print it and return its exit code; Ctrl-C leaves it."""
    from farm.serve.pages.progress import ProgressQuery, progress_page
    from farm.serve.pages.runs import RunQuery, run_page

    shown = ""
    try:
        run = server.read(run_page, RunQuery(run=run, limit=1)).run.run_id
        while True:
            runs = server.read(progress_page, ProgressQuery()).runs
            progress = next((one for one in runs if one.run_id == run and one.finished_ms is None), None)
            if progress is None:
                break
            if progress.text != shown:
                shown = progress.text
                notice(f"run {run}: {shown}")
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        notice(f"the run goes on: 'farm runs watch {run}' follows it, 'farm runs cancel {run}' ends it")
        return ExitCode.INTERRUPTED
    if html is not None:
        write_file(html, server.report(run).decode())
    view = server.run(run)
    deliver(view, report=html or server.address_of(run), html=None, junitxml=junitxml)
    return ExitCode.INTERRUPTED if view.exit_code is None else view.exit_code
