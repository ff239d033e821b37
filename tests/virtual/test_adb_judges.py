"""Independent programs of the adb protocol against the adb daemon of a virtual device."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from adb_judges import (
    ADB_VERSIONS,
    SECONDS,
    Judged,
    adb_program,
    echo_server,
    echoed,
    judged_device,
    node_packages,
    run_node,
    until,
)
from adb_shell.adb_device import AdbDeviceTcp
from adb_shell.exceptions import AdbCommandFailureException, PushFailedError, TcpTimeoutException
from ppadb.client import Client
from waiting import listens

# In the default run farm's own client, and adb 36, stand for them.
pytestmark = pytest.mark.whole

MESSAGE = os.urandom(1_000_000)
REMOTE = "/data/local/tmp/judged.bin"


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with echo_server() as port:
        yield port


@pytest.fixture(scope="module", params=ADB_VERSIONS)
def judged(request: pytest.FixtureRequest, farm_cache: Path) -> Iterator[Judged]:
    with judged_device(adb_program(request.param, farm_cache)) as one:
        assert f"\nVersion {request.param}." in one.text("version")
        yield one


@pytest.fixture
def attached(farm_cache: Path) -> Iterator[Judged]:
    """A device for a client that needs the adb server, or takes the place of one."""
    with judged_device(adb_program("36", farm_cache)) as one:
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


class TestAdb:
    def test_commands(self, judged: Judged) -> None:
        done = judged.adb("shell", "echo out; echo err >&2; exit 42", check=False)
        assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")
        assert judged.adb("shell", "wc -c", stdin=MESSAGE).stdout == b"1000000\n"
        assert judged.adb("exec-out", "head -c 3000000 /dev/zero").stdout == bytes(3_000_000)
        assert judged.text("shell", "-x", "echo plain; exit 3") == "plain"
        assert judged.text("get-state") == "device"

    def test_files(self, judged: Judged, file: Path, tmp_path: Path) -> None:
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

    def test_forward_carries_data_both_ways(self, judged: Judged, echo: int) -> None:
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

    def test_reverse_carries_data_both_ways(self, judged: Judged, echo: int) -> None:
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

    def test_logcat(self, judged: Judged) -> None:
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

    def test_root_and_remount(self, judged: Judged) -> None:
        assert "Not running as root. Try" in refusal(judged, "remount")
        assert judged.text("root") == "restarting adbd as root"
        judged.adb("wait-for-device")
        assert judged.text("shell", "id -un") == "root"
        assert judged.text("root") == "adbd is already running as root"
        assert "remount succeeded" in judged.text("remount")
        assert judged.text("unroot") == "restarting adbd as non root"
        judged.adb("wait-for-device")
        assert judged.text("shell", "id -un") == "shell"

    def test_what_it_cannot_do_is_refused(self, judged: Judged, tmp_path: Path) -> None:
        package = tmp_path / "one.apk"
        package.write_bytes(b"no package")
        for words in (
            ["reboot", "bootloader"],
            ["reboot", "recovery"],
            ["reboot", "sideload"],
            ["usb"],
            ["jdwp"],
            ["sideload", package],
            ["backup", "-f", tmp_path / "backup", "-all"],
            ["restore", package],
        ):
            assert "closed" in refusal(judged, *words), words
        for words, reason in (
            (["tcpip", "0"], "invalid port"),
            (["disable-verity"], ""),
            (["enable-verity"], ""),
            (["install", package], "pm: not found"),
            (["uninstall", "some.package"], "pm: not found"),
            (["bugreport", tmp_path], "bugreportz"),
            (["shell", "reboot bootloader"], "bootloader"),
            (["shell", "am start"], "am: not found"),
        ):
            assert reason in refusal(judged, *words)
        assert judged.text("get-state") == "device"

    @pytest.mark.parametrize(
        ("words", "reason"),
        [(["reboot"], "reboot,adb"), (["shell", "reboot test"], "reboot,test"), (["shell", "reboot"], "reboot,shell")],
    )
    def test_reboot(self, judged: Judged, words: list[str], reason: str) -> None:
        before = judged.boot_id()
        judged.adb(*words, check=words[0] == "reboot")
        judged.wait_for_boot(before)
        assert judged.text("shell", "getprop sys.boot.reason") == reason
        assert f"started: {reason}" in judged.text("logcat", "-d")

    def test_tcpip(self, judged: Judged) -> None:
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


class TestAdbShell:
    """adb-shell: of the version of adb's protocol that has checksums; it speaks to the device itself."""

    def test_it(self, attached: Judged, file: Path, tmp_path: Path) -> None:
        device = AdbDeviceTcp("127.0.0.1", attached.port, default_transport_timeout_s=SECONDS)
        try:
            assert device.connect(auth_timeout_s=SECONDS)
            assert device.shell("echo out; echo err >&2") == "out\nerr\n"
            assert device.exec_out("echo out") == "out\n"
            assert len(device.shell("head -c 3000000 /dev/zero", decode=False)) == 3_000_000
            assert "".join(device.streaming_shell("seq 3")) == "1\n2\n3\n"
            assert "the device has started" in device.shell("logcat -d")
            device.push(str(file), REMOTE, mtime=1_700_000_000)
            device.pull(REMOTE, str(tmp_path / "back"))
            assert filecmp.cmp(file, tmp_path / "back", shallow=False)
            assert device.stat(REMOTE)[1:] == (3_000_001, 1_700_000_000)
            assert [bytes(one.filename) for one in device.list("/data/local/tmp")] == [b".", b"..", b"judged.bin"]
            with pytest.raises(AdbCommandFailureException, match="No such file or directory"):
                device.pull("/data/none", str(tmp_path / "none"))
            with pytest.raises(PushFailedError, match="Is a directory"):
                device.push(str(file), "/data/local/tmp")
            assert device.shell("echo still there") == "still there\n"
            device.root()
            reconnect(device, attached, "id -un", "root\n")
            device.reboot()
            reconnect(device, attached, "getprop sys.boot.reason", "reboot,adb\n")
        finally:
            device.close()


def reconnect(device: AdbDeviceTcp, attached: Judged, command: str, says: str) -> None:
    """Connect a client to a restarting device, until `command` answers `says`, which it does not before."""
    log = attached.root / "data/misc/logd/logcat"
    until(lambda: "restarting adbd" in log.read_text() or "reboot,adb" in log.read_text())

    def is_there() -> bool:
        with contextlib.suppress(OSError, TcpTimeoutException):
            # A connection to the daemon that is about to end is cut.
            device.close()
            return bool(device.connect() and device.shell(command) == says)
        device.close()
        return False

    until(is_there)


class TestPurePythonAdb:
    """pure-python-adb, through an adb server."""

    def test_it(self, attached: Judged, file: Path, tmp_path: Path, echo: int) -> None:
        client = Client("127.0.0.1", attached.server_port)
        assert [one.serial for one in client.devices()] == [attached.serial]
        device = client.device(attached.serial)
        assert device.shell("echo out; echo err >&2") == "out\nerr\n"
        assert len(device.shell("head -c 3000000 /dev/zero")) == 3_000_000
        assert device.get_properties()["ro.soc.model"] == "SM8650"
        assert device.get_battery_level() == 100
        device.push(str(file), REMOTE)
        device.pull(REMOTE, str(tmp_path / "back"))
        assert filecmp.cmp(file, tmp_path / "back", shallow=False)
        local = f"localfilesystem:{attached.folder}/forward"
        device.forward(local, f"tcp:{echo}")
        assert device.list_forward() == {local: f"tcp:{echo}"}
        assert echoed(f"{attached.folder}/forward", MESSAGE) == MESSAGE
        device.killforward_all()
        assert device.list_forward() == {}
        assert device.root()

        def is_root() -> bool:
            # The server may not have noticed yet that the device starts anew.
            with contextlib.suppress(RuntimeError):
                return bool(device.shell("id -un") == "root\n")
            return False

        until(is_root)
        with pytest.raises(RuntimeError, match="already running as root"):
            device.root()
        device.remount()
        before = attached.boot_id()
        device.reboot()
        attached.wait_for_boot(before)


class TestAdbkit:
    """@devicefarmer/adbkit, through an adb server."""

    def test_it(self, attached: Judged, farm_cache: Path, file: Path, echo: int) -> None:
        packages = node_packages(farm_cache)
        before = attached.boot_id()
        settings = {"server": attached.server_port, "serial": attached.serial, "echo": echo}
        local = f"localfilesystem:{attached.folder}/forward"
        seen = run_node("adbkit.mjs", packages, {**settings, "local": local, "file": str(file), "remote": REMOTE})
        attached.wait_for_boot(before)
        assert seen == {
            "devices": [[attached.serial, "device"]],
            "model": "SM8650",
            "shell": "out\nerr\n",
            "much": 3_000_000,
            "size": 3_000_001,
            "names": ["judged.bin"],
            "pulled": hashlib.sha256(file.read_bytes()).hexdigest(),
            "missing": "FailError: Failure: 'open failed: No such file or directory'",
            "tcp": True,
            "forwards": [[local, f"tcp:{echo}"]],
            "forward": True,
            "reverses": [["localabstract:adbkit", f"tcp:{echo}"]],
            "reverse": True,
            "nobody": "",
            "log": ["words", 5, True],
            "root": True,
            "user": "0",
            "usb": "FailError: Failure: 'closed'",
        }


class TestYumeAdb:
    """@yume-chan/adb, which is an adb of its own: beside the adb server, and through it."""

    @pytest.mark.parametrize("way", ["daemon", "server"])
    def test_it(self, attached: Judged, farm_cache: Path, file: Path, echo: int, way: str) -> None:
        packages = node_packages(farm_cache)
        before = attached.boot_id()
        settings = {"way": way, "port": attached.port, "server": attached.server_port, "serial": attached.serial}
        seen = run_node("yume_adb.mjs", packages, {**settings, "echo": echo, "file": str(file), "remote": REMOTE})
        attached.wait_for_boot(before)
        assert "the device has started" in seen.pop("logcat")
        refused = "Error: Socket open failed" if way == "daemon" else "Error: closed"
        assert seen == {
            "product": "virtual-SM8650-0",
            "model": "SM8650",
            "shell": [42, "out\n", "err\n"],
            "plain": "out\nerr\n",
            "much": 3_000_000,
            "stat": [3_000_001, 1_700_000_000, True],
            "names": [".", "..", "judged.bin"],
            "pulled": hashlib.sha256(file.read_bytes()).hexdigest(),
            "missing": "Error: open failed: No such file or directory",
            "forward": True,
            "nobody": "",
            "refused": refused,
            "listed": True,
            "reverse": True,
            "left": 0,
            "remount": 'Not running as root. Try "adb root" first.\nremount failed\n',
            "unknownReverse": "Error: listener 'tcp:1' not found",
            "bootloader": refused,
            "cut": True,
        }
