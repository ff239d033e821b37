from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farm.devices.device import LocalAddress
from farm.devices.local.transport import LocalTransport
from farm.devices.status import DeviceStatus, parse_status, read_status

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
    assert parse_status(PHONE.splitlines(), 1_700_000_000_000) == DeviceStatus(
        root=False,
        battery_percent=87,
        temperature_c=31.2,
        free_bytes=62456780 * 1024,
        boot_id="6f1e2f0a-1111-4222-8333-444455556666",
        uptime_s=12345.67,
        clock_offset_ms=500,
    )


def test_a_board_without_a_battery_tells_its_hottest_sensor() -> None:
    status = parse_status(BOARD.splitlines(), 1_700_000_000_500)
    assert status == DeviceStatus(True, None, 51.2, 4096, "", 9.0, 0)
    invented = [*BOARD.splitlines(), "battery=  present: false", "battery=  level: 0", "battery=  temperature: 250"]
    assert parse_status(invented, 1_700_000_000_500) == status


@pytest.mark.parametrize(
    "line",
    [
        "battery=level: 4000",
        "battery=level: nan",
        "battery=level: -1",
        "battery=temperature: 99999",
        "battery=temperature: 1e9",
        "free=x x x 99999999999999999999 x x",
        "free=-",
        "uptime=inf",
        "uptime=-4",
        "time=9999999999999",
        "time=\N{ARABIC-INDIC DIGIT ONE}",
        "boot=; reboot",
        "boot=" + "a" * 65,
        "zone=274000",
        "zone=-273000",
        "uid=0 0",
    ],
)
def test_what_cannot_be_is_not_believed(line: str) -> None:
    assert parse_status([line], 0) == DeviceStatus(False, None, None, None, "", None, None)


def test_a_virtual_device_is_asked(bench: Bench) -> None:
    status = read_status(bench.transport(), os="android")
    assert not status.root
    assert status.battery_percent == 100
    assert status.temperature_c is not None
    assert status.free_bytes is not None
    assert status.free_bytes > 0
    assert status.boot_id
    assert status.boot_id == read_status(bench.transport(), os="android").boot_id
    assert status.boot_id != read_status(bench.transport(1), os="android").boot_id
    assert status.clock_offset_ms is not None
    assert abs(status.clock_offset_ms) < 60_000


def test_this_machine_is_asked(tmp_path: Path) -> None:
    status = read_status(LocalTransport("this", LocalAddress(str(tmp_path / "not there yet"))), os="linux")
    assert status.root == (os.geteuid() == 0)
    assert status.uptime_s is not None
    assert status.free_bytes is not None
