"""Devices of the workers of one session."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.base.config.settings import LeaseConfig
from farm.base.errors import NoDeviceError
from farm.devices.device import AdbAddress, Device
from farm.dispatch.pytest_plugin.lease import DeviceLease, release_of
from farm.policy.situation import Priority
from farm.store.leases.registry import Seen
from farm.store.store import open_store


class PlanStub:
    """Plan of two devices, with the fields that a lease reads."""

    def __init__(self, folder: Path) -> None:
        self.lease_store = f"sqlite:///{folder / 'leases.db'}"
        self.lease_times, self.purpose, self.leased = LeaseConfig(), "farm pytest tests", True
        self.devices = tuple(
            Device(f"virtual-{n}", "SM8650", "virtual", "", AdbAddress(5037), "", host="here") for n in range(2)
        )
        self.left: dict[int, str] = {}

    def devices_left(self) -> dict[int, str]:
        return self.left


@pytest.fixture
def plan(tmp_path: Path) -> PlanStub:
    plan = PlanStub(tmp_path)
    with open_store(plan.lease_store) as store:
        store.devices.see([Seen(device, "device", None) for device in plan.devices])
    return plan


@pytest.fixture
def worker(plan: PlanStub) -> Iterator[Callable[..., DeviceLease]]:
    made: list[DeviceLease] = []

    def make(**options: Any) -> DeviceLease:
        any_plan: Any = plan
        made.append(DeviceLease(any_plan, **options))
        return made[-1]

    yield make
    for lease in made:
        lease.close()


def test_each_worker_has_a_device_of_its_own(worker: Callable[..., DeviceLease]) -> None:
    first, second, third = worker(), worker(), worker()
    devices = [first.acquire(first.usable()), second.acquire(second.usable())]
    assert {device.serial for device in devices if device} == {"virtual-0", "virtual-1"}
    assert first.is_ours
    assert second.is_ours
    assert third.acquire(third.usable(), 0.0) is None


def test_a_device_of_another_worker_may_run_a_test_again(worker: Callable[..., DeviceLease]) -> None:
    first, second = worker(), worker()
    assert first.acquire([0])
    assert second.acquire([1])
    assert first.others({"virtual-0"}) == [1]
    assert first.others({"virtual-0", "virtual-1"}) == []


def test_a_device_of_another_command_does_not(plan: PlanStub, worker: Callable[..., DeviceLease]) -> None:
    other, ours = worker(), worker()
    assert other.acquire([1])
    plan.purpose = "farm pytest more_tests"
    assert ours.acquire([0])
    assert ours.others({"virtual-0"}) == []


def test_the_device_of_a_dead_worker_is_free_at_once(plan: PlanStub, worker: Callable[..., DeviceLease]) -> None:
    dead, new = worker(), worker()
    assert dead.acquire([0])
    any_plan: Any = plan
    release_of(any_plan, os.getpid())
    device = new.acquire([0], 30.0)
    assert device is not None
    assert device.serial == "virtual-0"


def test_a_worker_exchanges_its_device_for_a_free_one(plan: PlanStub, worker: Callable[..., DeviceLease]) -> None:
    lease = worker()
    assert lease.acquire([0])
    assert lease.wanted_elsewhere() == []
    with open_store(plan.lease_store) as store:
        words = {"count": 1, "user": store.user, "priority": Priority.PERSON, "ttl_s": 30.0}
        mine = {"host": socket.gethostname(), "pid": os.getpid() + 1, "purpose": plan.purpose}
        store.leases.request([plan.devices[0].id], **words, **mine)
        assert lease.wanted_elsewhere() == [1]
        other = worker()
        assert other.acquire([1])
        assert lease.wanted_elsewhere() == [], "no device is free"


def test_with_dist_each_a_worker_keeps_its_device(plan: PlanStub, worker: Callable[..., DeviceLease]) -> None:
    lease = worker(exchanges=False)
    assert lease.acquire(lease.usable())
    assert lease.device is not None
    own = plan.devices.index(lease.device)
    assert lease.usable() == [own]
    assert lease.others(set()) == []
    plan.left = {own: "it is gone"}
    assert lease.usable() == []


def test_a_device_out_of_service_is_not_waited_for(plan: PlanStub, worker: Callable[..., DeviceLease]) -> None:
    with open_store(plan.lease_store) as store:
        store.devices.set_service(plan.devices[0].id, in_service=False, note="bench is moved", user="ada")
    lease = worker()
    with pytest.raises(NoDeviceError, match="bench is moved"):
        lease.acquire([0])
