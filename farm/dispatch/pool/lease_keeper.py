"""The leases of the devices of one run: asked for, renewed, handed over to who has a better right, given back."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from farm.base.clock import now_s
from farm.base.errors import FarmError, LeaseLostError
from farm.devices.health import Health

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterable, Sequence

    from farm.base.config.settings import LeaseConfig
    from farm.devices.device import Device
    from farm.policy.situation import Lease, Priority
    from farm.store.store import Store

logger = logging.getLogger(__name__)

# People put devices out of service, and runs quarantine them.
_REGISTRY_SECONDS = 2.0


class LeaseTerms(NamedTuple):
    """How a run asks for devices."""

    times: LeaseConfig
    """Lifetime of its leases, and interval between two heartbeats."""
    priority: Priority
    purpose: str
    most: int | None
    """Devices of each SoC at most."""


class LeaseKeeper:
    """Leases of a run by device number. Safe for several threads."""

    def __init__(
        self,
        devices: Sequence[Device],
        store: Store,
        terms: LeaseTerms | None,
        lock: threading.RLock,
        take: Callable[[Device], None],
    ) -> None:
        """Take the lease `terms`, None for the run's own devices, and the `lock` that guards leases and their users.

        `take` is called with a device when it becomes this run's, before anything uses it.
        """
        self._devices, self._store, self._terms, self._lock = tuple(devices), store, terms, lock
        self._number = {device.id: number for number, device in enumerate(self._devices)}
        self._leases: dict[int, Lease] = {}
        self._until_s: dict[int, float] = {}
        self._requests: dict[str, str] = {}
        """Tokens of waiting requests by SoC."""
        self._asked_at = float("-inf")
        self._take = take
        self.leaving: set[int] = set()
        """Devices to hand over to another user after their job."""

    @property
    def is_needed(self) -> bool:
        """True if other users may use the devices as well."""
        return self._terms is not None

    def holds(self, number: int) -> bool:
        """Return whether a device is this run's."""
        return not self.is_needed or number in self._leases

    def fence(self, number: int) -> int:
        """Return the fence of a device's lease; 0 without one."""
        lease = self._leases.get(number)
        return lease.fence if lease else 0

    def until_s(self, number: int) -> float | None:
        """Return when a lease ends if it cannot be renewed, on the clock of `now_s`; None without one."""
        return self._until_s.get(number)

    def has_none(self, soc: str) -> bool:
        """Return whether none of the devices of an SoC is this run's."""
        return not any(device.soc == soc and number in self._leases for number, device in enumerate(self._devices))

    def renew(self) -> list[int]:
        """Renew leases, and mark devices that a waiter with a better right should get; return the lost devices.

        Raises StoreError.
        """
        with self._lock:
            held = dict(self._leases)
        lost: list[int] = []
        if self._terms is None or not held:
            return lost
        times = self._terms.times
        until_s = now_s() + times.ttl_s
        renewal = self._store.leases.renew(list(held.values()), ttl_s=times.ttl_s, heartbeat_s=times.heartbeat_s)
        with self._lock:
            for lease in renewal.kept:
                number = self._number[lease.device]
                if number in self._leases and lease.expires_ms != self._leases[number].expires_ms:
                    self._leases[number], self._until_s[number] = lease, until_s
            for lease in renewal.lost:
                number = self._number[lease.device]
                if number in self._leases and self._leases[number].fence == lease.fence:
                    self.forget(number)
                    lost.append(number)
                    name = self._devices[number].called
                    logger.warning("%s is not ours any more: its lease was lost", name, extra={"device": name})
            self.leaving |= {self._number[device] for device in renewal.wanted} & self._leases.keys()
        return lost

    def update_request(self, soc: str, numbers: Sequence[int], *, wanted: bool) -> None:
        """Wait for the unheld devices among `numbers`, of one SoC, and take the free ones.

        Without `wanted` the wait ends. Raises StoreError.
        """
        terms = self._terms
        if terms is None:
            return
        with self._lock:
            wishes = [self._devices[number].id for number in numbers if number not in self._leases]
            held = sum(self._devices[number].soc == soc for number in self._leases)
        room = (len(numbers) if terms.most is None else terms.most) - held
        count = min(len(wishes), room) if wanted else 0
        if count <= 0:
            if soc in self._requests:
                self._store.leases.withdraw(self._requests.pop(soc))
            return
        if soc not in self._requests:
            self._requests[soc] = self._store.leases.request(
                wishes,
                count=count,
                user=self._store.user,
                host=socket.gethostname(),
                pid=os.getpid(),
                purpose=terms.purpose,
                priority=terms.priority,
                ttl_s=terms.times.ttl_s,
            )
        until_s = now_s() + terms.times.ttl_s
        try:
            granted = self._store.leases.poll(self._requests[soc], ttl_s=terms.times.ttl_s, devices=wishes, count=count)
        except LeaseLostError:
            # Forgotten, as after a long stop: asked anew the next time.
            del self._requests[soc]
            return
        for lease in granted:
            self._take(self._devices[self._number[lease.device]])
        with self._lock:
            for lease in granted:
                number = self._number[lease.device]
                self._leases[number], self._until_s[number] = lease, until_s

    def unusable(self) -> dict[int, str]:
        """Return unheld devices that are out of use, with the reason; checked at intervals."""
        if time.monotonic() < self._asked_at + _REGISTRY_SECONDS:
            return {}
        self._asked_at = time.monotonic()
        with self._lock:
            lacking = {device.id: n for n, device in enumerate(self._devices) if n not in self._leases}
        found = {}
        for known in self._store.devices.all() if lacking and self.is_needed else ():
            if known.id in lacking and not known.in_service:
                found[lacking[known.id]] = f"it was put out of service: {known.service_note or 'without a note'}"
            elif known.id in lacking and known.health == Health.QUARANTINED:
                found[lacking[known.id]] = f"it is quarantined: {known.health_reason}"
        return found

    def why_unused(self, number: int, reason: str) -> str:
        """Return the message about a device out of use, with the next step for a quarantined one."""
        device, health = self._devices[number], ("", "")
        with contextlib.suppress(FarmError):
            health = self._store.devices.health([device.id])[device.id]
        if health[0] != Health.QUARANTINED:
            return f"is not used any more: {reason}"
        return f"is quarantined: {health[1]}; 'farm devices unquarantine {device.called}' when it is repaired"

    def holders(self, socs: Collection[str]) -> str:
        """Return why this run waits for devices of some SoCs, and who has them."""
        why = [self._store.leases.why(token) for soc, token in self._requests.items() if soc in socs]
        held = self._held_by_others([device for device in self._devices if device.soc in socs])
        return "; ".join([*dict.fromkeys(why), *held.values()]) or "no device is free"

    def missed(self) -> dict[str, str]:
        """Return who has the devices that this run would use as well, by their ids."""
        if self._terms is None:
            return {}
        with self._lock:
            held = Counter(self._devices[number].soc for number in self._leases)
            lacking = [device for number, device in enumerate(self._devices) if number not in self._leases]
        most = len(self._devices) if self._terms.most is None else self._terms.most
        return self._held_by_others([device for device in lacking if held[device.soc] < most])

    def _held_by_others(self, devices: Collection[Device]) -> dict[str, str]:
        names = {device.id: device.called for device in devices}
        # A lease that is given just now is not yet among the leases.
        ours = frozenset(self._requests.values())
        found = {}
        for lease in self._store.leases.all():
            who = lease.reserved_for or lease.user
            if lease.device in names and who and lease.token not in ours:
                why = lease.purpose or ("reserved" if lease.reserved_for else "")
                if lease.reserved_for:
                    why += time.strftime(" until %H:%M", time.localtime(lease.reserved_until_ms / 1000))
                found[lease.device] = f"{names[lease.device]} is with {who}" + (f" ({why})" if why else "")
        return found

    def forget(self, number: int) -> Lease | None:
        """Return the lease of a device, which is not held from now on."""
        self.leaving.discard(number)
        self._until_s.pop(number, None)
        return self._leases.pop(number, None)

    def release(self, leases: Iterable[Lease]) -> None:
        """Give leases back; without the store, a lease ends by itself when its time is over."""
        with contextlib.suppress(FarmError):
            self._store.leases.release(list(leases))

    def close(self) -> None:
        """Give everything back."""
        with contextlib.suppress(FarmError):
            for token in self._requests.values():
                self._store.leases.withdraw(token)
        self.release(self._leases.values())
        self._leases.clear()
