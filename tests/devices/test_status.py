"""Status of a device, its conditions for measurements, and notes on measurements that did not wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.config.settings import HealthConfig
from farm.devices.status import DeviceStatus, check, parse_status, wait_until_cool
from farm.devices.text import named_values
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

if TYPE_CHECKING:
    from conftest import Bench

PHONE = """\
time=1700000000.500000000
uid=2000
uptime=12345.67
boot=6f1e2f0a-1111-4222-8333-444455556666
free=/dev/block/dm-40 112456780 50000000 62456780 45% /data
zone=61200
zone=-40000
zone=0
battery=Current Battery Service state:
battery=  present: true
battery=  level: 87
battery=  scale: 100
battery=  temperature: 312
battery=  technology: Li-ion
"""
BOARD = "time=1700000000.%N\nuid=0\nuptime=9\nboot=\nfree=overlay 8 4 4 50% /\nzone=48500\nzone=51200\nzone=\n"


def test_a_phone_that_tells_everything() -> None:
    assert parse_status(named_values(PHONE.splitlines()), 1_700_000_000_000) == DeviceStatus(
        root=False,
        battery_percent=87,
        temperature_c=31.2,
        free_bytes=62456780 * 1024,
        boot_id="6f1e2f0a-1111-4222-8333-444455556666",
        uptime_s=12345.67,
        clock_offset_ms=500,
    )


def test_a_board_without_a_battery_tells_its_hottest_sensor() -> None:
    status = parse_status(named_values(BOARD.splitlines()), 1_700_000_000_500)
    assert status == DeviceStatus(True, None, 51.2, 4096, "", 9.0, 0)
    invented = [*BOARD.splitlines(), "battery=  present: false", "battery=  level: 0", "battery=  temperature: 250"]
    assert parse_status(named_values(invented), 1_700_000_000_500) == status


def test_what_cannot_be_is_not_believed() -> None:
    for line in (
        *("battery=level: 4000", "battery=level: nan", "battery=level: -1"),
        *("battery=temperature: 99999", "battery=temperature: 1e9", "zone=274000", "zone=-273000"),
        *("free=x x x 99999999999999999999 x x", "free=-", "uptime=inf", "uptime=-4"),
        *("time=9999999999999", "time=\N{ARABIC-INDIC DIGIT ONE}", "boot=; reboot", f"boot={'a' * 65}", "uid=0 0"),
    ):
        assert parse_status(named_values([line]), 0) == DeviceStatus(False, None, None, None, "", None, None), line


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


def test_nobody_waits_who_is_told_to_stop(bench: Bench, body: Path) -> None:
    inject(body, Fault(FaultKind.OVERHEATED))
    assert "after waiting 0 s" in wait(bench, lambda _: pytest.fail("it was stopped"), stop=lambda: True)
