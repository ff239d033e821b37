"""Devices for commands that run one job, not a suite: an attached device under a lease, or a new virtual device."""

from __future__ import annotations

import math
import secrets
import time
from contextlib import ExitStack
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
# A free device is granted at the first look of a pool.
_OTHER_SECONDS = 3.0


class AcquiredDevice(NamedTuple):
    """Something to run on."""

    device: Device
    runtime: Runtime
    fence: tuple[str, int] | None = None
    """Id of the device, and its lease's fence; None for a device that no other user can reach."""


class DeviceAcquirer:
    """A folder and processes of one command, and the devices that it acquires until it ends. A context manager."""

    def __init__(
        self,
        config: Config,
        store: Store,
        target: Target,
        *,
        name: str,
        purpose: str,
        otherwise: str,
        until_s: float = math.inf,
        priority: Priority = Priority.PERSON,
    ) -> None:
        """Take the prefix `name` of the folder, the `purpose` shown to other users, and the hint `otherwise` for a
        missing device.

        Acquisition waits for a busy device until `until_s` on the clock of `time.monotonic`.
        """
        self._config, self._store, self._target = config, store, target
        self._name, self._purpose, self._otherwise, self._until_s = name, purpose, otherwise, until_s
        self._priority = priority
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from farm.base.processes import Supervisor
        from farm.base.publish import own_folder

        with self._stack:
            name = f"{self._name}-{secrets.token_hex(6)}"
            self.folder: Path = self._stack.enter_context(own_folder(self._config.cache_dir / "virtual", name))
            self.supervisor = self._stack.enter_context(Supervisor())
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def acquire(self, choice: Choice | None) -> AcquiredDevice:
        """Return an attached device that `choice` leaves, leased until the end; a virtual one where that is None.

        Raises NoDeviceError, UnknownNameError, LeaseLostError.
        """
        return self._virtual() if choice is None else self._attached(choice, (), self._until_s)

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

        target, storage = self._target, self.folder / "device"
        fleet = virtual_fleet(
            self._config, [find_soc(target.soc)], 1, target.backend, self.supervisor, storage, mode=target.mode
        )
        [device] = fleet.devices
        return AcquiredDevice(device, fleet.runtimes[device.serial])

    def _attached(self, choice: Choice, used: Collection[str], until_s: float) -> AcquiredDevice:
        from farm.dispatch.pool.device_pool import DevicePool
        from farm.dispatch.pool.fleet import attached_fleet
        from farm.dispatch.pool.lease_keeper import LeaseTerms

        config, store, target = self._config, self._store, self._target
        try:
            fleet = attached_fleet(
                config, [find_soc(target.soc)], target.backend, choice, self.supervisor, store, mode=target.mode
            )
        except NoDeviceError as error:
            raise NoDeviceError(str(error).replace(_NO_DEVICE, self._otherwise)) from None
        terms = LeaseTerms(times=config.leases, priority=self._priority, purpose=self._purpose, most=1)
        devices = [device for device in fleet.devices if device.id not in used]
        if not devices:
            raise NoDeviceError(f"no other {target.soc} is attached")
        pool = DevicePool(devices, store, terms, revive=fleet.revive)
        self._stack.callback(pool.close)
        pool.acquire(until_s)
        held = {device.id: device for device in pool.held()}
        if not held and time.monotonic() >= until_s:
            raise NoDeviceError(f"no {target.soc} became free in time")
        for lease in store.leases.all():
            if lease.device in held:
                device = held[lease.device]
                return AcquiredDevice(device, fleet.runtimes[device.serial], (device.id, lease.fence))
        raise LeaseLostError(f"the lease of {', '.join(held) or 'the device'} was lost before anything ran: try again")
