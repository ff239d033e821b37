"""Google's adbd and adb judge virtual devices."""

from __future__ import annotations

import contextlib
import filecmp
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

import pytest
from debian import unpack
from networks import serving
from parts import do_without
from waiting import until

from farm.base.errors import MissingToolError
from farm.base.processes import Supervisor
from farm.devices.adb.server import find_adb
from farm.devices.virtual.boot import start_device
from farm.devices.virtual.tree import LOGCAT

# Devices behind adb of several versions, and servers for their forwarded connections.


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


# Independent programs of the adb protocol against the adb daemon of a virtual device.


# In the default run farm's own client, and adb 36, stand for them.
pytestmark = pytest.mark.whole

MESSAGE = os.urandom(1_000_000)
REMOTE = "/data/local/tmp/judged.bin"


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with serving(Echo) as port:
        yield port


@pytest.fixture(scope="module", params=ADB_VERSIONS)
def judged(request: pytest.FixtureRequest, farm_cache: Path) -> Iterator[Judged]:
    with judged_device(adb_program(request.param, farm_cache)) as one:
        assert f"\nVersion {request.param}." in one.text("version")
        yield one


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_001))
    return path


def refusal(judged: Judged, *words: str | Path) -> str:
    """Return the error message of an adb command that has to fail."""
    done = judged.adb(*words, check=False)
    assert done.returncode != 0, (words, done)
    return (done.stdout + done.stderr).decode()


def test_commands(judged: Judged) -> None:
    done = judged.adb("shell", "echo out; echo err >&2; exit 42", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")
    assert judged.adb("shell", "wc -c", stdin=MESSAGE).stdout == b"1000000\n"
    assert judged.adb("exec-out", "head -c 3000000 /dev/zero").stdout == bytes(3_000_000)
    assert judged.text("shell", "-x", "echo plain; exit 3") == "plain"
    assert judged.text("get-state") == "device"


def test_files(judged: Judged, file: Path, tmp_path: Path) -> None:
    judged.adb("push", file, REMOTE)
    assert (judged.root / REMOTE[1:]).read_bytes() == file.read_bytes()
    judged.adb("pull", REMOTE, tmp_path / "back")
    assert filecmp.cmp(file, tmp_path / "back", shallow=False)
    (tmp_path / "folder/deep").mkdir(parents=True)
    for name in ("one", "deep/two", "deep/a b'$(id)"):
        (tmp_path / "folder" / name).write_text(name)
    judged.adb("push", tmp_path / "folder", "/data/local/tmp/folder")
    judged.adb("pull", "/data/local/tmp/folder", tmp_path / "again")
    assert sorted(path.name for path in (tmp_path / "again").rglob("*")) == ["a b'$(id)", "deep", "one", "two"]
    assert (tmp_path / "again/deep/a b'$(id)").read_text() == "deep/a b'$(id)"
    assert "No such file or directory" in refusal(judged, "pull", "/data/none", tmp_path / "none")


def test_forward_carries_data_both_ways(judged: Judged, echo: int) -> None:
    port = int(judged.text("forward", "tcp:0", f"tcp:{echo}"))
    assert f"tcp:{port} tcp:{echo}" in judged.text("forward", "--list")
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
    assert judged.text("forward", "--list") == ""


def test_logcat(judged: Judged) -> None:
    assert "the device has started: reboot" in judged.text("logcat", "-d")
    lines = [f"01-02 03:04:05.006   700   701 {text}" for text in ("W judged  : some words", "I other   : quiet")]
    with (judged.root / LOGCAT).open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert judged.text("logcat", "-d", "-s", "judged").splitlines()[1:] == lines[:1]
    assert judged.text("logcat", "-d", "other:I", "*:S").splitlines()[1:] == lines[1:]
    assert judged.text("logcat", "-d", "-v", "threadtime", "-t", "1").splitlines()[1:] == lines[1:]
    assert judged.text("logcat", "-t", "12-31 23:59:59.999") == ""
    assert "nonsense" in refusal(judged, "logcat", "-v", "nonsense", "-d")
    judged.adb("logcat", "-c")
    assert judged.text("logcat", "-d") == ""


def test_root(judged: Judged) -> None:
    assert judged.text("root") == "restarting adbd as root"
    judged.adb("wait-for-device")
    assert judged.text("shell", "id -un") == "root"
    assert judged.text("root") == "adbd is already running as root"
    assert judged.text("unroot") == "restarting adbd as non root"
    judged.adb("wait-for-device")
    assert judged.text("shell", "id -un") == "shell"


def test_what_it_cannot_do_is_refused(judged: Judged, tmp_path: Path) -> None:
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
    assert judged.text("get-state") == "device"


def test_reboot(judged: Judged) -> None:
    before = judged.boot_id()
    judged.adb("reboot", "test")
    judged.wait_for_boot(before)
    assert judged.text("shell", "getprop sys.boot.reason") == "reboot,test"
    assert "started: reboot,test" in judged.text("logcat", "-d")
