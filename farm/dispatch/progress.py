"""Events of a run for its display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from farm.builds.compile.protocol import BuildReply


class ProgressListener(Protocol):
    """Display of a run in progress. Several threads call its methods."""

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """Show the start of a planned run: its jobs, the number to compile, its devices."""

    def build_started(self, job_id: str) -> None:
        """Show that a compiler process has begun a job."""

    def build_ended(self, job_id: str, reply: BuildReply) -> None:
        """Show that a compiler process has finished a job."""

    def devices(self, running: dict[str, str]) -> None:
        """Show the jobs that run now, by device."""

    def job_ended(self, shown: dict[str, Any]) -> None:
        """Show the last attempt of a job: a dictionary by `farm.dispatch.local_jobs.shown`."""

    def job_repeated(self, shown: dict[str, Any]) -> None:
        """Show an attempt after which the job is tried again."""
