"""The slot of a device as its agent uses it: started when it is needed, and again after it died."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.cluster.slots.slot_protocol import LOOKED, Back, Died, LookNow
from farm.errors import FarmError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.cluster.agent.office import Office
    from farm.cluster.slots.slot_protocol import DeviceSlot, FromSlot, ToSlot
    from farm.devices.device import Device


class SlotLink:
    """Belongs to the thread of decisions, but for `close`."""

    def __init__(self, device: Device, office: Office, heard: Callable[[FromSlot], None]) -> None:
        """`heard` gets the messages of the slot that there is now, in the thread of decisions."""
        self._device, self._office, self._heard = device, office, heard
        self._slot: DeviceSlot | None = None
        self._life = 0
        """Of the slot: what a former one says is of no interest."""
        self._looks = 0
        """Which the slot has not answered yet."""
        self.sign_s = time.monotonic()
        """When it last said anything."""

    @property
    def is_asked(self) -> bool:
        """Whether it owes the answer to a LookNow."""
        return self._slot is not None and self._looks > 0

    def start(self) -> None:
        """Start a slot where there is none."""
        if self._slot is not None:
            return
        self._life += 1
        life = self._life
        slot = self._office.slot(self._device)
        try:
            slot.start(lambda message: self._office.post(lambda: self._take(life, message)))
        except FarmError as error:
            reason = str(error)
            self._office.post(lambda: self._take(life, Died(reason)))
            return
        self._slot, self._looks = slot, 0
        self.sign_s = time.monotonic()

    def send(self, *messages: ToSlot) -> None:
        """Send messages, to a new slot where there is none."""
        self.start()
        if self._slot is not None:
            self._slot.send(*messages)

    def look(self, *messages: ToSlot) -> None:
        """Have the slot do what the newest grant says, after `messages`; only the answer to the last Look is heard."""
        self.start()
        self._looks += 1
        self.send(*messages, LookNow())

    def kill(self) -> None:
        """End the slot at once; that it died is heard."""
        if self._slot is not None:
            self._slot.kill()

    def close(self) -> None:
        """End the slot, and hear nothing more. May take some seconds: any thread may call it."""
        slot, self._slot = self._slot, None
        self._life += 1
        if slot is not None:
            slot.close()

    def _take(self, life: int, message: FromSlot) -> None:
        if life != self._life:
            return
        self.sign_s = time.monotonic()
        if isinstance(message, Died):
            self._slot, self._looks = None, 0
        elif isinstance(message, Back) and message.number == LOOKED:
            self._looks -= 1
            if self._looks > 0:
                return
        self._heard(message)
