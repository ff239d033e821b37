from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
from processors import of_an_arm

from farm.devices.adb.host import parse_listing
from farm.devices.connect import from_plain
from farm.devices.device import AdbAddress, Device
from farm.devices.discovery import scan
from farm.devices.identity import identify
from farm.errors import DeviceError, InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Bench


def test_discover_tells_who_is_there(bench: Bench) -> None:
    found = list(scan(bench.server.port).devices)
    assert found == sorted(bench.devices, key=lambda device: device.serial)
    assert [(d.serial, d.soc, d.kind, d.address.port) for d in found] == [
        ("virtual-SM8650-0", "SM8650", "virtual", bench.server.port),
        ("virtual-SM8750-0", "SM8750", "virtual", bench.server.port),
    ]
    assert all("virtual" in d.build and d.product.startswith("Virtual ") for d in found)
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Device], dec_hook=from_plain) == found


@pytest.fixture
def properties(bench: Bench) -> Iterator[Path]:
    path = bench.root / "virtual-SM8750-0/system/build.prop"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_what_a_device_says_is_bounded_and_cleaned(bench: Bench, properties: Path) -> None:
    properties.write_bytes(
        b"ro.soc.model=sm8750-ab\n"
        b"ro.build.fingerprint=\x1b[31mred\x07\xff\xe2\x80\xae" + b"x" * 5000 + b"\nro.product.model=<script>\n"
    )
    with of_an_arm(bench.root / "virtual-SM8750-0/system/bin"):
        device = identify("virtual-SM8750-0", AdbAddress(bench.server.port))
    assert device.soc == "SM8750"
    assert device.kind == "hardware"
    assert len(device.build) == 200
    assert device.build.isprintable()
    assert device.product == "<script>"


@pytest.mark.parametrize("said", [b"", b"ro.soc.model=\n", b"ro.soc.model=../../etc/passwd\n", b"ro.soc.model=A B\n"])
def test_a_device_that_names_no_soc_cannot_be_used(bench: Bench, properties: Path, said: bytes) -> None:
    properties.write_bytes(said)
    found = scan(bench.server.port)
    assert [device.serial for device in found.devices] == ["virtual-SM8650-0"]
    assert [(one.serial, one.state) for one in found.unusable] == [("virtual-SM8750-0", "device")]
    assert "does not say which SoC" in found.unusable[0].reason


def test_an_endless_answer_is_an_error(bench: Bench, properties: Path) -> None:
    properties.write_bytes(b"ro.soc.model=" + b"x" * 100_000 + b"\n")
    with pytest.raises(DeviceError, match="more than"):
        identify("virtual-SM8750-0", AdbAddress(bench.server.port))


def test_adbs_listing() -> None:
    listing = (
        "R5CT10ABCDE            device usb:1-1 product:kalama model:X device:y transport_id:1\n"
        "0a388e93               unauthorized usb:1-2 transport_id:2\n"
        "192.168.1.7:5555       offline product:z transport_id:3\n"
        "????????????           no permissions (user in plugdev group; are your udev rules wrong?); see [http://a]\n"
        "127.0.0.1:40001        device product:virtual-SM8650-0 model:V device:v transport_id:4\n"
        "127.0.0.1:40002        device product:virtual-$(reboot) model:V device:v transport_id:5\n"
    )
    assert parse_listing(listing) == [
        ("R5CT10ABCDE", "device", "R5CT10ABCDE"),
        ("0a388e93", "unauthorized", "0a388e93"),
        ("192.168.1.7:5555", "offline", "192.168.1.7:5555"),
        ("????????????", "no permissions", "????????????"),
        ("virtual-SM8650-0", "device", "127.0.0.1:40001"),
        ("127.0.0.1:40002", "device", "127.0.0.1:40002"),
    ]


def test_no_server_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(InfraError, match="no adb server listens"):
            scan(taken.getsockname()[1])
