"""What Ctrl-C means to who follows a run on a shared farm, and how a run ends that is followed no more."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from farm.cli.output import echo, notice, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.follow import Meaning
    from farm.dispatch.request.request import RunOutcome


def asking(front: Front) -> Callable[[], Meaning] | None:
    """Return what asks whoever sits at the terminal; None where nobody does."""
    return partial(_ask, front) if sys.stdin.isatty() and sys.stderr.isatty() else None


def _ask(front: Front) -> Meaning:
    """Ask whether to leave the run running. A second Ctrl-C raises KeyboardInterrupt, and leaves as well."""
    from farm.dispatch.cluster.client.follow import Meaning

    meanings = {"l": Meaning.LEAVE, "c": Meaning.CANCEL, "f": Meaning.FOLLOW}
    with front.paused():
        while True:
            echo("farm: [l]eave it running, [c]ancel it, or [f]ollow on? (Ctrl-C leaves) ", err=True, nl=False)
            line = sys.stdin.readline()
            if not line:
                return Meaning.LEAVE
            if (first := line.strip().casefold()[:1]) in meanings:
                return meanings[first]


def show_left(outcome: RunOutcome, *, as_json: bool) -> int:
    """Print the id of a run that goes on, for scripts, where it was not Ctrl-C that left it; return the exit code."""
    if outcome.exit_code == 0:
        run_id = outcome.view.id
        if as_json:
            print_json({"run": run_id})
        else:
            notice(f"'farm attach {run_id}' follows it, 'farm cancel {run_id}' ends it, 'farm queue' says how it goes")
            echo(run_id)
    return outcome.exit_code
