"""The transport over SSH, for Linux devices.

sshd sends no hangup to a program without a terminal, and the program survives its connection. So each program carries a
mark in its environment, inherited by its children, and is ended by this mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

import paramiko

from farm.base.errors import DeviceError, UsageError
from farm.devices.device import SshAddress
from farm.devices.process import END_MARKED, Output, Process, export_mark, new_mark
from farm.devices.ssh.link import SshLink
from farm.devices.transport import ASK_SECONDS, COMMAND_BYTES, Transport, shell_command

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
                self._keep_tail(stderr)
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
                    self._link.run_ending(_sh(END_MARKED), f"{self._mark}\n".encode(), _KILL_SECONDS)
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
        raise self._link.classify("the connection ended before the program did", argv=self._argv, stderr=self._tail)


def _sh(script: str) -> bytes:
    """Return the command by which any login shell runs a script in a POSIX shell."""
    return os.fsencode(f"exec sh -c {shlex.quote(script)}")


# Watcher of the SSH server, the login shell's parent, which lives as long as the connection and ends no program without
# a terminal. The watcher is no child of the program and has none of its streams. sshd gives each program a process
# group; dropbear has one group for itself and all programs of a connection, which carries no other program.
_WATCH = """
( (
    trap '' HUP
    read -r stat <"/proc/$$/stat"
    set -- ${stat##*) }
    case $3 in
        "$$") while [ -d "/proc/$PPID" ] && [ -d "/proc/$$" ]; do sleep 1; done ;;
        "$PPID") while [ -d "/proc/$PPID" ]; do sleep 1; done ;;
        *) exit ;;
    esac
    kill -s HUP -- "-$3"
    sleep 1
    kill -s KILL -- "-$3"
) </dev/null >/dev/null 2>&1 & )
"""
_LOGIN_SHELL = 'exec "${SHELL:-sh}" -l'
# ssh expands or splits these in the names of files, and has no way to write some of them.
_SPECIAL = ('"', "\\", "${", "\n")


class SshTransport(Transport):
    """The device `serial` at `address`, over one connection that is made when it is needed and kept until `close`."""

    no_reboot = ""

    def __init__(self, serial: str, address: SshAddress) -> None:
        # Identification checks that the folder is the user's own.
        super().__init__(serial, PurePosixPath(address.storage or f"/var/tmp/farm-{address.user}"))  # noqa: S108
        self._address = address
        self._link = SshLink(serial, address)

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> SshProcess:
        """Start a program: see Transport."""
        return SshProcess(self._link, self.serial, argv, command, timeout_s, stdin=stdin)

    def close(self) -> None:
        """Hang up, once nothing runs over the connection."""
        self._link.close()

    def shell_argv(self, words: Sequence[str], *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """Return `ssh` with what this transport does: the same way there, nothing forwarded, strict host keys."""
        script = shell_command(words, None, None) if words else ""
        command = [script] if words else []
        if not terminal:
            command = [shell_command(["sh", "-c", f"{_WATCH}{script or _LOGIN_SHELL}"], None, None)]
        argv = _ssh_words(self._address, self._address.jumps)
        return [*argv, "-tt" if terminal else "-T", "--", self._address.host, *command], dict(os.environ)

    def reboot(self) -> None:
        """Run `reboot`, which only root may."""
        # From the background, so that the answer comes before the end.
        script = '[ "$(id -u)" = 0 ] || exit 77; (sleep 1; reboot) >/dev/null 2>&1 </dev/null &'
        if self.run(["sh", "-c", script], timeout_s=ASK_SECONDS).code:
            raise DeviceError(self.serial, "only root may reboot it: use root in its address, or restart it")


def _ssh_words(address: SshAddress, jumps: Sequence[SshAddress]) -> list[str]:
    """Return `ssh` and its options for `address`, reached through `jumps`, each of which is checked in the same way."""
    options = ["StrictHostKeyChecking=yes", "UpdateHostKeys=no"]
    if keys := [address.key_file] if address.key_file else address.identity_files:
        options += [f'IdentityFile="{_literal(key)}"' for key in keys]
        options += ["IdentitiesOnly=yes"] if address.key_file else []
    if known := [address.known_hosts] if address.known_hosts else address.known_hosts_files:
        files = " ".join(f'"{_literal(file)}"' for file in known)
        options += [f"UserKnownHostsFile={files}", "GlobalKnownHostsFile=/dev/null"]
    if address.host_key_alias:
        options.append(f"HostKeyAlias={address.host_key_alias}")
    if jumps:
        *before, last = jumps
        through = [*_ssh_words(last, before), "-T", "-W", f"[{address.host}]:{address.port}", "--", last.host]
        # ssh has a shell run it, after it has replaced what follows a %.
        options.append(f"ProxyCommand={shlex.join(through).replace('%', '%%')}")
    argv = ["ssh", "-F", "none", "-a", "-x", "-p", str(address.port), "-l", address.user]
    return argv + [word for option in options for word in ("-o", option)]


def _literal(path: str) -> str:
    """Return the name of a file as ssh's options take it, between quotes. Raises UsageError where they cannot."""
    if any(special in path for special in _SPECIAL):
        raise UsageError(f"ssh cannot use the file {path!r}: give it a name without quotes, backslashes and ${{")
    return path.replace("%", "%%")
