"""Devices, and one device with its health, drift and attempts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.devices.device import HealthEvent
from farm.dispatch.pool.inventory import DeviceRow, remembered, resolve_device, wanted_of
from farm.policy.situation import Lease, Waiting
from farm.report.model.chart import Plot, health_check_plots
from farm.report.model.history import Drift, drift_of, health_check_p50
from farm.serve.page import Facts, Text, has_words
from farm.serve.pages.progress import device_rows
from farm.store.leases.registry import Registered
from farm.store.queries.browse import DeviceAttempt
from farm.store.store import Store

_EVENTS, _ATTEMPTS = 200, 1000
ENDED = "ended"
"""State of a device of runs that is not registered, such as a virtual device, which ends with its run."""


class DevicesQuery(msgspec.Struct, frozen=True):
    """Filter of devices."""

    soc: Text = ""
    state: Text = ""
    health: Text = ""
    q: Text = ""
    """Words of name, id, product and labels."""


class Reservation(msgspec.Struct, frozen=True):
    """Reservation of a device. Times are epoch, milliseconds."""

    device: str
    """Id of the device."""
    name: str
    """Name of the device, or its id."""
    user: str
    from_ms: int
    """Begin; 0 for a reservation that has begun."""
    until_ms: int


class DevicesFacts(Facts, frozen=True, kw_only=True):
    """Devices in the store, and commands that wait for one."""

    path: ClassVar[str] = "/devices"
    template: ClassVar[str] = "devices.html.j2"
    devices: list[DeviceRow]
    total: int
    waiting: list[Waiting]
    wanted: list[str]
    """Target of each waiting command in words."""
    socs: list[str]
    states: list[str]
    reservations: list[Reservation]
    """Reservations of all devices, by their begin."""


class DeviceQuery(msgspec.Struct, frozen=True):
    """A device and the number of its attempts."""

    device: Text
    limit: Annotated[int, msgspec.Meta(ge=1, le=_ATTEMPTS, description="Attempts.")] = 40


class DeviceFacts(Facts, frozen=True, kw_only=True):
    """Device with its health, drift and attempts."""

    path: ClassVar[str] = "/devices/{device:path}"
    template: ClassVar[str] = "device.html.j2"
    schema: int = 2
    device: Registered
    events: list[HealthEvent]
    now: DeviceRow
    attempts: list[DeviceAttempt]
    looked_at: int
    """Attempts that the drift is made of."""
    drift: Drift
    plots: list[Plot]
    """Times of the health check; empty with fewer than two."""
    leased_ms: int | None
    """Time since which a process has the device."""
    leased_on: str = ""
    """Host of that process."""
    reservations: list[Reservation]
    """Reservation of the device, now or later."""

    def shown(self) -> dict[str, Any]:
        """Return the values of the table of health events."""
        shared = self.device.kind == "virtual" and self.device.id != self.device.serial
        return {"health_check_p50": health_check_p50, "host_shared": shared}


def devices_page(store: Store, query: DevicesQuery) -> DevicesFacts:
    """Return every device in the store, without contacting it."""
    found = [*device_rows(store), *map(_row, _ended(store))]
    rows = [
        row
        for row in found
        if query.soc in ("", row.soc)
        and query.state in ("", row.state)
        and query.health in ("", row.health)
        and has_words(query.q, row.name, row.id, row.product, *row.labels)
    ]
    waiting, known = store.leases.waiting(), {row.id: row for row in found}
    return DevicesFacts(
        title="Devices",
        devices=rows,
        total=len(found),
        waiting=waiting,
        wanted=[wanted_of(one, known) for one in waiting],
        socs=sorted({row.soc for row in found}),
        states=sorted({row.state for row in found}),
        reservations=_reservations(store),
    )


def _reservations(store: Store) -> list[Reservation]:
    names = {one.id: one.called for one in store.devices.all()}
    return [
        Reservation(
            one.device, names.get(one.device, one.device), one.reserved_for, one.reserved_from_ms, one.reserved_until_ms
        )
        for one in (*store.leases.all(), *store.leases.upcoming())
        if one.reserved_for
    ]


def _ended(store: Store) -> list[Registered]:
    """Return the devices of runs that are not registered, such as virtual devices, which end with their run."""
    known = {one.serial for one in store.devices.all(forgotten=True)}
    return [
        Registered(one.serial, one.serial, soc=one.soc, kind=one.kind, state=ENDED, last_seen_ms=one.last_ms)
        for one in store.browse.met_devices()
        if one.serial not in known
    ]


def _row(device: Registered, lease: Lease | None = None) -> DeviceRow:
    row = remembered(device, lease)
    return row if device.state != ENDED else msgspec.structs.replace(row, state=ENDED)


def _find(store: Store, name: str) -> Registered:
    """Return a device by its name, registered or met in a run. Raises UnknownNameError."""
    try:
        return resolve_device(store, name, forgotten=True)
    except UnknownNameError:
        for one in _ended(store):
            if one.serial == name:
                return one
        raise


def device_page(store: Store, query: DeviceQuery) -> DeviceFacts:
    """Return one device, as `farm devices show`, with its recent attempts and its drift."""
    known = _find(store, query.device)
    events = store.devices.health_events(known.id, _EVENTS)
    lease: Lease | None = next((lease for lease in store.leases.all() if lease.device == known.id), None)
    attempts = store.browse.on_device(known.serial, known.kind, _ATTEMPTS) if known.serial else []
    # The token of a lease is a secret: who has it can end the lease.
    held = lease is not None and bool(lease.token)
    return DeviceFacts(
        title=known.name or known.id,
        device=known,
        events=events,
        now=_row(known, lease),
        attempts=attempts[: query.limit],
        looked_at=len(attempts),
        drift=drift_of(events, attempts),
        plots=health_check_plots(events),
        leased_ms=lease.acquired_ms if lease is not None and held else None,
        leased_on=lease.host if lease is not None and held else "",
        reservations=[one for one in _reservations(store) if one.device == known.id],
    )
