"""Peculiarities of small boards: a real dropbear, in some cases with one program a connection, and busybox."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dropbear_server import DropbearServer
from ssh_server import alive
from waiting import until

from farm.base.errors import DeviceError, DeviceGoneError
from farm.base.processes import Supervisor
from farm.devices.execution.content_store import ContentStore, hashes_of
from farm.devices.identity import identify
from farm.devices.room import free_bytes
from farm.devices.ssh.link import SESSIONS
from farm.devices.ssh.login import takes_one_program
from farm.devices.ssh.transport import SshTransport
from farm.devices.status import read_status

SECONDS = 30.0
# Connections of the programs, and of the commands that end them.
MOST_CONNECTIONS = SESSIONS + 2


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DropbearServer]:
    with Supervisor() as supervisor:
        board = DropbearServer(supervisor, tmp_path_factory.mktemp("dropbear") / "board").start()
        yield board
        board.stop()
        # The watcher of a terminal's end polls once a second.
        until(lambda: board.left() == [])


@pytest.fixture
def transport(board: DropbearServer) -> Iterator[SshTransport]:
    transport = SshTransport("board", board.address)
    yield transport
    transport.close()


@pytest.mark.parametrize(
    ("banner", "one"),
    [
        ("SSH-2.0-dropbear_2022.83", True),
        ("SSH-2.0-dropbear_2024.85", True),
        ("SSH-2.0-dropbear_2024.86", True),
        ("SSH-2.0-dropbear_2026.94", True),
        ("SSH-2.0-dropbear_0.52", True),
        ("SSH-2.0-dropbear", True),
        ("SSH-2.0-OpenSSH_9.2p1 Debian-2", False),
    ],
)
def test_which_servers_take_one_program_at_a_time(banner: str, one: bool) -> None:
    assert takes_one_program(banner) is one


def test_a_board_is_identified_and_says_how_it_is(board: DropbearServer) -> None:
    device = identify("board", board.address)
    assert (device.soc, device.serial, device.os, device.kind) == ("QCS9100", "board-8", "linux", "virtual")
    transport = SshTransport("board", board.address)
    status = read_status(transport, os="linux")
    assert status.root
    assert status.free_bytes
    assert status.uptime_s
    transport.close()


def test_a_program_is_ended_with_its_children_also_those_that_left_it(
    board: DropbearServer, transport: SshTransport
) -> None:
    script = "setsid sleep 600 >/dev/null 2>&1 </dev/null & sleep 601 & echo here; exec sleep 602"
    process = transport.start(["sh", "-c", script])
    assert process.receive(SECONDS).stdout == b"here\n"
    until(lambda: len([program for program in board.left() if program.startswith("sleep 60")]) == 3)
    process.close()
    assert board.left() == []


def test_files_and_programs_in_a_row_share_one_connection(board: DropbearServer, transport: SshTransport) -> None:
    for number in range(10):
        transport.push({transport.storage / "file": b"%d" % number})
        assert transport.run(["cat", str(transport.storage / "file")], timeout_s=SECONDS).stdout == b"%d" % number
    assert len(board.connections()) == 1


def test_programs_and_files_at_the_same_time_have_connections_of_their_own(
    board: DropbearServer, transport: SshTransport, tmp_path: Path
) -> None:
    def work(number: int) -> bool:
        path = transport.storage / "many" / str(number)
        transport.push({path: b"%d" % number})
        echoed = transport.run(["cat", str(path)], timeout_s=SECONDS).stdout
        transport.pull({path: tmp_path / str(number)}, max_bytes=10)
        return echoed == (tmp_path / str(number)).read_bytes() == b"%d" % number

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(work, range(24)))
    assert 1 < len(board.connections()) <= MOST_CONNECTIONS
    transport.close()
    until(lambda: not board.connections())


@pytest.mark.whole
def test_no_program_and_no_file_of_many_fails(board: DropbearServer, transport: SshTransport) -> None:
    def work(number: int) -> int:
        transport.push({transport.storage / "whole" / str(number % 7): b"x"})
        process = transport.start(["sh", "-c", "echo here; exec cat"])
        assert process.receive(SECONDS).stdout == b"here\n"
        if number % 5:
            process.close_stdin()
            until(lambda: process.receive(1).code is not None)
        process.close()
        return transport.run(["true"], timeout_s=SECONDS).code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, range(200))) == {0}
    assert len(board.connections()) <= MOST_CONNECTIONS
    assert board.left() == []


def test_a_command_of_more_than_dropbear_takes(transport: SshTransport) -> None:
    words = ["x" * 9000, "two\nlines", "back\\slash", "$HOME `id`", os.fsdecode(b"not utf-8 \xff")]
    done = transport.run(["printf", "%s|", *words], timeout_s=SECONDS)
    assert done.stdout == b"".join(os.fsencode(word) + b"|" for word in words)
    # The script's own standard input comes after the script.
    script = f"# {'x' * 20_000}\ncat; exit 7"
    done = transport.run(["sh", "-c", script], stdin=b"mine\n", timeout_s=SECONDS)
    assert (done.code, done.stdout, done.stderr) == (7, b"mine\n", b"")
    process = transport.start(["sh", "-c", f"# {'x' * 9000}\nsleep 600 & echo $!; wait"])
    pid = int(process.receive(SECONDS).stdout)
    process.close()
    assert not alive(pid)


def test_objects_of_any_number_are_admitted_and_removed(
    board: DropbearServer, transport: SshTransport, tmp_path: Path
) -> None:
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    files = {sha256: tmp_path / name for name, sha256 in hashes_of(tmp_path.iterdir()).items()}
    store = ContentStore(transport, transport.storage / "run-1-1")
    store.ensure(files)
    objects = board.root / str(transport.storage).lstrip("/") / "objects"
    assert set(os.listdir(objects)) == set(files)
    assert store.verify(files.keys())
    assert store.free(keep=())
    assert os.listdir(objects) == []


def test_without_an_sftp_server_it_says_what_to_install(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        board = DropbearServer(supervisor, tmp_path / "board", sftp=False).start()
        transport = SshTransport("board", board.address)
        with pytest.raises(
            DeviceError, match=r"install openssh-sftp-server there \(command: sftp, exit code 127\)"
        ) as caught:
            transport.push({transport.storage / "file": b"x"})
        assert type(caught.value) is DeviceError
        assert transport.run(["true"], timeout_s=SECONDS).code == 0
        transport.close()
        board.stop()


def test_room_is_known_where_df_prints_nothing(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        board = DropbearServer(supervisor, tmp_path / "board").start()
        # Output of busybox's df if the root file system is an initramfs.
        (board.root / "bin/df").unlink()
        header = "Filesystem 1024-blocks Used Available Capacity Mounted on"
        board.write("bin/df", f"#!/bin/sh\necho {header}\n", mode=0o755)
        transport = SshTransport("board", board.address)
        status = read_status(transport, os="linux")
        assert status.free_bytes
        assert status.free_bytes > 1 << 20
        (tmp_path / "object").write_bytes(b"object")
        files = {sha256: tmp_path / name for name, sha256 in hashes_of([tmp_path / "object"]).items()}
        assert ContentStore(transport, transport.storage / "run-1-1").ensure(files) == len(b"object")
        transport.close()
        board.stop()


@pytest.mark.parametrize(
    ("lines", "free"),
    [
        (["/dev/block/dm-40 112456780 50000000 62456780 45% /data", "blocks 5 4096"], 62456780 * 1024),
        (["my disk 8 4 4 50% /", "blocks 5 4096"], 4096),
        (["Filesystem 1024-blocks Used Available Capacity Mounted on", "blocks 5 4096"], 20480),
        (["blocks 5 4096"], 20480),
        (["blocks -5 4096", "blocks 5"], None),
        (["blocks 99999999999999 99999999999999"], None),
        ([], None),
    ],
)
def test_what_is_believed_of_room(lines: list[str], free: int | None) -> None:
    assert free_bytes(lines) == free


@pytest.mark.skipif(platform.machine() in {"aarch64", "arm64"}, reason="this machine could be a device")
def test_a_machine_with_another_processor_is_no_device(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        board = DropbearServer(supervisor, tmp_path / "board", virtual=False).start()
        with pytest.raises(DeviceError, match=f"uname -m says '{platform.machine()}'"):
            identify("board", board.address)
        board.stop()


@pytest.mark.whole
@pytest.mark.parametrize("program", [["sh", "-c", "echo $$; sleep 600 & wait"], []])
def test_a_shell_without_a_terminal_ends_with_its_client(board: DropbearServer, program: list[str]) -> None:
    transport = SshTransport("board", board.address)
    argv, env = transport.shell_argv(program, terminal=False)
    before = set(board.connections())
    client = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    with client:
        if not program:
            client.stdin.write(b"echo $$; sleep 600 & wait\n")
            client.stdin.flush()
        pid = int(client.stdout.readline())
        assert alive(pid)
        client.kill()
    until(lambda: board.left() == [])
    assert not alive(pid)
    until(lambda: set(board.connections()) <= before)
    # Input, output and exit code are passed on.
    argv, env = transport.shell_argv(["sh", "-c", "cat; exit 7"], terminal=False)
    done = subprocess.run(argv, env=env, input=b"said", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (7, b"said")


@pytest.mark.whole
def test_a_board_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        board = DropbearServer(supervisor, tmp_path / "board").start()
        transport = SshTransport("board", board.address)
        process = transport.start(["sh", "-c", "echo $$; exec sleep 600"])
        pid = int(process.receive(SECONDS).stdout)
        board.stop()
        with pytest.raises(DeviceGoneError):
            process.receive(SECONDS)
        board.start()
        assert alive(pid)
        process.close()
        assert not alive(pid)
        assert transport.run(["true"], timeout_s=SECONDS).code == 0
        process = transport.start(["cat"])
        for connection in board.connections():
            os.kill(connection, signal.SIGKILL)
        with pytest.raises(DeviceError, match="the connection ended before the program did") as caught:
            process.receive(SECONDS)
        assert type(caught.value) is DeviceError
        process.close()
        transport.close()
        board.stop()
        assert board.left() == []
