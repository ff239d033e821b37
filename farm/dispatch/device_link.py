"""A device runner's link to its device process: started when it is needed, and again after it exited."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.dispatch.messages import (
    GRANT_APPLIED,
    ApplyGrant,
    DeviceProcess,
    FromDevice,
    JobReturned,
    ProcessEnded,
    ToDevice,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.device import Device
    from farm.dispatch.job_source import Host


class DeviceLink:
    """Belongs to the decision thread, but for `close`."""

    def __init__(self, device: Device, host: Host, on_message: Callable[[FromDevice], None]) -> None:
        """`on_message` gets the messages of the present process, in the decision thread."""
        self._device, self._host, self._on_message = device, host, on_message
        self._process: DeviceProcess | None = None
        self._generation = 0
        """Number of the process: messages of an earlier process are dropped."""
        self._grants_unanswered = 0
        """Number of ApplyGrant messages without an answer."""
        self.sign_s = time.monotonic()
        """Time of its last message."""

    @property
    def is_applying_grant(self) -> bool:
        """True if the answer to an ApplyGrant is due."""
        return self._process is not None and self._grants_unanswered > 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        return self._process is not None and self._process.is_stopped

    def start(self) -> None:
        """Start a process if there is none."""
        if self._process is not None:
            return
        self._generation += 1
        generation = self._generation
        process = self._host.process(self._device)
        try:
            process.start(lambda message: self._host.post(lambda: self._take(generation, message)))
        except FarmError as error:
            reason = str(error)
            self._host.post(lambda: self._take(generation, ProcessEnded(reason)))
            return
        self._process, self._grants_unanswered = process, 0
        self.sign_s = time.monotonic()

    def send(self, *messages: ToDevice) -> None:
        """Send messages, to a new process if there is none."""
        self.start()
        if self._process is not None:
            self._process.send(*messages)

    def apply_grant(self, *messages: ToDevice) -> None:
        """Send `messages` and an ApplyGrant; only the answer to the last ApplyGrant is passed on."""
        self.start()
        self._grants_unanswered += 1
        self.send(*messages, ApplyGrant())

    def kill(self) -> None:
        """Kill the process; its end is heard."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and drop its messages. Takes up to some seconds; any thread may call it."""
        process, self._process = self._process, None
        self._generation += 1
        if process is not None:
            process.close()

    def _take(self, generation: int, message: FromDevice) -> None:
        if generation != self._generation:
            return
        self.sign_s = time.monotonic()
        if isinstance(message, ProcessEnded):
            self._process, self._grants_unanswered = None, 0
        elif isinstance(message, JobReturned) and message.number == GRANT_APPLIED:
            self._grants_unanswered -= 1
            if self._grants_unanswered > 0:
                return
        self._on_message(message)
