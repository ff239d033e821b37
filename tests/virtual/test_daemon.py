"""The daemon of a virtual device: its clients, and its storage."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attached import rack
from waiting import Started, all_the_time, listens, until

from farm.base.errors import InfraError, UnknownNameError
from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, find_adb
from farm.devices.connect import open_transport
from farm.devices.virtual import boot as boot_module
from farm.devices.virtual.__main__ import main
from farm.devices.virtual.boot import Reviver, boot, kept_objects, remove_kept, take_objects, virtual_storage
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
    with rack(tmp_path, "SM8650") as one:
        folder, serial = one.folder(), one.device.serial
        script = "sleep 601 & setsid sleep 602 & echo ready >up; wait"
        command = [str(one.server.adb), "-s", f"product:{serial}", "shell", f"cd /data/local/tmp; {script}"]
        with Started(command, env={**os.environ, **one.server.environment()}, stdin=subprocess.PIPE) as shell:
            until((one.files() / "up").exists)
            until(lambda: len(processes_in(folder)) >= 4)
            os.kill(one.supervisor.find(serial).pid, signal.SIGKILL)
            until(lambda: not processes_in(folder))
            shell.wait(timeout=30)


@pytest.mark.parametrize("victims", [("parent",), ("parent", "reaper"), ("reaper", "parent")])
def test_killing_the_parent_also_with_its_reaper_leaves_nothing(tmp_path: Path, victims: tuple[str, ...]) -> None:
    with Started([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
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
    with rack(tmp_path) as empty:
        with pytest.raises(UnknownNameError, match="SM8650"):
            boot(empty.supervisor, empty.server, ["SM8650", "SM865O"], tmp_path)
        assert not (tmp_path / "virtual-SM8650-0").exists()
        with pytest.raises(InfraError, match=r"did not start: .*only letters, digits"):
            boot(empty.supervisor, empty.server, ["SM8650"], tmp_path / "a $(name)")
        assert empty.devices == []


def test_a_device_that_is_killed_while_it_starts_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rack(tmp_path) as empty:
        connect = AdbServer.connect

        def connect_late(*words: Any, **options: Any) -> str:
            process = empty.supervisor.find("virtual-SM8650-0").process
            process.kill()
            process.wait()
            return connect(*words, **options)

        monkeypatch.setattr(AdbServer, "connect", connect_late)
        with pytest.raises(InfraError) as caught:
            boot(empty.supervisor, empty.server, ["SM8650"], tmp_path)
    assert str(caught.value) == "the virtual device virtual-SM8650-0 did not start: it ended with signal 9"


def test_by_hand_it_prints_one_line_and_ends_when_told_and_has_its_folder_alone(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "farm.devices.virtual", "--root", str(tmp_path), "--soc", "SM8750"]
    with Started(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        output = json.loads(daemon.stdout.readline())
        assert output["serial"] == "virtual-SM8750-0"
        second = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (second.returncode, second.stderr.count("\n")) == (2, 1)
        assert "another virtual device runs in" in second.stderr
        with _connected(output["port"]):
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(timeout=30) == 0


def test_bad_arguments_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "umask", lambda _: 0)
    for words, message in (
        (["--soc", "SM865O"], "did you mean 'SM8650'"),
        (["--soc", "../SM8650"], "unknown SoC"),
        (["--soc", "SM8650", "--serial", "phone"], "begins with virtual-"),
    ):
        monkeypatch.setattr(sys, "argv", ["virtual", "--root", str(tmp_path / "x"), *words])
        assert main() == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1, said


def _port(device: Attached) -> int:
    return int(device.server.network_address(device.serial).rpartition(":")[2])


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
    with rack(tmp_path, "SM8650", "SM8650") as two:
        reviver = Reviver(two.supervisor, two.server, two.devices, tmp_path)
        assert reviver.revive() == []
        transport = open_transport(two.device)
        assert transport.run(["sh", "-c", "echo kept > /data/local/tmp/kept"], timeout_s=20).code == 0
        for name in (SERIAL, "adb server"):
            kill(two.supervisor, name)
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
    with rack(tmp_path, "SM8650") as one:
        reviver = Reviver(one.supervisor, one.server, one.devices, tmp_path)
        for number in range(3):
            kill(one.supervisor, SERIAL)
            lines = reviver.revive(lambda: 10.0 * number)  # noqa: B023 - it is called here
            assert len(lines) == (number < 2), lines


def kill(supervisor: Supervisor, name: str) -> None:
    child = supervisor.find(name)
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()


# Virtual device through the ordinary adb command; tests of `any_device` run over Android's own daemon as well.


def test_getprop(device: Attached) -> None:
    assert device.adb("shell", "getprop", "ro.soc.model").stdout == b"SM8650\n"
    assert device.adb("shell", "/system/bin/getprop ro.farm.virtual").stdout == b"1\n"
    assert device.adb("shell", "getprop ro.none fallback").stdout == b"fallback\n"
    assert device.adb("shell", "getprop 'ro.*'").stdout == b"\n"
    everything = device.adb("shell", "getprop").stdout.decode()
    assert f"[ro.serialno]: [{device.serial}]\n" in everything
    assert "[ro.build.version.sdk]: [35]\n" in everything


def test_a_folder_goes_there_and_back(any_device: Attached, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran $1\n")
    (source / "run.sh").chmod(0o755)
    (source / "deep/er/data").write_bytes(os.urandom(300_000))
    (source / "deep/none").write_bytes(b"")
    for name in ("a b", "quote's", "$(id)", "new\nline", "Grüße"):
        (source / "deep" / name).write_text(name)
    any_device.adb("push", source, "/data/local/tmp/folder")
    assert any_device.adb("shell", "/data/local/tmp/folder/run.sh 'x  y'").stdout == b"ran x y\n"
    mode = (any_device.root / "data/local/tmp/folder/deep/none").stat().st_mode
    assert not stat.S_IMODE(mode) & 0o111
    any_device.adb("pull", "/data/local/tmp/folder", tmp_path / "back")
    compared = filecmp.dircmp(source, tmp_path / "back")
    assert not compared.left_only
    assert not compared.right_only
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    assert filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)[0] == names


def test_exit_codes_and_streams(any_device: Attached) -> None:
    done = any_device.adb("shell", "echo out; echo err >&2; exit 42", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")
    assert any_device.adb("shell", "kill -9 $$", check=False).returncode == 137
    old = any_device.adb("shell", "-x", "echo out; echo err >&2; exit 42", check=False)
    assert (old.returncode, old.stdout) == (0, b"out\nerr\n")
    assert any_device.adb("shell", "wc -c", stdin=b"x" * 300_000).stdout == b"300000\n"


def test_binary_out_and_in(any_device: Attached) -> None:
    path = any_device.root / "data/local/tmp/binary"
    # adb hangs up with a packet still under way, and does so at another moment every time.
    for _ in range(4):
        path.unlink(missing_ok=True)
        data = os.urandom(3_000_000)
        any_device.adb("exec-in", "cat > /data/local/tmp/binary", stdin=data)
        until(lambda: path.exists() and path.stat().st_size >= 3_000_000, "all bytes")
    assert any_device.adb("exec-out", "cat /data/local/tmp/binary").stdout == data


def test_nothing_of_this_machines_environment_is_seen(device: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = {line.partition("=")[0] for line in device.adb("shell", "env").stdout.decode().splitlines()}
    allowed = {"PATH", "HOME", "TMPDIR", "ANDROID_DATA", "ANDROID_ROOT", "LANG", "PWD", "OLDPWD", "FARM_PROCESS", "_"}
    assert names <= allowed | {"SHLVL", "VIRTUAL_LIFE"}


def test_only_whole_device_paths_are_mapped(device: Attached) -> None:
    echoed = device.adb("shell", "echo /data/local/tmp/x /data/local/tmpfs a/data/local/tmp L=/data/local/tmp").stdout
    here = f"{device.root}/data/local/tmp"
    assert echoed.decode().split() == [f"{here}/x", "/data/local/tmpfs", "a/data/local/tmp", f"L={here}"]


def test_links_that_lead_out_are_refused(device: Attached, tmp_path: Path) -> None:
    for name, target in (("out", "/etc/passwd"), ("up", "../../../../../etc/passwd"), ("fine", "real")):
        (tmp_path / "links").mkdir(exist_ok=True)
        (tmp_path / "links" / name).symlink_to(target)
    (tmp_path / "links/real").write_text("here")
    device.adb("push", tmp_path / "links", "/data/local/tmp/links", check=False)
    device.adb("shell", "ln -sf /etc/passwd /data/local/tmp/passwd")
    for way in ("/data/local/tmp/passwd", "/../../../../etc/passwd", "/etc/passwd", "/.incoming"):
        refused = device.adb("pull", way, tmp_path / "got", check=False)
        assert refused.returncode != 0, way
        assert not (tmp_path / "got").exists()
    passwd = "/etc/passwd"
    before = os.stat(passwd)
    assert device.adb("push", tmp_path / "links/real", "/data/local/tmp/../../../../etc/passwd", check=False).returncode
    assert os.stat(passwd).st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("way", ["shell", "exec-out"])
def test_hanging_up_tells_one_process_and_what_it_started_lives_on(any_device: Attached, way: str) -> None:
    """As on a phone, adbd sends SIGHUP to the command of a shell alone, and to no process for `exec-out`."""
    script = "echo $$; sleep 600 & echo $!; setsid sleep 600 & echo $!; wait"
    with Started(
        any_device.command(way, script), env=any_device.environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as shell:
        command, *children = (int(shell.stdout.readline()) for _ in range(3))
        shell.kill()
    try:
        until(lambda: way != "shell" or not any_device.alive(command), "the end of the command")
        living = children if way == "shell" else [command, *children]
        assert all_the_time(lambda: all(any_device.alive(pid) for pid in living), 0.2)
        assert any_device.alive(command) == (way != "shell")
    finally:
        any_device.adb("shell", f"kill -9 {command} {' '.join(map(str, children))}", check=False)


def test_a_program_that_writes_to_nobody_ends(any_device: Attached) -> None:
    with Started(
        any_device.command("exec-out", "echo $$; exec yes"), env=any_device.environment, stdout=subprocess.PIPE
    ) as shell:
        pid = int(shell.stdout.readline())
        shell.kill()
    until(lambda: not any_device.alive(pid), "the end of the program", 60)


# Pushed files that virtual devices keep from one command to the next.


OBJECTS = "data/local/tmp/farm/objects"


def _push(storage: Path, name: str, size: int = 3, used_s: int = 0) -> None:
    place = storage / SERIAL / OBJECTS
    place.mkdir(parents=True, exist_ok=True)
    with (place / name).open("wb") as file:
        file.truncate(size)
    os.utime(place / name, (used_s, used_s))


def _found(cache: Path, storage: Path) -> list[str]:
    take_objects(cache, storage / SERIAL)
    return sorted(path.name for path in storage.glob(f"{SERIAL}/{OBJECTS}/*"))


def test_the_next_command_finds_the_pushed_objects_and_nothing_else(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        assert _found(tmp_path, storage) == []
        _push(storage, "program")
        (storage / SERIAL / OBJECTS).chmod(0o777)
        (storage / SERIAL / "data/local/tmp/farm/run-1").mkdir()
    assert [(Path(one.path).name, one.files, one.nbytes) for one in kept_objects(tmp_path)] == [(SERIAL, 1, 3)]
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == ["program"]
        assert [path.name for path in (storage / SERIAL / "data/local/tmp/farm").iterdir()] == ["objects"]
        assert kept_objects(tmp_path) == []


def test_commands_at_the_same_time_share_no_file(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "before") as storage:
        _push(storage, "program")
    with virtual_storage(tmp_path, "first") as first:
        assert _found(tmp_path, first) == ["program"]
        with virtual_storage(tmp_path, "second") as second:
            assert _found(tmp_path, second) == []
            _push(second, "other")
    with virtual_storage(tmp_path, "after") as storage:
        assert _found(tmp_path, storage) == ["other"]


def test_the_least_recently_used_objects_beyond_one_gigabyte_are_removed(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        for number in range(3):
            _push(storage, str(number), size=500 << 20, used_s=number)
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == ["1", "2"]


def test_objects_without_a_use_for_some_time_can_be_removed(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        _push(storage, "program")
    assert kept_objects(tmp_path, unused_s=3600) == []
    remove_kept(kept_objects(tmp_path))
    assert kept_objects(tmp_path) == []
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == []
