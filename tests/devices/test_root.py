"""Root through a real adb server: adbd restarts, and the device disconnects and returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import STORAGE, AdbTransport
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device
from farm.devices.virtual.boot import boot

Start = Callable[[str], tuple[Device, AdbHost]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Supervisor, Path, Start]]:
    """Function that boots another device of a build, at one adb server; its supervisor, and the devices' folder."""
    folder = tmp_path_factory.mktemp("root")
    socs = iter(("SM8850", "SM8750", "SM8650", "SM8550", "SM8475", "SM8450", "SM8350"))
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")

        def start(build: str) -> tuple[Device, AdbHost]:
            [device] = boot(supervisor, server, [next(socs)], folder, build=build)
            return device, server

        yield supervisor, folder, start


@pytest.fixture
def start(running: tuple[Supervisor, Path, Start]) -> Start:
    return running[2]


def test_adbd_of_a_userdebug_build_becomes_root_and_the_device_comes_back(start: Start) -> None:
    device, server = start("userdebug")
    transport = AdbTransport(device.serial, AdbAddress(server.port))
    ended: list[Exception] = []
    started = threading.Event()

    def run_meanwhile() -> None:
        process = transport.start(["sh", "-c", "echo started; sleep 600"])
        process.receive(30)
        started.set()
        try:
            process.receive(60)
        except DeviceError as error:
            ended.append(error)

    meanwhile = threading.Thread(target=run_meanwhile)
    meanwhile.start()
    assert started.wait(30)
    assert transport.user_id() == 2000
    assert open_transport(device).ensure_root() is True
    assert transport.user_id() == 0
    assert transport.run(["getprop", "service.adb.root"], timeout_s=10).stdout == b"1\n"
    meanwhile.join(60)
    # The earlier program has ended: adbd really restarted.
    assert "the connection ended before the program did" in str(ended)
    assert open_transport(device).ensure_root() is False
    # A later `adb root` of others gives the same answer.
    with AdbHost(server.port).open(device.serial, "root:", timeout_s=10) as stream:
        assert stream.recv(100) == b"adbd is already running as root\n"


def test_a_device_that_is_root_from_the_start_is_left_alone(start: Start) -> None:
    device, _ = start("rooted-already")
    assert open_transport(device).ensure_root() is False
    assert open_transport(device).user_id() == 0


def test_a_production_build_is_refused_with_what_adbd_says(start: Start) -> None:
    device, _ = start("user")
    with pytest.raises(DeviceError, match=r"adbd cannot run as root in production builds.*userdebug or eng"):
        open_transport(device).ensure_root()


@pytest.mark.parametrize("build", ["rooted-by-su", "rooted-by-magisk"])
def test_su_makes_commands_root_where_adbd_cannot(start: Start, build: str) -> None:
    device, server = start(build)
    transport = open_transport(device)
    assert (transport.user_id(), transport.root_refusal()) == (2000, "")
    assert transport.ensure_root() is True
    assert transport.user_id() == 0
    # Words, folder, environment, standard input and exit code arrive as without it.
    script = 'printf "%s|" "$@" "$PWD" "$NAME"; id -un; cat; exit 7'
    words = ["it's", "a b", "$(reboot)"]
    done = transport.run(
        ["sh", "-c", script, "sh", *words], stdin=b"in", timeout_s=10, cwd=STORAGE.parent, env={"NAME": "'$x"}
    )
    folder = done.stdout.split(b"|")[3]
    assert (done.code, done.stdout) == (7, b"it's|a b|$(reboot)|" + folder + b"|'$x|root\nin")
    assert folder.endswith(b"/data/local/tmp")
    # Each new connection queries the user id itself.
    assert AdbTransport(device.serial, AdbAddress(server.port)).user_id() == 2000
    assert transport.ensure_root() is False


def test_a_device_that_does_not_come_back_is_said_so(
    running: tuple[Supervisor, Path, Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, _, start = running
    device, _ = start("userdebug")

    def dies(transport: AdbTransport) -> str:
        supervisor.find(transport.serial).terminate()
        return "restarting adbd as root"

    monkeypatch.setattr(AdbTransport, "_ask_for_root", dies)
    monkeypatch.setattr("farm.devices.adb.transport._ROOT_SECONDS", 0.5)
    with pytest.raises(DeviceTimeoutError, match="asked to start anew as root, and 0.5 s later it is not there"):
        open_transport(device).ensure_root()


def test_a_device_that_says_nothing_sensible_about_its_user_is_an_error(
    running: tuple[Supervisor, Path, Start],
) -> None:
    _, folder, start = running
    device, _ = start("userdebug")
    (folder / device.serial / "system/bin/id").write_text("#!/bin/sh\nprintf '0\\033[31m; rm'\n")
    with pytest.raises(DeviceError, match="does not report the user") as caught:
        open_transport(device).ensure_root()
    assert "\033" not in str(caught.value)
