"""Programs that run on a device, and links among its files: plain types of every transport."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple


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
