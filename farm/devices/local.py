"""The transport to this machine, where it is the device itself."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from farm.base.errors import DeviceError
from farm.base.processes import Supervisor
from farm.devices.process import Output, Process
from farm.devices.transport import COMMAND_BYTES, Transport, shell_command

if TYPE_CHECKING:
    from farm.devices.device import LocalAddress


# Variables of farm's environment for programs: places alone, no settings of farm and no secrets.
_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "LC_ALL")
_READ_BYTES = 256 * 1024


class LocalTransport(Transport):
    """This machine as the device `serial`; programs run as this user, outside of farm's process group."""

    no_reboot = "it is this machine"

    def __init__(self, serial: str, address: LocalAddress) -> None:
        super().__init__(serial, PurePosixPath(address.storage))

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> Process:
        """Start a program: see Transport. It ends with farm, even when that is killed."""
        del timeout_s, stdin
        return LocalProcess(self.serial, argv, ["sh", "-c", command])

    def shell_argv(self, words: Sequence[str], *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """Return the user's shell: see Transport."""
        del terminal
        argv = ["sh", "-c", shell_command(words, None, None)] if words else [os.environ.get("SHELL", "/bin/sh")]
        return argv, dict(os.environ)


class LocalProcess(Process):
    """Program on this machine: see Process."""

    def __init__(self, serial: str, argv: Sequence[str], program: Sequence[str]) -> None:
        """Start `program`, which stands for `argv` on the device `serial`. Raises DeviceError."""
        if any(len(os.fsencode(word)) > COMMAND_BYTES for word in program):
            raise DeviceError(serial, f"a command may have at most {COMMAND_BYTES} bytes", argv=argv)
        super().__init__()
        self._supervisor = Supervisor()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._child = self._supervisor.spawn(
            program,
            name=f"{serial}: {argv[0]}",
            env=environment,
            cwd=Path("/"),
            stdin_pipe=True,
            stdout_pipe=True,
            stderr_pipe=True,
        )
        process = self._child.process
        self._pipes = [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._stdin, self._stdout, self._stderr = (pipe.fileno() for pipe in self._pipes)
        self._open = {self._stdout, self._stderr}

    def receive(self, timeout_s: float) -> Output:
        """See Process."""
        deadline = time.monotonic() + timeout_s
        output = {self._stdout: b"", self._stderr: b""}
        while self._code is None and not any(output.values()):
            left = max(0.0, deadline - time.monotonic())
            if not self._open and not self._sending:
                self._wait(left)
                break
            poll = select.poll()
            for number in self._open:
                poll.register(number, select.POLLIN)
            if self._sending:
                poll.register(self._stdin, select.POLLOUT)
            events = dict(poll.poll(left * 1000))
            for number in self._open & events.keys():
                output[number] = self._read(number)
            if self._stdin in events:
                self._send()
            if not events and left <= 0:
                break
        return Output(output[self._stdout], output[self._stderr], self._code)

    def close(self) -> None:
        """See Process."""
        self._supervisor.close()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def _read(self, number: int) -> bytes:
        data = os.read(number, _READ_BYTES)
        if not data:
            self._open.discard(number)
        return data

    def _send(self) -> None:
        try:
            while self._sending:
                self._sending = self._sending[os.write(self._stdin, self._sending) :]
        except BlockingIOError:
            return
        except (OSError, ValueError):
            # The program ended without reading everything.
            self._sending = memoryview(b"")
        if self._no_more and not self._pipes[0].closed:
            with contextlib.suppress(OSError):
                self._pipes[0].close()

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.process.wait(timeout_s)
            self._code = code if code >= 0 else 128 - code
