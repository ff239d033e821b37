"""One program on a device behind SSH: its streams, its exit code and its end.

sshd sends no hangup to a program without a terminal, nor does it end with the connection. So each carries a mark in its
environment that its children inherit, and is ended by it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import time
from typing import TYPE_CHECKING

import paramiko

from farm.devices.ssh.link import end
from farm.devices.transport import COMMAND_BYTES, TAIL_BYTES, Output, Process
from farm.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.ssh.link import SshLink

_READ_BYTES = 256 * 1024
# paramiko does not say when there is room to send.
_SEND_POLL_SECONDS = 0.01
_KILL_SECONDS = 5.0

# The shell stays and waits, so that a signal becomes 128 + n as everywhere: paramiko tells no exit signals. What it
# says itself of a program's death is nobody's output.
_WRAPPER = "exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; export FARM_SESSION={mark}; {command}){stdin}; exit $?"

# Standard input: the mark. Ends every process that has it in its environment, or in its command line before it has an
# environment of its own; a second look after the first, as one that was just forked shows neither.
_KILL = """
read -r mark || exit 1
quiet=0 round=0
while [ $quiet -lt 2 ] && [ $round -lt 50 ]; do
    round=$((round + 1))
    found=$(echo "$mark" | grep -l -s -F -f - /proc/[0-9]*/environ /proc/[0-9]*/cmdline)
    if [ -z "$found" ]; then quiet=$((quiet + 1)); sleep 0.05; continue; fi
    quiet=1
    for path in $found; do path=${path#/proc/}; kill -KILL "${path%%/*}"; done 2>/dev/null
done
"""


class SshProcess(Process):
    """One program: see Process. Its session is given back when it is closed."""

    def __init__(
        self, link: SshLink, serial: str, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool = True
    ) -> None:
        """`command` is for a POSIX shell; without `stdin` there is nothing for it to read. Raises DeviceError.

        A program that ends by itself just when its input is ended may take the whole connection along: paramiko then
        speaks of a stream that sshd has forgotten, and sshd hangs up. So what reads nothing has no input to be ended.
        """
        super().__init__()
        self._link, self._serial, self._argv = link, serial, argv
        self._mark = secrets.token_hex(12)
        self._closed = False
        self._tail = b""
        self._has_stdin = stdin
        script = _WRAPPER.format(mark=self._mark, command=command, stdin="" if stdin else " </dev/null")
        line = os.fsencode(f"exec sh -c {shlex.quote(script)}")
        if len(line) > COMMAND_BYTES:
            raise DeviceError(serial, f"a command may have at most {COMMAND_BYTES} bytes when quoted", argv=argv)
        link.take(timeout_s)
        try:
            self._channel = link.execute(line, timeout_s=timeout_s, argv=argv)
        except BaseException:
            link.give_back()
            raise
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)

    def receive(self, timeout_s: float) -> Output:
        """See Process."""
        channel, deadline = self._channel, time.monotonic() + timeout_s
        while self._code is None:
            self._send()
            # Before the streams: what comes after this is seen next time.
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
        """See Process. What cannot be reached any more is not waited for long."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._code is None:
                with contextlib.suppress(DeviceError, OSError, EOFError, paramiko.SSHException):
                    self._kill()
        finally:
            end(self._channel)
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
        raise self._link.blame("the connection ended before the program did", argv=self._argv, stderr=stderr)

    def _kill(self) -> None:
        channel = self._link.execute(
            os.fsencode(f"exec sh -c {shlex.quote(_KILL)}"), timeout_s=_KILL_SECONDS, connect_s=_KILL_SECONDS
        )
        try:
            channel.settimeout(_KILL_SECONDS)
            channel.sendall(f"{self._mark}\n".encode())
            channel.status_event.wait(_KILL_SECONDS)
        finally:
            end(channel)
