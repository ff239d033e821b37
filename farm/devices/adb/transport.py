"""The transport over a real adb server, for phones and virtual devices alike."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from farm.devices.adb.host import AdbHost
from farm.devices.adb.shell import ShellProcess
from farm.devices.adb.sync import HungUpError, LinkRefusedError, SyncStream
from farm.devices.conversation import communicate
from farm.devices.device import LOOPBACK
from farm.devices.text import says_full
from farm.devices.transport import OUTPUT_BYTES, Link, shell_command
from farm.errors import DeviceError, DeviceSpaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farm.devices.transport import Completed

# Where an ordinary adb user may write and execute; everything of farm is below.
STORAGE = PurePosixPath("/data/local/tmp/farm")

# A device that moves no byte of a file for so long is gone; flash storage that stalls recovers sooner.
STALL_SECONDS = 30.0
_START_SECONDS = 30.0


class AdbTransport:
    """The device `serial` behind the adb server on `port` of `host`.

    Streams for files are kept open and used again: opening one costs as much as a small file.
    """

    def __init__(self, serial: str, port: int, *, host: str = LOOPBACK, stall_s: float = STALL_SECONDS) -> None:
        self._serial, self._stall_s = serial, stall_s
        self._host = AdbHost(port, host)
        self._idle: list[SyncStream] = []
        self._lock = threading.Lock()
        self._sync_links = True

    @property
    def serial(self) -> str:
        """The device's name."""
        return self._serial

    @property
    def storage(self) -> PurePosixPath:
        """Folder of farm on the device: see Transport."""
        return STORAGE

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
        process = self._open_shell(argv, cwd, env, timeout_s)
        try:
            return communicate(process, self._serial, argv, stdin=stdin, timeout_s=timeout_s, max_output=max_output)
        finally:
            process.close()

    def start(
        self, argv: Sequence[str], *, cwd: PurePosixPath | None = None, env: Mapping[str, str] | None = None
    ) -> ShellProcess:
        """Start a program: see Transport."""
        return self._open_shell(argv, cwd, env, _START_SECONDS)

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write files, all over one stream: see Transport."""
        links = {path: source for path, source in files.items() if isinstance(source, Link)}
        if links and self._sync_links:
            try:
                self._push(files)
            except LinkRefusedError:
                # On some builds of Android adbd may write files in /data/local/tmp and only the shell may make links.
                self._sync_links = False
            else:
                return
        self._push({path: source for path, source in files.items() if path not in links})
        if links:
            self._link(links)

    def _push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        if files:
            self._sync(lambda stream: stream.push(files))

    def _link(self, links: Mapping[PurePosixPath, Link]) -> None:
        folders = sorted({str(path.parent) for path in links})
        words = [word for path, link in links.items() for word in (str(link.target), str(path))]
        script = (
            'n=$1; shift; while [ "$n" -gt 0 ]; do mkdir -p -- "$1" || exit 1; shift; n=$((n - 1)); done; '
            'while [ $# -gt 1 ]; do rm -f -- "$2"; ln -s -- "$1" "$2" || exit 1; shift 2; done'
        )
        argv = ["sh", "-c", script, "sh", str(len(folders)), *folders, *words]
        done = self.run(argv, timeout_s=self._stall_s)
        if done.code != 0:
            stderr = done.stderr.decode(errors="replace")
            kind = DeviceSpaceError if says_full(stderr) else DeviceError
            raise kind(self._serial, "links cannot be made", argv=["ln", "-s"], code=done.code, stderr=stderr)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files, all over one stream: see Transport."""
        if files:
            limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
            self._sync(lambda stream: stream.pull(files, limits))

    def close(self) -> None:
        """Close the streams for files that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _open_shell(
        self,
        argv: Sequence[str],
        cwd: PurePosixPath | None,
        env: Mapping[str, str] | None,
        timeout_s: float,
    ) -> ShellProcess:
        try:
            command = shell_command(argv, cwd, env)
        except ValueError as error:
            raise DeviceError(self._serial, str(error)) from None
        stream = self._host.open(self._serial, f"shell,v2,raw:{command}", timeout_s=timeout_s, argv=argv)
        return ShellProcess(stream, self._host, self._serial, argv)

    def _sync(self, transfer: Callable[[SyncStream], None]) -> None:
        with self._lock:
            stream = self._idle.pop() if self._idle else None
        if stream is not None:
            try:
                self._transfer(stream, transfer)
            except HungUpError:
                # It may have died long ago, with the server or the device. Either transfer can be begun anew.
                pass
            else:
                return
        opened = self._host.open(self._serial, "sync:", timeout_s=self._stall_s)
        try:
            self._transfer(SyncStream(opened, self._serial, self._stall_s), transfer)
        except HungUpError as error:
            raise self._host.blame(self._serial, str(error).removeprefix(f"{self._serial}: ")) from None

    def _transfer(self, stream: SyncStream, transfer: Callable[[SyncStream], None]) -> None:
        try:
            transfer(stream)
        except BaseException:
            # Answers to what was asked before may still be on their way.
            stream.close()
            raise
        with self._lock:
            self._idle.append(stream)
