"""The transport over a real adb server, for phones and virtual devices alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from farm.devices.adb_host import AdbHost
from farm.devices.adb_shell import ShellCall
from farm.devices.adb_sync import SyncStream
from farm.devices.transport import OUTPUT_BYTES, Completed, shell_command
from farm.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path, PurePosixPath

# A device that moves no byte of a file for so long is gone; flash storage that stalls recovers sooner.
STALL_SECONDS = 30.0


class AdbTransport:
    """The device `serial` behind the adb server on `port` of this machine."""

    def __init__(self, serial: str, port: int, *, stall_s: float = STALL_SECONDS) -> None:
        self._serial, self._stall_s = serial, stall_s
        self._host = AdbHost(port)

    @property
    def serial(self) -> str:
        """The device's name."""
        return self._serial

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = OUTPUT_BYTES,
    ) -> Completed:
        """Run a program: see Transport. Needs shell protocol v2, which is Android 7 or newer."""
        try:
            command = shell_command(argv, cwd, env)
        except ValueError as error:
            raise DeviceError(self._serial, str(error)) from None
        with self._host.open(self._serial, f"shell,v2,raw:{command}", timeout_s=timeout_s, argv=argv) as stream:
            return ShellCall(stream, self._serial, argv, stdin, max_output).communicate(timeout_s)

    def push(self, files: Mapping[PurePosixPath, Path | bytes]) -> None:
        """Write files, all over one stream: see Transport."""
        if files:
            with self._host.open(self._serial, "sync:", timeout_s=self._stall_s) as stream:
                SyncStream(stream, self._serial).push(files)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files, all over one stream: see Transport."""
        if files:
            limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
            with self._host.open(self._serial, "sync:", timeout_s=self._stall_s) as stream:
                SyncStream(stream, self._serial).pull(files, limits)
