"""Peculiarities of small boards: a real dropbear, in some cases with one program a connection, and busybox."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ssh_server import DropbearServer, running
from waiting import alive, until

from farm.base.errors import DeviceError
from farm.devices.execution.content_store import ContentStore, hashes_of
from farm.devices.facts import identify, read_status
from farm.devices.files import free_bytes
from farm.devices.ssh.link import SESSIONS, takes_one_program
from farm.devices.ssh.transport import SshTransport

SECONDS = 30.0
# Connections of the programs, and of the commands that end them.
MOST_CONNECTIONS = SESSIONS + 2


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DropbearServer]:
    with running(DropbearServer, tmp_path_factory.mktemp("dropbear") / "board") as board:
        yield board
        # The watcher of a terminal's end polls once a second.
        until(lambda: board.left() == [])


@pytest.fixture
def transport(board: DropbearServer) -> Iterator[SshTransport]:
    transport = SshTransport("board", board.address)
    yield transport
    transport.close()


def test_which_servers_take_one_program_at_a_time() -> None:
    for version in ("_2022.83", "_2026.94", "_0.52", ""):
        assert takes_one_program(f"SSH-2.0-dropbear{version}")
    assert not takes_one_program("SSH-2.0-OpenSSH_9.2p1 Debian-2")


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


def test_room_is_known_where_df_prints_nothing(tmp_path: Path) -> None:
    with running(DropbearServer, tmp_path / "board") as board:
        # Output of busybox's df if the root file system is an initramfs.
        (board.root / "bin/df").unlink()
        header = "Filesystem 1024-blocks Used Available Capacity Mounted on"
        board.write("bin/df", f"#!/bin/sh\necho {header}\n", mode=0o755)
        device = identify("board", board.address)
        assert (device.soc, device.serial, device.os, device.kind) == ("QCS9100", "board-8", "linux", "virtual")
        transport = SshTransport("board", board.address)
        status = read_status(transport, os="linux")
        assert status.root
        assert status.free_bytes
        assert status.free_bytes > 1 << 20
        (tmp_path / "object").write_bytes(b"object")
        files = {sha256: tmp_path / name for name, sha256 in hashes_of([tmp_path / "object"]).items()}
        assert ContentStore(transport, transport.storage / "run-1-1").ensure(files) == len(b"object")
        transport.close()


def test_what_is_believed_of_room() -> None:
    header, blocks = "Filesystem 1024-blocks Used Available Capacity Mounted on", "blocks 5 4096"
    for lines, free in (
        (["/dev/block/dm-40 112456780 50000000 62456780 45% /data", blocks], 62456780 * 1024),
        (["my disk 8 4 4 50% /", blocks], 4096),
        ([header, blocks], 20480),
        ([blocks], 20480),
        (["blocks -5 4096", "blocks 5"], None),
        (["blocks 99999999999999 99999999999999"], None),
        ([], None),
    ):
        assert free_bytes(lines) == free, lines


@pytest.mark.skipif(platform.machine() in {"aarch64", "arm64"}, reason="this machine could be a device")
def test_a_machine_with_another_processor_is_no_device(tmp_path: Path) -> None:
    refused = pytest.raises(DeviceError, match=f"uname -m prints '{platform.machine()}'")
    with running(DropbearServer, tmp_path / "board", virtual=False) as board, refused:
        identify("board", board.address)


@pytest.mark.whole
@pytest.mark.parametrize("program", [["sh", "-c", "echo $$; sleep 600 & wait"], []])
def test_a_shell_without_a_terminal_ends_with_its_client(board: DropbearServer, program: list[str]) -> None:
    transport = SshTransport("board", board.address)
    argv, env = transport.shell_argv(program, terminal=False)
    before = set(board.connections())
    client = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
