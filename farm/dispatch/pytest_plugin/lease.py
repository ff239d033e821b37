"""Lease of the one device of a pytest worker, and the exchange of devices between the workers of a session."""

from __future__ import annotations

import math
import os
import socket
import time
from typing import TYPE_CHECKING

from farm.base.errors import LeaseLostError
from farm.base.machine import now_s
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
from farm.policy.situation import Lease, Priority, Waiting
from farm.store.store import Store, open_store
from farm.store.values import clean

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from farm.devices.device import Device
    from farm.dispatch.pytest_plugin.plan import SuitePlan


def release_of(plan: SuitePlan, pid: int) -> None:
    """Release the device of a dead worker, by its process id."""
    with open_store(plan.lease_store) as store:
        leases = [one for one in store.leases.all() if one.token and one.pid == pid]
        store.leases.release(one for one in leases if _is_of_session(plan, store, one))


def _is_of_session(plan: SuitePlan, store: Store, one: Lease | Waiting) -> bool:
    """Return whether a lease or a request belongs to this command, or to another with the same command line."""
    return (one.host, one.purpose, one.user) == (socket.gethostname(), clean(plan.purpose), store.user)


class DeviceLease:
    """Lease of a worker's device. Belongs to the thread that runs the tests."""

    def __init__(self, plan: SuitePlan, *, exchanges: bool = True) -> None:
        """Make a lease; without `exchanges` the worker keeps its first device until the end, as for `--dist each`."""
        self._plan, self._exchanges = plan, exchanges
        self._store: Store | None = None
        self._pool: DevicePool | None = None
        self.fence = 0
        """Fence of the lease; 0 for the own devices of a command."""
        self.device: Device | None = None
        self._own: Device | None = None
        """First device of this worker."""

    @property
    def is_ours(self) -> bool:
        """True while the device may be used."""
        if self._pool is None or self.device is None:
            return False
        return self._pool.is_ours(self.device.id) and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """True if the lease has ended although this worker has not released it."""
        if self._pool is None or self.device is None:
            return False
        until_s = self._pool.until_s(self.device.id)
        return until_s is None or now_s() >= until_s

    def acquire(self, devices: Sequence[Device], wait_s: float = math.inf) -> Device | None:
        """Release the former device, and return a newly leased device among `devices`.

        Returns None after `wait_s`. Raises NoDeviceError if no device is left to wait for.
        """
        self.release()
        if not devices:
            return None
        plan = self._plan
        terms = LeaseTerms(times=plan.lease_times, priority=Priority.PERSON, purpose=plan.purpose, most=1)
        pool = self._pool = DevicePool(devices, self._opened(), terms)
        try:
            pool.acquire(time.monotonic() + wait_s)
        except BaseException:
            self.release()
            raise
        # The worker itself leases again after a loss, as it has to begin anew on the device.
        pool.stop_waiting()
        if not (held := pool.held()):
            self.release()
            return None
        self.device = held[0]
        self._own = self._own or self.device
        self.fence = pool.fence(self.device.id) if plan.leased else 0
        return self.device

    def release(self) -> None:
        """Release the device."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self.device = None, None

    def close(self) -> None:
        """Release the device, and close the store."""
        self.release()
        if self._store is not None:
            self._store.close()
            self._store = None

    def usable(self) -> list[Device]:
        """Return the devices that this worker may wait for."""
        left, own = self._plan.devices_left(), None if self._exchanges else self._own
        return [device for device in self._plan.devices if device.id not in left and own in (None, device)]

    def others(self, tried: Collection[str]) -> list[Device]:
        """Return the devices that this session has or could lease now, except for the serials `tried`."""
        if not self._exchanges:
            return []
        leases = {lease.device: lease for lease in self._opened().leases.all()}
        return [
            device
            for device in self.usable()
            if device.serial not in tried and ((lease := leases.get(device.id)) is None or self._may_have(lease))
        ]

    def wanted_elsewhere(self) -> list[Device]:
        """Return free devices to lease instead, if another worker waits for this device and cannot use them."""
        if self.device is None or not self._exchanges or len(self._plan.devices) == 1:
            return []
        waiting = [one for one in self._opened().leases.waiting() if self._is_sibling(one)]
        wanted = next((one for one in waiting if self.device.id in one.devices), None)
        if wanted is None:
            return []
        held = {lease.device for lease in self._opened().leases.all() if lease.token}
        return [one for one in self.others({self.device.serial}) if one.id not in {*held, *wanted.devices}]

    def require(self) -> None:
        """Raise LeaseLostError if the lease was lost."""
        if self.device is not None and self.is_lost:
            raise LeaseLostError(f"{self.device.serial} may no longer be used: its lease was lost")

    def _may_have(self, lease: Lease) -> bool:
        if lease.token:
            return _is_of_session(self._plan, self._opened(), lease)
        return lease.reserved_for in ("", self._opened().user)

    def _is_sibling(self, one: Waiting) -> bool:
        return _is_of_session(self._plan, self._opened(), one) and one.pid != os.getpid()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self._plan.lease_store)
        return self._store
