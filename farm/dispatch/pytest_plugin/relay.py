"""Standard output and error of a child, handed on for as long as anybody reads them."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LAST_SECONDS = 5.0


class OutputRelay:
    """What hands on; whoever waits for the child calls `finish` then."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, source: int, target: int) -> None:
        """Hand on what comes from the descriptor `source` to `target`, and close both at its end."""
        thread = threading.Thread(target=_hand_on, args=(source, target), name="output", daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for what the child wrote last; something that it left running may keep its output open for longer."""
        for thread in self._threads:
            thread.join(_LAST_SECONDS)


@contextmanager
def relayed_output() -> Iterator[OutputRelay]:
    """Let what is started meanwhile write into pipes of ours, where standard output and error are pipes.

    Whoever reads a pipe may leave before the child has ended, as `| head` does: many programs break down over that.
    """
    relay, kept = OutputRelay(), {}
    pipes: dict[tuple[int, int], int] = {}
    for number in (1, 2):
        status = os.fstat(number)
        if not stat.S_ISFIFO(status.st_mode):
            continue
        original = kept[number] = os.dup(number)
        # Both into one, as with `2>&1`, stay in their order.
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
