"""Temperatures of a device before, during and after a long program; errors of the thermometer fail no job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from farm.base.errors import LeaseLostError
from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.transport import Transport
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, fired, inject
from farm.dispatch.device_run import device_run as room
from farm.dispatch.device_run.device_run import Thermometer

SOON_S = 0.05


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Device, Transport, Path]]:
    folder = tmp_path_factory.mktemp("warm")
    with Supervisor() as supervisor:
        [device] = boot(supervisor, start_adb_server(supervisor, folder / "adb"), ["SM8650"], folder)
        transport = open_transport(device)
        yield device, transport, folder / device.serial
        transport.close()


def odd(answer: Callable[[], bytes]) -> Thermometer:
    """Return the thermometer of a device with given answers."""
    device: Any = SimpleNamespace(os="android")
    transport: Any = SimpleNamespace(
        serial="odd", storage="/data", run=lambda *_, **__: SimpleNamespace(stdout=answer(), stderr=b"", code=0)
    )
    return Thermometer(device, transport, SOON_S)


def watching() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "thermometer"]


def test_a_device_that_gets_warm_is_seen_to(phone: tuple[Device, Transport, Path]) -> None:
    device, transport, root = phone
    with Thermometer(device, transport, SOON_S) as thermometer:
        assert thermometer.readings == (25.0,), "before"
        inject(root, Fault(FaultKind.OVERHEATED, code=44, times=0))
        until(lambda: 44.0 in thermometer.readings)
        clear(root)
    assert thermometer.readings[-1] == 25.0, "and after"
    assert not watching()


def test_a_device_that_is_away_for_a_while_has_readings_before_and_after(phone: tuple[Device, Transport, Path]) -> None:
    device, transport, root = phone
    with Thermometer(device, transport, SOON_S) as thermometer:
        inject(root, Fault(FaultKind.OFFLINE, seconds=0.5))
        until(lambda: any(one["kind"] == FaultKind.OFFLINE for one in fired(root)))
        before = len(thermometer.readings)
        until(lambda: len(thermometer.readings) > before)
    assert set(thermometer.readings) == {25.0}
    assert not watching()


@pytest.mark.parametrize(
    "answer", [b"uid=0\nbattery=temperature: 99999\nzone=0\n", b"no word of it", LeaseLostError("")]
)
def test_a_device_without_a_temperature_or_whose_lease_is_lost_has_no_readings(answer: bytes | Exception) -> None:
    asked: list[int] = []

    def answer_again() -> bytes:
        asked.append(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with odd(answer_again) as thermometer:
        until(lambda: len(asked) > isinstance(answer, bytes))
    assert thermometer.readings == ()
    assert not watching()


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt])
def test_a_hanging_device_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException] | None
) -> None:
    monkeypatch.setattr(room, "STATUS_SECONDS", 60.0 if interrupt else 0.2)
    over, asked = threading.Event(), []

    def answer() -> bytes:
        asked.append(1)
        if len(asked) > 1:
            over.wait(60)
        return b"uid=0\nbattery=temperature: 311\n"

    thermometer = odd(answer).__enter__()
    until(lambda: len(asked) == 2)
    thermometer.__exit__(interrupt, None, None)
    assert watching(), "the second answer is not waited for"
    assert (thermometer.readings, len(asked)) == ((31.1,), 2)
    over.set()
    until(lambda: not watching())
