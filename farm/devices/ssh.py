"""The transport over SSH, for Linux devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from farm.devices.conversation import communicate
from farm.devices.ssh_files import UNPACK, Receiver, batches, drain, write_archive
from farm.devices.ssh_link import SshLink
from farm.devices.ssh_process import InputClosedError, SshProcess
from farm.devices.text import clean_text, says_full
from farm.devices.transport import OUTPUT_BYTES, shell_command
from farm.errors import DeviceError, DeviceSpaceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.devices.device import SshAddress
    from farm.devices.transport import Completed, Link

# A device that moves no byte of a file for so long is gone.
STALL_SECONDS = 30.0
_START_SECONDS = 30.0
_REASON_BYTES = 4096


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
        process = self._start(argv, cwd, env, timeout_s)
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
        if not files:
            return
        process = self._start(UNPACK, PurePosixPath("/"), None, self._stall_s)
        try:
            # Should tar have ended already, it says why.
            with contextlib.suppress(InputClosedError):
                write_archive(files, lambda data: process.write(data, self._stall_s), self._serial)
            process.close_stdin()
            code, said = drain(process, self._stall_s, _REASON_BYTES)
            if code is None:
                raise process.stalled(self._stall_s)
        finally:
            process.close()
        if code != 0:
            stderr = said.decode(errors="replace")
            # The first line names the file, the last only says that there were errors.
            reason = clean_text(next((line for line in stderr.splitlines() if line.strip()), "it said nothing"))
            kind = DeviceSpaceError if says_full(stderr) else DeviceError
            raise kind(self._serial, f"push failed: {reason}", argv=["tar", "-x"], code=code)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files, all over one stream: see Transport."""
        limits = {path: max_bytes[path] if isinstance(max_bytes, Mapping) else max_bytes for path in files}
        for argv, end, paths in batches(limits, self._serial):
            process = self._start(argv, None, None, self._stall_s)
            try:
                receiver = Receiver(process, self._serial, end, self._stall_s)
                for path in paths:
                    receiver.file(path, files[path], limits[path])
                # Read to its end, so that it need not be ended by force.
                drain(process, self._stall_s, _REASON_BYTES)
            finally:
                process.close()

    def close(self) -> None:
        """Hang up, once nothing runs over the connection."""
        self._link.close()

    def _start(
        self, argv: Sequence[str], cwd: PurePosixPath | None, env: Mapping[str, str] | None, timeout_s: float
    ) -> SshProcess:
        try:
            command = shell_command(argv, cwd, env)
        except ValueError as error:
            raise DeviceError(self._serial, str(error)) from None
        return SshProcess(self._link, self._serial, argv, command, timeout_s)


def default_storage(address: SshAddress) -> str:
    """Return farm's folder on a device behind SSH."""
    return address.storage or f"/var/tmp/farm-{address.user}"  # noqa: S108 - checked to be the user's own
