"""Root through a real adb server: adbd restarts, and the device disconnects and returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import STORAGE, AdbTransport
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.virtual.boot import boot


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[Device, AdbServer, Supervisor]]]:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")

        def start(build: str) -> tuple[Device, AdbServer, Supervisor]:
            [device] = boot(supervisor, server, ["SM8850"], tmp_path, build=build)
            return device, server, supervisor

        yield start


def test_adbd_of_a_userdebug_build_becomes_root_and_the_device_comes_back(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]],
) -> None:
    device, server, _ = start("userdebug")
    transport = AdbTransport(device.serial, server.port)
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


def test_a_device_that_is_root_from_the_start_is_left_alone(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]],
) -> None:
    device, server, _ = start("rooted-already")
    assert open_transport(device).ensure_root() is False
    assert AdbTransport(device.serial, server.port).run(["id"], timeout_s=10).stdout.startswith(b"uid=0(root) ")


def test_a_production_build_is_refused_with_what_adbd_says(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]],
) -> None:
    device, server, _ = start("user")
    with pytest.raises(DeviceError, match=r"adbd cannot run as root in production builds.*userdebug or eng"):
        open_transport(device).ensure_root()
    assert AdbTransport(device.serial, server.port).run(["getprop", "ro.debuggable"], timeout_s=10).stdout == b"0\n"


@pytest.mark.parametrize("build", ["rooted-by-su", "rooted-by-magisk"])
def test_su_makes_commands_root_where_adbd_cannot(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]], build: str
) -> None:
    device, server, _ = start(build)
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
    assert AdbTransport(device.serial, server.port).user_id() == 2000
    assert transport.ensure_root() is False


def test_a_device_that_does_not_come_back_is_said_so(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _, supervisor = start("userdebug")

    def dies(transport: AdbTransport) -> str:
        supervisor.find(transport.serial).terminate()
        return "restarting adbd as root"

    monkeypatch.setattr(AdbTransport, "_ask_for_root", dies)
    monkeypatch.setattr("farm.devices.adb.transport._ROOT_SECONDS", 0.5)
    with pytest.raises(DeviceTimeoutError, match="asked to start anew as root, and 0.5 s later it is not there"):
        open_transport(device).ensure_root()


def test_a_device_that_says_nothing_sensible_about_its_user_is_an_error(
    start: Callable[[str], tuple[Device, AdbServer, Supervisor]], tmp_path: Path
) -> None:
    device, _, _ = start("userdebug")
    (tmp_path / device.serial / "system/bin/id").write_text("#!/bin/sh\nprintf '0\\033[31m; rm'\n")
    with pytest.raises(DeviceError, match="does not say which user") as caught:
        open_transport(device).ensure_root()
    assert "\033" not in str(caught.value)
