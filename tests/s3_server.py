"""A server that speaks S3, as a process of its own: moto's, which keeps objects in memory and checks no signature."""

from __future__ import annotations

import sys
from pathlib import Path

from waiting import free_port, require_listening

from farm.base.processes import Child, Supervisor

SECONDS = 30.0
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test"}


class S3Server:
    """Listens from `start` on; its port stays the same."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self._supervisor, self._folder = supervisor, folder
        self._child: Child | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def address(self, bucket: str, prefix: str = "farm") -> str:
        return f"s3://{bucket}/{prefix}?endpoint_url={self.url}&region=us-east-1"

    def start(self) -> S3Server:
        self._child = self._supervisor.spawn(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            name="s3",
            stderr=self._folder / "s3.log",
        )
        require_listening(self._child, self.port, SECONDS)
        return self

    def stop(self) -> None:
        assert self._child is not None
        self._child.terminate()
