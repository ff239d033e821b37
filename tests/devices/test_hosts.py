"""adb servers of this machine and of others, and their devices."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import socketserver
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from attached import Rack, rack
from made import config
from networks import serving
from ordinary_server import kill_server, ordinary_adb_server
from processors import of_an_arm
from ssh_server import SshServer, login, running
from waiting import free_port, until

from farm.base.errors import ConfigError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server, outdated, suitable_adb
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import KINDS, TransportKind, from_plain, open_transport
from farm.devices.device import AdbAddress, Device, DeviceAddress, LocalAddress
from farm.devices.discovery import Scan, scan_all
from farm.devices.facts import identify, reported_soc
from farm.devices.hosts import Servers, reach_server, revive_tunnels
from farm.devices.local import LocalProcess, LocalTransport
from farm.devices.virtual.boot import boot

# Everything that is attached, through a real adb server, a real sshd and a real tunnel.


HERE = socket.gethostname()


class StubAddress(msgspec.Struct, DeviceAddress, frozen=True, tag="stub"):
    """Address of a device whose every program prints the file `answer`."""

    answer: str

    @property
    def place(self) -> str:
        return self.answer


class StubTransport(LocalTransport):
    def __init__(self, serial: str, address: StubAddress) -> None:
        super().__init__(serial, LocalAddress("/farm"))
        self._answer = address.answer

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> LocalProcess:
        del command, timeout_s, stdin
        return LocalProcess(self.serial, argv, ["cat", self._answer])


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with running(SshServer, tmp_path_factory.mktemp("board"), "QCS9100", "board-7") as server:
        yield server


@pytest.fixture
def look(bench: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Scan]]:
    """Look for devices with such a farm.toml; the ordinary adb server is the bench's."""
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(bench.server.port))
    with Supervisor() as supervisor:

        def look(toml: str) -> Scan:
            return scan_all(config(tmp_path, toml), supervisor)

        look.supervisor = supervisor  # type: ignore[attr-defined]
        yield look


def unusable(scan: Scan) -> dict[str, tuple[str, str]]:
    return {one.serial: (one.state, one.reason) for one in scan.unusable}


def test_without_a_word_in_farm_toml_the_ordinary_server_is_asked(look: Callable[[str], Scan], bench: Rack) -> None:
    found = look("")
    assert [(one.id, one.soc, one.host, one.os, one.kind) for one in found.devices] == [
        (f"virtual-{soc}-0@{HERE}", soc, HERE, "android", "virtual") for soc in ("SM8650", "SM8750")
    ]
    assert {one.address.port for one in found.devices} == {bench.server.port}
    assert found.unusable == ()
    assert msgspec.json.decode(msgspec.json.encode(found.devices), type=tuple[Device, ...], dec_hook=from_plain)


def test_a_device_of_a_kind_that_has_no_key_of_its_own_is_found_by_its_address(
    look: Callable[[str], Scan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "stub", TransportKind(StubAddress, StubTransport))
    (tmp_path / "answer").write_text("ro.soc.model=SM8550\nro.serialno=R5CT\nstorage=ok\n")
    entry = f'address = {{ type = "stub", answer = "{tmp_path}/answer" }}\n'
    found = look(f'[[device]]\n{entry}name = "made-up"\n')
    device = next(one for one in found.devices if one.serial == "R5CT")
    assert (device.soc, device.name, device.host) == ("SM8550", "made-up", HERE)
    found = look('[[device]]\naddress = { type = "pigeon" }\n[[device]]\naddress = { type = "stub" }\n')
    assert "there is no transport 'pigeon': known are adb, ssh, local, stub" in unusable(found)["pigeon"][1]
    assert "missing required field `answer`" in unusable(found)["stub"][1]
    with pytest.raises(ConfigError, match="expected one of serial, ssh, connect, address and local"):
        look(f"[[device]]\n{entry}local = true\n")


def test_devices_of_every_kind_are_found_and_described(look: Callable[[str], Scan], board: SshServer) -> None:
    found = look(
        f'[[device]]\nserial = "virtual-SM8650-0"\nname = "left"\nlabels = ["lab", "hot"]\nsoc = "sm8650"\n'
        f'[[device]]\n{login(board)}storage = "{board.folder}/kept/here"\nname = "board"\n'
    )
    assert unusable(found) == {}
    assert {one.serial: (one.name, one.labels) for one in found.devices} == {
        "virtual-SM8650-0": ("left", ("lab", "hot")),
        "virtual-SM8750-0": ("", ()),
        "board-7": ("board", ()),
    }
    device = next(one for one in found.devices if one.serial == "board-7")
    assert (device.soc, device.os, device.host) == ("QCS9100", "linux", "127.0.0.1")
    assert device.build
    # The device gives the same answers again, and can be used.
    assert identify(device.serial, device.address, host=device.host) == msgspec.structs.replace(
        device, name="", labels=()
    )
    transport = open_transport(device)
    assert str(transport.storage) == f"{board.folder}/kept/here"
    assert stat.S_IMODE(Path(transport.storage).stat().st_mode) == 0o700
    transport.push({transport.storage / "file": b"x"})
    transport.close()


def test_what_cannot_be_reached_is_said_and_ends_nothing(look: Callable[[str], Scan], board: SshServer) -> None:
    nobody = free_port()
    found = look(
        f'[[host]]\nname = "direct"\nadb = "127.0.0.1:{nobody}"\n'
        f'[[host]]\nname = "tunnelled"\nssh = "me@127.0.0.1:{nobody}"\n'
        f'[[host]]\nname = "strange"\n{login(board)}adb = "127.0.0.2:{nobody}"\n'
        f'[[device]]\nssh = "me@127.0.0.1:{nobody}"\n'
        f'[[device]]\nconnect = "127.0.0.1:{nobody}"\n'
        f'[[device]]\n{login(board)}soc = "QCM6490"\n'
    )
    assert [one.serial for one in found.devices] == ["virtual-SM8650-0", "virtual-SM8750-0"]
    output = unusable(found)
    assert {state for state, _ in (output["direct"], output["tunnelled"], output["strange"])} == {"absent"}
    assert "no adb server listens" in output["direct"][1]
    assert "no tunnel to tunnelled" in output["tunnelled"][1]
    assert "Connection refused" in output["tunnelled"][1]
    assert f"no adb server answers at 127.0.0.2:{nobody}" in output["strange"][1]
    assert output["board-7"] == ("mismatch", "is a QCS9100, and farm.toml expects a QCM6490")
    # The ssh device and the device to be attached have the same address.
    assert "absent" in output[f"127.0.0.1:{nobody}"]


@pytest.mark.parametrize(
    ("force", "text"),
    [
        ("/bin/true", "ended with exit code 0: give"),
        ("/usr/sbin/nologin", "ended with exit code 1 (This account is currently not available.): give"),
    ],
)
def test_an_account_without_a_shell_is_named_with_the_next_step(
    look: Callable[[str], Scan], tmp_path: Path, force: str, text: str
) -> None:
    with running(SshServer, tmp_path / "closed", force=force) as closed:
        host = f'[[host]]\nname = "attic"\n{login(closed)}adb = "127.0.0.1:{free_port()}"\n'
        found = look(f"{host}[[device]]\n{login(closed)}")
    for name in ("attic", f"127.0.0.1:{closed.port}"):
        _, reason = unusable(found)[name]
        assert f"the account {getpass.getuser()} at 127.0.0.1:{closed.port} runs no commands" in reason
        assert text in reason
        assert "name another user in farm.toml" in reason
        assert "\n" not in reason


def test_this_machine_is_a_device_only_when_it_says_which(
    look: Callable[[str], Scan], board: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = f'[[device]]\nlocal = true\nstorage = "{tmp_path}/mine"\n'
    if not Path("/sys/devices/soc0").exists():
        state, reason = unusable(look(toml))["localhost"]
        assert state == "absent"
        assert "does not report its SoC" in reason
    monkeypatch.setenv("PATH", f"{board.tools}:{os.environ['PATH']}")
    device = next(one for one in look(toml).devices if one.serial == "board-7")
    assert (device.soc, device.os, device.host) == ("QCS9100", "linux", HERE)
    # The same board by another way is not a second device; only of virtual ones each machine has its own.
    board.tree.set_property("ro.farm.virtual", "0")
    try:
        with of_an_arm(board.tools):
            both = look(f"{toml}[[device]]\n{login(board)}")
    finally:
        board.tree.set_property("ro.farm.virtual", "1")
    assert [one.serial for one in both.devices if one.soc == "QCS9100"] == ["board-7"]
    state, reason = unusable(both)[f"127.0.0.1:{board.port}"]
    assert state == "mismatch"
    assert "has the serial board-7" in reason
    assert "remove one of the two from farm.toml" in reason


def test_a_serial_that_many_boards_have_is_none(look: Callable[[str], Scan], board: SshServer) -> None:
    board.tree.set_property("ro.serialno", "00000000")
    try:
        found = look(f"[[device]]\n{login(board)}")
    finally:
        board.tree.set_property("ro.serialno", "board-7")
    assert [(one.serial, one.serialno) for one in found.devices if one.soc == "QCS9100"] == [
        (f"127.0.0.1:{board.port}", "")
    ]


def test_what_is_out_of_service_is_not_asked(look: Callable[[str], Scan]) -> None:
    with socket.socket() as ssh, socket.socket() as adb:
        for one in (ssh, adb):
            one.bind(("127.0.0.1", 0))
            one.listen()
            one.setblocking(False)
        places = [f"127.0.0.1:{one.getsockname()[1]}" for one in (ssh, adb)]
        out = 'in_service = false\nnote = "its fan is loud"\n'
        found = look(
            f'[[device]]\nssh = "me@{places[0]}"\n{out}[[device]]\nconnect = "{places[1]}"\n{out}'
            f'[[device]]\nserial = "virtual-SM8750-0"\n{out}[[device]]\nlocal = true\n{out}'
        )
        reason = ("out", "out of service in farm.toml: its fan is loud")
        assert unusable(found) == dict.fromkeys([*places, "virtual-SM8750-0", "localhost"], reason)
        for one in (ssh, adb):
            with pytest.raises(BlockingIOError):
                one.accept()


def test_storage_of_somebody_else_is_not_used(look: Callable[[str], Scan], board: SshServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = f"127.0.0.1:{board.port}"
    _, reason = unusable(look(f'[[device]]\n{login(board)}storage = "{tmp_path}/file/below"\n'))[place]
    assert "farm cannot keep its files" in reason
    assert "Not a directory" in reason
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o777)
        os.chown(tmp_path / "theirs", 12345, 12345)
        _, reason = unusable(look(f'[[device]]\n{login(board)}storage = "{tmp_path}/theirs"\n'))[place]
        assert "not this user's own" in reason


def test_a_device_on_the_network_is_attached(bench: Rack, tmp_path: Path, look: Callable[[str], Scan]) -> None:
    with rack(tmp_path / "remote", "SM8850") as remote:
        listed = remote.server.network_address(remote.device.serial)
        remote.server.query(f"host:disconnect:{listed}")
        toml = f'[[device]]\nconnect = "{listed}"\nname = "wireless"\n'
        for _ in range(2):
            device = next(one for one in look(toml).devices if one.name == "wireless")
            assert (device.serial, device.soc) == ("virtual-SM8850-0", "SM8850")
            assert device.address.port == bench.server.port
        bench.server.query(f"host:disconnect:{listed}")


def test_an_adb_server_of_another_machine_through_a_tunnel(
    look: Callable[[str], Scan], board: SshServer, tmp_path: Path
) -> None:
    """The machine has sshd and adb alone: the server is started there, on a free port."""
    adb = board.tools / "adb"
    started = tmp_path / "started"
    far = free_port()
    with Supervisor() as supervisor:
        environment = "ADB_MDNS=0 ADB_USB=0 ADB_EMU=0"
        adb.write_text(f'#!/bin/sh\necho "$@" >>{started}\nHOME={tmp_path} {environment} exec {find_adb()} "$@"\n')
        adb.chmod(0o755)
        toml = f'[[host]]\nname = "attic"\n{login(board)}adb = "127.0.0.1:{far}"\n'
        try:
            assert unusable(look(toml)) == {}
            assert started.read_text() == f"-P {far} start-server\n"
            boot(supervisor, AdbServer(far, find_adb()), ["SM8450"], tmp_path / "attic")
            # adb may still be connecting to the device.
            device = until(lambda: next((one for one in look(toml).devices if one.host == "attic"), None), "the device")
            # The server was there already, and so was the tunnel.
            assert started.read_text() == f"-P {far} start-server\n"
            assert device.id == "virtual-SM8450-0@attic"
            assert device.address.port != far
            transport = open_transport(device)
            data = os.urandom(3 << 20)
            transport.push({transport.storage / "file": data})
            transport.pull({transport.storage / "file": tmp_path / "back"}, max_bytes=len(data))
            assert (tmp_path / "back").read_bytes() == data
            assert transport.run(["cat"], stdin=data, timeout_s=30).stdout == data
            # The ssh connection may die; the tunnel opens a new one.
            board.stop()
            board.start()
            assert transport.run(["echo", "again"], timeout_s=30).stdout == b"again\n"
            # A tunnel that is killed is opened again, at the port that its devices have.
            assert revive_tunnels(look.supervisor) == []  # type: ignore[attr-defined]
            child = look.supervisor.find("tunnel to attic")  # type: ignore[attr-defined]
            os.kill(child.pid, signal.SIGKILL)
            child.process.wait()
            assert not transport.server_answers()
            [line] = revive_tunnels(look.supervisor)  # type: ignore[attr-defined]
            assert line == "the tunnel to attic had ended with signal 9 and was opened again"
            assert transport.server_answers()
            assert transport.run(["echo", "once more"], timeout_s=30).stdout == b"once more\n"
            transport.close()
        finally:
            os.system(f"HOME={tmp_path} {find_adb()} -P {far} kill-server >/dev/null 2>&1")  # noqa: S605
            adb.unlink()


def test_a_tunnel_to_a_machine_without_adb_is_refused(board: SshServer, tmp_path: Path) -> None:
    toml = f'[[host]]\nname = "attic"\n{login(board)}adb = "127.0.0.1:{free_port()}"\n'
    (host,) = config(tmp_path, toml).hosts
    with Supervisor() as supervisor:
        # No adb is there: sshd's shell does not find it.
        if Path("/usr/bin/adb").exists() or Path("/usr/local/bin/adb").exists():
            pytest.skip("this machine has an adb of its own")
        with pytest.raises(InfraError, match=r"no tunnel to attic: .*start-server.*127"):
            reach_server(host, supervisor)


def test_where_the_soc_is_read_from() -> None:
    compatible = "qcom,qcs9100-ride qcom,qcs9100 qcom,sa8775p"
    for answer, soc in (
        ({"ro.soc.model": "SM8650-AC", "machine": "other"}, "SM8650"),
        ({"machine": "QCS9100"}, "QCS9100"),
        ({"machine": "Some Board, Rev 2", "compatible": compatible}, "QCS9100"),
        ({"compatible": "raspberrypi,4-model-b brcm,bcm2711"}, ""),
        ({"compatible": "evil,sm8650"}, ""),
        ({}, ""),
    ):
        assert reported_soc(answer)[1] == soc, answer


class Tunnel(NamedTuple):
    """A tunnel to the bench's adb server, as farm opens it."""

    server: AdbHost
    pid: int

    def answers(self) -> bool:
        return "virtual-SM8650-0" in self.server.query("host:devices-l")

    def reset(self, data: bytes, answer: bytes = b"") -> None:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            connection.sendall(data)
            if answer:
                assert connection.recv(4) == answer
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))


@pytest.fixture
def tunnel(bench: Rack, board: SshServer, tmp_path: Path) -> Iterator[Tunnel]:
    toml = f'[[host]]\nname = "attic"\nadb = "127.0.0.1:{bench.server.port}"\n{login(board)}'
    with Supervisor() as supervisor:
        server = reach_server(config(tmp_path, toml).hosts[0], supervisor)
        yield Tunnel(server, supervisor.find("tunnel to attic").pid)


@pytest.mark.parametrize("data", [b"", b"000chost:ver"], ids=["at once", "within a request"])
def test_connections_that_are_reset_end_nothing(tunnel: Tunnel, data: bytes) -> None:
    for _ in range(40):
        tunnel.reset(data)
    assert tunnel.answers()


def test_a_reset_ends_what_the_server_would_go_on_with(tunnel: Tunnel) -> None:
    """adb's stream of devices is endless: no part of it stays after its reader has left."""
    assert tunnel.answers()
    before = tunnel.threads
    for _ in range(10):
        tunnel.reset(b"0012host:track-devices", answer=b"OKAY")
    until(lambda: tunnel.threads <= before + 2, "the end of the threads", 30)
    assert tunnel.answers()


def test_streams_that_both_sides_end_at_once_take_no_other_along(tunnel: Tunnel) -> None:
    """sshd ends the whole connection over a message for a stream that both sides have closed."""
    with socket.create_connection(("127.0.0.1", tunnel.server.port), timeout=30) as endless:
        endless.sendall(b"0012host:track-devices")
        assert endless.recv(4) == b"OKAY"
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(tunnel.server.query, "host:version") for _ in range(400)]
            assert {one.result() for one in asked} == {asked[0].result()}
        # The listing, and then nothing: no end.
        assert endless.recv(4096)
        endless.settimeout(0.5)
        with pytest.raises(TimeoutError):
            endless.recv(4096)


# The user's own adb server, as `adb start-server` starts it: it ends, others start it, it is of any version.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AdbServer]:
    with ordinary_adb_server(tmp_path) as server:
        yield server


def test_one_that_was_killed_is_started_again_with_what_was_attached_to_it(server: AdbServer, tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        kept = Servers(supervisor, [device])
        assert kept.revive() == []
        kill_server(server.port)
        assert not server.listens()
        assert kept.revive() == [f"the adb server on port {server.port} had ended and was started again"]
        with contextlib.closing(open_transport(device)) as transport:
            server.wait_for(AdbHost(server.port).network_address(device.serial))
            assert transport.run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
        assert kept.revive() == []


def test_two_that_start_it_at_the_same_moment_get_the_same(server: AdbServer) -> None:
    kill_server(server.port)
    with ThreadPoolExecutor(4) as pool:
        started = list(pool.map(lambda _: ordinary_server(start=True), range(4)))
    assert {one.version() for one in started} == {server.version()}


def test_it_stays_when_whatever_started_it_was_started_by_a_farm_that_ends(server: AdbServer) -> None:
    kill_server(server.port)
    script = "from farm.devices.adb import server; server.ordinary_server(start=True); print('up', flush=True)"
    with Supervisor() as supervisor:
        child = supervisor.spawn([sys.executable, "-c", script], name="farm", env=dict(os.environ), stdout_pipe=True)
        assert child.first_line(60) == b"up\n"
    assert server.answers()


class Version40Stub(socketserver.BaseRequestHandler):
    """Connection to a stub of an adb server, which gives a version that no package has and answers nothing else."""

    def handle(self) -> None:
        size = int(self.request.recv(4, socket.MSG_WAITALL), 16)
        if self.request.recv(size, socket.MSG_WAITALL) == b"host:version":
            self.request.sendall(b"OKAY00040028")


@pytest.fixture
def old_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdbHost]:
    """Old server; the only adb on PATH is the test's program in the folder `bin`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with serving(Version40Stub) as port:
        yield AdbHost(port)


def test_no_client_of_another_version_is_let_near_a_server(old_server: AdbHost) -> None:
    """A client of another version ends a server."""
    with pytest.raises(InfraError) as refused:
        AdbTransport("R5CT1", AdbAddress(old_server.port)).shell_argv([], terminal=False)
    assert f"the adb server on port {old_server.port} is version 40, and {find_adb()} version 41" in str(refused.value)
    assert "kill-server" in str(refused.value)


def test_the_adb_that_suits_a_server_is_taken_the_users_own_first(
    old_server: AdbHost, server: AdbServer, tmp_path: Path
) -> None:
    assert suitable_adb(server) == find_adb()
    stub = tmp_path / "bin" / "adb"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 'Android Debug Bridge version 1.0.40'\n")
    stub.chmod(0o755)
    assert suitable_adb(old_server) == stub
    assert suitable_adb(server) == find_adb()
    # Large outputs are cut by old servers.
    assert outdated(server) == ""
    assert outdated(old_server).startswith(
        f"the adb server on port {old_server.port} is version 40, which cuts large outputs of devices"
    )
