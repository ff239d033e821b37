"""Archives of the device's `tar`: its lies, its errors, and a full storage."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest

from farm.base.errors import DeviceError, DeviceSpaceError, DeviceTimeoutError, LocalError
from farm.base.processes import Supervisor
from farm.devices.device import LocalAddress
from farm.devices.local import LocalProcess, LocalTransport
from farm.devices.process import Link

SECONDS = 30.0


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalTransport:
    """This machine, whose `tar` may be another program in `bin`."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    return LocalTransport("this", LocalAddress(str(tmp_path / "storage")))


def header(size: int = 5, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo("file")
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("sent", "then", "problem"),
    [
        (header() + b"12345".ljust(512, b"\0") + bytes(1024), "", ""),
        (header(7, tarfile.GNUTYPE_LONGNAME) + bytes(512) + header() + b"12345".ljust(1536, b"\0"), "", ""),
        (b"Welcome to this board!\n" * 100, "", "a login script"),
        (header(1 << 40), "", "more than the 1000 bytes"),
        (header(0, tarfile.DIRTYPE) * 9, "", "sends no file"),
        (header(0, tarfile.LNKTYPE) + bytes(1024), "", "sends no file, but a link"),
        (header() + b"123", "", "ended in the middle"),
        (b"", "", "empty header"),
        (header()[:124] + b"\xff" * 12 + header()[136:], "", "cannot be understood"),
        (header() + b"12345".ljust(1536, b"\0"), "cat /dev/zero", "prints more than files"),
        (header() + b"12345".ljust(1536, b"\0"), "echo trouble >&2; exit 2", "pull of .*file: trouble"),
        (header(), "sleep 60", "moved no byte of a file for 0.3 s"),
        (header(1000), "while sleep 0.05; do printf x; done", r"moved \d+ bytes of files in .* at least 64 KiB/s"),
    ],
)
def test_what_a_device_sends_is_not_believed(
    device: LocalTransport, tmp_path: Path, sent: bytes, then: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.push({device.storage / "file": b"x"})
    (tmp_path / "sent").write_bytes(sent)
    (tmp_path / "bin/tar").write_text(f"#!/bin/sh\ncat {tmp_path}/sent\n{then}\n")
    (tmp_path / "bin/tar").chmod(0o755)
    if "printf" in then:
        monkeypatch.setattr("farm.devices.files._STALLS", 0)
        monkeypatch.setattr("farm.devices.files._FILE_SECONDS", 0.2)
    device.stall_s = 0.3 if "60" in then else SECONDS
    target = tmp_path / "copy"
    if problem:
        with pytest.raises(DeviceError, match=problem) as caught:
            device.pull({device.storage / "file": target}, max_bytes=1000)
        assert isinstance(caught.value, DeviceTimeoutError) == ("moved" in problem)
        assert not target.exists() or target.read_bytes() == b"12345"
    else:
        device.pull({device.storage / "file": target}, max_bytes=1000)
        assert target.read_bytes() == b"12345"


def test_a_file_of_several_names_comes_back_by_each(device: LocalTransport, tmp_path: Path) -> None:
    # `tar` has such a file once, and long names in entries of their own.
    folder = device.storage / ("long" * 30)
    device.push({folder / "file": b"12345", folder / "link": Link(PurePosixPath("file"))})
    os.link(folder / "file", folder / "hard")
    copies = {folder / name: tmp_path / name for name in ("file", "link", "hard")}
    device.pull(copies, max_bytes=5)
    assert [copy.read_bytes() for copy in copies.values()] == [b"12345"] * 3
    with pytest.raises(DeviceError, match="more than the 4 bytes"):
        device.pull(copies, max_bytes={path: 4 if path.name == "hard" else 5 for path in copies})


def test_a_name_is_no_escape_sequence(device: LocalTransport, tmp_path: Path) -> None:
    device.push({device.storage / "A": b"other", device.storage / r"\101": b"12345"})
    device.pull({device.storage / r"\101": tmp_path / "copy"}, max_bytes=5)
    assert (tmp_path / "copy").read_bytes() == b"12345"


def test_a_device_without_tar_and_a_local_file_that_goes(device: LocalTransport, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="gone"):
        device.push({device.storage / "file": b"x" * 1_000_000, device.storage / "other": tmp_path / "gone"})
    (tmp_path / "bin/tar").write_text("#!/bin/sh\nexec no-tar-here\n")
    (tmp_path / "bin/tar").chmod(0o755)
    with pytest.raises(DeviceError, match="no-tar-here"):
        device.push({device.storage / "file": b"x" * 1_000_000})


class Inside(LocalTransport):
    """This machine as a process with file systems of its own sees it."""

    pid = 0

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> LocalProcess:
        del timeout_s, stdin
        enter = ["nsenter", "-t", str(self.pid), "-U", "-m", "--preserve-credentials"]
        return LocalProcess(self.serial, argv, [*enter, "sh", "-c", command])


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    mount = f"mount -t tmpfs -o size=1m farm {shlex.quote(str(tmp_path))}/full"
    own = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*own, mount], check=False, capture_output=True).returncode:
        pytest.skip("needs to mount something")
    with Supervisor() as supervisor:
        child = supervisor.spawn([*own, f"{mount} && echo && exec sleep 600"], name="mounts", stdout_pipe=True)
        child.first_line(SECONDS)
        device = Inside("this", LocalAddress(f"{tmp_path}/full/storage"))
        device.pid = child.pid
        for size in (200_000, 5_000_000):
            with pytest.raises(DeviceSpaceError, match="storage/.*: No space left on device"):
                device.push({device.storage / str(n): bytes(size) for n in range(10)})
            device.run(["sh", "-c", f"rm {device.storage}/*"], timeout_s=SECONDS)
        device.push({device.storage / "small": b"it works again"})
