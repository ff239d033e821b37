"""Fixture `device`: the small part of a leased device that tests need."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.base.text import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.devices.device import Device
    from farm.devices.transport import Completed, Transport

_PULL_BYTES = 1 << 30
_ASK_SECONDS = 15.0


class LeasedDevice:
    """Leased device of this worker; after a loss, the next device.

    Every method raises DeviceError for faults of the device or its cable, which make a test `infra` and not `failed`.
    Mistakes of the test itself raise Python's own errors: TimeoutError, FileNotFoundError, ValueError.
    """

    info: Device
    """Facts about the device."""
    folder: PurePosixPath
    """Folder of this worker alone on the device, removed at the end; relative paths start there."""
    _transport: Transport

    def __init__(self, note: Callable[[DeviceError], None]) -> None:
        """Pass every DeviceError to `note`, even if the test catches it."""
        self._note = note

    def use(self, info: Device, transport: Transport, folder: PurePosixPath) -> None:
        """Stand for another device from now on."""
        self.info, self._transport, self.folder = info, transport, folder

    def __repr__(self) -> str:
        return f"<{self.info.soc} {self.info.serial}>"

    @property
    def serial(self) -> str:
        """Serial of the device in farm."""
        return self.info.serial

    @property
    def soc(self) -> str:
        """SoC as in device profiles: `SM8650`."""
        return self.info.soc

    @property
    def is_virtual(self) -> bool:
        """True for a simulator, whose times are times of this machine."""
        return self.info.kind == "virtual"

    @property
    def adb_name(self) -> str:
        """Serial for `adb -s` at the server of ANDROID_ADB_SERVER_PORT; empty for a device without adb."""
        return self._transport.tool_environment().get("ANDROID_SERIAL", "")

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run the program `argv[0]` and return `code`, `stdout`, `stderr` (bytes) and `seconds`; no shell reads `argv`.

        Raises TimeoutError for a program that does not end in time, DeviceError.
        """
        try:
            return self._transport.run(argv, stdin=stdin, timeout_s=timeout_s, cwd=self._path(cwd or "."), env=env)
        except DeviceTimeoutError as error:
            self._ask(error)
            raise TimeoutError(f"{self.serial}: {argv[0]} did not end within {timeout_s:g} s") from None
        except DeviceError as error:
            self._note(error)
            raise

    def push(self, files: Mapping[str | PurePosixPath, str | Path | bytes]) -> None:
        """Write local files, or bytes, to paths on the device, and create their folders. Raises DeviceError."""
        absolute = {
            self._path(to): content if isinstance(content, bytes) else Path(content) for to, content in files.items()
        }
        for content in absolute.values():
            if isinstance(content, Path) and not content.is_file():
                raise FileNotFoundError(f"{content} is not a file")
        try:
            self._transport.push(dict(absolute))
        except DeviceError as error:
            self._note(error)
            raise

    def pull(self, path: str | PurePosixPath, to: str | Path, *, max_bytes: int = _PULL_BYTES) -> Path:
        """Copy a file of the device to the local file `to`, whose folder must exist, and return the local path.

        Raises FileNotFoundError for a missing file, ValueError for a file of more than `max_bytes`, DeviceError.
        """
        remote, local = self._path(path), Path(to)
        try:
            self._transport.pull({remote: local}, max_bytes=max_bytes)
        except DeviceError as error:
            self._explain(remote, max_bytes, error)
            self._note(error)
            raise
        return local

    def _path(self, path: str | PurePosixPath) -> PurePosixPath:
        return self.folder / path

    def _ask(self, error: DeviceError) -> None:
        """Raise `error` unless the device answers: an answering device did not cause the timeout."""
        try:
            self._transport.run(["true"], timeout_s=_ASK_SECONDS)
        except DeviceError:
            self._note(error)
            raise error from None

    def _explain(self, remote: PurePosixPath, max_bytes: int, error: DeviceError) -> None:
        """Raise FileNotFoundError or ValueError for a missing or too large file, the test's own mistakes."""
        script = 'if [ -f "$1" ]; then wc -c <"$1"; else echo none; fi'
        try:
            answer = self._transport.run(["sh", "-c", script, "sh", str(remote)], timeout_s=_ASK_SECONDS).stdout.strip()
        except DeviceError:
            return
        if answer == b"none":
            raise FileNotFoundError(f"{self.serial} has no file {remote}") from None
        size = count_of(answer.decode(errors="replace"))
        if size is not None and size > max_bytes:
            raise ValueError(f"{self.serial}: {remote} has {size} bytes, more than {max_bytes}") from error
