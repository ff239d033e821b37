"""The decision thread for all devices of a machine: calls happen one after the other, in the order of their arrival."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.device import Device
    from farm.dispatch.process_link import ForkedProcess


class Dispatcher:
    """Queue of actions for the thread of `run`. Any thread may call the other methods."""

    def __init__(self, make_process: Callable[[Device], ForkedProcess]) -> None:
        self.process = make_process
        """Returns a new device process, which is not started."""
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._timers: set[threading.Timer] = set()

    def run(self, is_over: Callable[[], bool], tick: Callable[[], None], tick_s: float = 1.0) -> None:
        """Call posted actions, and `tick` every `tick_s`, until `is_over`."""
        ticked_s = time.monotonic()
        while not is_over():
            with contextlib.suppress(Empty):
                self._actions.get(timeout=max(0.0, ticked_s + tick_s - time.monotonic()))()
            if time.monotonic() >= ticked_s + tick_s:
                ticked_s = time.monotonic()
                tick()

    def post(self, action: Callable[[], None]) -> None:
        """Call `action` in the decision thread."""
        self._actions.put(action)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` in the decision thread, after `seconds`."""

        def ring() -> None:
            self._timers.discard(timer)
            self.post(action)

        timer = threading.Timer(seconds, ring)
        timer.daemon = True
        self._timers.add(timer)
        timer.start()

    def close(self) -> None:
        """Cancel every timer."""
        for timer in list(self._timers):
            timer.cancel()
