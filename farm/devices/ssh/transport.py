"""The transport over SSH, for Linux devices."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from farm.base.errors import DeviceError, UsageError
from farm.devices.device import SshAddress
from farm.devices.ssh.files import Files
from farm.devices.ssh.link import SshLink
from farm.devices.ssh.process import SshProcess
from farm.devices.ssh.sftp_stream import SftpStream
from farm.devices.transport import ASK_SECONDS, Link, Transport, shell_command

# A device that moves no byte of a file for so long is gone.
STALL_SECONDS = 30.0
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

    def __init__(self, serial: str, address: SshAddress, *, stall_s: float = STALL_SECONDS) -> None:
        super().__init__(serial)
        self._address, self._stall_s = address, stall_s
        self._link = SshLink(serial, address)

    @property
    def storage(self) -> PurePosixPath:
        """Folder of farm on the device: see Transport."""
        # Identification checks that the folder is the user's own.
        return PurePosixPath(self._address.storage or f"/var/tmp/farm-{self._address.user}")  # noqa: S108

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> SshProcess:
        """Start a program: see Transport."""
        return SshProcess(self._link, self.serial, argv, command, timeout_s, stdin=stdin)

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

    @contextlib.contextmanager
    def _files(self, count: int) -> Iterator[Files]:
        stream = SftpStream(self._link, self.serial, self._stall_s, count)
        try:
            yield Files(stream, self.serial)
        finally:
            stream.close()


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
        raise UsageError(f"ssh cannot be told of the file {path!r}: give it a name without quotes, backslashes and ${{")
    return path.replace("%", "%%")
