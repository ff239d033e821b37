"""Terminals in whose foreground `farm` runs, as a user has it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Terminal:
    """A terminal whose foreground has a program."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.shown = b""
        """All output so far."""
        self.pid, self.number = os.forkpty()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(argv[0], argv, dict(env))  # noqa: S606

    def write(self, text: bytes) -> None:
        """Type a text."""
        os.write(self.number, text)

    def read_until(self, pattern: str) -> str:
        """Return the output from here up to a match of `pattern`."""
        start = len(self.shown)
        while not re.search(pattern.encode(), self.shown[start:]):
            assert select.select([self.number], [], [], 60)[0], self.shown
            self.shown += os.read(self.number, 4096)
        return self.shown[start:].decode()

    def close(self) -> int:
        """Wait for the end of the program, reading on, and return its exit code."""
        # Linux reports a closed other end by EIO.
        with contextlib.suppress(OSError):
            while select.select([self.number], [], [], 60)[0] and (part := os.read(self.number, 4096)):
                self.shown += part
        os.close(self.number)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code


@contextlib.contextmanager
def terminal_of(*words: str, env: Mapping[str, str], cwd: Path, columns: int = 80) -> Iterator[Terminal]:
    """Yield a terminal of 24 rows with a Python program in its foreground; a failure of the block kills the program.

    `words` are arguments of `python` if the first is `-c`, else of `farm`.
    """
    arguments = words if words[0] == "-c" else ("-m", "farm.cli.main", *words)
    script = f'stty rows 24 cols {columns}; exec "$@"'
    terminal = Terminal(["/bin/sh", "-c", script, "sh", sys.executable, *arguments], env, cwd)
    try:
        yield terminal
    finally:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.close()
