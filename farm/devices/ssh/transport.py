"""The transport over SSH, for Linux devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from farm.devices.conversation import communicate
from farm.devices.ssh.files import Files
from farm.devices.ssh.link import SshLink
from farm.devices.ssh.process import SshProcess
from farm.devices.ssh.sftp_stream import SftpStream
from farm.devices.transport import OUTPUT_BYTES, shell_command
from farm.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.devices.device import SshAddress
    from farm.devices.transport import Completed, Link

# A device that moves no byte of a file for so long is gone.
STALL_SECONDS = 30.0
_START_SECONDS = 30.0


class SshTransport:
    """The device `serial` at `address`, over one connection that is made when it is needed and kept until `close`."""

    def __init__(self, serial: str, address: SshAddress, *, stall_s: float = STALL_SECONDS) -> None:
        self._serial, self._stall_s = serial, stall_s
        self._storage = PurePosixPath(default_storage(address))
        self._link = SshLink(serial, address)

    @property
    def serial(self) -> str:
        """The device's name."""
        return self._serial

    @property
    def storage(self) -> PurePosixPath:
        """Folder of farm on the device: see Transport."""
        return self._storage

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
        """Run a program: see Transport."""
        process = self._start(argv, cwd, env, timeout_s, stdin=bool(stdin))
        try:
            return communicate(process, self._serial, argv, stdin=stdin, timeout_s=timeout_s, max_output=max_output)
        finally:
            process.close()

    def start(
        self, argv: Sequence[str], *, cwd: PurePosixPath | None = None, env: Mapping[str, str] | None = None
    ) -> SshProcess:
        """Start a program: see Transport."""
        return self._start(argv, cwd, env, _START_SECONDS)

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write files, all over one stream: see Transport. They get the time at which they arrive."""
        if files:
            with self._files(len(files)) as stream:
                stream.push(files)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files, all over one stream: see Transport."""
        if files:
            limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
            with self._files(len(files)) as stream:
                stream.pull(files, limits)

    def close(self) -> None:
        """Hang up, once nothing runs over the connection."""
        self._link.close()

    @contextlib.contextmanager
    def _files(self, count: int) -> Iterator[Files]:
        stream = SftpStream(self._link, self._serial, self._stall_s, count)
        try:
            yield Files(stream, self._serial)
        finally:
            stream.close()

    def _start(
        self,
        argv: Sequence[str],
        cwd: PurePosixPath | None,
        env: Mapping[str, str] | None,
        timeout_s: float,
        *,
        stdin: bool = True,
    ) -> SshProcess:
        try:
            command = shell_command(argv, cwd, env)
        except ValueError as error:
            raise DeviceError(self._serial, str(error)) from None
        return SshProcess(self._link, self._serial, argv, command, timeout_s, stdin=stdin)


def default_storage(address: SshAddress) -> str:
    """Return farm's folder on a device behind SSH."""
    return address.storage or f"/var/tmp/farm-{address.user}"  # noqa: S108 - checked to be the user's own
