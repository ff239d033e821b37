"""A device that a real adbd serves: whose processes, network and files are its own, and what cannot be asked of it."""

from __future__ import annotations

import errno
import os
import pwd
import signal
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
from adbd_system import need_adbd, processes_on
from waiting import until

from farm.devices.adb.server import start_adb_server
from farm.devices.connect import open_transport
from farm.errors import InfraError, MissingToolError
from farm.system.processes import Supervisor
from farm.virtual.android.system import android_system
from farm.virtual.boot import boot
from farm.virtual.faults import Fault, FaultKind, clear, fired, inject, randomize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.devices.transport import Transport

whole = pytest.mark.whole
SECONDS = 20.0
TMP = PurePosixPath("/data/local/tmp")


@pytest.fixture(scope="module")
def android(farm_cache: Path) -> Path:
    return need_adbd(farm_cache)


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory, android: Path) -> Iterator[tuple[Transport, Path]]:
    folder = tmp_path_factory.mktemp("adbd")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, ["SM8650"], folder, android=android)
        transport = open_transport(device)
        yield transport, folder / device.serial
        transport.close()


def output(transport: Transport, script: str) -> str:
    done = transport.run(["sh", "-c", script], timeout_s=SECONDS)
    assert done.code == 0, done.stderr
    assert done.stderr == b""
    return done.stdout.decode()


def wait_until_empty(root: Path) -> None:
    until(lambda: not processes_on(root), lambda: str(processes_on(root)), SECONDS)


@whole
def test_its_shell_its_user_and_its_processes_are_its_own(booted: tuple[Transport, Path]) -> None:
    transport, _ = booted
    assert output(transport, "id") == "uid=2000(shell) gid=2000(shell) groups=2000(shell)\n"
    assert "MIRBSD KSH" in output(transport, "echo $KSH_VERSION")
    assert output(transport, "readlink -f /system/bin/ls /bin/sh") == "/usr/bin/toybox\n/usr/bin/mksh\n"
    assert (
        output(transport, "echo /proc/[0-9]*/environ | wc -w; head -c 1 /proc/[0-9]*/environ | wc -c").split()[0] < "9"
    )
    assert output(transport, "sed -n '/CapEff\\|NoNewPrivs/s/.*\t//p' /proc/1/status") == "0000000000000000\n1\n"
    assert output(transport, "sed -n 's/^ *\\([a-z0-9]*\\):.*/\\1/p' /proc/net/dev") == "lo\n"
    assert output(transport, "ls /") == output(transport, "ls -d /* | sed s,/,,")
    assert "home" not in output(transport, "ls /").split()
    for script in (f"touch {place}" for place in ("/usr/x", "/system/x", "/product/bin/x", "/system/bin/x")):
        assert transport.run(["sh", "-c", script], timeout_s=SECONDS).code != 0


@whole
def test_it_says_what_it_is(booted: tuple[Transport, Path]) -> None:
    transport, _ = booted
    names = ("ro.farm.virtual", "ro.soc.model", "ro.farm.daemon", "ro.build.type")
    virtual, soc, daemon, build = output(transport, "".join(f"getprop {name};" for name in names)).splitlines()
    assert (virtual, soc, build) == ("1", "SM8650", "user")
    assert daemon.startswith("adbd ")
    assert daemon in output(transport, "getprop ro.product.model")
    assert transport.root_refusal() != ""


@whole
def test_there_are_no_sockets_of_virtual_machines_which_no_namespace_keeps_apart(
    booted: tuple[Transport, Path],
) -> None:
    transport, _ = booted
    done = transport.run(["/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_VSOCK)"], timeout_s=SECONDS)
    assert os.strerror(errno.EAFNOSUPPORT).encode() in done.stderr


@whole
def test_what_adbd_cannot_do_is_refused_and_what_the_link_can_is_done(booted: tuple[Transport, Path]) -> None:
    transport, root = booted
    before = len(fired(root))
    for fault in (Fault(FaultKind.KILL_RUNNER), Fault(FaultKind.DISK_FULL), Fault(FaultKind.RESET, match="sh")):
        with pytest.raises(InfraError, match=r"refuses: it is served by a real adbd.*--daemon built-in"):
            inject(root, fault)
    with pytest.raises(InfraError, match="real adbd"):
        randomize(root, 0.5, 1)
    assert len(fired(root)) == before
    inject(root, Fault(FaultKind.LOW_BATTERY, code=7))
    assert "level: 7" in output(transport, "dumpsys battery")
    clear(root)
    assert "level: 100" in output(transport, "dumpsys battery")


@whole
def test_after_a_reboot_its_files_are_there_and_what_ran_is_not(booted: tuple[Transport, Path]) -> None:
    transport, root = booted
    boot_id = output(transport, "cat /proc/sys/kernel/random/boot_id")
    transport.push({TMP / "kept": b"kept"})
    output(transport, "setsid sleep 1234 >/dev/null 2>&1 </dev/null &")
    assert any("1234" in command for command in processes_on(root).values())
    transport.reboot()

    def is_back() -> bool:
        try:
            assert output(transport, "cat /data/local/tmp/kept") == "kept"
        except InfraError:
            transport.nudge()
            return False
        return True

    until(is_back, "the device after its reboot", 60)
    assert output(transport, "cat /proc/sys/kernel/random/boot_id") != boot_id
    assert not any("1234" in command for command in processes_on(root).values())
    assert "the device has started: reboot,adb" in output(transport, "logcat -d")


@whole
def test_its_log_is_asked_as_androids(booted: tuple[Transport, Path]) -> None:
    transport, _ = booted
    output(transport, "log -t farm first; log -t farm second")
    assert output(transport, "logcat -d -v threadtime -t 1").endswith("farm    : second\n")
    later = "$(date -d @$(($(date +%s) + 100)) '+%m-%d %H:%M:%S.000')"
    assert "farm" not in output(transport, f'logcat -d -v threadtime -t "{later}"')


@whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_one_that_ends_and_its_files_serve_another(
    tmp_path: Path, android: Path, number: signal.Signals
) -> None:
    with Supervisor() as supervisor:
        # What the built-in daemon made as root is the user's on the other one.
        for name, served_by in (("built-in", None), ("adbd", android)):
            server = start_adb_server(supervisor, tmp_path / f"server-{name}")
            [device] = boot(supervisor, server, ["SM8650"], tmp_path, android=served_by)
            transport = open_transport(device)
            root = tmp_path / device.serial
            if served_by is None:
                transport.push({TMP / "farm/file": b"of the built-in daemon"})
                transport.close()
                supervisor.find(device.serial).terminate()
            else:
                assert output(transport, "cd /data/local/tmp/farm; cat file; rm file") == "of the built-in daemon"
        output(transport, "setsid sleep 1234 >/dev/null 2>&1 </dev/null &")
        transport.close()
        assert len(processes_on(root)) >= 3
        os.kill(supervisor.find(device.serial).pid, number)
        wait_until_empty(root)
    assert str(android) not in Path("/proc/self/mounts").read_text()


def test_where_somebody_has_androids_uid_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.getpwall()[0])
    with pytest.raises(MissingToolError, match="this machine's user root: uid 2000"):
        android_system(tmp_path)


def test_who_is_not_root_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingToolError, match="only root"):
        android_system(tmp_path)
