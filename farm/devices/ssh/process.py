"""Program on a device behind SSH: streams, exit code and end.

sshd sends no hangup to a program without a terminal, and the program survives its connection. So each program carries
a mark in its environment, inherited by its children, and is ended by this mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import time
from typing import TYPE_CHECKING

import paramiko

from farm.base.errors import DeviceError
from farm.devices.marks import END_MARKED, export_mark, new_mark
from farm.devices.transport import COMMAND_BYTES, TAIL_BYTES, Output, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.ssh.link import SshLink

_READ_BYTES = 256 * 1024
# Seconds between two tries to send, as paramiko has no event for free room.
_SEND_POLL_SECONDS = 0.01
_KILL_SECONDS = 5.0

# dropbear takes 9,000 bytes of a command.
_LINE_BYTES = 8000

# The shell stays and waits, so that a signal becomes 128 + n as everywhere: paramiko reports no exit signals. The
# shell's own message about a program's death is dropped.
_WRAPPER = "exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; {mark}; {command}){stdin}; exit $?"

# A script too long for a command goes into the first lines of standard input: a shell reads exactly one line.
_READ_COMMAND = """{mark}; left={lines} script=
while [ "$left" -gt 0 ]; do
    IFS= read -r line || exit 1
    script="$script$line
"
    left=$((left - 1))
done
eval "$script"
"""


class SshProcess(Process):
    """Program behind SSH, see Process. Closing it returns its session."""

    def __init__(
        self, link: SshLink, serial: str, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool = True
    ) -> None:
        """`command` is for a POSIX shell; without `stdin` there is nothing for it to read. Raises DeviceError.

        A program that ends by itself just when its input is ended may take the whole connection along: paramiko then
        speaks of a stream that sshd has forgotten, and sshd hangs up. So what reads nothing has no input to be ended.
        """
        super().__init__()
        self._link, self._serial, self._argv = link, serial, argv
        self._mark = new_mark()
        self._closed = False
        self._tail = b""
        self._has_stdin = stdin
        script = _WRAPPER.format(mark=export_mark(self._mark), command=command, stdin="" if stdin else " </dev/null")
        line, first = _sh(script), b""
        if len(line) > COMMAND_BYTES:
            raise DeviceError(serial, f"a command may have at most {COMMAND_BYTES} bytes when quoted", argv=argv)
        if len(line) > _LINE_BYTES:
            first = os.fsencode(f"{script}\n")
            line = _sh(_READ_COMMAND.format(mark=export_mark(self._mark), lines=first.count(b"\n")))
        link.take(timeout_s)
        try:
            self._channel = link.execute(line, timeout_s=timeout_s, argv=argv)
        except BaseException:
            link.give_back()
            raise
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        if first:
            self.send(first)

    def receive(self, timeout_s: float) -> Output:
        """See Process."""
        channel, deadline = self._channel, time.monotonic() + timeout_s
        while self._code is None:
            self._send()
            # Read before the streams, so that later data is seen in the next call.
            at_end = channel.eof_received or channel.closed
            stdout = channel.recv(_READ_BYTES) if channel.recv_ready() else b""
            stderr = channel.recv_stderr(_READ_BYTES) if channel.recv_stderr_ready() else b""
            if stdout or stderr:
                self._tail = (self._tail + stderr[-TAIL_BYTES:])[-TAIL_BYTES:]
                return Output(stdout, stderr, None)
            if at_end and channel.exit_status_ready():
                self._code = self._exit_code()
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            wait = min(left, _SEND_POLL_SECONDS) if self._sending else left
            if at_end:
                channel.status_event.wait(wait)
            else:
                self._poll.poll(wait * 1000)
        return Output(b"", b"", self._code)

    def close(self) -> None:
        """Close as Process does, with a short wait for an unreachable device."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._code is None:
                with contextlib.suppress(DeviceError, OSError, EOFError, paramiko.SSHException):
                    self._kill()
        finally:
            self._link.release(self._channel)
            self._link.give_back()

    def _send(self) -> None:
        channel = self._channel
        channel.settimeout(0)
        try:
            while self._sending and channel.send_ready():
                sent = channel.send(bytes(self._sending[:_READ_BYTES]))
                if not sent:
                    break
                self._sending = self._sending[sent:]
        except TimeoutError:
            return
        except (OSError, EOFError, paramiko.SSHException):
            # The program ended without reading everything: its exit code is on the way, or the end of the connection.
            self._sending = memoryview(b"")
        if self._no_more and self._has_stdin and not self._sending:
            self._has_stdin = False
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.shutdown_write()

    def _exit_code(self) -> int:
        code = self._channel.exit_status
        if code >= 0:
            return code
        stderr = self._tail.decode(errors="replace")
        raise self._link.classify("the connection ended before the program did", argv=self._argv, stderr=stderr)

    def _kill(self) -> None:
        self._link.run_ending(_sh(END_MARKED), f"{self._mark}\n".encode(), _KILL_SECONDS)


def _sh(script: str) -> bytes:
    """Return the command by which any login shell runs a script in a POSIX shell."""
    return os.fsencode(f"exec sh -c {shlex.quote(script)}")
