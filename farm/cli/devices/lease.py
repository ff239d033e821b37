"""`farm lease` and `farm devices release`, and the search and lease of a device for `farm shell`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.errors import NoDeviceError, UnknownNameError, UsageError
from farm.cli.options import duration, json_option
from farm.cli.output import asked_server, echo, opened, show
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.devices.device import Device
    from farm.devices.discovery import Scan
    from farm.policy.situation import Lease
    from farm.store.leases.registry import Registered
    from farm.store.store import Store

_SHOWN_CHARACTERS = 500


@click.command("lease")
@click.argument("wanted", metavar="SOC|DEVICE")
@click.option("--for", "seconds", metavar="TIME", callback=duration, default="1h", show_default=True,
              help="Time of the reservation: 90s, 10m, 1h, 2d.")  # fmt: skip
@click.option("--from", "begin", metavar="TIME", type=click.DateTime(["%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"]),
              help="Start of the reservation, as 2026-11-30 14:00; otherwise at once.")  # fmt: skip
@click.option("--wait", "wait_s", metavar="TIME", callback=duration, default="10m", show_default=True,
              help="Longest wait for a device.")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Do not wait; show the user of the device.")
@json_option()
def lease_command(
    *, wanted: str, seconds: float, begin: datetime.datetime | None, wait_s: float, no_wait: bool
) -> None:
    """Reserve a device: until the time of --for only your commands may use it.

    Each call with a SOC reserves one more device. For a DEVICE that you have
    reserved already, the time begins anew. farm devices release ends it earlier.
    """
    from farm.base.processes import Supervisor
    from farm.base.socs import reported_profile
    from farm.dispatch.pool.inventory import clock_time, reserve_device, reserved_for, resolve_device

    from_ms = round(begin.timestamp() * 1000) if begin is not None else 0
    server = asked_server()
    if server is not None:
        done = server.act("lease", device=wanted, seconds=round(seconds), from_ms=from_ms)
        show({"id": done.device, "from_ms": from_ms, "until_ms": done.until_ms}, [done.done])
        return
    if begin is not None:
        with opened() as (_, store):
            later, lease = reserve_device(store, wanted, store.user, seconds, from_ms)
            answer = {"id": later.id, "user": store.user, "from_ms": from_ms, "until_ms": lease.reserved_until_ms}
        times = f"from {clock_time(from_ms)} until {clock_time(lease.reserved_until_ms)}"
        show(answer, [f"{later.called} ({later.soc}, {later.kind}) is yours {times}"])
        return
    with ended_in_order(), Supervisor() as supervisor, opened() as (config, store):
        devices = find_devices(config, store, supervisor, wanted)
        mine = {lease.device for lease in reserved_for(store, store.user)}
        is_soc = (reported_profile(wanted) or wanted).casefold() == devices[0].soc.casefold()
        if len(devices) == 1 and not is_soc and devices[0].id in mine:
            device = devices[0]
            until_ms = store.leases.reserve(device.id, store.user, seconds).reserved_until_ms
        else:
            devices = [device for device in devices if device.id not in mine]
            if not devices:
                raise NoDeviceError(
                    f"every {wanted} is yours already: 'farm devices release' without a name lists them"
                )
            ttl_s, wait_s = config.leases.ttl_s, 0.0 if no_wait else wait_s
            lease = acquire(store, devices, purpose="farm lease", wait_s=wait_s, ttl_s=ttl_s, seconds=seconds)
            store.leases.release([lease])
            device = next(one for one in devices if one.id == lease.device)
            until_ms = next(one.reserved_until_ms for one in reserved_for(store, store.user) if one.device == device.id)
        name, user = resolve_device(store, device.id).called, store.user
    hints = [
        (f"farm shell {name}", "a shell on it"),
        (f"farm run --soc {device.soc} ...", "uses it, as all your commands may"),
        *_adb_hint(device, name),
        (f"farm devices release {name}", "gives it back"),
    ]
    head = f"{name} ({device.soc}, {device.kind}) is yours until {clock_time(until_ms)}"
    answer = {"device": device, "id": device.id, "user": user, "until_ms": until_ms}
    show(answer, [head, *columns(hints, indent="  ")])


def _adb_hint(device: Device, name: str) -> list[tuple[str, str]]:
    """Return the command for the user's own adb on a device, with its name and server in adb; empty without adb."""
    from farm.devices.adb.protocol import adb_target
    from farm.devices.device import LOOPBACK, AdbAddress

    address = device.address
    if not isinstance(address, AdbAddress):
        return []
    place = f"port {address.port}" if address.host == LOOPBACK else f"{address.host}:{address.port}"
    serial = address.attached_at or address.name or adb_target(device.serial)
    return [(f"farm devices connect {name}", f"your own adb on it: {serial}, {place}")]


@click.command("release")
@click.argument("device", required=False)
@click.option("--all", "everything", is_flag=True, help="Release every device that is reserved for you.")
@click.option("--force", is_flag=True,
              help="Release also a device of another user, or in use: its shell ends, its run leaves it after the job.",
)  # fmt: skip
@json_option()
def release_command(*, device: str | None, everything: bool, force: bool) -> None:
    """Give a device back: DEVICE, or the only device that is reserved for you."""
    from farm.dispatch.pool.inventory import give_back, reserved_for

    if device and everything:
        raise UsageError("give a device or --all, not both")
    server = asked_server()
    if server is not None:
        if not device:
            raise UsageError("name the device: with $FARM_SERVER each is released by its name")
        _show_released({device: server.act("release", device=device, force=force).done})
        return
    with opened() as (_, store):
        if device:
            _show_released({device: give_back(store, device, store.user, force=force)})
            return
        later = [lease for lease in store.leases.upcoming() if lease.reserved_for == store.user]
        mine = [*reserved_for(store, store.user), *later]
        if not mine:
            raise UsageError("no device is reserved for you: 'farm devices' shows who has which")
        if len(mine) > 1 and not everything:
            names = {known.id: known.called for known in store.devices.all()}
            yours = ", ".join(names.get(lease.device, lease.device) for lease in mine)
            raise UsageError(f"{len(mine)} devices are yours: name one of {yours}, or give --all")
        done = {lease.device: give_back(store, lease.device, store.user, force=force) for lease in mine}
    _show_released(done)


def _show_released(done: Mapping[str, str]) -> None:
    """Print the devices that were given back, each with its effect on other commands."""
    released = [{"device": device, "done": line} for device, line in done.items()]
    show({"released": released}, done.values())


def find_devices(config: Config, store: Store, supervisor: Supervisor, wanted: str) -> list[Device]:
    """Return the attached devices with a name, serial, id or SoC that may be used, best first.

    ANDROID_SERIAL, if set, chooses among the devices of an SoC, and the device for an empty `wanted`.

    Raises UnknownNameError for an unknown name, and NoDeviceError with the reasons if no device can be used.
    """
    from farm.base.socs import load_socs, reported_profile
    from farm.devices.discovery import scan_all
    from farm.dispatch.pool.fleet import narrowed, out_of_use
    from farm.store.leases.registry import Seen

    scan = scan_all(config, supervisor)
    store.devices.see([Seen(device, "device", None) for device in scan.devices])
    known = {one.id: one for one in store.devices.all()}
    devices = [msgspec.structs.replace(one, name=one.name or known[one.id].name) for one in scan.devices]
    names = {one.id: {*one.known_as, known[one.id].name} - {""} for one in devices}
    found = [device for device in devices if wanted in names[device.id]]
    if not found:
        here = {device.id for device in narrowed(scan, ()).devices}
        devices = [device for device in devices if device.id in here]
        found = [] if wanted else devices
    if not found:
        _refuse_unusable(scan, known.values(), wanted)
        socs = load_socs()
        soc = reported_profile(wanted)
        found = [device for device in devices if device.soc.casefold() == (soc or wanted).casefold()]
        if not found and not soc:
            every = {*socs, *(name for these in names.values() for name in these)}
            raise UnknownNameError("device or SoC", wanted, every, "(farm devices shows the attached devices)")
        if not found:
            pinned = scan.pinned
            none = f"{pinned.name}, which ANDROID_SERIAL names, is no {soc}" if pinned else f"no {soc} is attached"
            raise NoDeviceError(f"{none}: 'farm devices' shows the devices, and why others cannot be used")
    reasons = {device.id: out_of_use(known[device.id], known[device.id].called) for device in found}
    usable = [device for device in found if not reasons[device.id]]
    if not usable:
        raise NoDeviceError("; ".join(f"{device.name or device.id} is {reasons[device.id]}" for device in found))
    return sorted(usable, key=lambda device: (known[device.id].health != "healthy", device.id))


def acquire(
    store: Store, devices: Sequence[Device], *, purpose: str, wait_s: float, ttl_s: float, seconds: float = 0.0
) -> Lease:
    """Return a lease of one device of `devices`, waiting up to `wait_s`. Raises NoDeviceError with the present users.

    With `seconds` the device is also reserved for the user, in the same step.
    """
    from farm.base.text import clean_text
    from farm.dispatch.pool.device_pool import LOOK_SECONDS
    from farm.dispatch.pool.inventory import holder_text
    from farm.policy.situation import Priority

    user = store.user
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
        deadline, noted = time.monotonic() + wait_s, False
        while not (taken := store.leases.poll(token, ttl_s=ttl_s)):
            leases = {lease.device: lease for lease in store.leases.all()}
            held = [
                holder_text(leases[device.id], device.name or device.id) for device in devices if device.id in leases
            ]
            why = clean_text(store.leases.why(token), _SHOWN_CHARACTERS)
            holders = "; ".join([why, *held, *_queue(store, devices)])
            if time.monotonic() >= deadline:
                hint = "wait longer" if wait_s else "wait for it"
                raise NoDeviceError(f"{holders}: {hint} with --wait 10m, or choose another")
            if not noted:
                echo(f"waiting: {holders}", err=True)
                noted = True
            time.sleep(LOOK_SECONDS)
        if seconds:
            store.leases.reserve(taken[0].device, user, seconds)
        return taken[0]
    finally:
        store.leases.withdraw(token)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit once, so that leases are released."""
    # A signal that nohup ignores stays ignored.
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = [(one, signal.signal(one, end)) for one in numbers]
    try:
        yield
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def _queue(store: Store, devices: Sequence[Device]) -> list[str]:
    """Return the other processes that wait for any of `devices`, in one text; empty without any."""
    from farm.base.text import clean_text
    from farm.dispatch.pool.inventory import clock_time

    ids, here = {device.id for device in devices}, (os.getpid(), socket.gethostname())
    waiting = [
        f"{one.user} since {clock_time(one.since_ms)} ({one.purpose})"
        for one in store.leases.waiting()
        if (one.pid, one.host) != here and ids & {*one.devices}
    ]
    return [clean_text(f"waiting as well: {', '.join(waiting)}", _SHOWN_CHARACTERS)] if waiting else []


def _refuse_unusable(scan: Scan, known: Iterable[Registered], wanted: str) -> None:
    """Raise NoDeviceError when `wanted` is a known device that is absent or cannot be used."""
    serials = {one.serial: one.serial for one in scan.unusable}
    for one in known:
        serials |= {name: one.serial for name in (one.id, one.serial, one.name) if name}
    serial = serials.get(wanted)
    if serial is None:
        return
    for unusable in scan.unusable:
        if unusable.serial == serial:
            raise NoDeviceError(f"{serial}: {unusable.reason}")
    raise NoDeviceError(f"{serial} is not attached: 'farm devices' shows the attached devices")
