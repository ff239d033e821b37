"""Devices behind adb of several versions, and servers for their forwarded connections."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socketserver import BaseRequestHandler

from debian import unpack
from parts import do_without
from waiting import until

from farm.base.errors import MissingToolError
from farm.base.processes import Supervisor
from farm.devices.adb.server import find_adb
from farm.devices.virtual.boot import start_device

SECONDS = 30.0
ADB_VERSIONS = ("29", "34", "36")
# Debian release by version of its package `adb`; other versions come with adbutils.
_DEBIAN = {"29": "bookworm", "34": "trixie"}

# No mDNS, no phones on USB, no emulators, and no other adb's `kill-server`, where the version knows of it.
_QUIET = {"ADB_MDNS": "0", "ADB_USB": "0", "ADB_EMU": "0", "ADB_REJECT_KILL_SERVER": "1"}
_UNREACHED = re.compile(rb"device offline|device .* not found")


def adb_program(version: str, cache: Path) -> list[str]:
    """Return the words that start adb of a version, or skip the test; where parts are required, fail it."""
    if version not in _DEBIAN:
        return [str(find_adb())]
    try:
        root = unpack(["adb"], cache, suite=_DEBIAN[version])
    except MissingToolError as error:
        do_without(f"adb {version} cannot be had: {error}")
    # The program may need another C library than this machine's, so its own loader starts it.
    loader = next(path for path in sorted(root.glob("**/ld-linux*.so*")) if path.is_file())
    libraries = sorted({str(path.parent) for path in root.glob("**/*.so.*") if path.is_file()})
    program = root / "usr/lib/android-sdk/platform-tools/adb"
    return [str(loader), "--library-path", ":".join(libraries), str(program)]


class Judged:
    """Virtual device, connected to the server of an adb program."""

    def __init__(self, supervisor: Supervisor, folder: Path, program: Sequence[str]) -> None:
        self.folder, self._program = folder, program
        child = start_device(supervisor, "virtual-SM8650-0", "SM8650", folder, "userdebug")
        self.root = folder / child.name
        self.port = int(json.loads(child.first_line(SECONDS))["port"])
        environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), **_QUIET}
        with socket.socket() as listener:
            # The server takes a socket that listens already, so that no other process can take the port in between.
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            self.server_port = int(listener.getsockname()[1])
            words = [*program, "-L", f"acceptfd:{listener.fileno()}", "server", "nodaemon"]
            log = folder / "adb-server.log"
            supervisor.spawn(words, name="adb server", env=environment, stderr=log, pass_fds=(listener.fileno(),))
        self._environment = {**environment, "ANDROID_ADB_SERVER_PORT": str(self.server_port)}
        self.connect()

    @property
    def serial(self) -> str:
        """Return the serial of the device in adb."""
        return f"127.0.0.1:{self.port}"

    def adb(self, *words: str | Path, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run the adb program on the device."""
        done = self._run(*words, stdin=stdin)
        # A server that has not noticed the device's return, or that ends an old connection to it late, answers with
        # these errors and has not run the command.
        deadline = time.monotonic() + SECONDS
        while check and _UNREACHED.search(done.stderr) and time.monotonic() < deadline:
            self._run("disconnect", self.serial)
            self._run("connect", self.serial)
            done = self._run(*words, stdin=stdin)
        assert not check or done.returncode == 0, (words, done)
        return done

    def _run(self, *words: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self._program, *map(str, words)], input=stdin, env={**self._environment, "ANDROID_SERIAL": self.serial},
            capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip

    def text(self, *words: str | Path) -> str:
        """Return the output of the adb program, without white space around it."""
        return self.adb(*words).stdout.decode().strip()

    def connect(self) -> None:
        """Let adb connect to the device, where it is now."""
        assert "connected to" in self.text("connect", self.serial)
        self.adb("wait-for-device")

    def wait_for_boot(self, boot_id: str) -> None:
        """Return when the device is up again, with another boot id."""

        def is_back() -> bool:
            done = self.adb("shell", "getprop farm.boot_id", check=False)
            if done.returncode == 0:
                return done.stdout.decode().strip() != boot_id
            # Without this, adb 29 connects once in ten seconds.
            self.adb("disconnect", self.serial, check=False)
            self.adb("connect", self.serial, check=False)
            return False

        until(is_back)

    def boot_id(self) -> str:
        return self.text("shell", "getprop farm.boot_id")


@contextlib.contextmanager
def judged_device(program: Sequence[str]) -> Iterator[Judged]:
    """Yield a device behind a server of `program`, a list of words; nothing of either stays."""
    # Not pytest's: sockets are made in it, whose paths have to be short.
    with tempfile.TemporaryDirectory(prefix="farm-", dir="/tmp") as folder, Supervisor() as supervisor:
        yield Judged(supervisor, Path(folder), program)


class Echo(BaseRequestHandler):
    """Sends all bytes back."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


def echoed(address: int | str, message: bytes) -> bytes:
    """Return the answer to `message` from a port of loopback, or from a socket with a name."""
    family, where = (socket.AF_INET, ("127.0.0.1", address)) if isinstance(address, int) else (socket.AF_UNIX, address)
    answer = bytearray()
    with socket.socket(family) as connection:
        connection.settimeout(SECONDS)
        connection.connect(where)
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
