"""Conditions of a device for measurements, and notes on measurements that did not wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.config.settings import HealthConfig
from farm.devices.status import DeviceStatus, check, wait_until_cool
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

if TYPE_CHECKING:
    from .conftest import Bench

LIMITS = HealthConfig(max_temperature_c=45.0, min_battery_percent=20, gate_wait_s=12.0)
FINE = DeviceStatus(
    root=False, battery_percent=80, temperature_c=30.0, free_bytes=None, boot_id="", uptime_s=None, clock_offset_ms=None
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"temperature_c": 45.0, "battery_percent": 20}, ""),
        ({"temperature_c": None, "battery_percent": None}, ""),
        ({"temperature_c": 45.1}, "at 45.1 C, limit 45.0 C"),
        ({"battery_percent": 19}, "at 19 % of battery, at least 20 %"),
        (
            {"temperature_c": 60.0, "battery_percent": 1},
            "at 60.0 C, limit 45.0 C and at 1 % of battery, at least 20 %",
        ),
    ],
)
def test_limits_decide(changes: dict[str, float | None], problem: str) -> None:
    assert check(msgspec.structs.replace(FINE, **changes), LIMITS) == problem


@pytest.fixture
def body(bench: Bench) -> Iterator[Path]:
    """The folder of a device whose body may be changed."""
    root = bench.root / bench.devices[0].serial
    yield root
    clear(root)


def wait(bench: Bench, sleep: Callable[[float], None], stop: Callable[[], bool] = lambda: False) -> str:
    return wait_until_cool(bench.transport(), "android", LIMITS, sleep, stop)


def test_a_cool_device_is_measured_at_once(bench: Bench) -> None:
    assert wait(bench, lambda _: pytest.fail("there is nothing to wait for")) == ""


def test_a_hot_device_is_waited_for_until_the_deadline_and_measured_with_a_note(bench: Bench, body: Path) -> None:
    inject(body, Fault(FaultKind.OVERHEATED, code=47))
    pauses: list[float] = []
    assert wait(bench, pauses.append) == "measured at 47.0 C, limit 45.0 C, after waiting 12 s"
    assert sum(pauses) == 12.0


def test_a_device_that_cools_down_is_measured_then(bench: Bench, body: Path) -> None:
    inject(body, Fault(FaultKind.OVERHEATED, code=60))
    assert wait(bench, lambda _: clear(body)) == "waited 5 s before measuring: it was at 60.0 C, limit 45.0 C"


def test_an_empty_battery_is_waited_for_as_well(bench: Bench, body: Path) -> None:
    inject(body, Fault(FaultKind.LOW_BATTERY, code=3))
    assert wait(bench, lambda _: None).startswith("measured at 3 % of battery, at least 20 %")


def test_nobody_waits_who_is_told_to_stop(bench: Bench, body: Path) -> None:
    inject(body, Fault(FaultKind.OVERHEATED))
    assert "after waiting 0 s" in wait(bench, lambda _: pytest.fail("it was stopped"), stop=lambda: True)
