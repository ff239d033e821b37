"""Endless content of a device over adb's streams that is no answer."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.devices.adb.host import AdbHost
from farm.devices.adb.shell import ShellProcess
from farm.devices.adb.sync import SyncStream
from farm.devices.transport import communicate

FILE = PurePosixPath("/data/local/tmp/file")
# Seconds after which a device ends without a hang-up.
SECONDS = 10.0


class DeviceStub:
    """Stub of a device that sends given bytes without end, until the connection is closed."""

    def __init__(self, says: Iterable[bytes], pause_s: float) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
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
                if self.enough.wait(pause_s) if pause_s else self.enough.is_set():
                    return
                self._far.sendall(output)

    def close(self) -> None:
        self.enough.set()
        self._timer.cancel()
        self.stream.close()
        self._thread.join()


@pytest.fixture
def device_stub() -> Iterator[Callable[[Iterable[bytes], float], DeviceStub]]:
    stubs: list[DeviceStub] = []

    def start(says: Iterable[bytes], pause_s: float = 0.0) -> DeviceStub:
        stubs.append(DeviceStub(says, pause_s))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.close()


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
        SyncStream(device.stream, "stub", 30.0).pull({FILE: tmp_path / "file"}, {FILE: 10})
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
        SyncStream(device.stream, "stub", 30.0).pull({FILE: tmp_path / "file"}, {FILE: 100_000})
    assert not device.enough.is_set()
    assert list(tmp_path.iterdir()) == []
