"""Devices of the store: attached and known devices with health and holder, and their reservations."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from farm.base.backends.registry import BACKENDS
from farm.base.errors import DeviceError, LeaseLostError, NoDeviceError, UnknownNameError, UsageError
from farm.base.socs import Soc, load_socs, no_profile, profile_name, reported_profile
from farm.base.text import clean_text, one_line
from farm.devices.adb.protocol import VIRTUAL_PREFIX
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device
from farm.devices.discovery import ABSENT, OUT, Scan, scan_all
from farm.devices.facts import DeviceStatus, read_status
from farm.dispatch.pool.fleet import out_of_use

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.policy.situation import Lease, Waiting
    from farm.store.cluster.records import Agent
    from farm.store.leases.registry import Registered
    from farm.store.store import Store


# Most devices named in a wait; more are named by their SoC.
_NAMES_SHOWN = 2


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Device that is attached or known from before. Unreported values are None or empty."""

    id: str
    serial: str
    name: str = ""
    host: str = ""
    soc: str = ""
    kind: str = ""
    os: str = ""
    product: str = ""
    build: str = ""
    labels: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    """Backends of its SoC; none for an SoC without a profile."""
    root: bool | None = None
    battery_percent: int | None = None
    temperature_c: float | None = None
    free_bytes: int | None = None
    state: str = ""
    """`ready`, adb's state of an unready device, or `absent`."""
    reason: str = ""
    """Reason why it is unusable, and the next step."""
    in_service: bool = True
    holder: str = ""
    """User with its lease or reservation."""
    purpose: str = ""
    until_ms: int = 0
    """End of a reservation; 0 for a lease, which its holder renews."""
    health: str = "healthy"
    health_reason: str = ""
    last_seen_ms: int = 0
    agent: str | msgspec.UnsetType = msgspec.UNSET
    """Name of its agent on a shared farm; unset for a device without one."""
    also_at: tuple[str, ...] = ()
    """adb's names of its further addresses, which are used when the first one is gone."""


def take_inventory(config: Config, store: Store, supervisor: Supervisor) -> list[DeviceRow]:
    """Ask every attached device for its state; return attached and absent known devices, sorted by serial."""
    from farm.store.leases.registry import Seen

    scan = scan_all(config, supervisor)
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(scan.devices)))) as pool:
        answers = dict(zip((d.id for d in scan.devices), pool.map(_ask, scan.devices), strict=True))
    store.devices.see([Seen(d, "device", s) for d in scan.devices if not isinstance(s := answers[d.id], str)])
    known = {one.id: one for one in store.devices.all()}
    leases = {lease.device: lease for lease in store.leases.all()}
    found = rows(scan, answers, known, leases)
    return with_agents(found, store.cluster.agents()) if config.is_shared else found


def with_agents(found: Sequence[DeviceRow], agents: Sequence[Agent]) -> list[DeviceRow]:
    """Return the rows, completed by the agents' reports on devices that are not attached here. Pure."""
    devices = {device.id: (agent, device) for agent in agents for device in agent.facts.devices}

    def with_agent(row: DeviceRow) -> DeviceRow:
        if row.id not in devices:
            return row
        agent, device = devices[row.id]
        row = replace(row, agent=agent.name)
        if row.state != ABSENT:
            return row
        state, reason = "ready", row.reason
        if not agent.alive:
            state, reason = ABSENT, f"its agent {one_line(agent.name)} does not answer"
        elif not row.in_service:
            state = OUT
        elif row.health == "quarantined":
            state, reason = "quarantined", row.health_reason
        elif device.refused:
            state, reason = "refused", device.refused
        labels = tuple(dict.fromkeys((*device.labels, *row.labels)))
        return _clean(replace(row, state=state, reason=reason, labels=labels))

    return sorted(map(with_agent, found), key=lambda row: (row.state == ABSENT, row.serial))


def rows(
    scan: Scan,
    answers: Mapping[str, DeviceStatus | str],
    known: Mapping[str, Registered],
    leases: Mapping[str, Lease],
) -> list[DeviceRow]:
    """Return a row for every device; `answers` has its status or the reason of a missing one. Pure."""
    found = [
        _attached(device, answers[device.id], known.get(device.id), leases.get(device.id)) for device in scan.devices
    ]
    here = {row.id for row in found}
    for unusable in scan.unusable:
        # The id of a device is its serial; of a virtual device it is SERIAL@HOST.
        ids = (f"{unusable.serial}@{unusable.host}", unusable.serial)
        before = next((known[id_] for id_ in ids if id_ in known and id_ not in here), None)
        row = DeviceRow(id=unusable.serial, serial=unusable.serial)
        if before is not None:
            row = _row(before, leases.get(before.id))
        found.append(replace(row, host=unusable.host, state=unusable.state, reason=unusable.reason))
        here.add(row.id)
    for one in known.values():
        if one.last_seen_ms and one.id not in here:
            reason = "" if one.in_service else one.service_note or "out of service"
            found.append(_row(one, leases.get(one.id), state=ABSENT, reason=reason))
    return sorted(map(_clean, found), key=lambda row: (row.state == ABSENT, row.serial))


def remembered(known: Registered, lease: Lease | None) -> DeviceRow:
    """Return the row of a device from the store alone.

    The row's state is `leased`, `reserved`, `out`, `quarantined` or `idle`; the device may be absent.
    """
    state = "idle"
    if not known.in_service:
        state = "out"
    elif known.health == "quarantined":
        state = "quarantined"
    if lease is not None:
        state = "leased" if lease.token else "reserved"
    reason = "" if known.in_service else known.service_note or "out of service"
    return _clean(_row(known, lease, state=state, reason=reason, **_status(known.status)))


def resolve_device(store: Store, name: str, *, forgotten: bool = False) -> Registered:
    """Return the known device whose name, serial, id or address is `name`. Raises UnknownNameError.

    With `forgotten` removed devices count as well.
    """
    known = sorted(store.devices.all(forgotten=forgotten), key=lambda one: one.forgotten_ms)
    for one in known:
        if name in (one.id, one.serial) or (name and name == one.name):
            return one
    # adb's addresses at the last 'farm devices'.
    for one in known:
        if one.status is not None and name in one.status.addresses:
            return one
    names = [one.name or one.serial or one.id for one in known]
    hint = "('farm devices' lists attached devices)"
    if name.startswith(VIRTUAL_PREFIX):
        hint = "(a virtual device of a run ends with it; 'farm virtual up --soc SM8650' starts a lasting one)"
    raise UnknownNameError("device", name, names, hint)


def addresses_of(device: Device) -> tuple[str, ...]:
    """Return adb's names of a device with several addresses, the address in use first. Pure."""
    address = device.address
    if not isinstance(address, AdbAddress) or not address.also:
        return ()
    return tuple(clean_text(one.attached_at or one.name or device.serial) for one in (address, *address.also))


def _ask(device: Device) -> DeviceStatus | str:

    with contextlib.closing(open_transport(device)) as transport:
        try:
            return replace(read_status(transport, os=device.os), addresses=addresses_of(device))
        except DeviceError as error:
            return str(error).removeprefix(f"{device.serial}: ")


def _attached(device: Device, answer: DeviceStatus | str, known: Registered | None, lease: Lease | None) -> DeviceRow:
    status = None if isinstance(answer, str) else answer
    socs = load_socs()
    state, reason = "ready", ""
    if isinstance(answer, str):
        state, reason = "silent", answer
    elif device.soc not in socs:
        state, reason = "unknown", no_profile(device.soc)
    elif known is not None and not known.in_service:
        state, reason = "out", known.service_note or "out of service"
    elif known is not None and known.health == "quarantined":
        state, reason = "quarantined", known.health_reason
    row = _row(known, lease) if known is not None else DeviceRow(id=device.id, serial=device.serial, **_held(lease))
    addresses = addresses_of(device)
    return replace(
        row,
        **{name: getattr(device, name) for name in ("serial", "host", "soc", "kind", "os", "product", "build")},
        name=device.name or row.name,
        labels=tuple(dict.fromkeys((*device.labels, *row.labels))),
        backends=_backends(socs[device.soc], device.kind) if device.soc in socs else (),
        also_at=addresses[1:],
        state=state,
        reason=reason,
        **_status(status),
    )


def _row(known: Registered, lease: Lease | None, **more: Any) -> DeviceRow:
    """Return the row of a known device, with its lease and `more`."""
    same = ("id", "serial", "name", "host", "soc", "kind", "os", "product", "labels", "in_service")
    names = (*same, "health", "health_reason", "last_seen_ms")
    return DeviceRow(**{name: getattr(known, name) for name in names}, **_held(lease), **more)


def _status(status: DeviceStatus | None) -> dict[str, Any]:
    names = ("root", "battery_percent", "temperature_c", "free_bytes")
    return {name: getattr(status, name) for name in names} if status is not None else {}


def _held(lease: Lease | None) -> dict[str, Any]:
    if lease is None:
        return {}
    if lease.reserved_for:
        until_ms = lease.reserved_until_ms
        return {"holder": lease.reserved_for, "purpose": lease.purpose or "reserved", "until_ms": until_ms}
    return {"holder": lease.user, "purpose": lease.purpose}


def _clean(row: DeviceRow) -> DeviceRow:
    """Return the row without control sequences of a terminal, as it has texts of other users."""
    fields = msgspec.structs.asdict(row)
    return replace(row, **{name: clean_text(text, 1000) for name, text in fields.items() if isinstance(text, str)})


def find_rows(found: Sequence[DeviceRow], names: Sequence[str]) -> list[DeviceRow]:
    """Return the rows whose name, serial, id, address or SoC is in `names`; all rows without names.

    Raises UnknownNameError, but not for an SoC without a device.
    """
    if not names:
        return list(found)
    names = [profile_name(name) or name for name in names]
    socs = {soc.casefold() for soc in (*load_socs(), *(row.soc for row in found))}
    for name in names:
        if name.casefold() not in socs and not any(name in _names(row) for row in found):
            known = {known for row in found for known in (row.name or row.serial, row.soc) if known}
            raise UnknownNameError("device or SoC", name, known, "('farm devices socs' lists every SoC)")
    wanted, folded = set(names), {name.casefold() for name in names}
    return [row for row in found if row.soc.casefold() in folded or _names(row) & wanted]


def _names(row: DeviceRow) -> set[str]:
    return {row.name, row.serial, row.id, *row.also_at}


def wanted_of(one: Waiting, known: Mapping[str, DeviceRow | Registered]) -> str:
    """Return the text of a wait's target: `desk`, `1 of 3 SM8650`. Pure."""
    if len(one.devices) <= _NAMES_SHOWN and one.count == len(one.devices):
        rows = (known.get(id_) or DeviceRow(id=id_, serial=id_) for id_ in one.devices)
        return " and ".join(one_line(row.name or row.serial) for row in rows)
    socs = sorted({known[id_].soc if id_ in known else "?" for id_ in one.devices})
    return f"{one.count} of {len(one.devices)} {'/'.join(map(one_line, socs))}"


def _backends(soc: Soc, kind: str) -> tuple[str, ...]:
    """Return the backends of an SoC; for a virtual device the simulated ones."""
    return tuple(backend for backend in soc.backends if kind != "virtual" or BACKENDS[backend].on_host != "absent")


_SHOWN_CHARACTERS = 500
_MOST_DAYS = 90


def reserve_device(store: Store, wanted: str, user: str, seconds: float, from_ms: int = 0) -> tuple[Registered, Lease]:
    """Reserve a known device by its name, serial, id or SoC for `user`, at once or from `from_ms` on.

    An SoC stands for any free device of it that is not reserved for `user` yet.

    Raises UnknownNameError for an unknown name, UsageError for a time out of range, and NoDeviceError with the users.
    """
    if not 0 < seconds <= _MOST_DAYS * 86_400:
        raise UsageError(f"a reservation of {seconds:.0f} s: expected at most {_MOST_DAYS} days")
    if from_ms > store.leases.now_ms() + 1000 * _MOST_DAYS * 86_400:
        raise UsageError(f"a reservation from {clock_time(from_ms)} on: expected at most {_MOST_DAYS} days ahead")
    known = store.devices.all()
    named = [one for one in known if wanted and wanted in (one.id, one.serial, one.name)]
    soc = (reported_profile(wanted) or wanted).casefold()
    mine = {one.device for one in (*store.leases.all(), *store.leases.upcoming()) if one.reserved_for == user}
    found = named or [one for one in known if one.soc.casefold() == soc and one.id not in mine]
    if not found:
        if any(one.soc.casefold() == soc for one in known):
            raise NoDeviceError(f"every {wanted} is yours already: 'farm devices release' without a name lists them")
        names = {*load_socs(), *(name for one in known for name in (one.name, one.serial) if name)}
        raise UnknownNameError("device or SoC", wanted, names, "(farm devices shows the attached devices)")
    problems = []
    for one in sorted(found, key=lambda one: (one.health != "healthy", one.id)):
        if problem := out_of_use(one, one.called):
            problems.append(f"{one.called} is {problem}")
            continue
        try:
            return one, store.leases.reserve(one.id, user, seconds, from_ms)
        except LeaseLostError as error:
            problems.append(str(error))
    raise NoDeviceError(clean_text("; ".join(problems), _SHOWN_CHARACTERS))


def give_back(store: Store, device: str, user: str, *, force: bool) -> str:
    """Give back a device that is reserved for `user`, and return what happens now, as text.

    With `force` also a device of another user, whose process ends or leaves it after its job.
    Raises UnknownNameError, and UsageError for a device that is free or another user's.
    """
    leases = {lease.device: lease for lease in (*store.leases.upcoming(), *store.leases.all())}
    id_ = device if device in leases else resolve_device(store, device).id
    if id_ not in leases:
        raise UsageError(f"{device} is free already")
    lease = leases[id_]
    name = next((one.called for one in store.devices.all() if one.id == lease.device), lease.device)
    if lease.reserved_for != user and not force:
        end = "end that" if lease.user == user else "ask for it"
        raise UsageError(f"{holder_text(lease, name)}: {end}, or give --force")
    if lease.reserved_for:
        store.leases.cancel(lease.device, lease.reserved_for)
    if lease.token and force:
        store.leases.release([lease])
    after = ""
    if lease.token:
        after = f"; {lease.purpose!r} of {lease.user} " + ("stops using it" if force else "still uses it")
    return clean_text(f"{name} is given back{after}", 400)


def reserved_for(store: Store, user: str) -> list[Lease]:
    """Return the leases of devices that are reserved for a user."""
    return [lease for lease in store.leases.all() if lease.reserved_for == user]


def holder_text(lease: Lease, name: str) -> str:
    """Return user, time and purpose of the lease of the device `name`."""
    parts = []
    if lease.reserved_for:
        begin = f"from {clock_time(lease.reserved_from_ms)} " if lease.reserved_from_ms else ""
        parts.append(f"is reserved for {lease.reserved_for} {begin}until {clock_time(lease.reserved_until_ms)}")
    if lease.token:
        purpose = f" for {lease.purpose!r}" if lease.purpose else ""
        where = f"process {lease.pid} on {lease.host}"
        parts.append(f"is used by {lease.user} since {clock_time(lease.acquired_ms)}{purpose} ({where})")
    # Programs of other users wrote these texts into the store.
    return clean_text(f"{name} {' and '.join(parts)}", _SHOWN_CHARACTERS)


def clock_time(time_ms: int) -> str:
    """Return a local time, with the date unless it is today."""
    then = time.localtime(time_ms / 1000)
    today = time.strftime("%Y-%m-%d", then) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)
