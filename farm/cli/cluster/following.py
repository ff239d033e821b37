"""Following a run on a shared farm: the question after Ctrl-C, and the output for a run that was left."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from farm.base.exit_codes import ExitCode
from farm.cli.output import deliver, echo, notice, print_json, write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.follow import InterruptChoice
    from farm.dispatch.request.request import RunOutcome
    from farm.serve.client import Server

_LOOK_S = 2.0


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


def show_left(outcome: RunOutcome, *, as_json: bool) -> int:
    """Print the id of a submitted run for scripts, unless Ctrl-C left the run; return the exit code."""
    if outcome.exit_code == 0:
        run_id = outcome.view.id
        if as_json:
            print_json({"run": run_id})
        else:
            notice(f"'farm runs watch {run_id}' follows it, 'farm runs cancel {run_id}' ends it; see 'farm lab queue'")
            echo(run_id)
    return outcome.exit_code


def follow_there(server: Server, run: str, *, html: Path | None, junitxml: Path | None, as_json: bool) -> int:
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
    deliver(view, report=html or server.address_of(run), html=None, junitxml=junitxml, as_json=as_json)
    return ExitCode.INTERRUPTED if view.exit_code is None else view.exit_code
