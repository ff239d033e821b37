"""Discovery of attached devices: names of adb, joined addresses, hostile properties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processors import of_an_arm

from farm.base.config.settings import load_config
from farm.base.errors import DeviceError
from farm.base.processes import Supervisor
from farm.devices.adb.host import parse_listing
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device
from farm.devices.discovery import _joined, scan, scan_all
from farm.devices.identity import identify

if TYPE_CHECKING:
    from conftest import Bench


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
    assert (device.soc, device.soc_reported) == ("SM8750", "sm8750-ab")
    assert device.kind == "hardware"
    assert len(device.build) == 200
    assert device.build.isprintable()
    assert device.product == "<script>"


@pytest.mark.parametrize("message", [b"", b"ro.soc.model=../../etc/passwd\n"])
def test_a_device_that_names_no_soc_cannot_be_used(bench: Bench, properties: Path, message: bytes) -> None:
    properties.write_bytes(message)
    found = scan(bench.server.port)
    assert [device.serial for device in found.devices] == ["virtual-SM8650-0"]
    assert [(one.serial, one.state) for one in found.unusable] == [("virtual-SM8750-0", "device")]
    assert "does not report its SoC" in found.unusable[0].reason


def test_an_endless_answer_is_an_error(bench: Bench, properties: Path) -> None:
    properties.write_bytes(b"ro.soc.model=" + b"x" * 100_000 + b"\n")
    with pytest.raises(DeviceError, match="more than"):
        identify("virtual-SM8750-0", AdbAddress(bench.server.port))


TLS = "adb-2233fd19-9mU6UL (2)._adb-tls-connect._tcp"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("R5CT10ABCDE            device usb:1-1 product:kalama model:X transport_id:1", ("R5CT10ABCDE", "device")),
        ("0a388e93               unauthorized usb:1-2 transport_id:2", ("0a388e93", "unauthorized")),
        ("R5CT                   warming usb:1-1 transport_id:7", ("R5CT", "warming")),
        ("????????????           no permissions (user in plugdev group); see [http://a]",
         ("????????????", "no permissions")),
        ("127.0.0.1:40001 device product:virtual-SM8650-0 transport_id:4", ("virtual-SM8650-0", "device")),
        ("127.0.0.1:40002 device product:virtual-$(reboot) transport_id:5", ("127.0.0.1:40002", "device")),
        # The text before the state is the name.
        (f"{TLS} device product:kalama model:X device:y transport_id:1", (TLS, "device")),
        (f"{TLS} offline transport_id:1", (TLS, "offline")),
        ("offline box (2)    device usb:1-1 product:a model:b transport_id:4", ("offline box (2)", "device")),
        ("two  blanks  detached transport_id:5", ("two  blanks", "detached")),
    ],
)  # fmt: skip
def test_a_line_of_adbs_listing_names_a_device_and_its_state(line: str, found: tuple[str, str]) -> None:
    [one] = parse_listing(f"{line}\n")
    assert (one[0], one.state, one.adb_name) == (*found, found[0] if "virtual-S" not in line else "127.0.0.1:40001")


def phone(name: str, boot_id: str, attached_at: str = "") -> Device:
    address = AdbAddress(5037, attached_at=attached_at, name=name)
    return Device("2233fd19", "SM8650", "hardware", "b", address, "p", serialno="2233fd19", boot_id=boot_id)


@pytest.mark.parametrize("other", [phone(TLS, "a"), phone("10.0.0.7:5555", "a", "10.0.0.7:5555")])
def test_the_cable_comes_first_and_the_other_address_is_kept(other: Device) -> None:
    cable = phone("2233fd19", "a")
    for first, second in ((cable, other), (other, cable)):
        one = _joined(first, second)
        assert one is not None
        assert isinstance(one.address, AdbAddress)
        assert (one.id, one.address.name) == ("2233fd19", "2233fd19")
        assert one.address.also == (other.address,)
        assert {"2233fd19", other.address.name} <= one.known_as  # type: ignore[attr-defined]


@pytest.mark.parametrize("boot_id", ["b", ""])
def test_two_boards_with_one_serial_are_not_one_device(boot_id: str) -> None:
    assert _joined(phone("2233fd19", boot_id and "a"), phone("10.0.0.7:5555", boot_id, "10.0.0.7:5555")) is None


def test_a_device_under_two_addresses_is_one_and_is_reached_by_the_other(bench: Bench) -> None:
    near = bench.server.network_address("virtual-SM8650-0")
    second = near.replace("127.0.0.1", "localhost")
    bench.server.query(f"host:connect:{second}")
    bench.server.wait_for(second)
    try:
        with pytest.MonkeyPatch.context() as patch, Supervisor() as supervisor:
            patch.setenv("ANDROID_ADB_SERVER_PORT", str(bench.server.port))
            (bench.root / "none.toml").write_text("")
            scan = scan_all(load_config(bench.root / "none.toml"), supervisor)
        assert scan.unusable == ()
        found = scan.devices
        assert [one.serial for one in found] == ["virtual-SM8650-0", "virtual-SM8750-0"]
        device = found[0]
        assert {near, second} <= device.known_as
        bench.server.query(f"host:disconnect:{device.address.name}")  # type: ignore[attr-defined]
        with contextlib.closing(open_transport(device)) as transport:
            assert transport.run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
    finally:
        bench.server.query(f"host:disconnect:{second}")
        bench.server.query(f"host:connect:{near}")
        bench.server.wait_for(near)


@pytest.mark.parametrize("message", ["2233fd19", "0123456789ABCDEF"])
def test_a_phone_is_known_by_its_serial_and_not_by_adbs_name(bench: Bench, properties: Path, message: str) -> None:
    properties.write_text(f"ro.soc.model=SM8750\nro.serialno={message}\n")
    with of_an_arm(bench.root / "virtual-SM8750-0/system/bin"):
        near = bench.server.network_address("virtual-SM8750-0")
        device = identify(near, AdbAddress(bench.server.port, attached_at=near, name=near))
    assert device.serial == ("2233fd19" if message == "2233fd19" else near)
