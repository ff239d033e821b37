"""Records of devices between runs."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.errors import LeaseLostError, UnknownNameError, UsageError
from farm.devices.health import HealthEvent
from farm.devices.status import DeviceStatus
from farm.store.leases.registry import Seen
from farm.store.store import Store

if TYPE_CHECKING:
    from conftest import Make

STATUS = DeviceStatus(
    root=True,
    battery_percent=81,
    temperature_c=31.5,
    free_bytes=1 << 40,
    boot_id="b",
    uptime_s=60.0,
    clock_offset_ms=-3,
)


def test_facts_of_a_device_stay_until_they_are_told_again(store: Store, make: type[Make]) -> None:
    device, before_ms = make.device("phone-1", "hardware"), time.time_ns() // 1_000_000
    store.devices.see([Seen(device, "device", STATUS), Seen(make.device(), "device", None)])
    phone, virtual = store.devices.all()
    assert (phone.id, phone.serial, phone.soc, phone.kind, phone.os) == (
        "phone-1", "phone-1", "SM8650", "hardware", "android",
    )  # fmt: skip
    assert (phone.status, phone.state, phone.in_service, phone.health) == (STATUS, "device", True, "healthy")
    assert before_ms - 1 <= phone.last_seen_ms <= time.time_ns() // 1_000_000 + 1
    assert virtual.status is None

    store.devices.set_name("phone-1", "left", ["rack-1", "rooted"])
    store.devices.set_service("phone-1", False, "cracked screen", "ada")
    store.devices.record_health(HealthEvent("phone-1", "gone", "suspect", "it was not there"))
    store.devices.see([Seen(device, "offline", None)])
    known = store.devices.all()[0]
    assert (known.name, known.labels, known.status, known.state) == ("left", ("rack-1", "rooted"), STATUS, "offline")
    assert (known.in_service, known.service_note, known.service_user) == (False, "cracked screen", "ada")
    assert (known.health, known.health_reason) == ("suspect", "it was not there")
    # farm.toml wins.
    store.devices.see([Seen(msgspec.structs.replace(device, name="right", labels=("a",)), "device", None)])
    known = store.devices.all()[0]
    assert (known.name, known.labels) == ("right", ("a",))


def test_a_device_that_is_forgotten_is_in_no_list_until_it_is_seen_again(store: Store, make: type[Make]) -> None:
    device = make.device("phone-1", "hardware")
    store.devices.see([Seen(device, "device", STATUS)])
    store.devices.set_name("phone-1", "left", ["rack-1"])
    store.devices.record_health(HealthEvent("phone-1", "gone", "suspect", "it was not there"))
    store.devices.forget("phone-1")
    assert store.devices.all() == []
    (gone,) = store.devices.all(forgotten=True)
    assert gone.forgotten_ms > 0
    assert [event.reason for event in store.devices.health_events("phone-1", 9)] == ["it was not there"]
    store.devices.see([Seen(device, "device", None)])
    (known,) = store.devices.all()
    assert (known.forgotten_ms, known.name, known.labels, known.health, known.status) == (0, "", (), "healthy", None)
    store.devices.record_health(HealthEvent("phone-1", "gave_up", "quarantined", "it was gone"))
    store.devices.forget("phone-1")
    store.devices.see([Seen(device, "device", None)])
    (known,) = store.devices.all()
    assert (known.health, known.health_reason) == ("quarantined", "it was gone"), "only a person ends a quarantine"
    store.leases.reserve("phone-1", "ada", 60)
    with pytest.raises(LeaseLostError, match="reserved by ada: run 'farm devices release phone-1'"):
        store.devices.forget("phone-1")
    with pytest.raises(UnknownNameError):
        store.devices.forget("phone-2")


def test_a_name_is_one_and_means_one_device(sqlite_store: Store, make: type[Make]) -> None:
    devices = sqlite_store.devices
    second = msgspec.structs.replace(make.device("phone-2"), soc="SM9999")
    devices.see([Seen(make.device("phone-1"), "device", None), Seen(second, "device", None)])
    for name, labels, message in (
        ("\x1b]0;x\x07", [], "cannot be a name"),
        ("two words", [], "cannot be a name"),
        ("x" * 65, [], "cannot be a name"),
        ("", ["\x1b[31m"], "cannot be a label"),
        ("", [""], "cannot be a label"),
        ("", list(map(str, range(33))), "at most 32 labels"),
        ("sm8750", [], "is an SoC"),
        ("SM9999", [], "is an SoC"),
        ("phone-2", [], "phone-2 is called 'phone-2' already"),
    ):
        with pytest.raises(UsageError, match=message):
            devices.set_name("phone-1", name, labels)
    assert [one.name for one in devices.all()] == ["", ""]
    devices.set_name("phone-1", "phone-1", ["a", "a"])
    assert devices.all()[0].labels == ("a",)
    devices.set_name("phone-1", "left", [])
    with pytest.raises(UsageError, match="phone-1 is called 'left' already"):
        devices.set_name("phone-2", "left", [])
    with pytest.raises(UnknownNameError, match="did you mean 'phone-2'"):
        devices.set_name("phone-22", "x", [])
    with pytest.raises(UnknownNameError, match="unknown device"):
        devices.set_service("nothing", True, "", "ada")


def test_health_is_a_history_and_a_state(store: Store) -> None:
    health_check = HealthEvent(
        "d", "health_check", "healthy", "", {"temperature_c": 31.5, "build": "b"}, (1.5e6, 2e6), 5
    )
    store.devices.record_health(health_check)
    store.devices.record_health(HealthEvent("d", "crash", "quarantined", "3 in a row", {"nan": math.nan}))
    newest, oldest = store.devices.health_events("d", 9)
    assert oldest == health_check
    assert (newest.event, newest.state, newest.detail, newest.latency_ns) == (
        "crash", "quarantined", {"nan": "nan"}, (),
    )  # fmt: skip
    assert newest.time_ms > 1_790_000_000_000
    assert len(store.devices.health_events("d", 1)) == 1
    assert store.devices.health("d") == ("quarantined", "3 in a row")
    assert store.devices.health("e") == ("healthy", "")
    (known,) = store.devices.all()
    assert (known.id, known.serial, known.last_seen_ms) == ("d", "", 0)


def test_texts_of_devices_and_people_are_bounded_and_safe_to_show(store: Store, make: type[Make]) -> None:
    """Texts in a store may come from another version that did not clean them."""
    store.devices.see([Seen(msgspec.structs.replace(make.device("p"), name="\x1b[2J", labels=("\x07",)), "x", None)])
    store.devices.set_service("p", False, "\x1b[31m cracked\nscreen", "\x1b]0;ada")
    store.devices.record_health(HealthEvent("p", "crash", "suspect", "\x9b31m bad"))
    (known,) = store.devices.all()
    (event,) = store.devices.health_events("p", 1)
    shown = (known.name, *known.labels, known.service_note, known.service_user, known.health_reason, event.reason)
    assert all(text and text.isprintable() for text in shown), shown
    assert known.service_note.endswith("cracked screen")

    hostile = "x\0\udcff" * 5_000
    device = msgspec.structs.replace(make.device(hostile), product=hostile, soc=hostile, labels=(hostile,) * 100)
    store.devices.see([Seen(device, hostile, None)])
    store.devices.record_health(HealthEvent(device.id, hostile, hostile, hostile, {hostile: hostile}))
    [known] = [one for one in store.devices.all() if one.id != "p"]
    assert max(map(len, (known.id, known.serial, known.product, *known.labels))) == 256
    assert (len(known.soc), len(known.health), len(known.health_reason), len(known.labels)) == (64, 16, 4_000, 32)
    assert store.devices.health(device.id)[0] == known.health
