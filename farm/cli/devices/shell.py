"""`farm shell`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from farm.cli.devices.hold import (
    CommandWithWords,
    device_held,
    held_device_options,
    purpose_of,
    terminal_restored,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.devices.device import Device


@click.command("shell", cls=CommandWithWords)
@held_device_options
def command(context: click.Context, *, device: str | None, wait_s: float | None, config_file: Path | None) -> int:
    """Open a shell on a device, or run COMMAND there, leased meanwhile.

    Without a name, it is the device that is reserved for you. COMMAND is a
    program and its arguments; for pipes and the like, sh -c '...'. The exit
    code is the exit code of the shell or of COMMAND.
    """
    words = words_of(context)
    with (
        terminal_restored(),
        device_held(device, purpose=purpose_of("shell", words), wait_s=wait_s, config_file=config_file) as held,
    ):
        argv, env = shell_of(held.device, words)
        return held.hold.run(held.supervisor, argv, env)


def shell_of(device: Device, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program, and its environment, that opens a shell on a device or runs the program `words` there.

    The shell gets a terminal if standard input is one; a command, if standard output is one as well.
    """
    from farm.devices.connect import open_transport

    terminal = sys.stdin.isatty() and (not words or sys.stdout.isatty())
    return open_transport(device).shell_argv(words, terminal=terminal)
