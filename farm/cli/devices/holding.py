"""What lease, release and shell have in common: finding the device that is meant, and getting hold of one."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from farm.cli.output import echo
from farm.devices.text import clean_text
from farm.errors import NoDeviceError, UnknownNameError
from farm.store.leases.rules import Priority
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.config.settings import Config
    from farm.devices.device import Device
    from farm.devices.discovery import Scan
    from farm.store.leases.registry import Registered
    from farm.store.leases.rules import Lease
    from farm.store.store import Store
    from farm.system.processes import Supervisor

_LOOK_SECONDS = 0.3
_SAID_CHARACTERS = 500


def find_devices(config: Config, store: Store, supervisor: Supervisor, wanted: str) -> list[Device]:
    """Return the attached devices that a name, serial, id or SoC means and that may be used, best first.

    Raises UnknownNameError for what is none of these, NoDeviceError, with the reasons, where none can be used.
    """
    from farm.devices.discovery import scan_all
    from farm.store.leases.registry import Seen
    from farm.suites.socs import load_socs

    scan = scan_all(config, supervisor)
    store.devices.see([Seen(device, "device", None) for device in scan.devices])
    known = {one.id: one for one in store.devices.all()}
    named = [device for device in scan.devices if wanted in _names(device, known[device.id])]
    if not named:
        _refuse_unusable(scan, known.values(), wanted)
        socs = load_socs()
        soc = next((name for name in socs if name.casefold() == wanted.casefold()), None)
        named = [device for device in scan.devices if device.soc.casefold() == wanted.casefold()]
        if soc is None and not named:
            names = {name for device in scan.devices for name in _names(device, known[device.id])}
            raise UnknownNameError("device or SoC", wanted, {*names, *socs}, "(farm devices shows what is attached)")
        if not named:
            raise NoDeviceError(f"no {soc} is attached: 'farm devices' shows what is, and why others cannot be used")
    reasons = {device.id: _why_not(known[device.id]) for device in named}
    usable = [device for device in named if not reasons[device.id]]
    if not usable:
        raise NoDeviceError("; ".join(f"{id_} {reason}" for id_, reason in reasons.items()))
    return sorted(usable, key=lambda device: (known[device.id].health != "healthy", device.id))


def acquire(
    store: Store, devices: Sequence[Device], *, purpose: str, wait_s: float, ttl_s: float, seconds: float = 0.0
) -> Lease:
    """Return a lease of one of `devices`, waiting up to `wait_s` for it. Raises NoDeviceError, saying who has them.

    With `seconds`, it is reserved for the user as well before anybody else can have it.
    """
    user = user_name()
    token = store.leases.request(
        [device.id for device in devices],
        count=1,
        user=user,
        host=socket.gethostname(),
        pid=os.getpid(),
        purpose=purpose,
        priority=Priority.PERSON,
        ttl_s=ttl_s,
    )
    try:
        deadline, told = time.monotonic() + wait_s, False
        while not (taken := store.leases.poll(token, ttl_s=ttl_s)):
            holders = describe_holders(store, devices)
            if time.monotonic() >= deadline:
                hint = "wait longer" if wait_s else "wait for it"
                raise NoDeviceError(f"{holders}: {hint} with --wait 10m, or choose another")
            if not told:
                echo(f"waiting: {holders}", err=True)
                told = True
            time.sleep(_LOOK_SECONDS)
        if seconds:
            store.leases.reserve(taken[0].device, user, seconds)
        return taken[0]
    finally:
        store.leases.withdraw(token)


def describe_holders(store: Store, devices: Iterable[Device]) -> str:
    """Say who has devices, since when or until when, and what for."""
    leases = {lease.device: lease for lease in store.leases.all()}
    said = [describe(leases[device.id]) for device in devices if device.id in leases]
    return "; ".join(said) or "others wait for it, and were first"


def describe(lease: Lease) -> str:
    """Say who has a device, since when or until when, and what for."""
    parts = []
    if lease.reserved_for:
        parts.append(f"is reserved for {lease.reserved_for} until {clock_time(lease.reserved_until_ms)}")
    if lease.token:
        purpose = f" for {lease.purpose!r}" if lease.purpose else ""
        where = f"process {lease.pid} on {lease.host}"
        parts.append(f"is used by {lease.user} since {clock_time(lease.acquired_ms)}{purpose} ({where})")
    # Others' programs wrote it into the store.
    return clean_text(f"{lease.device} {' and '.join(parts)}", _SAID_CHARACTERS)


def clock_time(time_ms: int) -> str:
    """Return a time as a person reads it here, with the date where it is not today."""
    then = time.localtime(time_ms / 1000)
    today = time.strftime("%Y-%m-%d", then) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def reserved_by_me(store: Store) -> list[Lease]:
    """Return what is reserved for this user."""
    return [lease for lease in store.leases.all() if lease.reserved_for == user_name()]


def _names(device: Device, known: Registered) -> set[str]:
    return {device.id, device.serial, device.name, known.name} - {""}


def _why_not(known: Registered) -> str:
    if not known.in_service:
        said = f" ({known.service_note})" if known.service_note else ""
        return f"is out of service{said}: 'farm device in {known.id}' puts it back"
    if known.health == "quarantined":
        return f"is quarantined ({known.health_reason}): 'farm device show {known.id}' shows its history"
    return ""


def _refuse_unusable(scan: Scan, known: Iterable[Registered], wanted: str) -> None:
    """Raise NoDeviceError when `wanted` is a device that is not there, or cannot be used."""
    serials = {one.serial: one.serial for one in scan.unusable}
    for one in known:
        serials |= {name: one.serial for name in (one.id, one.serial, one.name) if name}
    serial = serials.get(wanted)
    if serial is None:
        return
    for unusable in scan.unusable:
        if unusable.serial == serial:
            raise NoDeviceError(f"{serial}: {unusable.reason}")
    raise NoDeviceError(f"{serial} is not attached now: 'farm devices' shows what is")
