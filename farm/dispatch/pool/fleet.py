"""Devices that a run or a single job may use: virtual devices are booted, attached devices are found."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec

from farm.base.errors import (
    DeviceError,
    IllegalTargetError,
    InfraError,
    LeaseLostError,
    NoDeviceError,
    UnknownNameError,
    UsageError,
)
from farm.base.processes import Supervisor
from farm.base.socs import Soc, find_soc, load_socs, no_profile
from farm.builds.runtime.runtime import Runtime, runtime_for, virtual_runtime
from farm.devices.device import Device, common_kind
from farm.policy.situation import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.runtime.native import Mode, NativeBuild
    from farm.devices.discovery import Scan
    from farm.store.cluster.records import AgentDevice
    from farm.store.leases.registry import Registered
    from farm.store.store import Store
    from farm.suites.suite import Target


# Devices that a run may use, with their runtimes: virtual devices are booted, attached devices are found.


NO_HEAP = "ExecuTorch measures the DSP's heap on Android and QNX, not on Linux"


class Choice(msgspec.Struct, frozen=True):
    """Choice of attached devices for a run; all by default."""

    devices: tuple[str, ...] = ()
    """Names, serials or ids."""
    labels: tuple[str, ...] = ()
    """Required labels, all of them."""
    heap: bool = False
    """Only devices on which ExecuTorch can measure the heap of the DSP."""


class Fleet(msgspec.Struct, frozen=True):
    """Devices, and the runtime of each by its serial."""

    devices: list[Device]
    runtimes: dict[str, Runtime]
    leased: bool
    """True if other users may use the devices as well, so that each device needs a lease."""
    revive: Callable[[], list[str]] = list
    """Function that starts ended servers, tunnels and own virtual devices again; it returns a line for each, and
    warnings about servers."""


def virtual_fleet(
    config: Config,
    socs: Sequence[Soc],
    count: int,
    backend: str,
    supervisor: Supervisor,
    folder: Path,
    *,
    mode: Mode = "traditional",
    native: NativeBuild | None = None,
) -> Fleet:
    """Boot `count` private virtual devices of every SoC, with their storage in `folder` and the runner of `native`.

    Raises MissingToolError for a missing runtime.
    """
    from farm.builds.runtime.kept import keep
    from farm.devices.adb.server import start_adb_server
    from farm.devices.virtual.boot import Reviver, boot, take_objects

    # Runtimes come first, as one may be missing.
    made = {soc.name: virtual_runtime(config, soc, backend, mode=mode, native=native) for soc in socs}
    runtimes = {name: keep(config.cache_dir, runtime) for name, runtime in made.items()}
    server = start_adb_server(supervisor, config.state_dir / "adb")
    wanted = [soc.name for soc in socs for _ in range(count)]
    devices = boot(supervisor, server, wanted, folder, before=partial(take_objects, config.cache_dir))
    reviver = Reviver(supervisor, server, devices, folder)
    by_serial = {device.serial: runtimes[device.soc] for device in devices}
    fleet = Fleet(devices, by_serial, leased=False, revive=reviver.revive)
    return _with_root(fleet, [soc.name for soc in socs])


def attached_fleet(
    config: Config,
    socs: Sequence[Soc],
    backend: str,
    choice: Choice,
    supervisor: Supervisor,
    store: Store,
    *,
    mode: Mode = "traditional",
    partly: bool = False,
) -> Fleet:
    """Find the attached devices of every SoC that may be used, each under a lease.

    Raises NoDeviceError, with the reasons, for an SoC without a device (with `partly`: if no SoC has a device), and
    MissingToolError for a missing runtime.
    """
    from farm.devices.connect import require_named
    from farm.devices.discovery import scan_all
    from farm.devices.hosts import Servers
    from farm.store.leases.registry import Seen

    require_named(config)
    scan = scan_all(config, supervisor)
    store.devices.see([Seen(device, "device", None) for device in scan.devices])
    registered = {one.id: one for one in store.devices.all()}
    _require_known(scan, registered, choice)
    scan = narrowed(scan, choice.devices)
    devices, refused = choose(scan, registered, [soc.name for soc in socs], choice)
    names = [soc.name for soc in socs]
    if partly:
        names = [name for name in names if any(device.soc == name for device in devices)] or names
    _require(names, devices, refused)
    servers = Servers(supervisor, devices, scan.warnings)
    fleet = Fleet(devices, runtimes_of(config, backend, devices, mode), leased=True, revive=servers.revive)
    return _with_root(fleet, names, refused)


def attached_kind(config: Config, socs: Sequence[str], choice: Choice, supervisor: Supervisor, store: Store) -> str:
    """Return the kind of the attached devices that a run may use now; empty without such a device."""
    from farm.devices.discovery import scan_all

    registered = {one.id: one for one in store.devices.all()}
    scan = scan_all(config, supervisor)
    devices, _ = choose(scan if choice.devices else scan.narrowed, registered, socs, choice)
    return common_kind(device.kind for device in devices)


def narrowed(scan: Scan, names: Collection[str]) -> Scan:
    """Return the devices for a command with `names`: without names the device of ANDROID_SERIAL, if that is set.

    A name on the command line wins, as with `adb -s`. Raises NoDeviceError if ANDROID_SERIAL names no device.
    """
    if names or scan.pinned is None:
        return scan
    if not scan.pinned.ids:
        raise NoDeviceError(scan.pinned.refusal)
    return scan.narrowed


def _require_known(scan: Scan, registered: Mapping[str, Registered], choice: Choice) -> None:
    """Raise UnknownNameError for a chosen device or label that the store does not know."""
    names = {name for one in scan.devices for name in one.known_as} | {one.serial for one in scan.unusable}
    # The labels of an unreachable device are known to farm.toml alone.
    labels = {*choice.labels} if scan.unusable else {label for one in scan.devices for label in one.labels}
    require_known(choice, registered.values(), names, labels)


def require_known(
    choice: Choice, registered: Iterable[Registered], names: set[str], labels: set[str], hints: Mapping[str, str] = {}
) -> None:
    """Raise UnknownNameError for a chosen device or label outside of `names`, `labels` and the registry.

    `hints` are added to the message about a device, by its name.
    """
    for one in registered:
        names |= {one.id, one.serial, one.name}
        labels |= {*one.labels}
    for name in choice.devices:
        if name not in names:
            raise UnknownNameError("device", name, names - {""}, hints.get(name, ""))
    for label in choice.labels:
        if label not in labels:
            raise UnknownNameError("label", label, labels, "" if labels else "(no device has any)")


def _require(socs: Sequence[str], devices: Sequence[Device], refused: Sequence[str]) -> None:
    """Raise NoDeviceError for an SoC that none of `devices` has."""
    lacking = sorted(set(socs) - {device.soc for device in devices})
    if lacking:
        raise NoDeviceError(
            f"no usable {' or '.join(lacking)} is attached ({', '.join(refused) or 'no device'}): attach one, or "
            "use the simulator with '--virtual 2'"
        )


def _with_root(fleet: Fleet, socs: Sequence[str], refused: Sequence[str] = ()) -> Fleet:
    """Leave out devices that cannot be root although their runtime needs it. Raises NoDeviceError without any left."""
    wanting = [device for device in fleet.devices if fleet.runtimes[device.serial].needs_root]
    if not wanting:
        return fleet
    with ThreadPoolExecutor(max_workers=min(16, len(wanting))) as pool:
        answers = dict(zip((device.serial for device in wanting), pool.map(_root_refusal, wanting), strict=True))
    reasons = {serial: why for serial, why in answers.items() if why}
    devices = [device for device in fleet.devices if device.serial not in reasons]
    _require(socs, devices, [*refused, *(f"{serial} ({why})" for serial, why in reasons.items())])
    return msgspec.structs.replace(fleet, devices=devices)


def _root_refusal(device: Device) -> str:
    """Return why `device` cannot run commands as root, without switching to root; empty if it can."""
    from farm.devices.connect import open_transport

    with contextlib.closing(open_transport(device)) as transport:
        try:
            return "" if transport.user_id() == 0 else transport.root_refusal()
        except DeviceError as error:
            return str(error).removeprefix(f"{device.serial}: ")


def choose(
    scan: Scan, registered: Mapping[str, Registered], socs: Sequence[str], choice: Choice
) -> tuple[list[Device], list[str]]:
    """Return the usable devices, and the others with their reasons. Pure.

    Virtual devices of an SoC with hardware are left out unless named, as their numbers are not comparable. Raises
    IllegalTargetError for a heap measurement without a device that supports it.
    """
    usable, refused, without_heap = [], [], []
    for device in scan.devices:
        known = registered.get(device.id)
        if known is not None and known.name and not device.name:
            device = msgspec.structs.replace(device, name=known.name)  # noqa: PLW2901 - as people call it
        reason = device.soc if device.soc in load_socs() else no_profile(device.soc)
        if device.soc in socs:
            reason = refusal(device, device.known_as, known, choice)
        without_heap += [device.called] if reason == NO_HEAP else []
        if reason:
            refused.append(f"{device.called} ({device.soc}{f': {reason}' if reason != device.soc else ''})")
        else:
            usable.append(device)
    preferred = hardware_first(usable, without_heap, choice)
    return preferred, refused + [f"{one.serial} ({one.state}: {one.reason})" for one in scan.unusable]


_D = TypeVar("_D", Device, "AgentDevice")


def hardware_first(usable: Sequence[_D], without_heap: Sequence[str], choice: Choice) -> list[_D]:
    """Return the devices without the virtual ones of an SoC with hardware, unless `choice` names devices. Pure.

    Raises IllegalTargetError if the only devices are `without_heap`, refused for `NO_HEAP`.
    """
    if without_heap and not usable:
        raise IllegalTargetError(f"--heap: {', '.join(without_heap)}: {NO_HEAP}: attach a device with Android")
    hardware = {device.soc for device in usable if device.kind == "hardware"}
    return [one for one in usable if choice.devices or one.kind == "hardware" or one.soc not in hardware]


def is_called(device: Device, known: Registered | None, name: str) -> bool:
    """Return whether `name` is the name, serial or id of a device. Pure."""
    return name in device.known_as or (known is not None and bool(name) and name == known.name)


def refusal(device: Device | AgentDevice, names: Collection[str], known: Registered | None, choice: Choice) -> str:
    """Return why a device with `names`, of an SoC of the run, is not used; empty for a usable device. Pure."""
    names = {*names, known.name if known is not None else ""} - {""}
    labels = {*device.labels, *(known.labels if known is not None else ())}
    missing = [label for label in choice.labels if label not in labels]
    if choice.devices and names.isdisjoint(choice.devices):
        return "not among the requested devices"
    if missing:
        return f"not labelled {' and '.join(missing)}"
    if choice.heap and device.os == "linux":
        return NO_HEAP
    return out_of_use(known, device.called) if known is not None else ""


def out_of_use(known: Registered, called: str) -> str:
    """Return the reason why a device is out of use, with the command to return it; empty for none. Pure."""
    if not known.in_service:
        note = f": {known.service_note}" if known.service_note else ""
        return f"out of service{note}; 'farm devices enable {called}' puts it back"
    if known.health == "quarantined":
        return f"quarantined: {known.health_reason}; 'farm devices unquarantine {called}' gives it another chance"
    return ""


def runtimes_of(
    config: Config, backend: str, devices: Sequence[Device], mode: Mode = "traditional"
) -> dict[str, Runtime]:
    """Return the runtimes of devices, by serial. Raises MissingToolError for a missing runtime."""
    from farm.builds.runtime.kept import keep

    made: dict[tuple[str, str, str], Runtime] = {}
    for device in devices:
        key = (device.soc, device.kind, device.os)
        if key not in made:
            made[key] = keep(config.cache_dir, runtime_for(config, *key, backend, mode))
    return {device.serial: made[device.soc, device.kind, device.os] for device in devices}


# Devices for commands that run one job, not a suite: an attached device under a lease, or a new virtual device.


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
        from farm.devices.virtual.boot import virtual_storage

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

        target = self.target
        fleet = virtual_fleet(
            self.config, [find_soc(target.soc)], 1, target.backend, self.supervisor, self.folder, mode=target.mode
        )
        [device] = fleet.devices
        return AcquiredDevice(device, fleet.runtimes[device.serial])

    def _attached(self, choice: Choice, used: Collection[str], until_s: float) -> AcquiredDevice:
        from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms

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
