"""Adoption of a phone that an earlier version knew by a name of adb: its serial takes over all records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from farm.devices.device import AdbAddress, Device
from farm.devices.health import HealthEvent
from farm.devices.status import DeviceStatus
from farm.policy.situation import Lease, Priority
from farm.store import schema
from farm.store.leases.registry import Seen
from farm.store.store import Store

if TYPE_CHECKING:
    from conftest import Make

OLD = "192.168.1.20:5555"
BOOT = "1e2b7d4c-0000-4000-8000-00000000000a"
STATUS = DeviceStatus(
    root=True, battery_percent=None, temperature_c=None, free_bytes=None, boot_id=BOOT, uptime_s=9.0, clock_offset_ms=0
)


def phone(make: type[Make], serial: str, *names: str, **changes: object) -> Device:
    first, *others = (AdbAddress(5037, name=name, attached_at=name if ":" in name else "") for name in names)
    device = replace(make.device(serial, "hardware"), address=replace(first, also=tuple(others)), host="lab")
    return replace(device, **changes)


def see(store: Store, *devices: Device) -> None:
    store.devices.see([Seen(device, "device", None) for device in devices])


@pytest.fixture
def known(store: Store, make: type[Make]) -> Store:
    """Store of an earlier version with a phone under OLD: named, out of service, in quarantine and reserved."""
    store.devices.see([Seen(phone(make, OLD, OLD), "device", STATUS)])
    store.devices.set_name(OLD, "desk", ["camera"])
    store.devices.set_service(OLD, False, "cracked screen", "ada")
    store.devices.record_health(HealthEvent(OLD, "gave_up", "quarantined", "it was gone"))
    store.leases.reserve(OLD, "ada", 600)
    return store


def assert_untouched(store: Store, serial: str) -> None:
    ours = next(one for one in store.devices.all() if one.id == serial)
    old = next(one for one in store.devices.all() if one.id == OLD)
    assert (ours.name, ours.labels, ours.in_service, ours.health) == ("", (), True, "healthy")
    assert (old.name, old.health, old.in_service) == ("desk", "quarantined", False)
    assert [lease.device for lease in store.leases.all()] == [OLD]


@pytest.mark.parametrize(
    ("names", "boot_id"),
    [
        ((OLD,), ""),
        (("2233fd19", OLD), "another start"),
        (("2233fd19",), BOOT),
        (("adb-2233fd19-9mU6UL (2)._adb-tls-connect._tcp",), BOOT),
    ],
    ids=["address", "second address", "start on a cable", "start by mDNS"],
)
def test_a_phone_keeps_what_was_said_of_its_address(
    known: Store, make: type[Make], names: tuple[str, ...], boot_id: str
) -> None:
    see(known, phone(make, "2233fd19", *names, boot_id=boot_id))
    [one] = known.devices.all()
    assert (one.id, one.name, one.labels) == ("2233fd19", "desk", ("camera",))
    assert (one.in_service, one.service_note, one.service_user) == (False, "cracked screen", "ada")
    assert (one.health, one.health_reason) == ("quarantined", "it was gone")
    [lease] = known.leases.all()
    assert (lease.device, lease.reserved_for) == ("2233fd19", "ada")
    assert [event.reason for event in known.devices.health_events(OLD, 9)] == ["it was gone"]
    assert known.devices.health_events("2233fd19", 9) == [], "history stays where it was recorded"


def test_what_was_taken_over_is_not_taken_over_again(known: Store, make: type[Make]) -> None:
    ours = phone(make, "2233fd19", OLD)
    see(known, ours)
    known.devices.record_health(HealthEvent(ours.id, "released", "healthy", ""))
    known.devices.set_service(ours.id, True, "", "ada")
    known.devices.set_name(ours.id, "", [])
    known.leases.cancel(ours.id, "ada")
    see(known, ours)
    see(known, phone(make, "another", OLD))
    for one in known.devices.all():
        assert (one.name, one.labels, one.in_service, one.health) == ("", (), True, "healthy"), one.id
    assert known.leases.all() == []


def test_of_a_cable_and_an_address_the_worse_counts(known: Store, make: type[Make]) -> None:
    """Earlier versions knew one phone twice: by its serial, and by its address."""
    see(known, phone(make, "2233fd19", "2233fd19"))
    known.devices.set_name("2233fd19", "shelf", ["left"])
    known.leases.reserve("2233fd19", "bob", 600)
    see(known, phone(make, "2233fd19", "2233fd19", OLD))
    [one] = known.devices.all()
    assert (one.name, one.labels, one.health, one.in_service) == ("shelf", ("left", "camera"), "quarantined", False)
    assert [(lease.device, lease.reserved_for) for lease in known.leases.all()] == [("2233fd19", "bob")]


def test_a_forgotten_phone_in_quarantine_stays_there(known: Store, make: type[Make]) -> None:
    known.leases.cancel(OLD, "ada")
    known.devices.forget(OLD)
    see(known, phone(make, "2233fd19", OLD))
    [one] = known.devices.all()
    assert (one.id, one.name, one.health) == ("2233fd19", "", "quarantined")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (OLD, {"soc": "SM8750"}),
        (OLD, {"product": "another model"}),
        (OLD, {"host": "another network"}),
        ("192.168.1.21:5555", {}),
        ("192.168.1.21:5555", {"boot_id": BOOT[:-1] + "b"}),
        ("192.168.1.21:5555", {"boot_id": BOOT, "soc": "SM8750"}),
    ],
)
def test_another_device_takes_nothing(known: Store, make: type[Make], name: str, changes: dict[str, object]) -> None:
    see(known, phone(make, "2233fd19", name, **changes))
    assert_untouched(known, "2233fd19")


def test_a_start_that_two_devices_have_proves_nothing(known: Store, make: type[Make]) -> None:
    """Android in containers has the kernel of its host."""
    see(known, *(phone(make, serial, f"10.0.0.1:{port}", boot_id=BOOT) for port, serial in enumerate(("one", "two"))))
    assert_untouched(known, "one")
    see(known, *(phone(make, *names, boot_id=BOOT) for names in (("one", "10.0.0.1:0"), ("three", OLD))))
    assert {one.name for one in known.devices.all() if one.id != "three"} == {""}
    assert next(one for one in known.devices.all() if one.id == "three").name == "desk"


def test_a_board_without_a_serial_stays_itself(known: Store, make: type[Make]) -> None:
    board = phone(make, OLD, OLD, boot_id=BOOT)
    see(known, board, phone(make, "2233fd19", "2233fd19", boot_id=BOOT))
    assert_untouched(known, "2233fd19")


def leased(store: Store, device: str, user: str = "bob") -> tuple[Lease, ...]:
    token = store.leases.request(
        [device], count=1, user=user, host="lab", pid=1, purpose="farm run", priority=Priority.PERSON, ttl_s=30
    )
    try:
        return store.leases.poll(token, ttl_s=30)
    finally:
        store.leases.withdraw(token)


def test_a_lease_of_an_earlier_version_that_still_runs_is_respected(store: Store, make: type[Make]) -> None:
    see(store, phone(make, OLD, OLD))
    [lease] = leased(store, OLD)
    see(store, phone(make, "2233fd19", OLD))
    assert leased(store, "2233fd19") == ()
    [shown] = store.leases.all()
    assert (shown.device, shown.user, shown.purpose) == ("2233fd19", "bob", "farm run")
    # The process of the earlier version renews its lease of the address.
    [kept] = store.leases.renew([lease], ttl_s=60, heartbeat_s=20).kept
    assert leased(store, "2233fd19") == ()
    store.leases.release([kept])
    [ours] = leased(store, "2233fd19")
    store.leases.release([ours])
    # A person ends it as every other lease.
    see(store, phone(make, OLD, OLD))
    assert leased(store, OLD) != ()
    see(store, phone(make, "2233fd19", OLD))
    store.leases.release(store.leases.all())
    assert leased(store, "2233fd19") != ()


def test_an_earlier_version_takes_no_device_that_is_known_by_its_serial(store: Store, make: type[Make]) -> None:
    see(store, phone(make, OLD, OLD))
    ours = phone(make, "2233fd19", OLD)
    see(store, ours)
    # Columns that an earlier version writes: state and times, and no entries of a person.
    row = schema.device_state
    facts = {"state": "device", "forgotten_ms": 0, "serial": OLD}
    store._database.write(lambda connection: connection.execute(update(row).where(row.c.id == OLD).values(facts)))
    assert leased(store, OLD) == ()
    assert leased(store, ours.id) != ()
    see(store, ours)
    assert next(one for one in store.devices.all() if one.id == ours.id).in_service


def test_a_device_that_has_an_earlier_id_of_another_is_in_service(store: Store, make: type[Make]) -> None:
    """A board without a serial may get the address of a phone that moved to a cable."""
    see(store, phone(make, OLD, OLD))
    see(store, phone(make, "2233fd19", OLD))
    see(store, phone(make, OLD, OLD, product="board"))
    board = next(one for one in store.devices.all() if one.id == OLD)
    assert (board.in_service, board.service_note) == (True, "")
    assert leased(store, OLD) != ()
    assert leased(store, "2233fd19") != ()
