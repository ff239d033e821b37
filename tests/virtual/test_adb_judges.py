"""Independent programs of the adb protocol against the adb daemon of a virtual device."""

from __future__ import annotations

import filecmp
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from adb_judges import ADB_VERSIONS, Echo, Judged, adb_program, echoed, judged_device, until
from loopback import serving
from waiting import listens

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
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0farm-judged-" + judged.serial)
        listener.listen()
        judged.adb("forward", f"tcp:{port}", f"localabstract:farm-judged-{judged.serial}")
        with socket.create_connection(("127.0.0.1", port)) as host, listener.accept()[0] as device:
            host.sendall(b"there")
            device.sendall(b"back")
            assert (device.recv(5), host.recv(4)) == (b"there", b"back")
            device.close()
            # The device's end of the connection ends the host's as well.
            assert host.recv(1) == b""
    # As with a phone, only a connection shows adb that no server listens, or that the address is unknown.
    for remote in ("tcp:1", "jdwp:1", "nonsense:1"):
        judged.adb("forward", f"tcp:{port}", remote)
        assert echoed(port, MESSAGE) == b""
    judged.adb("forward", "--remove-all")
    assert judged.text("forward", "--list") == ""


def test_reverse_carries_data_both_ways(judged: Judged, echo: int) -> None:
    port = int(judged.text("reverse", "tcp:0", f"tcp:{echo}"))
    assert judged.text("reverse", "--list").endswith(f" tcp:{port} tcp:{echo}")
    assert echoed(port, MESSAGE) == MESSAGE
    name = f"farm-judged-{judged.serial}"
    judged.adb("reverse", f"localabstract:{name}", f"tcp:{echo}")
    assert echoed(f"\0{name}", MESSAGE) == MESSAGE
    judged.adb("reverse", f"localabstract:{name}", "tcp:1")
    assert echoed(f"\0{name}", MESSAGE) == b""
    assert "cannot rebind" in refusal(judged, "reverse", "--no-rebind", f"tcp:{port}", "tcp:1")
    assert "unknown socket specification" in refusal(judged, "reverse", "nonsense:1", "tcp:1")
    assert "listener 'tcp:1' not found" in refusal(judged, "reverse", "--remove", "tcp:1")
    judged.adb("reverse", "--remove", f"tcp:{port}")
    with pytest.raises(ConnectionRefusedError):
        echoed(port, MESSAGE)
    judged.adb("reverse", "--remove-all")
    assert judged.text("reverse", "--list") == ""


def test_logcat(judged: Judged) -> None:
    assert "the device has started: reboot" in judged.text("logcat", "-d")
    judged.adb("shell", "log -t judged -p w 'some words'")
    judged.adb("shell", "log -t other quiet")
    line = judged.text("logcat", "-d", "-s", "judged").splitlines()[-1]
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} +\d+ +\d+ W judged  : some words", line)
    assert judged.text("logcat", "-d", "-v", "brief", "-t", "1").splitlines()[-1].startswith("I/other")
    assert judged.text("logcat", "-d", "-b", "radio") == ""
    assert "some words" in judged.text("logcat", "-d", "-b", "main,crash")
    assert "nonsense" in refusal(judged, "logcat", "-b", "nonsense", "-d")
    judged.adb("logcat", "-c")
    assert judged.text("logcat", "-d") == ""


def test_root_and_remount(judged: Judged) -> None:
    assert "Not running as root. Try" in refusal(judged, "remount")
    assert judged.text("root") == "restarting adbd as root"
    judged.adb("wait-for-device")
    assert judged.text("shell", "id -un") == "root"
    assert judged.text("root") == "adbd is already running as root"
    assert "remount succeeded" in judged.text("remount")
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
        (["tcpip", "0"], "invalid port"),
        (["disable-verity"], ""),
        (["install", package], "pm: not found"),
        (["bugreport", tmp_path], "bugreportz"),
        (["shell", "reboot bootloader"], "bootloader"),
    ):
        assert reason in refusal(judged, *words), words
    assert judged.text("get-state") == "device"


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["reboot"], "reboot,adb"), (["shell", "reboot test"], "reboot,test"), (["shell", "reboot"], "reboot,shell")],
)
def test_reboot(judged: Judged, words: list[str], reason: str) -> None:
    before = judged.boot_id()
    judged.adb(*words, check=words[0] == "reboot")
    judged.wait_for_boot(before)
    assert judged.text("shell", "getprop sys.boot.reason") == reason
    assert f"started: {reason}" in judged.text("logcat", "-d")


def test_tcpip(judged: Judged) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = int(taken.getsockname()[1])
        assert "Address already in use" in judged.text("tcpip", str(number))
    assert judged.text("tcpip", str(number)) == f"restarting in TCP mode port: {number}"
    before = judged.port
    until(lambda: not listens(before) and listens(number))
    judged.adb("disconnect", judged.serial)
    judged.port = number
    judged.connect()
    assert judged.text("shell", "getprop service.adb.tcp.port") == str(number)
