"""Health of devices, and their recovery up to a power cycle."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytactl
import pytest
from attached import Rack, rack
from made import config
from ordinary_server import kill_server, ordinary_adb_server
from pytactl import debugboard
from waiting import alive, until

from farm.base.config.devices import TAC_MODULE
from farm.base.errors import ConfigError, DeviceError, DeviceTimeoutError
from farm.base.processes import Supervisor
from farm.devices import discovery, tac_power
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import ordinary_server
from farm.devices.connect import open_transport, require_named
from farm.devices.device import (
    FAILURES_IN_A_ROW,
    NOT_DEVICE_CAUSES,
    OPEN_CAUSES,
    AdbAddress,
    Device,
    Event,
    Health,
    HealthMark,
    LocalAddress,
    PowerCommand,
    next_health,
)
from farm.devices.facts import read_status
from farm.devices.recovery import PRINT_BOOT, Step, StepResult, cycle_power, recover
from farm.devices.tac_power import NoBoardError, cycle, require_board
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

# Transitions of a device's health: to suspect, into quarantine, and out of it.


DONE, OK = HealthMark(Event.JOB_DONE), HealthMark(Event.CHECK_PASSED)
GONE = HealthMark(Event.INFRA, "gone", "device offline")
CRASH = HealthMark(Event.INFRA, "crash")
CHECK_FAILED = HealthMark(Event.CHECK_FAILED, "connection", "no answer")
RECOVERED, GAVE_UP = HealthMark(Event.RECOVERED), HealthMark(Event.GAVE_UP, "", "it does not come back")
RELEASED, OUTVOTED = HealthMark(Event.RELEASED), HealthMark(Event.OUTVOTED, "hang", "s/c passed on b")
EVERYTHING = (DONE, OK, GONE, CRASH, CHECK_FAILED, RECOVERED, GAVE_UP, RELEASED, OUTVOTED)


def after(*marks: HealthMark) -> tuple[Health, str]:
    """Live through all of it, from a healthy device on."""
    state, reason = Health.HEALTHY, ""
    for count, mark in enumerate(marks):
        state, new = next_health(state, marks[:count], mark)
        reason = new or (reason if state is not Health.HEALTHY else "")
    return state, reason


HEALTHY, SUSPECT, QUARANTINED = Health.HEALTHY, Health.SUSPECT, Health.QUARANTINED
NEARLY = (GONE, OK) * (FAILURES_IN_A_ROW - 1)


@pytest.mark.parametrize(
    ("marks", "state", "reason"),
    [
        ((GONE,), SUSPECT, "a job did not come to its end: (gone) device offline"),
        ((GONE, OK), HEALTHY, ""),
        # Failures in a row, also with health checks that pass in between.
        ((*NEARLY, GONE), QUARANTINED,
         f"{FAILURES_IN_A_ROW} failures in a row, no job finished in between; the last: (gone) device offline"),
        ((*NEARLY, DONE, GONE), SUSPECT, None),
        *(((HealthMark(Event.INFRA, cause),) * 9, HEALTHY, "") for cause in sorted(NOT_DEVICE_CAUSES)),
        *(((GONE, GONE, HealthMark(Event.INFRA, cause)), SUSPECT, None) for cause in sorted(NOT_DEVICE_CAUSES)),
        # Firmware and a DSP that restarts count against the device, crashes of jobs do not.
        *(((HealthMark(Event.INFRA, one),) * FAILURES_IN_A_ROW, QUARANTINED, None) for one in ("device", "session")),
        *(((HealthMark(Event.INFRA, cause, "s/c"),) * 9, SUSPECT,
           f"a job that failed here is tried on another device: ({cause}) s/c") for cause in sorted(OPEN_CAUSES)),
        ((OUTVOTED,), SUSPECT, "other devices did what failed here: (hang) s/c passed on b"),
        ((OUTVOTED, OK) * FAILURES_IN_A_ROW, QUARANTINED, None),
        # A health check that fails is quarantine only after recovery was tried.
        ((CHECK_FAILED,), SUSPECT, "its health check fails: (connection) no answer"),
        ((CHECK_FAILED, CHECK_FAILED), SUSPECT, None),
        ((CHECK_FAILED, RECOVERED, CHECK_FAILED), QUARANTINED,
         "its health check fails, also after recovery: (connection) no answer"),
        ((CHECK_FAILED, RECOVERED, OK, DONE, CHECK_FAILED), SUSPECT, None),
        ((GONE, GAVE_UP), QUARANTINED, "it could not be brought back: it does not come back"),
    ],
)  # fmt: skip
def test_marks_lead_to_a_state_with_its_reason(
    marks: tuple[HealthMark, ...], state: Health, reason: str | None
) -> None:
    found = after(*marks)
    assert found[0] is state
    assert reason is None or found[1] == reason


@pytest.mark.parametrize(
    ("cause", "reason"), [("space", "its storage is full"), ("runtime", "its runtime does not fit")]
)
def test_what_the_lab_has_to_mend_asks_for_a_health_check_and_never_for_quarantine(cause: str, reason: str) -> None:
    failed, check, gave_up = (
        HealthMark(event, cause, "no room") for event in (Event.INFRA, Event.CHECK_FAILED, Event.GAVE_UP)
    )
    assert after(*[failed] * (FAILURES_IN_A_ROW + 1)) == (SUSPECT, f"{reason}: ({cause}) no room")
    assert after(check, RECOVERED, check, gave_up)[0] is SUSPECT
    assert after(check, gave_up, OK)[0] is HEALTHY
    assert after(*[GONE] * (FAILURES_IN_A_ROW - 1), failed)[0] is SUSPECT, "it brings none nearer to it"


def test_only_a_person_ends_a_quarantine_and_a_health_check_has_to_agree() -> None:
    for mark in EVERYTHING:
        if mark is not RELEASED:
            assert after(GONE, GAVE_UP, mark)[0] is Health.QUARANTINED, mark
    assert after(GONE, GAVE_UP, RELEASED)[0] is Health.SUSPECT
    assert after(*[GONE] * FAILURES_IN_A_ROW, RELEASED, OK)[0] is Health.HEALTHY
    assert after(*[GONE] * FAILURES_IN_A_ROW, RELEASED, GONE)[0] is Health.SUSPECT, "it begins anew"


def test_whatever_happens_a_state_that_is_not_healthy_has_a_reason_and_jobs_alone_quarantine_nothing() -> None:
    for marks in product(EVERYTHING, repeat=4):
        state, reason = after(*marks)
        assert bool(reason) == (state is not Health.HEALTHY), marks
        if state is Health.QUARANTINED:
            assert any(mark in (GONE, GAVE_UP, CHECK_FAILED, OUTVOTED) for mark in marks), marks


@pytest.mark.parametrize("event", [Event.CHECK_FAILED, Event.GAVE_UP])
@pytest.mark.parametrize("state", [Health.HEALTHY, Health.SUSPECT])
def test_what_nobody_could_reach_for_want_of_its_adb_server_stays_as_it_was(state: Health, event: Event) -> None:
    climbed = [HealthMark(Event.RECOVERED)]
    assert next_health(state, climbed, HealthMark(event, "adb_server", "no adb server listens")) == (state, "")
    assert next_health(state, climbed, HealthMark(event, "", "it does not answer"))[0] is Health.QUARANTINED


# Recovery of lost devices through a real adb server, step by step, or a failure with a reason.


WITHOUT_POWER = (Step.RECONNECT, Step.RESTART, Step.REBOOT)


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with rack(tmp_path_factory.mktemp("patient"), "SM8650") as one:
        yield one


@pytest.fixture
def patient(booted: Rack) -> Iterator[Rack]:
    yield booted
    clear(booted.folder())
    assert recover(booted.device).ok


def boot_id(patient: Rack) -> bytes:
    with contextlib.closing(patient.transport()) as transport:
        return transport.run(["sh", "-c", PRINT_BOOT], timeout_s=10).stdout


def words(steps: tuple[StepResult, ...]) -> list[tuple[Step, bool]]:
    return [(step.step, not step.problem) for step in steps]


def test_a_device_that_was_away_is_connected_again(patient: Rack) -> None:
    before = boot_id(patient)
    assert read_status(open_transport(patient.device), os="android").boot_id == before.decode().strip()
    inject(patient.folder(), Fault(FaultKind.OFFLINE, seconds=1))
    recovery = recover(patient.device)
    assert words(recovery.steps) == [(Step.RECONNECT, True)], recovery
    assert boot_id(patient) == before


def test_one_that_adb_has_forgotten_is_found_by_its_address(patient: Rack) -> None:
    host, logged = AdbHost(patient.server.port), []
    host.query(f"host:disconnect:{host.network_address(patient.device.serial)}")
    assert host.network_address(patient.device.serial) == ""
    recovery = recover(patient.device, log=logged.append)
    assert words(recovery.steps) == [(Step.RECONNECT, True)], recovery
    assert logged == list(recovery.steps)


def test_one_that_answers_and_does_not_work_is_rebooted(patient: Rack) -> None:
    before = boot_id(patient)

    def find_problem() -> str:
        return "its health check fails" if boot_id(patient) == before else ""

    recovery = recover(patient.device, find_problem=find_problem)
    assert recovery.ok
    assert [(step.step, step.problem) for step in recovery.steps] == [
        (Step.RECONNECT, "its health check fails"), (Step.RESTART, "its health check fails"), (Step.REBOOT, ""),
    ]  # fmt: skip


def test_one_that_does_not_come_back_is_given_up_after_the_last_step(patient: Rack) -> None:
    inject(patient.folder(), Fault(FaultKind.OFFLINE, seconds=60))
    recovery = recover(patient.device, timeout_s=0.5)
    assert words(recovery.steps) == [(step, False) for step in WITHOUT_POWER]
    assert "it cannot be rebooted" in recovery.problem
    recovery = recover(patient.device, max_step=Step.RECONNECT, timeout_s=0.5)
    assert words(recovery.steps) == [(Step.RECONNECT, False)]
    assert recovery.problem


def test_another_device_in_its_place_is_not_used_and_not_rebooted(patient: Rack) -> None:
    inject(patient.folder(), Fault(FaultKind.WRONG_SOC, text="SM8750"))
    before = boot_id(patient)
    recovery = recover(patient.device, timeout_s=0.5)
    assert words(recovery.steps) == [(Step.RECONNECT, False), (Step.RESTART, False)]
    assert recovery.problem == (
        "another device answers in its place: virtual-SM8650-0 (virtual SM8750), "
        "it was virtual-SM8650-0 (virtual SM8650)"
    )
    assert boot_id(patient) == before


@pytest.mark.whole
def test_another_phone_of_the_same_kind_at_its_address_is_not_rebooted(patient: Rack) -> None:
    """The case of a new DHCP lease: adb's name is the same, only the device's own serial differs."""
    properties = patient.folder() / "system/build.prop"
    before, text = boot_id(patient), properties.read_text()
    asked: list[str] = []

    def find_problem() -> str:
        asked.append("health_check")
        if len(asked) == 6:
            # The latest possible moment: just before the reboot of the device.
            own = f"ro.serialno={patient.device.serial}\n"
            assert own in text
            properties.write_text(text.replace(own, "ro.serialno=R5CTOTHER\n"))
        return "its health check fails"

    try:
        recovery = recover(patient.device, find_problem=find_problem)
        assert words(recovery.steps) == [(step, False) for step in WITHOUT_POWER]
        assert recovery.problem == (
            "it cannot be rebooted: another device answers in its place: virtual-SM8650-0 (virtual SM8650, serial "
            "R5CTOTHER), it was virtual-SM8650-0 (virtual SM8650)"
        )
        again = recover(patient.device, timeout_s=0.5)
        assert words(again.steps) == [(Step.RECONNECT, False), (Step.RESTART, False)]
    finally:
        properties.write_text(text)
    assert boot_id(patient) == before


def test_it_can_be_stopped(patient: Rack) -> None:
    assert recover(patient.device, stop=lambda: True).steps == ()
    inject(patient.folder(), Fault(FaultKind.OFFLINE, seconds=60))
    answers = iter([False])
    recovery = recover(patient.device, stop=lambda: next(answers, True))
    assert words(recovery.steps) == [(Step.RECONNECT, False)]
    assert recovery.problem.startswith("stopped")


def test_a_device_is_back_as_soon_as_somebody_has_started_its_server_again(tmp_path: Path) -> None:
    with Supervisor() as supervisor, ordinary_adb_server(tmp_path) as server:
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        kill_server(server.port)
        lost = recover(device, timeout_s=0.5, max_step=Step.RECONNECT)
        assert "no adb server listens" in lost.problem
        timer = threading.Timer(0.5, ordinary_server, kwargs={"start": True})
        timer.start()
        recovery = recover(device)
        timer.join()
        assert words(recovery.steps) == [(Step.RECONNECT, True)], recovery


def test_what_no_step_mends_ends_the_ladder_before_a_reboot(patient: Rack) -> None:
    before = boot_id(patient)
    recovery = recover(patient.device, find_problem=lambda: "its storage is full", is_unrecoverable=lambda: True)
    assert words(recovery.steps) == [(Step.RECONNECT, False)]
    assert recovery.problem == "its storage is full"
    assert boot_id(patient) == before


def test_this_machine_is_not_rebooted(tmp_path: Path) -> None:
    device = Device("here", "SM8650", "hardware", "", LocalAddress(str(tmp_path)), "", "linux")
    recovery = recover(device, find_problem=lambda: "its health check fails", timeout_s=0.1)
    assert not recovery.ok
    if len(recovery.steps) == len(Step):
        assert recovery.problem == "it cannot be rebooted: it is this machine"


# The last step before a device is given up: its owner's command cuts its power, and real scripts bring it back.


SECONDS = 30.0


@pytest.fixture
def device(bench: Rack) -> Iterator[Device]:
    yield bench.devices[0]
    clear(bench.folder())
    assert recover(bench.devices[0]).ok


def script(folder: Path, text: str) -> str:
    path = folder / "hub power"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def with_power(device: Device, *argv: str, timeout_s: float = SECONDS) -> Device:
    return msgspec.structs.replace(device, power=PowerCommand(argv, timeout_s))


def test_a_command_revives_a_device_that_does_not_come_back_or_ends_the_ladder_with_what_it_said(
    bench: Rack, device: Device, tmp_path: Path
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


def test_farm_toml_names_the_command_of_a_device(bench: Rack, tmp_path: Path) -> None:
    loaded = config(
        tmp_path,
        '[[device]]\nserial = "virtual-SM8650-0"\npower = ["./hub", "-p", "3"]\npower_timeout_s = 20\n'
        '[[device]]\nserial = "virtual-SM8750-0"\npower = ["uhubctl", "-a", "${HOME}{serial}"]\n',
    )
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
        with pytest.raises(ConfigError) as caught:
            config(tmp_path, text)
        assert output in str(caught.value)


def test_a_command_that_is_not_there_is_refused_before_it_is_needed(tmp_path: Path) -> None:
    for program in ("./hub", "no-such-program"):
        unusable = config(tmp_path, f'[[device]]\nserial = "A"\npower = ["{program}", "3"]\n')
        with pytest.raises(ConfigError, match=r"device\[0\]\.power: there is no program .*(/hub|no-such-program)"):
            require_named(unusable)
    script(tmp_path, "")
    require_named(config(tmp_path, '[[device]]\nserial = "A"\npower = ["./hub power"]\n'))


# Power by Qualcomm's debug boards: the sequence on pytactl's simulated board, and refusals without a board.


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
    loaded = config(tmp_path, '[[device]]\nserial = "R5CT1"\npower = "tac:NOT-HERE-1"\npower_timeout_s = 30\n')
    (device,) = loaded.devices
    assert device.power == (sys.executable, "-P", "-m", TAC_MODULE, "NOT-HERE-1")
    output = r"device\[0\]\.power: there is no debug board NOT-HERE-1, no debug board is connected: connect it"
    with pytest.raises(ConfigError, match=output):
        require_named(loaded)
    # The recovery ladder gets the same reason.
    with pytest.raises(DeviceError, match="its power command ended with exit code 1: .*there is no debug board"):
        cycle_power(DEVICE, PowerCommand(device.power, 60.0))


def test_another_text_is_refused(tmp_path: Path) -> None:
    for power in ("tac:", "tac:-x", "hub 3", "tac:a b", "TAC:1"):
        with pytest.raises(ConfigError, match=r'power: .*expected "tac:SERIAL" of a debug board, or a list'):
            config(tmp_path, f'[[device]]\nserial = "R5CT1"\npower = "{power}"\n')
