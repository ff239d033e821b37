from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import Started, is_idle, listens, until

from farm.base.errors import InfraError, UnknownNameError
from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, find_adb, start_adb_server
from farm.devices.connect import open_transport
from farm.devices.virtual import boot as boot_module
from farm.devices.virtual.__main__ import main
from farm.devices.virtual.boot import Reviver, boot
from farm.devices.virtual.faults import Fault, clear, inject

if TYPE_CHECKING:
    from conftest import Attached

CONNECT = struct.pack("<6I", 0x4E584E43, 0x01000001, 1 << 20, 6, 0, 0x4E584E43 ^ 0xFFFFFFFF) + b"host::"

PARENT = """
import signal, sys
from farm.base import processes
from pathlib import Path
from farm.devices.adb.server import start_adb_server
from farm.base.processes import Supervisor
from farm.devices.virtual.boot import boot
root = Path(sys.argv[1])
supervisor = Supervisor()
server = start_adb_server(supervisor, root / "adb")
devices = boot(supervisor, server, ["SM8650", "SM8650"], root)
print(processes._link._process.pid, server.port, *(device.serial for device in devices), flush=True)
signal.pause()
"""


def processes_in(folder: Path) -> list[str]:
    """Every living process that names `folder`, or stands in it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                words = (process / "cmdline").read_bytes()
                where = os.readlink(process / "cwd")
            except OSError:
                continue
            if words and (os.fsencode(folder) in words or where.startswith(str(folder))):
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_killing_a_device_leaves_no_command(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        (device,) = boot(supervisor, server, ["SM8650"], tmp_path)
        folder = tmp_path / device.serial
        script = "sleep 601 & setsid sleep 602 & echo ready >up; wait"
        command = [str(server.adb), "-s", f"product:{device.serial}", "shell", f"cd /data/local/tmp; {script}"]
        with Started(command, env={**os.environ, **server.environment()}, stdin=subprocess.PIPE) as shell:
            until(lambda: (folder / "data/local/tmp/up").exists())
            until(lambda: len(processes_in(folder)) >= 4)
            os.kill(supervisor.find(device.serial).pid, signal.SIGKILL)
            until(lambda: not processes_in(folder))
            shell.wait(timeout=30)


@pytest.mark.parametrize("victims", [("parent",), ("parent", "reaper"), ("reaper", "parent")])
def test_killing_the_parent_also_with_its_reaper_leaves_nothing(tmp_path: Path, victims: tuple[str, ...]) -> None:
    with Started([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        reaper, port, *serials = parent.stdout.readline().decode().split()
        assert serials == ["virtual-SM8650-0", "virtual-SM8650-1"]
        environment = {**os.environ, "ANDROID_ADB_SERVER_PORT": port}
        with contextlib.ExitStack() as shells:
            # Two commands: a stopped one, like a runner that hangs, and a command with a terminal.
            for kind, stop in (("-T", "kill -STOP $!;"), ("-tt", "")):
                script = f"cd /data/local/tmp; sleep 600 & {stop} echo ready >up{kind}; wait"
                command = [str(find_adb()), "-s", f"product:{serials[0]}", "shell", kind, script]
                shells.enter_context(
                    subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                )
                until((tmp_path / serials[0] / f"data/local/tmp/up{kind}").exists)
            assert len(processes_in(tmp_path)) >= 7
            pids = {"parent": parent.pid, "reaper": int(reaper)}
            if "reaper" in victims:
                # A stopped reaper does nothing between the two deaths.
                os.kill(pids["reaper"], signal.SIGSTOP)
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            parent.wait()
            until(lambda: not processes_in(tmp_path))
    # A process that exits loses its command line before the kernel closes its sockets.
    until(lambda: not listens(int(port)))


def test_a_device_that_cannot_start_says_why(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        with pytest.raises(UnknownNameError, match="SM8650"):
            boot(supervisor, server, ["SM8650", "SM865O"], tmp_path)
        assert not (tmp_path / "virtual-SM8650-0").exists()
        with pytest.raises(InfraError, match=r"did not start: .*only letters, digits"):
            boot(supervisor, server, ["SM8650"], tmp_path / "a $(name)")
        assert boot(supervisor, server, [], tmp_path) == []


def test_a_device_that_is_killed_while_it_starts_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Supervisor() as supervisor:
        server, connect = start_adb_server(supervisor, tmp_path / "adb"), AdbServer.connect

        def connect_late(*words: Any, **options: Any) -> str:
            process = supervisor.find("virtual-SM8650-0").process
            process.kill()
            process.wait()
            return connect(*words, **options)

        monkeypatch.setattr(AdbServer, "connect", connect_late)
        with pytest.raises(InfraError) as caught:
            boot(supervisor, server, ["SM8650"], tmp_path)
    assert str(caught.value) == "the virtual device virtual-SM8650-0 did not start: it ended with signal 9"


def test_by_hand_it_prints_one_line_and_ends_when_told_and_has_its_folder_alone(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "farm.devices.virtual", "--root", str(tmp_path), "--soc", "SM8750"]
    with Started(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        output = json.loads(daemon.stdout.readline())
        assert output["serial"] == "virtual-SM8750-0"
        second = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (second.returncode, second.stderr.count("\n")) == (2, 1)
        assert "another virtual device runs in" in second.stderr
        with _connected(output["port"]):
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(timeout=30) == 0


def test_bad_arguments_are_one_line(
    device: Attached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "umask", lambda _: 0)
    for words, message in (
        (["--soc", "SM865O"], "did you mean 'SM8650'"),
        (["--soc", "../SM8650"], "unknown SoC"),
        (["--soc", "SM8650", "--serial", "phone"], "begins with virtual-"),
        (["--soc", "SM8650", "--port", "99999"], "port"),
        (["--soc", "SM8650", "--port", str(_port(device))], "Address already in use"),
    ):
        monkeypatch.setattr(sys, "argv", ["virtual", "--root", str(tmp_path / "x"), *words])
        assert main() == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1, said


def _port(device: Attached) -> int:
    for line in device.adb("devices", "-l").stdout.decode().splitlines():
        if f"product:{device.serial} " in line:
            return int(line.split()[0].rpartition(":")[2])
    raise AssertionError("it is not attached")


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    """Yield a connection that the device has accepted."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(30)
        connection.sendall(CONNECT)
        assert connection.recv(4) == b"CNXN"
        yield connection


def _is_well(device: Attached) -> bool:
    return device.adb("shell", "echo well").stdout == b"well\n" and Path(f"/proc/{device.pid}").exists()


def test_garbage_harms_nobody(device: Attached) -> None:
    port = _port(device)
    for data in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        CONNECT + b"\xff" * 24,
        CONNECT + struct.pack("<6I", 0x45545257, 1, 1, 0xFFFFFFFF, 0, 0x45545257 ^ 0xFFFFFFFF),
        struct.pack("<6I", 0x4E45504F, 1, 0, 6, 0, 0x4E45504F ^ 0xFFFFFFFF) + b"sync:\0" + b"\0" * 24,
    ):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(30)
            connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass
    assert _is_well(device)


def test_a_reboot_is_done_though_the_connection_that_asks_for_it_ends(device: Attached) -> None:
    service = b"reboot:left\0"
    with _connected(_port(device)) as connection:
        connection.sendall(struct.pack("<6I", 0x4E45504F, 1, 0, len(service), 0, 0x4E45504F ^ 0xFFFFFFFF) + service)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    def reason() -> bytes:
        return device.adb("shell", "getprop sys.boot.reason", check=False).stdout

    until(lambda: reason() == b"reboot,left\n", "the device after its reboot", 60)


def _reset(port: int, data: bytes = b"") -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(30)
        connection.sendall(data)
        if data == CONNECT:
            assert connection.recv(4) == b"CNXN"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_connections_that_are_reset_end_nothing(device: Attached) -> None:
    port = _port(device)
    # At once, within a packet, and once connected.
    for data in (b"", CONNECT[:10], CONNECT):
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(lambda _, data=data: _reset(port, data), range(80)))
        assert _is_well(device)
    # Before they are accepted.
    for _ in range(4):
        os.kill(device.pid, signal.SIGSTOP)
        try:
            for _ in range(12):
                _reset(port)
        finally:
            os.kill(device.pid, signal.SIGCONT)
        assert _is_well(device)


def test_a_lack_of_descriptors_ends_nothing(device: Attached) -> None:
    port = _port(device)
    limits = resource.prlimit(device.pid, resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir(f"/proc/{device.pid}/fd"))) + 1
    resource.prlimit(device.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        # An idle process has tried to accept them.
        until(lambda: is_idle(device.pid), "an idle process")
    finally:
        resource.prlimit(device.pid, resource.RLIMIT_NOFILE, limits)
    for connection in waiting:
        connection.close()
    with _connected(port):
        assert _is_well(device)


def _as_nobody(script: str, *arguments: str, user: int = 65534) -> list[str]:
    argv = ["/usr/bin/env", "python3", "-c", script, *arguments]
    done = subprocess.run(argv, user=user, env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_nobody_else_takes_the_port_of_a_device_that_is_away(device: Attached) -> None:
    script = (
        "import itertools, socket, sys\n"
        "for host, *options in itertools.product(('127.0.0.1', ''), (0, 1), (0, 1)):\n"
        "    with socket.socket() as other:\n"
        "        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options[0])\n"
        "        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options[1])\n"
        "        try:\n"
        "            other.bind((host, int(sys.argv[1])))\n"
        "            other.listen()\n"
        "            print('taken', host, options)\n"
        "        except OSError:\n"
        "            print('refused')\n"
    )
    port = str(_port(device))
    inject(device.root, Fault("offline", seconds=600))
    try:
        assert _as_nobody(script, port) == ["refused"] * 8
    finally:
        clear(device.root)
    device.adb("wait-for-device")
    assert _is_well(device)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_hung_up_on(device: Attached) -> None:
    script = (
        "import socket, sys\n"
        "connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "connection.settimeout(30)\n"
        "try:\n"
        "    connection.sendall(bytes.fromhex(sys.argv[2]))\n"
        "    print(len(connection.recv(100)) > 0)\n"
        "except ConnectionError:\n"
        "    print(False)\n"
    )
    port = str(_port(device))
    answers = [_as_nobody(script, port, CONNECT.hex(), user=user) for user in (0, 65534)]
    assert answers == [["True"], ["False"]]


SERIAL = "virtual-SM8650-0"


def test_a_device_and_the_adb_server_that_were_killed_are_back_with_the_same_serial_and_files(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        devices = boot(supervisor, server, ["SM8650", "SM8650"], tmp_path / "devices")
        reviver = Reviver(supervisor, server, devices, tmp_path / "devices")
        assert reviver.revive() == []
        transport = open_transport(devices[0])
        assert transport.run(["sh", "-c", "echo kept > /data/local/tmp/kept"], timeout_s=20).code == 0
        for name in (SERIAL, "adb server"):
            kill(supervisor, name)
        lines = reviver.revive()
        assert lines == [
            "the adb server had died and was started again",
            f"{SERIAL} had ended with signal 9 and was started again",
        ]
        assert transport.run(["cat", "/data/local/tmp/kept"], timeout_s=20).stdout == b"kept\n"
        transport.close()
        assert reviver.revive() == []


def test_one_that_ends_again_and_again_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_module, "MOST_STARTS", 2)
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        reviver = Reviver(supervisor, server, [device], tmp_path / "devices")
        for number in range(3):
            kill(supervisor, SERIAL)
            lines = reviver.revive(lambda: 10.0 * number)  # noqa: B023 - it is called here
            assert len(lines) == (number < 2), lines


def kill(supervisor: Supervisor, name: str) -> None:
    child = supervisor.find(name)
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()
