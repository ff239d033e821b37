"""Events of a run for its display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from farm.builds.compile.protocol import BuildReply


class ProgressListener(Protocol):
    """Display of a run in progress. Several threads call its methods."""

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """The run is planned."""

    def build_started(self, job_id: str) -> None:
        """A builder took a job."""

    def build_ended(self, job_id: str, reply: BuildReply) -> None:
        """A builder finished it."""

    def devices(self, running: dict[str, str]) -> None:
        """The busy devices and their jobs changed: `running` has job by device."""

    def job_ended(self, shown: dict[str, Any]) -> None:
        """An attempt was recorded; keys as in `farm.dispatch.local_jobs.shown`."""

    def job_repeated(self, shown: dict[str, Any]) -> None:
        """An attempt was recorded, and another device is to try the job."""
