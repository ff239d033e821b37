"""ADB transport that counts its requests for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress
from farm.devices.process import Link
from farm.devices.transport import Completed


class Watched(AdbTransport):
    """Real transport with counts of the pushed bytes and of the requests to the device."""

    def __init__(self, serial: str, port: int) -> None:
        super().__init__(serial, AdbAddress(port))
        self.pushed: dict[str, int] = {}
        self.calls: list[str] = []

    def forget(self) -> None:
        self.pushed.clear()
        self.calls.clear()

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        self.calls.append("push")
        for path, source in files.items():
            if not isinstance(source, Link):
                size = len(source) if isinstance(source, bytes) else source.stat().st_size
                self.pushed[path.name] = self.pushed.get(path.name, 0) + size
        super().push(files)

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        self.calls.append("run")
        return super().run(argv, **options)

    def listed(self, path: PurePosixPath) -> set[str]:
        return set(self.run(["ls", str(path)], timeout_s=10).stdout.decode().split())
