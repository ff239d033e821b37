"""Programs that run on a device, the marks that find them there, and links among its files."""

from __future__ import annotations

import abc
import secrets
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

# Programs that run on a device, and links among its files: plain types of every transport.

# Bytes of a program's standard error in an error message.
TAIL_BYTES = 400


class Output(NamedTuple):
    """Output of a running program since the last read; hostile."""

    stdout: bytes
    stderr: bytes
    code: int | None
    """Set once it has ended and everything it wrote was handed out: 128 + n for signal n."""


class Process(abc.ABC):
    """A program that runs on a device, and the pipes to it. Belongs to one thread."""

    def __init__(self) -> None:
        self._sending = memoryview(b"")
        self._no_more = False
        self._code: int | None = None
        self._tail = b""
        """End of the program's standard error, for error messages."""

    def send(self, data: bytes) -> None:
        """Write to its standard input, now or while `receive` waits. Raises DeviceError when the device is gone."""
        self._sending = memoryview(bytes(self._sending) + data)
        self._send()

    def close_stdin(self) -> None:
        """Close the program's input after the data sent so far."""
        self._no_more = True
        self._send()

    @property
    def unsent(self) -> int:
        """Bytes of the data that wait to be sent."""
        return len(self._sending)

    def _keep_tail(self, stderr: bytes) -> None:
        self._tail = (self._tail + stderr)[-TAIL_BYTES:]

    @abc.abstractmethod
    def receive(self, timeout_s: float) -> Output:
        """Return output as soon as some arrives within `timeout_s`; empty for none.

        Raises DeviceError if the connection ends before the program.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Hang up; the device ends the program. May be called again."""

    @abc.abstractmethod
    def _send(self) -> None:
        """Send as much of `_sending` as can be sent now, then the end of the input where there is `_no_more`."""


@dataclass(frozen=True)
class Link:
    """A symbolic link that a push makes; `target` is as in `ln -s`, and need not be there."""

    target: PurePosixPath


# Marks that find and end programs on a device after the loss of their connection.
#
# A program has the mark in its environment, which its children inherit, also in other sessions.


_VARIABLE = "FARM_SESSION"

END_MARKED = r"""
read -r mark || exit 1
rest=${mark#?}
pattern="[${mark%"$rest"}]$rest"
quiet=0 round=0
while [ "$quiet" -lt 2 ] && [ "$round" -lt 50 ]; do
    round=$((round + 1))
    found=$(
        head -c 1000000 /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\000' '\n' |
            LC_ALL=C sed -n -e '/^==> .* <==$/h' -e "/$pattern/{g;s/[^0-9]*//;s/[^0-9].*//;p;}"
    )
    if [ -z "$found" ]; then quiet=$((quiet + 1)); sleep 0.05; continue; fi
    quiet=1
    kill -KILL $found
done 2>/dev/null
"""
"""Script for a device's shell, with the mark as a line of its standard input, that ends every process with the mark in
its environment or command line; it looks twice, as a process just forked shows neither.

`head` prints the process before its data, and NULs are replaced before the search, because busybox's `grep` reads up to
the first NUL. The pattern differs from the mark, so that `sed` is not found.
"""


def new_mark() -> str:
    """Return a mark that no other program has: hexadecimal digits."""
    return secrets.token_hex(12)


def export_mark(mark: str) -> str:
    """Return the shell command after which every program that the shell starts has the mark."""
    return f"export {_VARIABLE}={mark}"
