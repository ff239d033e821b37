"""Devices of one command: their leases, and the servers that they need.

A thread looks four times a second: it renews leases, asks for devices that became free, and starts dead servers again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from farm.base.errors import NoDeviceError, StoreLostError
from farm.dispatch.pool.lease_keeper import LeaseKeeper, LeaseTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farm.devices.device import Device
    from farm.dispatch.pool.announce import Announcer
    from farm.policy.situation import Lease
    from farm.store.store import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Interval between two looks at leases and requests of a command; `[leases]` has the interval of heartbeats."""
_SHORT_SECONDS = 1.0
"""Shorter waits are not noted."""


class DevicePool:
    """Devices of one command, by their numbers. Several threads may call it."""

    def __init__(
        self,
        devices: Sequence[Device],
        store: Store,
        terms: LeaseTerms | None,
        *,
        revive: Callable[[], Sequence[str]] = tuple,
        take: Callable[[Device], None] = lambda _: None,
        announcer: Announcer | None = None,
    ) -> None:
        """Without `terms` the devices are this command's own.

        `take` is called with each device that becomes this command's, before anything uses it. Four times a second
        `revive` starts dead servers and returns a line for each, and `announcer` looks; it is closed at the end.
        """
        self._devices = tuple(devices)
        self._lock = threading.RLock()
        self.leases = LeaseKeeper(devices, store, terms, self._lock, take)
        self._retired: dict[int, str] = {}
        """Reason for the end of a device's use."""
        self._waiting_since: dict[str, float] = {}
        """Begin of the wait by SoC without a device; infinite once it was logged."""
        self._problems: dict[str, str] = {}
        """Last problem, by action."""
        self._revive, self._announcer = revive, announcer
        self._changed: Callable[[], None] = lambda: None
        self._is_wanted = True
        self.lost_store = ""
        """Reason for the lasting loss of the store; empty without a loss."""
        self._ending, self._looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="devices", daemon=True)
        for device in () if self.leases.is_needed else self._devices:
            take(device)

    def acquire(self, until_s: float = float("inf"), *, partly: bool = False) -> None:
        """Wait until there is a device of every SoC, or it is `until_s` on the clock of `time.monotonic`.

        Raises NoDeviceError for an SoC without a device to wait for; `partly`, only if that is so of all SoCs.
        """
        if not self.leases.is_needed:
            return
        self._start()
        while True:
            with self._lock:
                gone = [soc for soc in self._socs() if self._retired.keys() >= set(self._numbers(soc))]
                reasons = [f"{self._devices[n].called}: {why}" for n, why in self._retired.items()]
            if gone and not (partly and len(gone) < len(self._socs())):
                raise NoDeviceError(f"no {' and no '.join(gone)} is left to wait for: {'; '.join(reasons)}")
            if not self._lacking() or time.monotonic() >= until_s:
                return
            self._looked.wait(LOOK_SECONDS)
            self._looked.clear()

    def held(self) -> list[Device]:
        """Return the devices that may be used now."""
        with self._lock:
            return [device for number, device in enumerate(self._devices) if self.is_ours(number)]

    def give_up(self, socs: Collection[str], reason: str) -> None:
        """Stop waiting for devices of these SoCs."""
        for number, device in enumerate(self._devices):
            if device.soc in socs:
                self.retire(number, reason)

    def begin(self, changed: Callable[[], None]) -> None:
        """Call `changed` in the pool's thread after each look from now on."""
        self._changed = changed
        if missed := self.leases.missed():
            logger.info("once they are free, these take part as well: %s", "; ".join(missed.values()))
        self._start()

    def is_ours(self, number: int) -> bool:
        """Return whether a device may be used now."""
        with self._lock:
            is_kept = number not in self._retired and number not in self.leases.leaving
            return is_kept and self.leases.holds(number)

    def is_retired(self, number: int) -> bool:
        """Return whether the run has given up a device."""
        return number in self._retired

    def stop_waiting(self) -> None:
        """Ask for no other device."""
        self._is_wanted = False

    def let_go(self, number: int, fence: int) -> None:
        """Give the lease of `fence` back, after nothing of this command is left on the device."""
        lease: Lease | None = None
        with self._lock:
            if self.leases.fence(number) == fence:
                lease = self.leases.forget(number)
        if lease is not None:
            self.leases.release([lease])

    def retire(self, number: int, reason: str = "") -> None:
        """End the use of a device; without a reason if it has no work left. Its lease stays until `let_go`."""
        with self._lock:
            if number in self._retired:
                return
            self._retired[number] = reason
        if reason:
            name = self._devices[number].called
            logger.warning("%s %s", name, self.leases.why_unused(number, reason), extra={"device": name})

    def close(self) -> None:
        """Give every device back."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self.leases.close()
        if self._announcer is not None:
            self._announcer.close()

    def _start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def _keep_looking(self) -> None:
        while not self._ending.is_set():
            self.look()
            self._looked.set()
            self._ending.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Look once; a problem is noted once, as long as it is the same."""
        acts = {
            "servers": self._keep_servers,
            "leases": self._look_after_leases,
            "changes": self._changed,
            "notices": self._announce,
        }
        for name, act in acts.items():
            try:
                act()
            except StoreLostError as error:
                self.lost_store = str(error)
            except Exception as error:  # noqa: BLE001 - without this thread every lease is lost
                self._warn_once(name, error)
            else:
                self._problems.pop(name, None)

    def _warn_once(self, name: str, error: Exception) -> None:
        if str(error) != self._problems.get(name):
            self._problems[name] = str(error)
            logger.warning("device pool: %s: %s", name, error)

    def _announce(self) -> None:
        if self._announcer is not None:
            self._announcer.look()

    def _keep_servers(self) -> None:
        for line in self._revive():
            logger.info(line)

    def _look_after_leases(self) -> None:
        """Renew leases, and take granted ones."""
        if not self.leases.is_needed:
            return
        self.leases.renew()
        for number, reason in self.leases.unusable().items():
            self.retire(number, reason)
        for soc in self._socs():
            numbers = [number for number in self._numbers(soc) if number not in self._retired]
            self.leases.update_request(soc, numbers, wanted=self._is_wanted)
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Note once, each time, that jobs wait for a device."""
        lacking = self._lacking() if self._is_wanted else []
        now = time.monotonic()
        self._waiting_since = {soc: self._waiting_since.get(soc, now) for soc in lacking}
        if long := [soc for soc, since in self._waiting_since.items() if now > since + _SHORT_SECONDS]:
            self._waiting_since |= dict.fromkeys(long, float("inf"))
            logger.info("waiting for a %s: %s", " and a ".join(long), self.leases.holders(long))

    def _socs(self) -> list[str]:
        return list(dict.fromkeys(device.soc for device in self._devices))

    def _numbers(self, soc: str) -> list[int]:
        return [number for number, device in enumerate(self._devices) if device.soc == soc]

    def _lacking(self) -> list[str]:
        """Return the SoCs without a device, although there could be one."""
        with self._lock:
            could_be = (soc for soc in self._socs() if set(self._numbers(soc)) - self._retired.keys())
            return [soc for soc in could_be if self.leases.has_none(soc)]
