"""Records of devices between runs, and quarantines to notify users about."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.errors import LeaseLostError, UnknownNameError, UsageError
from farm.devices.device import HealthEvent
from farm.devices.facts import DeviceStatus
from farm.store.leases.registry import Seen
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make


# Records of devices between runs.


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


# Quarantines to notify users about: each once in all processes, and no past ones.


def health(
    store: Store, event: str, state: str, reason: str = "", *, device: str = "phone-1", time_ms: int = 0
) -> None:
    store.devices.record_health(
        HealthEvent(device, event, state, reason, {"run": "20260301-020000-0a1b2c"}, (), time_ms)
    )


def test_each_quarantine_is_claimed_once(store: Store) -> None:
    health(store, "infra", "suspect", "its cable")
    # A quarantine that is older than a day is no news.
    health(store, "gave_up", "quarantined", "long ago", device="phone-2", time_ms=1)
    assert store.quarantines.claim() == []
    health(store, "gave_up", "quarantined", "it could not be\x1b[31m brought back\nat all")
    health(store, "recovery", "quarantined", "reconnect: no")
    [one] = store.quarantines.claim()
    assert (one.device, one.reason, one.run) == (
        "phone-1", "it could not be brought back at all", "20260301-020000-0a1b2c",
    )  # fmt: skip
    assert store.quarantines.claim() == []
    for to in ("webhook 1", "webhook 2"):
        store.quarantines.add_outcome(one.claim, f"sent: {to}")
    newest = store.devices.health_events("phone-1", 1)[0]
    outcome = "sent: webhook 1; sent: webhook 2"
    assert (newest.event, newest.state, newest.reason) == ("notice", "quarantined", outcome)
    health(store, "released", "suspect", "released")
    health(store, "gave_up", "quarantined", "again")
    assert [again.reason for again in store.quarantines.claim()] == ["again"]


def test_of_many_who_look_at_once_one_claims(store: Store, address: str) -> None:
    health(store, "gave_up", "quarantined", "gone")

    def claim(_: int) -> int:
        with open_store(address) as other:
            return len(other.quarantines.claim())

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(claim, range(4))) == 1


def test_only_a_person_ends_a_quarantine(store: Store) -> None:
    health(store, "gave_up", "quarantined", "gone")
    # Events of a worker that does not know of the quarantine, for example after its job passed elsewhere.
    for event, state in (("outvoted", "suspect"), ("check_passed", "healthy")):
        health(store, event, state, "something else")
    [known] = store.devices.all()
    assert (known.health, known.health_reason) == ("quarantined", "gone")
    health(store, "released", "suspect", "released")
    assert store.devices.all()[0].health == "suspect"
