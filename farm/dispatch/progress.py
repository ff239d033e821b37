"""What a run reports to whoever shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from farm.builds.compile.protocol import BuildReply


class ProgressListener(Protocol):
    """Shows a run while it works. Called from several threads."""

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """The run is planned."""

    def build_started(self, job_id: str) -> None:
        """A builder took a job."""

    def build_ended(self, job_id: str, reply: BuildReply) -> None:
        """A builder finished it."""

    def devices(self, running: dict[str, str]) -> None:
        """Which device is busy with which job now."""

    def job_ended(self, shown: dict[str, Any]) -> None:
        """An attempt was recorded; keys as in `farm.dispatch.local_jobs.shown`."""

    def job_repeated(self, shown: dict[str, Any]) -> None:
        """An attempt was recorded, and another device is to try the job."""
