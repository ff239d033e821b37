"""Peculiarities of adb: servers and tunnels that break, and endless content over its streams that is no answer."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from waiting import free_port

from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.sync import LinkRefusedError, SyncStream
from farm.devices.adb.transport import AdbTransport, ShellProcess
from farm.devices.connect import transport_to
from farm.devices.device import AdbAddress
from farm.devices.process import Link
from farm.devices.transport import communicate
from farm.devices.virtual.boot import boot

if TYPE_CHECKING:
    from conftest import Bench

TMP = PurePosixPath("/data/local/tmp")


def test_a_server_that_is_killed_is_to_blame_and_not_the_device(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        (device,) = boot(supervisor, server, ["SM8650"], tmp_path)
        transport = AdbTransport(device.serial, AdbAddress(server.port))
        transport.push({TMP / "file": b"x"})
        process = transport.start(["cat"])
        supervisor.find("adb server").process.kill()
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


def test_a_stream_that_breaks_while_the_device_is_there_is_neither_gone_nor_the_server(bench: Bench) -> None:
    process = bench.transport().start(["cat"])
    process._stream.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceError, match="ended before the program did") as caught:
        process.receive(20)
    assert type(caught.value) is DeviceError
    process.close()


def test_the_sync_service_never_leaves_the_device(bench: Bench, tmp_path: Path) -> None:
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


def test_an_unknown_device_and_a_missing_server(bench: Bench) -> None:
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


def test_the_shell_makes_links_where_adbd_may_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    monkeypatch.setattr("farm.devices.min_throughput._STALLS", 0)
    monkeypatch.setattr("farm.devices.min_throughput._FILE_SECONDS", 0.2)
    says = itertools.chain([struct.pack("<4sI", b"DATA", 60_000)], itertools.repeat(b"x"))
    device = device_stub(says, 0.01)
    with pytest.raises(DeviceTimeoutError, match=r"moved \d+ bytes of files in .* at least 64 KiB/s is expected"):
        SyncStream(device.stream, "stub", 30.0).pull({TMP / "file": tmp_path / "file"}, {TMP / "file": 100_000})
    assert not device.enough.is_set()
    assert list(tmp_path.iterdir()) == []
