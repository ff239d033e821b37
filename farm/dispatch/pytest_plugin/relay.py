"""Relay of a child's standard output and error to this process's, for as long as they are read."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LAST_SECONDS = 5.0


class OutputRelay:
    """Relay of output by threads; `finish` is called once the child has ended."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, source: int, target: int) -> None:
        """Copy data from the descriptor `source` to `target`, and close both at the end of the data."""
        thread = threading.Thread(target=_hand_on, args=(source, target), name="output", daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait at most 5 s for each output's last data; a process that the child left may keep an output open."""
        for thread in self._threads:
            thread.join(_LAST_SECONDS)


@contextmanager
def relayed_output() -> Iterator[OutputRelay]:
    """Replace standard output and error, if they are pipes, by pipes of a relay for processes started in the block.

    The reader of a pipe may close it before the child has ended, as `| head` does, which many programs do not survive.
    """
    relay, kept = OutputRelay(), {}
    pipes: dict[tuple[int, int], int] = {}
    for number in (1, 2):
        status = os.fstat(number)
        if not stat.S_ISFIFO(status.st_mode):
            continue
        original = kept[number] = os.dup(number)
        # Two outputs into the same pipe, as with `2>&1`, share one relay, which keeps their order.
        place = status.st_dev, status.st_ino
        if place not in pipes:
            source, pipes[place] = os.pipe()
            relay.start(source, os.dup(original))
        os.dup2(pipes[place], number)
    try:
        yield relay
    finally:
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)
        for end in pipes.values():
            os.close(end)


def _hand_on(source: int, target: int) -> None:
    is_read = True
    while data := os.read(source, 1 << 16):
        try:
            while is_read and data:
                data = data[os.write(target, data) :]
        except OSError:
            is_read = False
    os.close(source)
    os.close(target)
