from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from waiting import until

from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceSpaceError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.sync import LinkRefusedError, SyncStream
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import transport_to
from farm.devices.device import AdbAddress
from farm.devices.transport import Link
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, clear, inject

if TYPE_CHECKING:
    from conftest import Bench


TMP = PurePosixPath("/data/local/tmp")


def test_a_server_that_is_killed_is_to_blame_and_not_the_device(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        (device,) = boot(supervisor, server, ["SM8650"], tmp_path)
        transport = AdbTransport(device.serial, server.port)
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


def test_a_full_disk_is_said_so(bench: Bench) -> None:
    root = bench.root / bench.devices[0].serial
    inject(root, Fault("disk_full"))
    try:
        with pytest.raises(DeviceSpaceError, match="No space left"):
            bench.transport().push({TMP / "file": bytes(1 << 20)})
    finally:
        clear(root)


def test_a_command_too_long_for_adb_is_refused(bench: Bench) -> None:
    with pytest.raises(DeviceError, match="at most 65535"):
        bench.transport().run(["echo", "x" * 70_000], timeout_s=30)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 15 * 65536, 15 * 65536 + 1, 16 * 65536])
def test_sizes_around_the_protocols_limits(bench: Bench, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    files = {TMP / "sizes" / "file": source, TMP / "sizes" / "bytes": data}
    bench.transport().push(files)
    bench.transport().pull({path: tmp_path / path.name for path in files}, max_bytes=size)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "bytes").read_bytes() == data


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


def test_a_broken_push_leaves_no_partial_file(bench: Bench) -> None:
    host = AdbHost(bench.server.port)
    name = b"/data/local/tmp/broken"
    argument = name + b",33188"
    with host.open(bench.devices[0].serial, "sync:", timeout_s=30) as stream:
        stream.sendall(struct.pack("<4sI", b"SEND", len(argument)) + argument)
        stream.sendall(struct.pack("<4sI", b"DATA", 65536) + b"x" * 65536)
        broken = bench.files() / "broken"
        until(lambda: broken.exists() and broken.stat().st_size >= 65536, "65536 bytes")
        stream.shutdown(socket.SHUT_RDWR)
    until(lambda: not broken.exists(), "the removal of the partial file")


def test_an_unknown_device_and_a_missing_server(bench: Bench) -> None:
    with pytest.raises(DeviceGoneError, match=r"nobody: adb refuses: .*not found"):
        AdbTransport("nobody", bench.server.port).run(["true"], timeout_s=5)
    with pytest.raises(DeviceGoneError):
        AdbTransport("nobody", bench.server.port).push({TMP / "file": b""})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(AdbServerError, match=f"no adb server listens on port {port}"):
            AdbTransport("nobody", port).run(["true"], timeout_s=5)


FORWARDED = (
    "where it is forwarded (ssh -L, a container), check the tunnel and the adb server behind it; otherwise restart"
)


@pytest.mark.parametrize("closes", [True, False], ids=["accepts and closes", "accepts and is silent"])
@pytest.mark.parametrize(
    ("host", "tunnel", "step"),
    [
        ("127.0.0.1", "", FORWARDED),
        ("127.0.0.1", "attic", "the tunnel to attic leads there: check that 'adb devices' works on attic"),
        ("127.0.0.2", "", "check that 'adb devices' works on 127.0.0.2, and the network in between"),
    ],
    ids=["port", "tunnel", "host"],
)
def test_a_cut_tunnel_or_server_is_named_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, host: str, tunnel: str, step: str, *, closes: bool
) -> None:
    monkeypatch.setattr("farm.devices.adb.host._STATE_SECONDS", 0.2)
    with socket.create_server((host, 0)) as cut:
        port = cut.getsockname()[1]
        kept: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(cut.accept()[0])
                    if closes:
                        kept.pop().close()

        threading.Thread(target=accept, daemon=True).start()
        transport = transport_to("phone", AdbAddress(port, host, tunnel=tunnel))
        with pytest.raises(AdbServerError) as caught:
            transport.run(["true"], timeout_s=0.2)
        with pytest.raises(InfraError) as asked:
            AdbHost(port, host, tunnel=tunnel).query("host:version", timeout_s=0.2)
        cut.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()
    for message in (str(caught.value), str(asked.value)):
        assert step in message
        assert str(port) in message
    with pytest.raises(AdbServerError) as over:
        transport.run(["true"], timeout_s=1)
    transport.close()
    assert ("start one with 'adb start-server'" in str(over.value)) == (host == "127.0.0.1" and not tunnel)
    assert str(port) in str(over.value)


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
