"""Power by Qualcomm's debug boards: the sequence on pytactl's simulated board, and refusals without a board."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytactl
import pytest
from pytactl import debugboard

from farm.base.config.devices import TAC_MODULE
from farm.base.config.settings import load_config
from farm.base.errors import ConfigError, DeviceError
from farm.devices import tac_power
from farm.devices.connect import require_named
from farm.devices.device import AdbAddress, Device, PowerCommand
from farm.devices.power import cycle_power
from farm.devices.tac_power import NoBoardError, cycle, require_board

DEVICE = Device("R5CT1", "SM8650", "hardware", "b", AdbAddress(5037), "Phone", serialno="R5CT1")
FTDI = Path(pytactl.PACKAGE_TAC_CONFIG_PATH) / pytactl.BUNDLED_DEFAULT_CONFIG_FILENAME


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let pytactl see boards of these serials on its serial ports."""

    def connect(*serials: str) -> None:
        boards = [{"type": "FTDI", "serial": one, "vid": 0x403, "pid": 0x6011} for one in serials]
        monkeypatch.setattr(debugboard.Board, "list_boards", classmethod(lambda _: boards))

    return connect


def simulated(switched: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return pytactl's simulated board of its FTDI configuration; `switched` gets the pins in order."""
    monkeypatch.setattr(debugboard, "sleep", lambda _: None)
    board = debugboard.Board.create_from_config(str(FTDI))
    for command in board.commands:
        monkeypatch.setattr(board, command, lambda value, command=command: switched.append((command, value)))
    return board


def test_the_power_is_cut_and_comes_back_on_the_simulated_board(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[tuple[str, int]] = []
    cycle(simulated(switched, monkeypatch), "123456")
    # 1 disconnects battery and USB; the power key is pressed and released at the end.
    assert switched.index(("battery", 1)) < switched.index(("battery", 0))
    assert switched.index(("usb0", 1)) < switched.index(("usb0", 0))
    assert switched[-2:] == [("pkey", 1), ("pkey", 0)]


def test_the_command_switches_the_board_of_its_serial_and_a_check_switches_nothing(
    monkeypatch: pytest.MonkeyPatch, connected: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    switched: list[tuple[str, int]] = []
    opened: list[str] = []

    def create(_: type, serial: str, folder: str) -> Any:
        opened.append(serial)
        assert Path(folder, "devicelist.json").is_file()
        return simulated(switched, monkeypatch)

    monkeypatch.setattr(debugboard.Board, "create_board", classmethod(create))
    connected("TAC1", "TAC2")
    monkeypatch.setattr(sys, "argv", ["tac_power", "TAC2", "--check"])
    assert (tac_power.main(), opened, switched) == (0, [], [])
    monkeypatch.setattr(sys, "argv", ["tac_power", "TAC2"])
    assert (tac_power.main(), opened) == (0, ["TAC2"])
    assert ("battery", 0) in switched
    monkeypatch.setattr(sys, "argv", ["tac_power", "TAC3"])
    assert tac_power.main() == 1
    assert "there is no debug board TAC3, connected are TAC1, TAC2" in capsys.readouterr().err
    monkeypatch.setattr(debugboard.Board, "create_board", classmethod(lambda *_: None))
    monkeypatch.setattr(sys, "argv", ["tac_power", "TAC1"])
    assert tac_power.main() == 1
    assert "does not know the kind of the debug board TAC1" in capsys.readouterr().err


def test_a_board_that_does_not_switch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    board = simulated([], monkeypatch)

    def fail() -> None:
        raise OSError("[Errno 19] no such\ndevice")

    monkeypatch.setattr(board, "powerOn", fail)
    with pytest.raises(NoBoardError, match=r"the debug board T1 does not switch: \[Errno 19\] no such device: see"):
        cycle(board, "T1")
    monkeypatch.setattr(board, "powerOn", None)
    with pytest.raises(NoBoardError, match="has no powerOn"):
        cycle(board, "T1")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytactl", None)
    with pytest.raises(NoBoardError, match=r"pip install 'snapdragon-farm\[tac\]'"):
        require_board("T1")


def test_farm_toml_names_a_board_and_without_it_the_run_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    config.write_text('[[device]]\nserial = "R5CT1"\npower = "tac:NOT-HERE-1"\npower_timeout_s = 30\n')
    (device,) = load_config(config).devices
    assert device.power == (sys.executable, "-P", "-m", TAC_MODULE, "NOT-HERE-1")
    output = r"device\[0\]\.power: there is no debug board NOT-HERE-1, no debug board is connected: connect it"
    with pytest.raises(ConfigError, match=output):
        require_named(load_config(config))
    # The recovery ladder gets the same reason.
    with pytest.raises(DeviceError, match="its power command ended with exit code 1: .*there is no debug board"):
        cycle_power(DEVICE, PowerCommand(device.power, 60.0))


def test_another_text_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    for power in ("tac:", "tac:-x", "hub 3", "tac:a b", "TAC:1"):
        config.write_text(f'[[device]]\nserial = "R5CT1"\npower = "{power}"\n')
        with pytest.raises(ConfigError, match=r'power: .*expected "tac:SERIAL" of a debug board, or a list'):
            load_config(config)
