"""Following a run on a shared farm: the question after Ctrl-C, and the output for a run that was left."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from farm.cli.output import echo, notice, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.follow import InterruptChoice
    from farm.dispatch.request.request import RunOutcome


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
