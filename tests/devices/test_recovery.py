"""Recovery of lost devices through a real adb server, step by step, or a failure with a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ordinary_server import kill_server, ordinary_adb_server

from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import AdbServer, ordinary_server, start_adb_server
from farm.devices.connect import open_transport
from farm.devices.device import Device, LocalAddress
from farm.devices.recovery import PRINT_BOOT, Step, StepResult, recover
from farm.devices.status import read_status
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

WITHOUT_POWER = (Step.RECONNECT, Step.RESTART, Step.REBOOT)


class Patient(NamedTuple):
    device: Device
    root: Path
    server: AdbServer
    address: str
    """Serial of the device in adb."""

    def boot_id(self) -> bytes:
        transport = open_transport(self.device)
        try:
            return transport.run(["sh", "-c", PRINT_BOOT], timeout_s=10).stdout
        finally:
            transport.close()


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    folder = tmp_path_factory.mktemp("patient")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, ["SM8650"], folder)
        address = AdbHost(server.port).network_address(device.serial)
        yield Patient(device, folder / device.serial, server, address)


@pytest.fixture
def patient(booted: Patient) -> Iterator[Patient]:
    yield booted
    clear(booted.root)
    assert recover(booted.device).ok


def words(steps: tuple[StepResult, ...]) -> list[tuple[Step, bool]]:
    return [(step.step, not step.problem) for step in steps]


def test_a_device_that_was_away_is_connected_again(patient: Patient) -> None:
    before = patient.boot_id()
    assert read_status(open_transport(patient.device), os="android").boot_id == before.decode().strip()
    inject(patient.root, Fault(FaultKind.OFFLINE, seconds=1))
    recovery = recover(patient.device)
    assert words(recovery.steps) == [(Step.RECONNECT, True)], recovery
    assert patient.boot_id() == before


def test_one_that_adb_has_forgotten_is_found_by_its_address(patient: Patient) -> None:
    host, logged = AdbHost(patient.server.port), []
    host.query(f"host:disconnect:{patient.address}")
    assert host.network_address(patient.device.serial) == ""
    recovery = recover(patient.device, log=logged.append)
    assert words(recovery.steps) == [(Step.RECONNECT, True)], recovery
    assert logged == list(recovery.steps)


def test_one_that_answers_and_does_not_work_is_rebooted(patient: Patient) -> None:
    before = patient.boot_id()

    def find_problem() -> str:
        return "its health check fails" if patient.boot_id() == before else ""

    recovery = recover(patient.device, find_problem=find_problem)
    assert recovery.ok
    assert [(step.step, step.problem) for step in recovery.steps] == [
        (Step.RECONNECT, "its health check fails"), (Step.RESTART, "its health check fails"), (Step.REBOOT, ""),
    ]  # fmt: skip


def test_one_that_does_not_come_back_is_given_up_after_the_last_step(patient: Patient) -> None:
    inject(patient.root, Fault(FaultKind.OFFLINE, seconds=60))
    recovery = recover(patient.device, timeout_s=0.5)
    assert words(recovery.steps) == [(step, False) for step in WITHOUT_POWER]
    assert "it cannot be rebooted" in recovery.problem
    recovery = recover(patient.device, max_step=Step.RECONNECT, timeout_s=0.5)
    assert words(recovery.steps) == [(Step.RECONNECT, False)]
    assert recovery.problem


def test_another_device_in_its_place_is_not_used_and_not_rebooted(patient: Patient) -> None:
    inject(patient.root, Fault(FaultKind.WRONG_SOC, text="SM8750"))
    before = patient.boot_id()
    recovery = recover(patient.device, timeout_s=0.5)
    assert words(recovery.steps) == [(Step.RECONNECT, False), (Step.RESTART, False)]
    assert recovery.problem == (
        "another device answers in its place: virtual-SM8650-0 (virtual SM8750), "
        "it was virtual-SM8650-0 (virtual SM8650)"
    )
    assert patient.boot_id() == before


@pytest.mark.whole
def test_another_phone_of_the_same_kind_at_its_address_is_not_rebooted(patient: Patient) -> None:
    """The case of a new DHCP lease: adb's name is the same, only the device's own serial differs."""
    properties = patient.root / "system/build.prop"
    before, text = patient.boot_id(), properties.read_text()
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
    assert patient.boot_id() == before


def test_it_can_be_stopped(patient: Patient) -> None:
    assert recover(patient.device, stop=lambda: True).steps == ()
    inject(patient.root, Fault(FaultKind.OFFLINE, seconds=60))
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


def test_what_no_step_mends_ends_the_ladder_before_a_reboot(patient: Patient) -> None:
    before = patient.boot_id()
    recovery = recover(patient.device, find_problem=lambda: "its storage is full", is_unrecoverable=lambda: True)
    assert words(recovery.steps) == [(Step.RECONNECT, False)]
    assert recovery.problem == "its storage is full"
    assert patient.boot_id() == before


def test_this_machine_is_not_rebooted(tmp_path: Path) -> None:
    device = Device("here", "SM8650", "hardware", "", LocalAddress(str(tmp_path)), "", "linux")
    recovery = recover(device, find_problem=lambda: "its health check fails", timeout_s=0.1)
    assert not recovery.ok
    if len(recovery.steps) == len(Step):
        assert recovery.problem == "it cannot be rebooted: it is this machine"
