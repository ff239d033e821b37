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
        self.left: dict[str, str] = {}

    def devices_left(self) -> dict[str, str]:
        return self.left


@pytest.fixture
def plan(tmp_path: Path) -> PlanStub:
    plan = PlanStub(tmp_path)
    with open_store(plan.lease_store) as store:
        store.devices.see([Seen(device, "device", None) for device in plan.devices])
    return plan


Worker = Callable[..., DeviceLease]


@pytest.fixture
def worker(plan: PlanStub) -> Iterator[Worker]:
    """Function that makes the lease of a worker; with `index` it has that device."""
    made: list[DeviceLease] = []

    def make(index: int | None = None, **options: Any) -> DeviceLease:
        any_plan: Any = plan
        made.append(DeviceLease(any_plan, **options))
        assert index is None or made[-1].acquire([plan.devices[index]])
        return made[-1]

    yield make
    for lease in made:
        lease.close()


def test_each_worker_has_a_device_of_its_own(plan: PlanStub, worker: Worker) -> None:
    first, second, third = worker(), worker(), worker()
    devices = [first.acquire(first.usable()), second.acquire(second.usable())]
    assert {device.serial for device in devices if device} == {"virtual-0", "virtual-1"}
    assert (first.is_ours, second.is_ours) == (True, True)
    assert third.acquire(third.usable(), 0.0) is None
    # The device of a dead worker is free at once.
    any_plan: Any = plan
    release_of(any_plan, os.getpid())
    assert third.acquire(plan.devices[:1], 30.0) == plan.devices[0]


def test_a_device_of_another_worker_may_run_a_test_again_and_of_another_command_not(
    plan: PlanStub, worker: Worker
) -> None:
    first, _ = worker(0), worker(1)
    assert first.others({"virtual-0"}) == [plan.devices[1]]
    assert first.others({"virtual-0", "virtual-1"}) == []
    plan.purpose = "farm pytest more_tests"
    assert first.others({"virtual-0"}) == []


def test_a_worker_exchanges_its_device_for_a_free_one(plan: PlanStub, worker: Worker) -> None:
    lease = worker(0)
    assert lease.wanted_elsewhere() == []
    with open_store(plan.lease_store) as store:
        words = {"count": 1, "user": store.user, "priority": Priority.PERSON, "ttl_s": 30.0}
        mine = {"host": socket.gethostname(), "pid": os.getpid() + 1, "purpose": plan.purpose}
        store.leases.request([plan.devices[0].id], **words, **mine)
        assert lease.wanted_elsewhere() == [plan.devices[1]]
        worker(1)
        assert lease.wanted_elsewhere() == [], "no device is free"


def test_with_dist_each_a_worker_keeps_its_device(plan: PlanStub, worker: Worker) -> None:
    lease = worker(1, exchanges=False)
    assert (lease.usable(), lease.others(set())) == ([plan.devices[1]], [])
    plan.left = {plan.devices[1].id: "it is gone"}
    assert lease.usable() == []


def test_a_device_out_of_service_is_not_waited_for(plan: PlanStub, worker: Worker) -> None:
    with open_store(plan.lease_store) as store:
        store.devices.set_service(plan.devices[0].id, in_service=False, note="bench is moved", user="ada")
    with pytest.raises(NoDeviceError, match="bench is moved"):
        worker(0)
