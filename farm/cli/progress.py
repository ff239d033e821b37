"""Progress of `farm run` on standard error: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from farm.base.log_setup import shown_by
from farm.base.text import REASON_LIMIT, one_line, visible
from farm.cli.output import echo, is_quiet
from farm.report.model.format import duration, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from farm.builds.compile.protocol import BuildReply

logger = logging.getLogger(__name__)

_MARKS = {"passed": "ok", "failed": "FAILED", "infra": "INFRA", "skipped": "skipped", "known issue": "known issue"}
_STYLES = {"passed": "green", "failed": "bold red", "infra": "magenta", "skipped": "dim", "known issue": "yellow"}


class Front:
    """Counts of a run, called from several threads. Subclasses show them in different ways."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_ended = 0.0
        self.total = self.built = self.to_build = 0
        self.counts: dict[str, int] = dict.fromkeys(_MARKS, 0)
        self.running: dict[str, str] = {}
        self.building: dict[str, str] = {}

    @property
    def ended(self) -> int:
        """Return the number of jobs that have ended."""
        return sum(self.counts.values())

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """Show the plan of the run."""
        with self._lock:
            self.total, self.to_build = jobs, to_build
            self.running = dict.fromkeys(devices, "")
        cached = f"{to_build} to compile" if to_build else "all compiled already"
        used = f", {plural(len(devices), 'device')}: {', '.join(devices)}" if devices else ""
        logger.info("%s, %s%s", plural(jobs, "job"), cached, used)

    def build_started(self, job_id: str) -> None:
        """Record that a builder took a job."""
        with self._lock:
            self.building[job_id] = job_id

    def build_ended(self, job_id: str, reply: BuildReply) -> None:
        """Record that a builder finished a job; a failure is shown when the job ends, with its verdict."""
        del reply
        with self._lock:
            self.built += 1
            self.building.pop(job_id, None)

    def devices(self, running: dict[str, str]) -> None:
        """Record the job of each busy device."""
        with self._lock:
            self.running.update(dict.fromkeys(self.running, ""))
            self.running.update(running)

    def job_ended(self, shown: dict[str, Any]) -> None:
        """Count a recorded attempt and show it."""
        kind = "known issue" if shown["known_issue"] else shown["verdict"]
        with self._lock:
            self.counts[kind] += 1
            self._first_ended = self._first_ended or time.monotonic()
        self.show_job(kind, shown)

    def job_repeated(self, shown: dict[str, Any]) -> None:
        """Show that the job will be tried again."""
        text = "%s is tried again: %s: %s"
        logger.info(text, shown["job_id"], shown["device"], shown["reason"][:REASON_LIMIT])

    def show_job(self, kind: str, shown: dict[str, Any]) -> None:
        """Show the end of a job."""

    def summary(self) -> str:
        """Return the counts that are not zero."""
        return ", ".join(_counted(count, kind) for kind, count in self.counts.items() if count)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing while the body asks a question."""
        yield

    def eta_seconds(self) -> float | None:
        """Return the remaining seconds at the pace since the first job ended; the first job includes the start-up."""
        paced = self.ended - 1
        if paced < 1 or self.ended >= self.total:
            return None
        return (time.monotonic() - self._first_ended) / paced * (self.total - self.ended)


class PlainFront(Front):
    """Progress as plain lines for logs and pipes, one per event."""

    def show_job(self, kind: str, shown: dict[str, Any]) -> None:
        """Show the end of a job."""
        reason = f": {one_line(shown['reason'], REASON_LIMIT)}" if shown["reason"] else ""
        line = f"[{self.ended}/{self.total}] {_MARKS[kind]} {shown['job_id']} ({shown['seconds']:.2f} s){reason}"
        echo(line, err=True)


class QuietFront(PlainFront):
    """Plain lines for failures only, for commands with many runs."""

    def show_job(self, kind: str, shown: dict[str, Any]) -> None:
        """Show the end of a job unless it passed."""
        if kind != "passed":
            super().show_job(kind, shown)


class LiveFront(Front):
    """Display that is redrawn ten times a second, with failures scrolling above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        from rich.live import Live

        self._console = console
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=10, transient=True)

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """Show the plan and start the display. Its thread starts only now, after the workers are forked."""
        super().begin(jobs=jobs, to_build=to_build, devices=devices)
        self.live.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing while the body asks a question."""
        was_started = self.live.is_started
        self.live.stop()
        try:
            yield
        finally:
            if was_started:
                self.live.start()

    def show(self, text: str) -> None:
        """Show a line."""
        self._console.print(visible(text), markup=False, highlight=False, soft_wrap=False)

    def show_job(self, kind: str, shown: dict[str, Any]) -> None:
        """Show the end of a job unless it passed."""
        if kind == "passed":
            return
        from rich.text import Text

        line = Text(f"{_MARKS[kind]} ", style=_STYLES[kind])
        reason = one_line(shown["reason"], REASON_LIMIT)
        line.append(one_line(shown["job_id"]), style="bold").append(f": {reason}", style="default")
        self._console.print(line)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            bars = Table.grid(padding=(0, 1))
            if self.to_build:
                building = ", ".join(_short(job) for job in self.building)
                bars.add_row("built", ProgressBar(self.to_build, self.built, width=16), f"{self.built}/{self.to_build}",
                             Text(building, style="dim", overflow="ellipsis", no_wrap=True))  # fmt: skip
            eta = self.eta_seconds()
            counts = Text(overflow="ellipsis", no_wrap=True)
            if eta is not None:
                counts.append(f"about {_rough(eta)} left  ", style="dim")
            for kind, count in self.counts.items():
                if count:
                    counts.append(f"{_counted(count, kind)}  ", style=_STYLES[kind])
            # Without devices the jobs are only compiled.
            if self.running:
                bars.add_row(
                    "run", ProgressBar(self.total or 1, self.ended, width=16), f"{self.ended}/{self.total}", counts
                )
            devices = Table.grid(padding=(0, 1))
            for serial, job in self.running.items():
                waits = job in self.building
                doing = f"waits for {_short(job)} to be compiled" if waits else _short(job) or "idle"
                devices.add_row(
                    Text(one_line(serial), style="cyan"), Text(doing, style="dim" if waits or not job else "")
                )
        return Group(bars, devices)


def _counted(count: int, kind: str) -> str:
    return plural(count, kind) if kind == "known issue" else f"{count} {kind}"


def _rough(seconds: float) -> str:
    """Return a duration; whole minutes from ten minutes on, so that a live display is steady."""
    return f"{round(seconds / 60)} min" if 600 <= seconds < 3570 else duration(seconds)


def _short(job_id: str) -> str:
    return one_line(job_id.partition("/")[2] or job_id)


@contextmanager
def make_front(plain: type[PlainFront] = PlainFront) -> Iterator[Front]:
    """Yield the progress display for standard error; `plain` if it is no terminal."""
    if is_quiet() or not sys.stderr.isatty():
        yield plain()
        return
    from rich.console import Console

    front = LiveFront(Console(stderr=True))
    try:
        with shown_by(front.show):
            yield front
    finally:
        front.live.stop()
