"""adb servers and devices behind them: connections, variables, losses."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from attached import Rack, rack
from msgspec.structs import replace
from networks import Relay
from ordinary_server import kill_server, ordinary_adb_server
from stub_home import make_stub_home, write_stub_suite
from waiting import free_port, listens

from farm.base.config.settings import load_config
from farm.base.errors import (
    AdbServerError,
    DeviceError,
    DeviceGoneError,
    DeviceTimeoutError,
    InfraError,
    NoDeviceError,
    UsageError,
)
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.protocol import environment_with
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server, server_place, start_adb_server
from farm.devices.adb.transport import AdbTransport, LinkRefusedError, ShellProcess, SyncStream
from farm.devices.connect import transport_to
from farm.devices.device import LOOPBACK, AdbAddress
from farm.devices.discovery import Scan, scan_all
from farm.devices.process import Link
from farm.devices.transport import communicate
from farm.dispatch.cluster.client.devices import pinned
from farm.dispatch.pool.fleet import Choice, choose, narrowed
from farm.dispatch.request.request import RunRequest

# Peculiarities of adb: servers and tunnels that break, and endless content over its streams that is no answer.


TMP = PurePosixPath("/data/local/tmp")


def test_a_server_that_is_killed_is_to_blame_and_not_the_device(tmp_path: Path) -> None:
    with rack(tmp_path, "SM8650") as one:
        transport = one.transport()
        transport.push({TMP / "file": b"x"})
        process = transport.start(["cat"])
        one.supervisor.find("adb server").process.kill()
        with pytest.raises(AdbServerError, match="the adb server on port"):
            process.receive(20)
        process.close()
        for use in (
            lambda: transport.run(["true"], timeout_s=20),
            lambda: transport.push({TMP / "file": b"y"}),
            lambda: transport.pull({TMP / "file": tmp_path / "file"}, max_bytes=10),
        ):
            with pytest.raises(AdbServerError, match="no adb server listens"):
                use()
        transport.close()


def test_a_stream_that_breaks_while_the_device_is_there_is_neither_gone_nor_the_server(bench: Rack) -> None:
    process = bench.transport().start(["cat"])
    process._stream.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceError, match="ended before the program did") as caught:
        process.receive(20)
    assert type(caught.value) is DeviceError
    process.close()


def test_the_sync_service_never_leaves_the_device(bench: Rack, tmp_path: Path) -> None:
    outside = bench.root / "outside"
    outside.write_text("secret")
    transport = bench.transport()
    assert transport.run(["ln", "-s", str(bench.root), "/data/local/tmp/link"], timeout_s=30).code == 0
    ways = [PurePosixPath("/../outside"), TMP / "../../../../outside", TMP / "link/outside", TMP / "link/new"]
    for way in ways:
        with pytest.raises(DeviceError, match=r"leads out of the device|No such file"):
            transport.pull({way: tmp_path / "got"}, max_bytes=100)
        with pytest.raises(DeviceError, match="leads out of the device"):
            transport.push({way: b"changed"})
    assert outside.read_text() == "secret"
    assert not (bench.root / "new").exists()


def test_an_unknown_device_and_a_missing_server(bench: Rack) -> None:
    with pytest.raises(DeviceGoneError, match=r"nobody: adb refuses: .*not found"):
        AdbTransport("nobody", AdbAddress(bench.server.port)).run(["true"], timeout_s=5)
    with pytest.raises(DeviceGoneError):
        AdbTransport("nobody", AdbAddress(bench.server.port)).push({TMP / "file": b""})
    port = free_port()
    with pytest.raises(AdbServerError, match=f"no adb server listens on port {port}"):
        AdbTransport("nobody", AdbAddress(port)).run(["true"], timeout_s=5)


FORWARDED = "where it is forwarded (ssh -L, a container), check the tunnel and the adb server behind it; otherwise rest"


@pytest.mark.parametrize(
    ("host", "tunnel", "closes", "step"),
    [
        ("127.0.0.1", "", True, FORWARDED),
        ("127.0.0.1", "", False, FORWARDED),
        ("127.0.0.1", "attic", False, "the tunnel to attic leads there: check that 'adb devices' works on attic"),
        ("127.0.0.2", "", True, "check that 'adb devices' works on 127.0.0.2, and the network in between"),
    ],
    ids=["port that closes", "silent port", "tunnel", "host"],
)
def test_a_cut_tunnel_or_server_is_named_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, host: str, tunnel: str, closes: bool, step: str
) -> None:
    monkeypatch.setattr("farm.devices.adb.host._STATE_SECONDS", 0.2)
    kept: list[socket.socket] = []
    with socket.create_server((host, 0)) as cut:
        port = cut.getsockname()[1]

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(cut.accept()[0])
                    if closes:
                        kept.pop().close()

        threading.Thread(target=accept, daemon=True).start()
        transport = transport_to("phone", AdbAddress(port, host, tunnel=tunnel))
        for error, use in (
            (AdbServerError, lambda: transport.run(["true"], timeout_s=0.2)),
            (InfraError, lambda: AdbHost(port, host, tunnel=tunnel).query("host:version", timeout_s=0.2)),
        ):
            with pytest.raises(error, match=rf"{port}.*{re.escape(step)}"):
                use()
        cut.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()
    with pytest.raises(AdbServerError, match=str(port)) as over:
        transport.run(["true"], timeout_s=1)
    assert ("start one with 'adb start-server'" in str(over.value)) == (host == "127.0.0.1" and not tunnel)


def test_the_shell_makes_links_where_adbd_may_not(bench: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncStream.push

    def refusing_stub(self: SyncStream, files: dict[PurePosixPath, Any]) -> None:
        if any(isinstance(source, Link) for source in files.values()):
            raise LinkRefusedError("virtual", "couldn't create link: Permission denied")
        real(self, files)

    monkeypatch.setattr(SyncStream, "push", refusing_stub)
    transport = bench.transport()
    folder = TMP / "by 'shell'"
    wanted = {folder / "a/link": Link(PurePosixPath("../$(target)")), folder / "$(target)": b"there"}
    transport.push(wanted)
    assert (bench.files() / "by 'shell'/a/link").read_bytes() == b"there"
    transport.push(wanted)
    assert (bench.files() / "by 'shell'/a/link").readlink() == Path("../$(target)")
    transport.close()


def test_streams_for_files_are_used_again_and_survive_a_hangup(
    bench: Rack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    real = AdbHost.open

    def counting(self: AdbHost, serial: str, service: str, **options: Any) -> socket.socket:
        opened.append(service)
        return real(self, serial, service, **options)

    monkeypatch.setattr(AdbHost, "open", counting)
    transport = bench.transport()
    for number in range(5):
        transport.push({TMP / "again": b"%d" % number})
        transport.pull({TMP / "again": tmp_path / "again"}, max_bytes=10)
        assert (tmp_path / "again").read_bytes() == b"%d" % number
    assert opened == ["sync:"]
    transport._idle[0]._stream.shutdown(socket.SHUT_RDWR)
    transport.push({TMP / "again": b"after"})
    assert (bench.files() / "again").read_bytes() == b"after"
    assert opened == ["sync:"] * 2
    # An answer that was never read must not be taken for that to another question.
    with pytest.raises(DeviceError, match="No such file"):
        transport.pull({TMP / "gone": tmp_path / "gone"}, max_bytes=10)
    transport.pull({TMP / "again": tmp_path / "again"}, max_bytes=10)
    assert (tmp_path / "again").read_bytes() == b"after"
    transport.close()
    transport.push({TMP / "again": b"closed and opened"})
    transport.close()


# Seconds after which a device ends without a hang-up.
SECONDS = 10.0


class DeviceStub:
    """Stub of a device that sends given bytes without end, until the connection is closed."""

    def __init__(self, says: Iterable[bytes], pause_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.stream = socket.create_connection(listener.getsockname())
            self._far, _ = listener.accept()
        self.enough = threading.Event()
        self._timer = threading.Timer(SECONDS, self.enough.set)
        self._thread = threading.Thread(target=self._send, args=(says, pause_s))
        self._timer.start()
        self._thread.start()

    def _send(self, says: Iterable[bytes], pause_s: float) -> None:
        with self._far, contextlib.suppress(OSError):
            for output in says:
                if self.enough.wait(pause_s):
                    return
                self._far.sendall(output)

    def close(self) -> None:
        self.enough.set()
        self._timer.cancel()
        self.stream.close()
        self._thread.join()


@pytest.fixture
def device_stub() -> Iterator[Callable[[Iterable[bytes], float], DeviceStub]]:
    with contextlib.ExitStack() as stubs:

        def start(says: Iterable[bytes], pause_s: float = 0.0) -> DeviceStub:
            return stubs.enter_context(contextlib.closing(DeviceStub(says, pause_s)))

        yield start


@pytest.mark.parametrize(
    "frame", [struct.pack("<BI", 99, 4) + b"junk", struct.pack("<BI", 3, 0), struct.pack("<BI", 1, 0)]
)
def test_frames_that_say_nothing_do_not_hold_up_a_command(
    device_stub: Callable[[Iterable[bytes]], DeviceStub], frame: bytes
) -> None:
    device = device_stub(itertools.repeat(frame * 1000))
    process = ShellProcess(device.stream, AdbHost(1), "stub", ["true"])
    assert process.receive(0.1) == (b"", b"", None)
    with pytest.raises(DeviceTimeoutError, match=r"did not finish in 0.1 s"):
        communicate(process, "stub", ["true"], stdin=b"", timeout_s=0.1, max_output=10)
    assert not device.enough.is_set()


def test_parts_of_no_bytes_are_no_file(device_stub: Callable[[Iterable[bytes]], DeviceStub], tmp_path: Path) -> None:
    device = device_stub(itertools.repeat(struct.pack("<4sI", b"DATA", 0) * 1000))
    with pytest.raises(DeviceError, match="pull of /data/local/tmp/file: sent a part of 0 bytes"):
        SyncStream(device.stream, "stub", 30.0).pull({TMP / "file": tmp_path / "file"}, {TMP / "file": 10})
    assert not device.enough.is_set()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_drips_is_given_up(
    device_stub: Callable[[Iterable[bytes], float], DeviceStub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.devices.files._STALLS", 0)
    monkeypatch.setattr("farm.devices.files._FILE_SECONDS", 0.2)
    says = itertools.chain([struct.pack("<4sI", b"DATA", 60_000)], itertools.repeat(b"x"))
    device = device_stub(says, 0.01)
    with pytest.raises(DeviceTimeoutError, match=r"moved \d+ bytes of files in .* at least 64 KiB/s is expected"):
        SyncStream(device.stream, "stub", 30.0).pull({TMP / "file": tmp_path / "file"}, {TMP / "file": 100_000})
    assert not device.enough.is_set()
    assert list(tmp_path.iterdir()) == []


def test_a_private_server_keeps_to_itself(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "state")
        assert server.port != 5037
        environment = {**os.environ, **server.environment()}
        listed = subprocess.run([server.adb, "devices"], env=environment, capture_output=True, text=True, check=True)
        assert listed.stdout.strip() == "List of devices attached"
        assert (tmp_path / "state/.android/adbkey").is_file()
        # An adb of another version would end it by itself, and with it every run.
        killed = subprocess.run([server.adb, "kill-server"], env=environment, capture_output=True, check=False)
        assert killed.returncode != 0
        assert listens(server.port)
        with pytest.raises(InfraError, match="cannot attach 127.0.0.1:"):
            server.connect("127.0.0.1", free_port())
    assert not listens(server.port)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python knows no IPv6")
def test_a_device_is_attached_by_an_ipv6_address(tmp_path: Path) -> None:
    with rack(tmp_path, "SM8650") as one:
        host = AdbHost(one.server.port)
        near = host.network_address(one.device.serial)
        host.query(f"host:disconnect:{near}")
        try:
            line = Relay(int(near.split(":")[1]), host="::1")
        except OSError:
            pytest.skip("this machine has no ::1")
        with contextlib.closing(line):
            assert one.server.connect("::1", line.port) == f"[::1]:{line.port}"
            assert host.network_address(one.device.serial) == f"[::1]:{line.port}"
            assert one.transport().run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
            host.query(f"host:disconnect:[::1]:{line.port}")


def test_a_cut_behind_a_forward_that_acknowledges_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.transport.SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.adb.transport.ASK_SECONDS", 1.0)
    with rack(tmp_path, "SM8650") as one:
        near = one.server.network_address(one.device.serial)
        one.server.query(f"host:disconnect:{near}")
        with contextlib.closing(Relay(int(near.split(":")[1]))) as line, ThreadPoolExecutor(1) as pool:
            one.server.connect("127.0.0.1", line.port)
            transport = one.transport()
            # A program may stay silent for any time while the device answers.
            assert transport.run(["sleep", "2"], timeout_s=20).code == 0
            running = pool.submit(lambda: transport.run(["sleep", "600"], timeout_s=600))
            with pytest.raises(TimeoutError):
                running.result(1)
            line.cut()
            with pytest.raises(DeviceTimeoutError, match="did not open a stream in 1 s: is it hanging"):
                running.result(30)
            line.restore()


# Variables of adb: farm looks for a server where adb looks for it, or refuses a value in one line.


NAMES = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT", "ANDROID_SERIAL")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables of adb, and no other."""

    def named(**variables: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return named


def variables(socket: str | None = None, host: str | None = None, port: str | None = None) -> dict[str, str]:
    values = dict(zip(NAMES, (socket, host, port), strict=False))
    return {name: value for name, value in values.items() if value is not None}


def test_the_server_is_where_adb_looks_for_it(named: Callable[..., None]) -> None:
    for words, place in (
        (variables(), (LOOPBACK, 5037, True)),
        (variables(port=""), (LOOPBACK, 5037, True)),
        (variables(port=" 45985"), (LOOPBACK, 45985, True)),
        (variables(port="0x1234"), (LOOPBACK, 4660, True)),
        (variables(host="localhost"), (LOOPBACK, 5037, True)),
        # adb starts a server at `localhost` alone.
        (variables(host="127.0.0.1"), (LOOPBACK, 5037, False)),
        (variables(host="10.0.0.7", port="5038"), ("10.0.0.7", 5038, False)),
        (variables(host="[fe80::1]"), ("fe80::1", 5037, False)),
        (variables("tcp:localhost:5999"), (LOOPBACK, 5999, True)),
        (variables("tcp:localhost"), (LOOPBACK, 5037, True)),
        (variables("tcp:host.docker.internal:5037"), ("host.docker.internal", 5037, False)),
        (variables("tcp:[::1]:5999"), ("::1", 5999, False)),
        # This variable wins over the two others.
        (variables("tcp:5999", host="10.0.0.7"), (LOOPBACK, 5999, True)),
    ):
        assert server_place(words)[:3] == place
        named(**words)
        assert (ordinary_server().host, ordinary_server().port) == place[:2]
    server = AdbServer(5037, find_adb(), host="fe80::1")
    assert server.environment() == {"ANDROID_ADB_SERVER_PORT": "5037", "ANDROID_ADB_SERVER_ADDRESS": "[fe80::1]"}


def test_what_farm_cannot_follow_is_refused_in_one_line(named: Callable[..., None]) -> None:
    for words, problem in (
        (variables(""), "ADB_SERVER_SOCKET is '', and farm reaches adb servers over TCP alone"),
        (variables("localfilesystem:/run/adb"), "over TCP alone: expected tcp:PORT or tcp:HOST:PORT"),
        (variables("tcp:host:70000"), "ADB_SERVER_SOCKET is '70000', expected a port number"),
        (variables("tcp:::1:5037"), "an IPv6 address in brackets"),
        (variables("tcp:-oProxy:5037"), "expected tcp:PORT or tcp:HOST:PORT"),
        (variables(host=""), "ANDROID_ADB_SERVER_ADDRESS is '', expected a host"),
        (variables(host="::1"), "an IPv6 address in brackets"),
        (variables(host="host:5037"), "expected a host"),
        (variables(port="many"), "ANDROID_ADB_SERVER_PORT is 'many', expected a port number"),
        (variables(port="0"), "expected a port number from 1 to 65535"),
        (variables(port="9" * 5000), "expected a port number"),
    ):
        named(**words)
        with pytest.raises(UsageError) as refused:
            ordinary_server(start=True)
        assert problem in str(refused.value)
        assert str(refused.value).isprintable()
        assert refused.value.exit_code == 2


@pytest.fixture
def scanned(tmp_path: Path, named: Callable[..., None]) -> Callable[..., Scan]:
    """Return the devices at the user's adb server, which variables name, and perhaps a device of it."""
    (tmp_path / "farm.toml").write_text("")

    def scanned(**words: str) -> Scan:
        named(**words)
        with Supervisor() as supervisor:
            return scan_all(load_config(tmp_path / "farm.toml"), supervisor)

    return scanned


def test_a_named_server_is_used_and_none_is_started_beside_it(bench: Rack, scanned: Callable[..., Scan]) -> None:
    beside, port = str(free_port()), bench.server.port
    for words in (
        variables(f"tcp:127.0.0.1:{port}", port=beside),
        variables(f"tcp:{port}", port=beside),
        variables(host=LOOPBACK, port=str(port)),
    ):
        assert {one.serial for one in scanned(**words).devices} == {one.serial for one in bench.devices}
    assert not AdbHost(int(beside)).listens()


def test_a_server_on_another_host_that_does_not_answer_is_named_and_not_replaced(scanned: Callable[..., Scan]) -> None:
    port, beside = free_port(), free_port()
    for words in (variables(f"tcp:127.0.0.2:{port}", port=str(beside)), variables(host="127.0.0.2", port=str(port))):
        assert [one.reason for one in scanned(**words).unusable] == [
            f"no adb server listens on 127.0.0.2:{port}, which {next(iter(words))} names: start one there, or unset it"
        ]
    assert not any(AdbHost(one).listens() for one in (port, beside))


def test_a_server_is_started_where_adb_would_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ordinary_adb_server(tmp_path) as server:
        kill_server(server.port)
        beside = free_port()
        # Undone before the server's own variables are.
        with monkeypatch.context() as patch:
            patch.setenv("ANDROID_ADB_SERVER_PORT", str(beside))
            patch.setenv("ADB_SERVER_SOCKET", f"tcp:localhost:{server.port}")
            patch.setenv("ANDROID_ADB_SERVER_ADDRESS", "127.0.0.2")
            started = ordinary_server(start=True)
            assert (started.port, started.answers()) == (server.port, True)
            assert not AdbHost(beside).listens()


def test_variables_for_the_server_reach_one_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"ADB_LOCAL_TRANSPORT_MAX_PORT": "5555", "ADB_VENDOR_KEYS": str(tmp_path), "ADB_LIBUSB": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ordinary_adb_server(tmp_path) as server:
        line = f"-L\0tcp:{server.port}\0".encode()
        [environment] = [
            (process / "environ").read_bytes().split(b"\0")
            for process in Path("/proc").iterdir()
            if process.name.isdecimal() and line in read(process / "cmdline")
        ]
        assert {f"{name}={value}".encode() for name, value in variables.items()} <= set(environment)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_programs_that_call_adb_reach_the_server_of_their_device(bench: Rack, named: Callable[..., None]) -> None:
    """The user's variables name other servers and another device: each would win over what farm sets."""
    named(ADB_SERVER_SOCKET="tcp:127.0.0.1:1", ANDROID_ADB_SERVER_ADDRESS="127.0.0.2", ANDROID_SERIAL="other")
    transport = bench.transport()
    argv, environment = transport.shell_argv(["getprop", "ro.soc.model"], terminal=False)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")
    environment = environment_with(transport.tool_environment())
    argv = [str(find_adb()), "shell", "getprop", "ro.soc.model"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")


def test_android_serial_names_the_device_that_adb_takes(bench: Rack, scanned: Callable[..., Scan]) -> None:
    def found(serial: str) -> Scan:
        return scanned(ANDROID_ADB_SERVER_PORT=str(bench.server.port), ANDROID_SERIAL=serial)

    first, second = bench.devices[:2]
    address = first.address.attached_at
    for serial in (address, f"product:{first.serial}", first.serial, f"tcp:{address}"):
        narrow = narrowed(found(serial), ())
        assert [one.serial for one in narrow.devices] == [first.serial], serial
        assert {one.serial for one in bench.devices} - {first.serial} == {one.serial for one in narrow.unusable}
        devices, refused = choose(narrow, {}, [first.soc], Choice())
        assert [one.serial for one in devices] == [first.serial]
        assert f"{second.serial} (left out: ANDROID_SERIAL names {serial})" in refused
    # A name on the command line wins, as with `adb -s`; an empty value names none, as for adb.
    assert narrowed(found(address), [second.id]).devices == narrowed(found(""), ()).devices
    assert len(found("").devices) == len(bench.devices)
    for serial, why in (
        ("zz", "device 'zz' not found"),
        ("127.0.0.1", "more than one device with serial 127.0.0.1"),
        ("\x1b[2Jzz", "not found"),
    ):
        scan = found(serial)
        with pytest.raises(NoDeviceError, match=why) as refused:
            narrowed(scan, ())
        assert "attach it, unset ANDROID_SERIAL, or name another with --device" in str(refused.value)
        assert str(refused.value).isprintable()
        assert scan.narrowed.devices == ()


def test_commands_use_the_device_of_android_serial(bench: Rack, tmp_path: Path) -> None:
    """Each of them would take another device, or ask for a name."""
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"only": 20})
    first, second = bench.devices[:2]
    adb = {"ANDROID_ADB_SERVER_PORT": str(bench.server.port)}
    chosen = {**adb, "ANDROID_SERIAL": second.address.attached_at}
    done = home.farm("shell", "--", "getprop", "ro.product.name", env=chosen)
    assert (done.returncode, done.stdout.strip()) == (0, second.serial), done.stderr
    done = home.farm("lease", second.soc, "--json", env=chosen)
    assert json.loads(done.stdout)["device"]["serial"] == second.serial
    # The other device stays free.
    assert "yours already" in home.farm("lease", second.soc, "--no-wait", env=chosen, code=4).stderr
    assert home.farm("lease", first.serial, env=chosen).returncode == 0
    for words in (("shell", "--", "true"), ("devices", "check"), ("run", "--soc", "SM8650", "--suite", "./mine")):
        done = home.farm(*words, env={**adb, "ANDROID_SERIAL": "zz"}, code=4)
        assert "ANDROID_SERIAL names zz, and device 'zz' not found" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_submitted_run_is_for_the_device_of_android_serial(named: Callable[..., None]) -> None:
    request = RunRequest(socs=("SM8650",), suites=("smoke",), choice=Choice(labels=("lab",)))
    named(ANDROID_SERIAL="desk")
    assert pinned(request).choice == Choice(("desk",), ("lab",))
    chosen = replace(request, choice=Choice(("shelf",)))
    assert pinned(chosen) == chosen
    named(ANDROID_SERIAL="")
    assert pinned(request) == request
