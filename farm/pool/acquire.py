"""One device to run on, and the runtime it needs: for commands that run one job, not a suite."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from farm.errors import LeaseLostError, NoDeviceError
from farm.suites.socs import find_soc

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from farm.config.settings import Config
    from farm.devices.device import Device
    from farm.pool.fleet import Choice
    from farm.runtime.runtime import Runtime
    from farm.store.store import Store
    from farm.suites.suite import Target
    from farm.system.processes import Supervisor

_NO_DEVICE = "'--virtual 2'"


class AcquiredDevice(NamedTuple):
    """Something to run on."""

    device: Device
    runtime: Runtime
    fence: tuple[str, int] | None = None
    """Id of the device, and its lease's fence; None where nobody else can use it."""


def acquire_attached(
    config: Config,
    store: Store,
    target: Target,
    supervisor: Supervisor,
    leases: ExitStack,
    say: Callable[[str], None],
    *,
    choice: Choice,
    purpose: str,
    otherwise: str,
    until_s: float = math.inf,
) -> AcquiredDevice:
    """Return an attached device that is leased until `leases` is closed; waits for one that somebody else has.

    It waits until `until_s` on the clock of `time.monotonic`. `otherwise` is what to use where there is none, for the
    message. Raises NoDeviceError, UnknownNameError.
    """
    from farm.pool.custody import Custody, LeaseTerms
    from farm.pool.fleet import attached_fleet
    from farm.store.leases.rules import Priority

    try:
        fleet = attached_fleet(config, [find_soc(target.soc)], target.backend, choice, supervisor, store)
    except NoDeviceError as error:
        raise NoDeviceError(str(error).replace(_NO_DEVICE, otherwise)) from None
    terms = LeaseTerms(ttl_s=config.leases.ttl_s, priority=Priority.PERSON, purpose=purpose, most=1)
    custody = Custody(fleet.devices, store, terms, say)
    custody.keep_alive(fleet.revive)
    leases.callback(custody.close)
    custody.acquire(until_s)
    held = {device.id: device for device in custody.held()}
    if not held and time.monotonic() >= until_s:
        raise NoDeviceError(f"no {target.soc} became free in time")
    for lease in store.leases.all():
        if lease.device in held:
            device = held[lease.device]
            return AcquiredDevice(device, fleet.runtimes[device.serial], (device.id, lease.fence))
    raise LeaseLostError(f"the lease of {', '.join(held) or 'the device'} was lost before anything ran: try again")


def acquire_virtual(config: Config, target: Target, supervisor: Supervisor, storage: Path) -> AcquiredDevice:
    """Boot a virtual device that nobody else knows of, with its files in `storage`."""
    from farm.pool.fleet import virtual_fleet

    fleet = virtual_fleet(config, [find_soc(target.soc)], 1, target.backend, supervisor, storage)
    [device] = fleet.devices
    return AcquiredDevice(device, fleet.runtimes[device.serial])
