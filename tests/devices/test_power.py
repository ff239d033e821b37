"""The last step before a device is given up: its owner's command cuts its power, and real scripts bring it back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from ssh_server import alive
from waiting import until

from farm.base.config.settings import load_config
from farm.base.errors import ConfigError, DeviceError, DeviceTimeoutError
from farm.devices import discovery
from farm.devices.connect import require_named
from farm.devices.device import Device, PowerCommand
from farm.devices.power import cycle_power
from farm.devices.recovery import Step, recover
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

if TYPE_CHECKING:
    from conftest import Bench

SECONDS = 30.0


@pytest.fixture
def device(bench: Bench) -> Iterator[Device]:
    yield bench.devices[0]
    clear(bench.root / bench.devices[0].serial)
    assert recover(bench.devices[0]).ok


def script(folder: Path, text: str) -> str:
    path = folder / "hub power"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def with_power(device: Device, *argv: str, timeout_s: float = SECONDS) -> Device:
    return msgspec.structs.replace(device, power=PowerCommand(argv, timeout_s))


def test_a_command_revives_a_device_that_does_not_come_back_or_ends_the_ladder_with_what_it_said(
    bench: Bench, device: Device, tmp_path: Path
) -> None:
    root, calls, mended = bench.root / device.serial, tmp_path / "calls", tmp_path / "mended"
    revive = f"from pathlib import Path; from farm.devices.virtual.faults import clear; clear(Path({str(root)!r}))"
    hub = script(
        tmp_path,
        f'echo "hub\033[31m at port $1 ($FARM_DEVICE_SERIAL, $FARM_DEVICE_SOC)" | tee -a "{calls}"\n'
        f'[ -e "{mended}" ] || exit 3\nexec "{sys.executable}" -c "{revive}"',
    )
    inject(root, Fault(FaultKind.OFFLINE, seconds=600))
    recovery = recover(with_power(device, hub, "7"), timeout_s=0.3)
    assert recovery.problem.startswith("its power command ended with exit code 3: hub")
    assert "\033" not in recovery.problem
    mended.touch()
    recovery = recover(with_power(device, hub, "{serial}"), timeout_s=1.0)
    assert recovery.ok, recovery
    assert [step.step for step in recovery.steps] == [Step.RECONNECT, Step.RESTART, Step.REBOOT, Step.POWER]
    assert f"at port {device.serial} ({device.serial}, SM8650)" in recovery.steps[-1].output
    # A device that answers keeps its power.
    inject(root, Fault(FaultKind.WRONG_SOC, text="SM8750"))
    assert not recover(with_power(device, hub, "{serial}"), timeout_s=0.2).ok
    assert len(calls.read_text().splitlines()) == 2


def test_a_command_has_a_time_limit_and_its_output_a_bound(tmp_path: Path, device: Device) -> None:
    endless = script(tmp_path, f"sleep 600 & echo $! >'{tmp_path}/pid'; exec yes on and on")
    began = time.monotonic()
    with pytest.raises(DeviceTimeoutError, match="did not end in 1 s") as caught:
        cycle_power(device, PowerCommand((endless,), 1.0))
    assert time.monotonic() - began < 10
    assert len(str(caught.value)) < 5000
    # The command's whole process group ends with it.
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not alive(pid), "the end of what it started")
    left = script(tmp_path, "sleep 600 & echo done")
    assert cycle_power(device, PowerCommand((left,), SECONDS)).strip() == "done", "what stays behind is not waited for"


def test_no_shell_reads_what_a_device_is_called(tmp_path: Path, device: Device) -> None:
    hostile = msgspec.structs.replace(device, serial=f"$(touch {tmp_path}/pwned); x")
    show = script(tmp_path, 'printf "%s|" "$@"')
    assert cycle_power(hostile, PowerCommand((show, "-s", "{serial}"), SECONDS)) == f"-s|{hostile.serial}|"
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(DeviceError, match="could take it for an option"):
        cycle_power(msgspec.structs.replace(device, serial="--all"), PowerCommand((show, "{serial}"), SECONDS))
    with pytest.raises(DeviceError, match="power command /nowhere/hub cannot be started: No such file"):
        cycle_power(device, PowerCommand(("/nowhere/hub",), SECONDS))


def test_farm_toml_names_the_command_of_a_device(bench: Bench, tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    config.write_text(
        '[[device]]\nserial = "virtual-SM8650-0"\npower = ["./hub", "-p", "3"]\npower_timeout_s = 20\n'
        '[[device]]\nserial = "virtual-SM8750-0"\npower = ["uhubctl", "-a", "${HOME}{serial}"]\n'
    )
    loaded = load_config(config)
    found = [discovery._Found(one) for one in bench.devices]
    named = [discovery._described(one, loaded.devices) for one in found]
    assert [one.power for one in named if isinstance(one, Device)] == [
        PowerCommand((str(tmp_path / "hub"), "-p", "3"), 20.0),
        PowerCommand(("uhubctl", "-a", "${HOME}{serial}"), 60.0),
    ]
    for text, output in (
        ('[[device]]\nlocal = true\npower = ["x"]\n', "device[0].power: this machine cannot cut its own power"),
        (
            '[[device]]\nserial = "A"\npower = ["x", "{serail}"]\n',
            "device[0].power: unknown placeholder '{serail}': did you mean '{serial}'?",
        ),
        ('[[device]]\nserial = "A"\npower = ["x", ""]\n', "device[0].power: expected a program and its arguments"),
        ('[[device]]\nserial = "A"\npower = ["x"]\npower_timeout_s = 0\n', "power_timeout_s: is 0, expected 1 to 600"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(config)
        assert output in str(caught.value)


def test_a_command_that_is_not_there_is_refused_before_it_is_needed(tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    for program in ("./hub", "no-such-program"):
        config.write_text(f'[[device]]\nserial = "A"\npower = ["{program}", "3"]\n')
        with pytest.raises(ConfigError, match=r"device\[0\]\.power: there is no program .*(/hub|no-such-program)"):
            require_named(load_config(config))
    script(tmp_path, "")
    config.write_text('[[device]]\nserial = "A"\npower = ["./hub power"]\n')
    require_named(load_config(config))
