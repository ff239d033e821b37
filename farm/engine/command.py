"""What every command that leaves a run in the store has in common: how it is ended, what it returns, what it writes."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farm.errors import InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.store.view import RunView

INTERRUPTED = 130


def write_report(view: RunView, path: Path) -> Path:
    """Write the HTML report of a run and return the file."""
    from farm.report.html import write_html

    write_html(view, path)
    return path


def exit_code_of(view: RunView) -> int:
    """Return what `farm run` returns for what a run found: 0, 1 (a job failed) or 4 (infrastructure). Pure."""
    from farm.report.summary import Outcome, summarize

    counts = summarize(view).counts
    if counts[Outcome.FAILED]:
        return 1
    return InfraError.exit_code if counts[Outcome.INFRA] or counts[Outcome.NOT_RUN] else 0


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, and a terminal that closes, end a run as Ctrl-C does, with everything put away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What nohup makes deaf stays so.
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    kept = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
