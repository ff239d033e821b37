"""Devices of one command, by their ids: their leases, and the servers that they need.

A thread looks four times a second: it renews leases, asks for devices that became free, hands devices over to users
with a better right, and starts dead servers again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import FarmError, LeaseLostError, NoDeviceError, StoreLostError
from farm.base.machine import now_s
from farm.devices.device import Device, Health

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farm.base.config.settings import LeaseConfig
    from farm.dispatch.notify.quarantine import Announcer
    from farm.policy.situation import Lease, Priority
    from farm.store.store import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Interval between two looks at leases and requests of a command; `[leases]` has the interval of heartbeats."""
_SHORT_SECONDS = 1.0
"""Shorter waits are not noted."""
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


class DevicePool:
    """Devices of one command. Several threads may call it."""

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
        self._devices, self._store, self._terms = {device.id: device for device in devices}, store, terms
        self._socs = list(dict.fromkeys(device.soc for device in devices))
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._until_s: dict[str, float] = {}
        self._requests: dict[str, str] = {}
        """Tokens of waiting requests by SoC."""
        self.leaving: set[str] = set()
        """Devices to hand over to another user after their job."""
        self._retired: dict[str, str] = {}
        """Reason for the end of a device's use."""
        self._waiting_since: dict[str, float] = {}
        """Begin of the wait by SoC without a device; infinite once it was logged."""
        self._problems: dict[str, str] = {}
        """Last problem, by action."""
        self._revive, self._take, self._announcer = revive, take, announcer
        self._changed: Callable[[], None] = lambda: None
        self._is_wanted = True
        self._asked_at = float("-inf")
        self.lost_store = ""
        """Reason for the lasting loss of the store; empty without a loss."""
        self._ending, self._looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="devices", daemon=True)
        for device in devices if terms is None else ():
            take(device)

    @property
    def is_leased(self) -> bool:
        """True if other users may use the devices as well."""
        return self._terms is not None

    def acquire(self, until_s: float = float("inf"), *, partly: bool = False) -> None:
        """Wait until there is a device of every SoC, or it is `until_s` on the clock of `time.monotonic`.

        Raises NoDeviceError for an SoC without a device to wait for; `partly`, only if that is so of all SoCs.
        """
        if self._terms is None:
            return
        self._start()
        while True:
            with self._lock:
                left = {device.soc for id_, device in self._devices.items() if id_ not in self._retired}
                reasons = [f"{self._devices[id_].called}: {why}" for id_, why in self._retired.items()]
            gone = [soc for soc in self._socs if soc not in left]
            if gone and not (partly and left):
                raise NoDeviceError(f"no {' and no '.join(gone)} is left to wait for: {'; '.join(reasons)}")
            if not self._lacking() or time.monotonic() >= until_s:
                return
            self._looked.wait(LOOK_SECONDS)
            self._looked.clear()

    def held(self) -> list[Device]:
        """Return the devices that may be used now."""
        with self._lock:
            return [device for id_, device in self._devices.items() if self.is_ours(id_)]

    def give_up(self, socs: Collection[str], reason: str) -> None:
        """Stop waiting for devices of these SoCs."""
        for id_, device in self._devices.items():
            if device.soc in socs:
                self.retire(id_, reason)

    def begin(self, changed: Callable[[], None]) -> None:
        """Call `changed` in the pool's thread after each look from now on."""
        self._changed = changed
        if missed := self.missed():
            logger.info("once they are free, these take part as well: %s", "; ".join(missed.values()))
        self._start()

    def is_ours(self, device: str) -> bool:
        """Return whether a device may be used now."""
        with self._lock:
            is_kept = device not in self._retired and device not in self.leaving
            return is_kept and (self._terms is None or device in self._leases)

    def is_retired(self, device: str) -> bool:
        """Return whether the run has given up a device."""
        return device in self._retired

    def fence(self, device: str) -> int:
        """Return the fence of a device's lease; 0 without one."""
        lease = self._leases.get(device)
        return lease.fence if lease else 0

    def until_s(self, device: str) -> float | None:
        """Return when a lease ends if it cannot be renewed, on the clock of `now_s`; None without one."""
        return self._until_s.get(device)

    def stop_waiting(self) -> None:
        """Ask for no other device."""
        self._is_wanted = False

    def let_go(self, device: str, fence: int) -> None:
        """Give the lease of `fence` back, after nothing of this command is left on the device."""
        with self._lock:
            lease = self._forget(device) if self.fence(device) == fence else None
        if lease is not None:
            self._release([lease])

    def retire(self, device: str, reason: str = "") -> None:
        """End the use of a device; without a reason if it has no work left. Its lease stays until `let_go`."""
        with self._lock:
            if device in self._retired:
                return
            self._retired[device] = reason
        if not reason:
            return
        name, health, text = self._devices[device].called, ("", ""), f"is no longer used: {reason}"
        with contextlib.suppress(FarmError):
            health = self._store.devices.health(device)
        if health[0] == Health.QUARANTINED:
            text = f"is quarantined: {health[1]}; 'farm devices unquarantine {name}' when it is repaired"
        logger.warning("%s %s", name, text, extra={"device": name})

    def holders(self, socs: Collection[str]) -> str:
        """Return why this run waits for devices of some SoCs, and who has them."""
        why = [self._store.leases.why(token) for soc, token in self._requests.items() if soc in socs]
        held = self._held_by_others([device for device in self._devices.values() if device.soc in socs])
        return "; ".join([*dict.fromkeys(why), *held.values()]) or "no device is free"

    def missed(self) -> dict[str, str]:
        """Return who has the devices that this run would use as well, by their ids."""
        if self._terms is None:
            return {}
        with self._lock:
            held = Counter(self._devices[id_].soc for id_ in self._leases)
            lacking = [device for id_, device in self._devices.items() if id_ not in self._leases]
        most = len(self._devices) if self._terms.most is None else self._terms.most
        return self._held_by_others([device for device in lacking if held[device.soc] < most])

    def close(self) -> None:
        """Give every device back."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(FarmError):
            for token in self._requests.values():
                self._store.leases.withdraw(token)
        self._release(list(self._leases.values()))
        self._leases.clear()
        if self._announcer is not None:
            self._announcer.close()

    def look(self) -> None:
        """Look once; a problem is noted once, as long as it is the same."""
        acts = {"servers": self._keep_servers, "leases": self._look_after_leases, "changes": self._changed}
        if self._announcer is not None:
            acts["notices"] = self._announcer.look
        for name, act in acts.items():
            try:
                act()
            except StoreLostError as error:
                self.lost_store = str(error)
            except Exception as error:  # noqa: BLE001 - without this thread every lease is lost
                if str(error) != self._problems.get(name):
                    self._problems[name] = str(error)
                    logger.warning("device pool: %s: %s", name, error)
            else:
                self._problems.pop(name, None)

    def _start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def _keep_looking(self) -> None:
        while not self._ending.is_set():
            self.look()
            self._looked.set()
            self._ending.wait(LOOK_SECONDS)

    def _keep_servers(self) -> None:
        for line in self._revive():
            logger.info(line)

    def _look_after_leases(self) -> None:
        """Renew leases, and take granted ones."""
        if self._terms is None:
            return
        self._renew(self._terms.times)
        self._retire_unusable()
        for soc in self._socs:
            self._update_request(soc, self._terms)
        self._note_waiting()

    def _renew(self, times: LeaseConfig) -> None:
        """Renew leases, and mark devices that a waiter with a better right should get. Raises StoreError."""
        with self._lock:
            held = list(self._leases.values())
        if not held:
            return
        until_s = now_s() + times.ttl_s
        renewal = self._store.leases.renew(held, ttl_s=times.ttl_s, heartbeat_s=times.heartbeat_s)
        with self._lock:
            for lease in renewal.kept:
                before = self._leases.get(lease.device)
                if before is not None and lease.expires_ms != before.expires_ms:
                    self._leases[lease.device], self._until_s[lease.device] = lease, until_s
            for lease in renewal.lost:
                if self.fence(lease.device) == lease.fence:
                    self._forget(lease.device)
                    name = self._devices[lease.device].called
                    logger.warning("%s: its lease was lost", name, extra={"device": name})
            self.leaving |= set(renewal.wanted) & self._leases.keys()

    def _retire_unusable(self) -> None:
        """End the use of unheld devices that are out of use; the store is asked at intervals."""
        if time.monotonic() < self._asked_at + _REGISTRY_SECONDS:
            return
        self._asked_at = time.monotonic()
        with self._lock:
            lacking = self._devices.keys() - self._leases.keys()
        for known in self._store.devices.all() if lacking else ():
            if known.id in lacking and not known.in_service:
                self.retire(known.id, f"it was put out of service: {known.service_note or 'without a note'}")
            elif known.id in lacking and known.health == Health.QUARANTINED:
                self.retire(known.id, f"it is quarantined: {known.health_reason}")

    def _update_request(self, soc: str, terms: LeaseTerms) -> None:
        """Wait for the unheld devices of an SoC, as long as the command wants any, and take the free ones.

        Raises StoreError.
        """
        with self._lock:
            usable = [one.id for one in self._devices.values() if one.soc == soc and one.id not in self._retired]
            wishes = [id_ for id_ in usable if id_ not in self._leases]
            held = sum(self._devices[id_].soc == soc for id_ in self._leases)
        room = (len(usable) if terms.most is None else terms.most) - held
        count = min(len(wishes), room) if self._is_wanted else 0
        if count <= 0:
            if soc in self._requests:
                self._store.leases.withdraw(self._requests.pop(soc))
            return
        ttl_s = terms.times.ttl_s
        if soc not in self._requests:
            self._requests[soc] = self._store.leases.request(
                wishes,
                count=count,
                user=self._store.user,
                host=socket.gethostname(),
                pid=os.getpid(),
                purpose=terms.purpose,
                priority=terms.priority,
                ttl_s=ttl_s,
            )
        until_s = now_s() + ttl_s
        try:
            granted = self._store.leases.poll(self._requests[soc], ttl_s=ttl_s, devices=wishes, count=count)
        except LeaseLostError:
            # Forgotten, as after a long stop: asked anew the next time.
            del self._requests[soc]
            return
        for lease in granted:
            self._take(self._devices[lease.device])
        with self._lock:
            for lease in granted:
                self._leases[lease.device], self._until_s[lease.device] = lease, until_s

    def _note_waiting(self) -> None:
        """Note once, each time, that jobs wait for a device."""
        lacking = self._lacking() if self._is_wanted else []
        now = time.monotonic()
        self._waiting_since = {soc: self._waiting_since.get(soc, now) for soc in lacking}
        if long := [soc for soc, since in self._waiting_since.items() if now > since + _SHORT_SECONDS]:
            self._waiting_since |= dict.fromkeys(long, float("inf"))
            logger.info("waiting for a %s: %s", " and a ".join(long), self.holders(long))

    def _lacking(self) -> list[str]:
        """Return the SoCs without a device, although there could be one."""
        with self._lock:
            could_be = {device.soc for id_, device in self._devices.items() if id_ not in self._retired}
            held = {self._devices[id_].soc for id_ in self._leases}
            return [soc for soc in self._socs if soc in could_be - held]

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

    def _forget(self, device: str) -> Lease | None:
        """Return the lease of a device, which is not held from now on."""
        self.leaving.discard(device)
        self._until_s.pop(device, None)
        return self._leases.pop(device, None)

    def _release(self, leases: Sequence[Lease]) -> None:
        """Give leases back; without the store, a lease ends by itself when its time is over."""
        with contextlib.suppress(FarmError):
            self._store.leases.release(leases)
