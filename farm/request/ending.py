"""What every command that leaves a run in the store has in common: how it is ended, what it returns, what it writes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from farm.errors import InfraError, NothingSelectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import FrameType

    from farm.report.model.context import ReportContext
    from farm.store.records import Background
    from farm.store.store import Store
    from farm.store.view import RunView

INTERRUPTED = 130


def write_report(view: RunView, path: Path, store: Store, state_dir: Path) -> Path:
    """Write the HTML report of a run, with what the store knows beyond the run, and return the file."""
    from farm.report.html.page_of_run import write_html
    from farm.report.model.context import artifact_links
    from farm.store.artifacts import ArtifactStore

    artifacts = ArtifactStore(state_dir / "artifacts")
    write_html(view, path, report_context(store, view.id, lambda known: artifact_links(known, artifacts, path)))
    return path


def report_context(store: Store, run_id: str, links: Callable[[Background], dict[str, str]]) -> ReportContext:
    """Return what the store knows beyond a run; `links` says where its artifacts are, by hash."""
    from farm.report.model.context import ReportContext

    background = store.history.background(run_id)
    return ReportContext(
        status=store.status.of_run(run_id),
        # None recorded may mean that nobody has looked, so that nothing is said of it.
        alerts=tuple(store.alerts.of_run(run_id)) or None,
        background=background,
        links=links(background),
    )


def exit_code_of(view: RunView) -> int:
    """Return what `farm run` returns for what a run found: 0, 1 (a job failed) or 4 (infrastructure). Pure.

    Stale jobs change nothing of it, as a budget is meant to leave some out; where it left out all, 5: nothing was run.
    """
    from farm.report.model.summary import Outcome, summarize

    counts = summarize(view).counts
    if counts[Outcome.FAILED]:
        return 1
    if counts[Outcome.INFRA] or counts[Outcome.NOT_RUN]:
        return InfraError.exit_code
    return NothingSelectedError.exit_code if counts[Outcome.STALE] == len(view.jobs) > 0 else 0


class Patience:
    """What Ctrl-C means while a command works: at once stop, unless there is something to let finish first.

    SIGTERM, and a terminal that closes, stop at once, as a second Ctrl-C does: by KeyboardInterrupt, with everything
    put away. With `term`, SIGTERM is heard as Ctrl-C is, for what a service manager stops.
    """

    def __init__(self, *, term: bool = False) -> None:
        self._patient = (signal.SIGINT, signal.SIGTERM) if term else (signal.SIGINT,)
        self._kept: dict[int, Any] = {}
        self._finish: Callable[[], None] | None = None
        self.was_asked = False
        """Ctrl-C was heard, and what ran was let finish."""

    @contextmanager
    def asking(self, finish: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `finish`, which may only set a flag, while the body works."""
        self._finish = finish
        try:
            yield
        finally:
            self._finish = None

    def __enter__(self) -> Patience:
        if threading.current_thread() is threading.main_thread():
            # What nohup makes deaf stays so.
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handler = self._interrupted if number in self._patient else signal.default_int_handler
                    self._kept[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._finish is None or self.was_asked:
            signal.default_int_handler(number, frame)
        self.was_asked = True
        if self._finish is not None:
            self._finish()
        # Not by `note`: its lock may be held by what was interrupted.
        os.write(2, b"\nfarm: finishing the running jobs; Ctrl-C again stops now\n")


def heard(outer: Patience | None) -> AbstractContextManager[Patience]:
    """Return the patience of a command that this is a part of, which goes on, or else one of its own."""
    return Patience() if outer is None else nullcontext(outer)
