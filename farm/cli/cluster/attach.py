"""`farm runs watch` and `farm runs cancel`: follow or end a submitted run of a shared farm."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED
from farm.cli.options import OUTPUT_FILE, configured, is_json, json_option
from farm.cli.output import asked_server, deliver, echo, notice, opened, print_json, show, write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.follow import InterruptChoice
    from farm.dispatch.request.request import RunOutcome
    from farm.serve.client import Server

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
    from farm.serve.pages.run import RunQuery, run_page

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
