"""`farm devices connect`: a leased device of another adb server under the user's own adb."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_runs import take
from ssh_server import SshServer, login, running
from waiting import Started, until

from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, find_adb, start_adb_server
from farm.devices.virtual.boot import boot
from farm.devices.virtual.relay import Relay
from farm.store.store import Store

SERIAL = "virtual-SM8650-0"
NAME = f"{SERIAL}@attic"
SECONDS = 60.0


class TwoServers:
    """The user's own adb server, with nothing attached, and one far away, with a virtual device."""

    def __init__(self, supervisor: Supervisor, root: Path) -> None:
        self.own, self.far = (start_adb_server(supervisor, root / name) for name in ("own", "far"))
        self.env = self.own.environment()
        boot(supervisor, self.far, ["SM8650"], root)

    def adb(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Call adb as the user does, with their own server."""
        env, command = {**os.environ, **self.env}, [str(find_adb()), *words]
        return subprocess.run(command, env=env, input=stdin, capture_output=True, timeout=SECONDS, check=False)

    def listed(self) -> list[str]:
        return [line.split("\t")[0] for line in self.own.query("host:devices").splitlines()]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoServers]:
    with Supervisor() as supervisor:
        yield TwoServers(supervisor, tmp_path_factory.mktemp("servers"))


@pytest.fixture
def attic(home: FarmHome, servers: TwoServers) -> FarmHome:
    """A home whose farm.toml names the far server."""
    toml = f'[[host]]\nname = "attic"\nadb = "127.0.0.1:{servers.far.port}"\n'
    (home.cwd / "farm.toml").write_text(toml)
    return home


class Connected:
    """`farm devices connect` that stays, as a user has it in a terminal."""

    def __init__(self, home: FarmHome, servers: TwoServers, *words: str) -> None:
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True}
        self.process = home.start_alone("devices", "connect", *words, env=servers.env, **options)
        line = self.process.stdout.readline()
        assert " is under your adb as " in line, self.process.communicate()
        self.name = line.split(" as ")[1].split(",")[0]

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """End the command; return its exit code and its messages."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


@pytest.mark.whole
def test_a_device_that_another_has_is_refused_with_who_and_what_to_do(
    attic: FarmHome, servers: TwoServers, store: Store
) -> None:
    env = servers.env
    assert "unknown device or SoC 'nobody'" in attic.refused("devices", "connect", "nobody", env=env)
    take(store, NAME, "bob")
    output = attic.refused("devices", "connect", NAME, env=env, code=4)
    assert f"{NAME} is used by bob since " in output
    assert "wait for it with --wait 10m" in output
    assert "no devices are reserved for you" in attic.refused("devices", "connect", env=env)


@pytest.mark.whole
def test_a_board_is_refused_and_told_of_the_shell(home: FarmHome, servers: TwoServers, tmp_path: Path) -> None:
    with running(SshServer, tmp_path / "board", "QCS9100", "board-7") as board:
        (home.cwd / "farm.toml").write_text(f'[[device]]\n{login(board)}storage = "{board.folder}/storage"\n')
        for words in ("connect board-7", "connect QCS9100"):
            done = home.farm("devices", *words.split(), env=servers.env, code=2)
            assert "board-7@127.0.0.1 has no adb server" in done.stderr
            assert "'farm shell board-7@127.0.0.1' opens a shell on it" in done.stderr


def test_the_users_own_adb_has_the_device_until_ctrl_c(
    attic: FarmHome, servers: TwoServers, store: Store, tmp_path: Path
) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)
    with Connected(attic, servers, NAME) as connected:
        assert servers.listed() == [connected.name]
        shell = servers.adb("shell", "cat; echo bad >&2; exit 7", stdin=data)
        assert (shell.returncode, shell.stdout, shell.stderr) == (7, data, b"bad\n")
        there = "/data/local/tmp/f"
        for words in (("push", str(tmp_path / "file"), there), ("pull", there, str(tmp_path / "back"))):
            moved = servers.adb("-s", connected.name, *words)
            assert moved.returncode == 0, moved.stderr
        assert (tmp_path / "back").read_bytes() == data
        (lease,) = store.leases.all()
        assert (lease.pid, lease.purpose) == (connected.process.pid, "farm devices connect")
        # The device is listed once, at its own host, and not by its second name.
        found = attic.json("devices", env=servers.env)
        assert [one["serial"] for one in found["devices"]] == [SERIAL]
        assert connected.end(signal.SIGINT) == (0, f"{NAME} is given back\n")
    assert servers.listed() == []
    assert store.leases.all() == []


@pytest.mark.whole
def test_a_device_whose_lease_is_taken_away_is_detached(attic: FarmHome, servers: TwoServers, store: Store) -> None:
    with Connected(attic, servers, NAME) as connected:
        (lease,) = store.leases.all()
        command = [str(find_adb()), "-s", connected.name, "shell", "echo up; sleep 600"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        with Started(command, env={**os.environ, **servers.env}, **pipes) as shell:
            assert shell.stdout.readline() == b"up\n"
            done = attic.farm("devices", "release", NAME, "--force", env=servers.env)
            assert done.stdout == f"{NAME} is given back; 'farm devices connect' of {lease.user} stops using it\n"
            code, errors = connected.end()
            assert shell.wait(timeout=SECONDS) != 0
    assert (code, servers.listed()) == (4, [])
    assert errors == f"farm: {NAME} was released and is free: it was detached from your adb\n"


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nobody_reaches_the_device_any_more(
    attic: FarmHome, servers: TwoServers, number: signal.Signals
) -> None:
    with Connected(attic, servers, NAME) as connected:
        code, _ = connected.end(number)
        assert code == (143 if number == signal.SIGTERM else -number)
        if number == signal.SIGTERM:
            assert servers.listed() == []
        until(lambda: servers.adb("-s", connected.name, "shell", "true").returncode != 0)
        servers.adb("disconnect", connected.name)


@pytest.mark.whole
def test_it_is_attached_again_after_a_reboot_root_and_a_disconnect(attic: FarmHome, servers: TwoServers) -> None:
    def answers() -> bool:
        return servers.adb("-s", connected.name, "shell", "true").returncode == 0

    def boot_id() -> bytes:
        return servers.adb("-s", connected.name, "shell", "cat /proc/sys/kernel/random/boot_id").stdout

    with Connected(attic, servers, NAME) as connected:
        before = boot_id()
        assert servers.adb("-s", connected.name, "root").stdout == b"restarting adbd as root\n"
        until(lambda: servers.adb("-s", connected.name, "shell", "id -u").stdout == b"0\n")
        assert servers.adb("-s", connected.name, "reboot").returncode == 0
        until(lambda: answers() and boot_id() not in (before, b""))
        servers.adb("disconnect")
        until(answers)
        assert connected.end(signal.SIGINT)[0] == 0
    assert servers.listed() == []


@pytest.mark.whole
def test_a_command_has_the_device_and_hands_on_its_exit_code(
    attic: FarmHome, servers: TwoServers, store: Store
) -> None:
    lease = f'"{sys.executable}" -m farm.cli.main lease SM8650 --no-wait'
    script = f'"{find_adb()}" shell getprop ro.soc.model; echo "$ANDROID_SERIAL"; {lease}; exit 9'
    done = attic.farm("devices", "connect", "SM8650", "--", "sh", "-c", script, env=servers.env)
    model, name = done.stdout.split()
    assert (done.returncode, model, name.split(":")[0]) == (9, "SM8650", "127.0.0.1"), done.stderr
    # Without the variable it would be any other SM8650.
    assert (
        f"ANDROID_SERIAL names {name}, and 'farm devices connect' has the device leased under that name" in done.stderr
    )
    done = attic.farm("devices", "connect", NAME, "--", "no-such-program", env=servers.env)
    assert (done.returncode, "there is no no-such-program" in done.stderr) == (6, True), done.stderr
    assert store.leases.all() == []
    assert servers.listed() == []


@pytest.mark.whole
def test_behind_a_machine_with_ssh_and_over_a_tunnel_that_breaks(
    home: FarmHome, servers: TwoServers, tmp_path: Path
) -> None:
    with running(SshServer, tmp_path / "sshd") as board:
        far = f'adb = "127.0.0.1:{servers.far.port}"\n'
        (home.cwd / "farm.toml").write_text(f'[[host]]\nname = "attic"\n{far}{login(board)}')
        with Connected(home, servers, NAME) as connected:
            assert servers.adb("-s", connected.name, "shell", "exit 6").returncode == 6
            board.stop()
            board.start()
            until(lambda: servers.adb("-s", connected.name, "shell", "exit 6").returncode == 6)
            assert connected.end(signal.SIGINT)[0] == 0
    assert servers.listed() == []


@pytest.mark.whole
def test_a_device_of_the_users_own_server_is_held_and_called_what_adb_calls_it(
    home: FarmHome, servers: TwoServers
) -> None:
    own = {"ANDROID_ADB_SERVER_PORT": str(servers.far.port)}
    script = f'"{find_adb()}" shell getprop ro.soc.model'
    done = home.farm("devices", "connect", SERIAL, "--", "sh", "-c", script, env=own)
    assert (done.returncode, done.stdout) == (0, "SM8650\n"), done.stderr
    assert len(servers.far.attached()) == 1


def packet(connection: socket.socket, command: bytes, first: int = 0, second: int = 0, payload: bytes = b"") -> None:
    number = int.from_bytes(command, "little")
    header = (number, first, second, len(payload), sum(payload), number ^ 0xFFFFFFFF)
    connection.sendall(struct.pack("<6I", *header) + payload)


def answer(connection: socket.socket) -> tuple[bytes, bytes]:
    header = connection.recv(24, socket.MSG_WAITALL)
    size = struct.unpack("<6I", header)[3]
    return header[:4], connection.recv(size, socket.MSG_WAITALL) if size else b""


def test_no_stream_is_a_request_to_the_other_server(servers: TwoServers) -> None:
    """Behind the choice of a device a server takes `host:kill` as ever: it must not get there."""
    with Relay(servers.far, SERIAL, model="a b;c=d", reverse=False) as relay:
        assert relay.wait_ready(SECONDS)
        with socket.create_connection(("127.0.0.1", relay.port), timeout=SECONDS) as connection:
            packet(connection, b"CNXN", 0x01000001, 1 << 20, b"host::features=shell_v2\0")
            command, banner = answer(connection)
            assert command == b"CNXN"
            assert b"ro.product.name=farm-connect;ro.product.model=a_b_c_d;" in banner
            assert (b"shell_v2" in banner, b"delayed_ack" in banner) == (True, False)
            for service in (b"host:version\0", b"host-serial:x:kill\0", b"reverse:list-forward\0"):
                packet(connection, b"OPEN", 1, 0, service)
                assert answer(connection)[0] == b"CLSE"
            packet(connection, b"OPEN", 2, 0, b"shell:echo hi\0")
            assert answer(connection)[0] == b"OKAY"
            assert answer(connection) == (b"WRTE", b"hi\n")


def test_a_relay_of_a_device_that_is_gone_says_so(servers: TwoServers) -> None:
    for server in (servers.far, AdbServer(1, find_adb())):
        with Relay(server, "R5CT", model="x", reverse=False) as relay:
            assert not relay.wait_ready(0.1)
