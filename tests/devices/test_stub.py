"""A stub of a device takes every path that a real one takes: identity, root, files, the recovery ladder."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from farm.base.errors import ConfigError, DeviceError, DeviceGoneError, UsageError
from farm.devices.connect import from_plain, open_transport
from farm.devices.device import Device
from farm.devices.identity import identify
from farm.devices.recovery import Step, recover
from farm.devices.stub.transport import StubAddress
from farm.devices.transport import Link

ANSWER = "ro.soc.model=SM8650\nro.serialno=R5CT\nkernel=6.1\nstorage=ok\n"


@pytest.fixture
def device(tmp_path: Path) -> Device:
    answers = tmp_path / "stub/answers"
    answers.mkdir(parents=True)
    (answers / "sh").write_text(ANSWER)
    (answers / "id").write_text("2000\n")
    return Device(
        "R5CT", "SM8650", "hardware", "6.1", StubAddress(str(tmp_path / "stub")), "", "linux", "", "", (), "R5CT"
    )


def asked(device: Device) -> list[str]:
    assert isinstance(device.address, StubAddress)
    return Path(device.address.folder, "asked").read_text().splitlines()


def test_it_is_identified_and_goes_through_json(device: Device) -> None:
    assert identify(device.serial, device.address) == device
    data = msgspec.json.encode(device)
    assert msgspec.json.decode(data, type=Device, dec_hook=from_plain) == device
    unknown = data.replace(b'"type":"stub"', b'"type":"pigeon"')
    with pytest.raises(ConfigError, match="there is no transport 'pigeon': known are adb, ssh, local, stub"):
        msgspec.json.decode(unknown, type=Device, dec_hook=from_plain)


def test_it_becomes_root_once(device: Device) -> None:
    transport = open_transport(device)
    assert transport.user_id() == 2000
    assert transport.root_refusal() == ""
    assert transport.ensure_root() is True
    assert transport.ensure_root() is False
    assert asked(device) == ["id", "id", "root", "id"]


def test_files_come_back_as_they_were_pushed(device: Device, tmp_path: Path) -> None:
    transport = open_transport(device)
    path, link = transport.storage / "a" / "file", transport.storage / "link"
    transport.push({path: b"12345", link: Link(path.relative_to(transport.storage))})
    transport.pull({link: tmp_path / "back"}, max_bytes=5)
    assert (tmp_path / "back").read_bytes() == b"12345"
    with pytest.raises(DeviceError, match="more than the 4 bytes"):
        transport.pull({path: tmp_path / "back"}, max_bytes=4)
    assert transport.run(["uname"], timeout_s=1).code == 127
    with pytest.raises(UsageError, match="no program that opens a shell"):
        transport.shell_argv([], terminal=False)


def test_the_ladder_takes_every_step_of_the_transport_and_gives_up(device: Device, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "stub")
    recovery = recover(device, timeout_s=0.3)
    # No power switch is configured for it.
    assert [step.step for step in recovery.steps] == [step for step in Step if step is not Step.POWER]
    assert recovery.problem == f"it cannot be rebooted: there is no folder {tmp_path / 'stub'}"
    with pytest.raises(DeviceGoneError):
        open_transport(device).run(["id"], timeout_s=1)


def test_the_ladder_does_not_reboot_another_device(device: Device, tmp_path: Path) -> None:
    (tmp_path / "stub/answers/sh").write_text(ANSWER.replace("R5CT", "OTHER"))
    recovery = recover(device, timeout_s=0.3)
    assert "another device answers in its place: OTHER" in recovery.problem
    steps = [what for what in asked(device) if what in ("reconnect", "restart", "reboot")]
    assert steps == ["reconnect", "restart"]
