"""Adoption of rows under a name of adb, `192.168.1.20:5555`, by which earlier versions identified devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, update

from farm.devices.device import AdbAddress, Device
from farm.devices.health import Health
from farm.store import schema, values
from farm.store.leases.rows import ADOPTED, lease_row

# Boot id of the kernel, which is unique. Other marks of a boot are numbers, which two devices may share.
_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RANKS = {Health.HEALTHY: 0, Health.SUSPECT: 1, Health.QUARANTINED: 2}


def earlier_rows(connection: Connection, seen: Sequence[Device]) -> dict[str, list[Row[Any]]]:
    """Return the rows under other ids that belong to devices in `seen`, by the id of the device."""
    devices = [device for device in seen if device.kind == "hardware" and isinstance(device.address, AdbAddress)]
    if not devices:
        return {}
    row = schema.device_state.c
    query = select(schema.device_state).where(
        row.kind == "hardware",
        row.state != ADOPTED,
        row.id.not_in([values.clean(one.id, values.NAME_LIMIT) for one in seen]),
    )
    rows = connection.execute(query.order_by(row.id)).all()
    found = {device.id: [one for one in rows if _is_of(device, one, devices)] for device in devices}
    return {id_: of for id_, of in found.items() if of}


def _is_of(device: Device, row: Row[Any], devices: Sequence[Device]) -> bool:
    """Return whether a row provably belongs to `device`, by its address or by the boot id of its system. Pure."""
    facts = (values.clean(device.soc, values.SOC_LIMIT), values.clean(device.product, values.NAME_LIMIT))
    if (row.soc, row.product) != facts:
        return False
    at = [one for one in devices if row.id in _names(one) and row.host == values.clean(one.host, values.NAME_LIMIT)]
    if at:
        return device in at
    boot_id = row.status.get("boot_id") if isinstance(row.status, dict) else None
    # Systems in containers share the kernel, and with it the boot id.
    same = [one for one in devices if one.boot_id == boot_id]
    return same == [device] and bool(_BOOT_ID.fullmatch(device.boot_id))


def _names(device: Device) -> Collection[str]:
    """Return the names of a device at adb servers."""
    address = device.address
    if not isinstance(address, AdbAddress):
        return ()
    return {name for one in (address, *address.also) for name in (one.name, one.attached_at)} - {""}


def adopt(connection: Connection, key: str, earlier: Sequence[Row[Any]], now_ms: int) -> None:
    """Copy the facts of `earlier` rows to the device `key`, and remove these rows from every list.

    Names, labels, service, health and reservations are copied; runs and health events stay where they are, and a lease
    stays with its process of an earlier version: until it ends, no other process gets the device.
    """
    for row in earlier:
        _adopt(connection, key, row, now_ms)


def revive(connection: Connection, keys: Sequence[str]) -> None:
    """Put devices into service again whose id had been adopted as an earlier id of another device."""
    row = schema.device_state.c
    theirs = (row.id.in_(keys), row.service_user == ADOPTED)
    if connection.scalar(select(row.id).where(*theirs).limit(1)) is None:
        return
    facts = {"in_service": True, "service_user": "", "service_note": ""}
    connection.execute(update(schema.device_state).where(*theirs).values(facts))


def _adopt(connection: Connection, key: str, earlier: Row[Any], now_ms: int) -> None:
    state = schema.device_state
    facts = _merged(connection.execute(select(state).where(state.c.id == key)).one(), earlier)
    if facts:
        connection.execute(update(state).where(state.c.id == key).values(facts))
    # A running earlier version gives no new lease of a device that is out of service; the note leads to an existing
    # lease. The row keeps its health for that version as well.
    over: dict[str, Any] = {"name": "", "labels": [], "state": ADOPTED, "forgotten_ms": now_ms}
    over |= {"in_service": False, "service_user": ADOPTED, "service_note": key}
    connection.execute(update(state).where(state.c.id == earlier.id).values(over))
    lease = schema.lease
    before = lease_row(connection, earlier.id)
    if before.reserved_until_ms > now_ms:
        if lease_row(connection, key).reserved_until_ms <= now_ms:
            names = ("reserved_for", "reserved_until_ms", "reserved_from_ms")
            reserved = {name: getattr(before, name) for name in names}
            connection.execute(update(lease).where(lease.c.device == key).values(reserved))
        free = {"reserved_for": "", "reserved_until_ms": 0, "reserved_from_ms": 0}
        connection.execute(update(lease).where(lease.c.device == earlier.id).values(free))


def _merged(row: Row[Any], earlier: Row[Any]) -> Mapping[str, Any]:
    """Return the facts that a device gets from an earlier row: missing ones, and the more cautious states. Pure."""
    facts: dict[str, Any] = {}
    if earlier.name and not row.name:
        facts["name"] = earlier.name
    if more := [label for label in earlier.labels if label not in row.labels]:
        facts["labels"] = [*row.labels, *more]
    if row.in_service and not earlier.in_service and earlier.service_user != ADOPTED:
        facts |= {name: getattr(earlier, name) for name in ("in_service", "service_note", "service_user")}
    if _RANKS.get(earlier.health, 0) > _RANKS.get(row.health, 0):
        facts |= {"health": earlier.health, "health_reason": earlier.health_reason}
    return facts
