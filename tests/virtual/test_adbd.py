"""Device with Android's own daemon: a judge of farm's whose processes, network and files are its own."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from adbd_device import AdbdDevice, device_image, processes_on, start_adbd
from waiting import until

from farm.base.errors import MissingToolError
from farm.base.processes import Supervisor
from farm.devices.transport import Transport

SECONDS = 60.0


@pytest.fixture
def transport(adbd: AdbdDevice) -> Iterator[Transport]:
    transport = adbd.transport()
    yield transport
    transport.close()


def output(transport: Transport, script: str) -> str:
    done = transport.run(["sh", "-c", script], timeout_s=SECONDS)
    assert (done.code, done.stderr) == (0, b"")
    return done.stdout.decode()


@pytest.mark.whole
def test_its_shell_its_user_and_its_processes_are_its_own(transport: Transport) -> None:
    assert output(transport, "id") == "uid=2000(shell) gid=2000(shell) groups=2000(shell)\n"
    assert "MIRBSD KSH" in output(transport, "echo $KSH_VERSION")
    assert output(transport, "readlink -f /system/bin/ls /bin/sh") == "/usr/bin/toybox\n/usr/bin/mksh\n"
    assert int(output(transport, "echo /proc/[0-9]*/environ | wc -w")) < 9
    assert output(transport, "sed -n '/CapEff\\|NoNewPrivs/s/.*\t//p' /proc/1/status") == "0000000000000000\n1\n"
    assert output(transport, "sed -n 's/^ *\\([a-z0-9]*\\):.*/\\1/p' /proc/net/dev") == "lo\n"
    assert "home" not in output(transport, "ls /").split()
    for place in ("/usr/x", "/system/x", "/product/bin/x", "/system/bin/x"):
        assert transport.run(["touch", place], timeout_s=SECONDS).code != 0


@pytest.mark.whole
def test_it_has_no_sockets_of_virtual_machines_which_no_namespace_isolates(transport: Transport) -> None:
    done = transport.run(["/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_VSOCK)"], timeout_s=SECONDS)
    assert os.strerror(errno.EAFNOSUPPORT).encode() in done.stderr


@pytest.mark.whole
def test_nothing_is_left_of_one_that_ends(tmp_path: Path, farm_cache: Path) -> None:
    with Supervisor() as supervisor:
        device = start_adbd(supervisor, tmp_path, farm_cache)
        transport = device.transport()
        output(transport, "setsid sleep 1234 >/dev/null 2>&1 </dev/null &")
        transport.close()
        assert len(processes_on(device.root)) >= 3
        device.vanish()
        until(lambda: not processes_on(device.root), lambda: str(processes_on(device.root)), SECONDS)
    assert "/debian/android-" not in Path("/proc/self/mounts").read_text()


def test_where_a_user_has_androids_uid_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.getpwall()[0])
    with pytest.raises(MissingToolError, match="this machine's user root: uid 2000"):
        device_image(tmp_path)


def test_only_root_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingToolError, match="only root"):
        device_image(tmp_path)
