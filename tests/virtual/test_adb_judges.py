"""Independent programs of the adb protocol, of several versions, against the adb daemon of a virtual device.

Tests of `any_device` run over older versions as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import TYPE_CHECKING

import pytest
from networks import serving
from waiting import until

from farm.base.errors import InfraError
from farm.devices.virtual.tree import LOGCAT

from .conftest import behind_adb

if TYPE_CHECKING:
    from conftest import Attached

# In the default run farm's own client, and adb 36, stand for them.
pytestmark = pytest.mark.whole

SECONDS = 30.0
MESSAGE = os.urandom(1_000_000)


class Echo(BaseRequestHandler):
    """Sends all bytes back."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


def echoed(port: int, message: bytes) -> bytes:
    """Return the answer to `message` from a port of loopback."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        sending = threading.Thread(target=_send, args=(connection, message))
        sending.start()
        with contextlib.suppress(ConnectionResetError):
            while len(answer) < len(message) and (data := connection.recv(1 << 16)):
                answer += data
        if len(answer) < len(message):
            # Closed without an answer: nothing takes the rest either.
            connection.close()
        sending.join()
    return bytes(answer)


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(message)


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with serving(Echo) as port:
        yield port


@pytest.fixture(scope="module", params=["29", "34", "36"])
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, farm_cache: Path
) -> Iterator[Attached]:
    with behind_adb(request.param, tmp_path_factory.mktemp("judged"), farm_cache) as one:
        assert f"\nVersion {request.param}." in text(one, "version")
        yield one


def text(judged: Attached, *words: str | Path) -> str:
    """Return the output of adb, without white space around it."""
    return judged.adb(*words).stdout.decode().strip()


def refusal(judged: Attached, *words: str | Path) -> str:
    """Return the error message of an adb command that has to fail."""
    done = judged.adb(*words, check=False)
    assert done.returncode != 0, (words, done)
    return (done.stdout + done.stderr).decode()


def is_back(judged: Attached, port: int, script: str, answer: str) -> bool:
    """Return whether the device answers so; adb 29 looks for a device that went away once in ten seconds."""
    if judged.adb("shell", script, check=False).stdout.decode().strip() == answer:
        return True
    with contextlib.suppress(InfraError):
        judged.server.query(f"host:disconnect:127.0.0.1:{port}")
    with contextlib.suppress(InfraError):
        judged.server.connect("127.0.0.1", port, timeout_s=2.0)
    return False


def test_forward_carries_data_both_ways(judged: Attached, echo: int) -> None:
    port = int(text(judged, "forward", "tcp:0", f"tcp:{echo}"))
    assert f"tcp:{port} tcp:{echo}" in text(judged, "forward", "--list")
    assert echoed(port, MESSAGE) == MESSAGE
    assert "cannot rebind" in refusal(judged, "forward", "--no-rebind", f"tcp:{port}", "tcp:1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        judged.adb("forward", f"tcp:{port}", f"tcp:{listener.getsockname()[1]}")
        with socket.create_connection(("127.0.0.1", port)) as host, listener.accept()[0] as device:
            host.sendall(b"there")
            device.sendall(b"back")
            assert (device.recv(5), host.recv(4)) == (b"there", b"back")
            device.close()
            # The device's end of the connection ends the host's as well.
            assert host.recv(1) == b""
    # As with a phone, only a connection shows adb that no server listens, or that the address is unknown.
    for remote in ("tcp:1", "tcp:99999", "jdwp:1", "localabstract:none"):
        judged.adb("forward", f"tcp:{port}", remote)
        assert echoed(port, MESSAGE) == b""
    judged.adb("forward", "--remove-all")
    assert text(judged, "forward", "--list") == ""


def test_logcat(judged: Attached) -> None:
    assert "the device has started: reboot" in text(judged, "logcat", "-d")
    lines = [f"01-02 03:04:05.006   700   701 {text}" for text in ("W judged  : some words", "I other   : quiet")]
    with (judged.root / LOGCAT).open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert text(judged, "logcat", "-d", "-s", "judged").splitlines()[1:] == lines[:1]
    assert text(judged, "logcat", "-d", "other:I", "*:S").splitlines()[1:] == lines[1:]
    assert text(judged, "logcat", "-d", "-v", "threadtime", "-t", "1").splitlines()[1:] == lines[1:]
    assert text(judged, "logcat", "-t", "12-31 23:59:59.999") == ""
    assert "nonsense" in refusal(judged, "logcat", "-v", "nonsense", "-d")
    judged.adb("logcat", "-c")
    assert text(judged, "logcat", "-d") == ""


def test_root(judged: Attached) -> None:
    port = int(judged.server.network_address(judged.serial).rpartition(":")[2])
    assert text(judged, "root") == "restarting adbd as root"
    until(lambda: is_back(judged, port, "id -un", "root"))
    assert text(judged, "root") == "adbd is already running as root"
    assert text(judged, "unroot") == "restarting adbd as non root"
    until(lambda: is_back(judged, port, "id -un", "shell"))


def test_what_it_cannot_do_is_refused(judged: Attached, tmp_path: Path) -> None:
    package = tmp_path / "one.apk"
    package.write_bytes(b"no package")
    for words, reason in (
        (["reboot", "bootloader"], "closed"),
        (["usb"], "closed"),
        (["jdwp"], "closed"),
        (["sideload", package], "closed"),
        (["tcpip", "5555"], "closed"),
        (["reverse", "tcp:5555", "tcp:5555"], "closed"),
        (["remount"], "closed"),
        (["disable-verity"], ""),
        (["install", package], "pm: not found"),
        (["bugreport", tmp_path], "bugreportz"),
        (["shell", "reboot"], "adb reboot"),
    ):
        assert reason in refusal(judged, *words), words
    assert text(judged, "get-state") == "device"


def test_reboot(judged: Attached) -> None:
    port = int(judged.server.network_address(judged.serial).rpartition(":")[2])
    judged.adb("reboot", "test")
    until(lambda: is_back(judged, port, "getprop sys.boot.reason", "reboot,test"))
    assert "started: reboot,test" in text(judged, "logcat", "-d")
