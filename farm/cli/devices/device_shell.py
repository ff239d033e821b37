"""Which program opens a shell on a device, whatever it hangs on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from farm.devices.adb.names import adb_target
from farm.devices.device import AdbAddress, SshAddress
from farm.devices.transport import shell_command
from farm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.device import Device

# Of sshd, the login shell's parent, which lives as long as the connection. sshd gives a program without a terminal a
# session of its own and ends nothing of it: what watches is no child of the program, and has none of its streams.
_WATCH = """
( (
    trap '' HUP
    while [ -d "/proc/$PPID" ] && [ -d "/proc/$$" ]; do sleep 1; done
    kill -s HUP -- "-$$"
    sleep 1
    kill -s KILL -- "-$$"
) </dev/null >/dev/null 2>&1 & )
"""
_LOGIN_SHELL = 'exec "${SHELL:-sh}" -l'
# ssh expands or splits these in the names of files, and has no way to write some of them.
_SPECIAL = ('"', "\\", "${", "\n")


def shell_of(device: Device, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program, and its environment, that opens a shell on a device or runs the program `words` there.

    It gets a terminal there where there is one here: for a command, where its output goes to it as well.
    """
    from farm.devices.adb.server import AdbServer, ordinary_server

    script, address = shell_command(words, None, None) if words else "", device.address
    terminal = sys.stdin.isatty() and (not words or sys.stdout.isatty())
    if isinstance(address, AdbAddress):
        server = AdbServer(address.port, ordinary_server().adb, host=address.host)
        argv = [str(server.adb), "-s", adb_target(device.serial), "shell"]
        # Without a command, adb looks for itself.
        command = [*(["-t"] if terminal else []), script] if words else []
        return [*argv, *command], {**os.environ, **server.environment()}
    if isinstance(address, SshAddress):
        command = [script] if words else []
        if not terminal:
            command = [shell_command(["sh", "-c", f"{_WATCH}{script or _LOGIN_SHELL}"], None, None)]
        return [*_ssh(address), "-tt" if terminal else "-T", "--", address.host, *command], dict(os.environ)
    return ["sh", "-c", script] if words else [os.environ.get("SHELL", "/bin/sh")], dict(os.environ)


def _ssh(address: SshAddress) -> list[str]:
    """Return `ssh` with what farm's own transport does: no configuration file, nothing forwarded, strict host keys."""
    argv = ["ssh", "-F", "none", "-a", "-x", "-p", str(address.port), "-l", address.user]
    options = ["StrictHostKeyChecking=yes", "UpdateHostKeys=no"]
    if address.key_file:
        options += [f'IdentityFile="{_literal(address.key_file)}"', "IdentitiesOnly=yes"]
    if address.known_hosts:
        options += [f'UserKnownHostsFile="{_literal(address.known_hosts)}"', "GlobalKnownHostsFile=/dev/null"]
    return argv + [word for option in options for word in ("-o", option)]


def _literal(path: str) -> str:
    """Return the name of a file as ssh's options take it, between quotes. Raises UsageError where they cannot."""
    if any(special in path for special in _SPECIAL):
        raise UsageError(f"ssh cannot be told of the file {path!r}: give it a name without quotes, backslashes and ${{")
    return path.replace("%", "%%")
