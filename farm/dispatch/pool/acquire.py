"""Devices for commands that run one job, not a suite: an attached device under a lease, or a new virtual device."""

from __future__ import annotations

import math
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from farm.base.errors import InfraError, LeaseLostError, NoDeviceError, UsageError
from farm.base.socs import find_soc
from farm.dispatch.pool.fleet import Choice
from farm.policy.situation import Priority

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.device import Device
    from farm.store.store import Store
    from farm.suites.suite import Target

_NO_DEVICE = "'--virtual 2'"
# A pool grants a free device at its first query.
_OTHER_SECONDS = 3.0


class AcquiredDevice(NamedTuple):
    """Device of a command, attached or virtual."""

    device: Device
    runtime: Runtime
    fence: tuple[str, int] | None = None
    """Id of the device, and its lease's fence; None for a device that no other user can reach."""


@dataclass
class DeviceAcquirer:
    """Folder, processes and devices of one command until it ends, as a context manager."""

    config: Config
    store: Store
    target: Target
    name: str
    """Prefix of the name of its folder."""
    purpose: str
    """Purpose of its lease for other users."""
    otherwise: str
    """Hint for a missing device."""
    until_s: float = math.inf
    """End of the wait for a busy device, on the clock of `time.monotonic`."""
    priority: Priority = Priority.PERSON

    def __post_init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from farm.base.processes import Supervisor
        from farm.devices.virtual.storage import virtual_storage

        with self._stack:
            name = f"{self.name}-{secrets.token_hex(6)}"
            self.folder: Path = self._stack.enter_context(virtual_storage(self.config.cache_dir, name))
            self.supervisor = self._stack.enter_context(Supervisor())
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def acquire(self, choice: Choice | None) -> AcquiredDevice:
        """Return an attached device that `choice` leaves, leased until the end; a virtual one where that is None.

        Raises NoDeviceError, UnknownNameError, LeaseLostError.
        """
        return self._virtual() if choice is None else self._attached(choice, (), self.until_s)

    def acquire_other(self, choice: Choice, used: Collection[str]) -> AcquiredDevice | None:
        """Return an attached device that is free now, leased until the end; None without one beside `used`, by ids.

        A device that `choice` names has no other beside it.
        """
        if choice.devices:
            return None
        try:
            return self._attached(choice, used, time.monotonic() + _OTHER_SECONDS)
        except (InfraError, UsageError):
            return None

    def _virtual(self) -> AcquiredDevice:
        from farm.dispatch.pool.fleet import virtual_fleet

        target = self.target
        fleet = virtual_fleet(
            self.config, [find_soc(target.soc)], 1, target.backend, self.supervisor, self.folder, mode=target.mode
        )
        [device] = fleet.devices
        return AcquiredDevice(device, fleet.runtimes[device.serial])

    def _attached(self, choice: Choice, used: Collection[str], until_s: float) -> AcquiredDevice:
        from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
        from farm.dispatch.pool.fleet import attached_fleet

        config, store, target = self.config, self.store, self.target
        try:
            fleet = attached_fleet(
                config, [find_soc(target.soc)], target.backend, choice, self.supervisor, store, mode=target.mode
            )
        except NoDeviceError as error:
            raise NoDeviceError(str(error).replace(_NO_DEVICE, self.otherwise)) from None
        terms = LeaseTerms(times=config.leases, priority=self.priority, purpose=self.purpose, most=1)
        devices = [device for device in fleet.devices if device.id not in used]
        if not devices:
            raise NoDeviceError(f"no other {target.soc} is attached")
        pool = DevicePool(devices, store, terms, revive=fleet.revive)
        self._stack.callback(pool.close)
        pool.acquire(until_s)
        held = next(iter(pool.held()), None)
        if held is not None:
            return AcquiredDevice(held, fleet.runtimes[held.serial], (held.id, pool.fence(held.id)))
        if time.monotonic() >= until_s:
            raise NoDeviceError(f"no {target.soc} became free in time")
        raise LeaseLostError("the lease of the device was lost before anything ran: try again")
