"""Device with Android's own daemon: the judge of farm's. Debian's adbd, mksh and toybox, in namespaces and a chroot.

The root folder has a C library, so that programs for any Linux of this processor run on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from debian import unpack
from parts import do_without
from waiting import until

from farm.base.errors import MissingToolError
from farm.base.files import published
from farm.base.processes import Child, Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress
from farm.devices.virtual.tree import TOOLS, DeviceTree, device_properties

DAEMONS = ["farm", pytest.param("adbd", marks=pytest.mark.whole)]
"""Parameters of a test that runs over farm's daemon and over Android's."""

SHELL_USER = 2000
"""User of adbd and of every command: Android's `shell`."""

_ADBD = "/usr/lib/android-sdk/platform-tools/adbd"
_BEGIN = Path(__file__).with_name("adbd_begin.sh")
_WITHOUT_VSOCK = Path(__file__).with_name("without_vsock.py")
# In the network of the device, which has a loopback interface alone.
_PORT = 5555
_SECONDS = 60.0

# libatomic1 is a dependency of QNN's libraries for x86-64, libc-bin has the locale C.UTF-8, python3 runs stubs.
_PACKAGES = ("adbd", "busybox-static", "libatomic1", "libc-bin", "mksh", "python3", "toybox")
# Applets that Android's own toybox, or its awk, has and Debian's toybox lacks.
_OF_BUSYBOX = ("awk", "bc", "dd", "diff", "expr", "getopt", "more", "tr", "vi")
_MOUNT_POINTS = ("data", "dev", "proc", "product", "sdcard", "sys", "system", "tmp")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
# Numbers and homes are Android's; toybox and adbd read both files.
_ETC = {
    "passwd": f"root:x:0:0::/:/system/bin/sh\nshell:x:{SHELL_USER}:{SHELL_USER}::/:/system/bin/sh\n",
    "group": f"root:x:0:\nshell:x:{SHELL_USER}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
_ENVIRONMENT = {
    "ADBD_PORT": str(_PORT), "ANDROID_DATA": "/data", "ANDROID_ROOT": "/system", "LANG": "C.UTF-8",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": "/data/local/tmp",
}  # fmt: skip


@dataclass(frozen=True)
class AdbdDevice:
    """Device behind an adb server of its own, which is in the device's network. adb calls it by its address."""

    server: AdbServer
    root: Path
    child: Child
    serial: str = f"127.0.0.1:{_PORT}"

    def transport(self) -> AdbTransport:
        """Return a new transport to it."""
        return AdbTransport(self.serial, AdbAddress(self.server.port))

    def vanish(self) -> None:
        """Kill all processes of the device at once, without SIGTERM before."""
        [init] = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()
        # The kernel kills a namespace with its first process.
        os.kill(int(init), signal.SIGKILL)

    def alive(self, number: int) -> bool:
        """Return whether process `number` of the device runs."""
        return number in processes_on(self.root)


@pytest.fixture(scope="session")
def adbd(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> Iterator[AdbdDevice]:
    """Device with Android's own daemon and tools."""
    with Supervisor() as supervisor:
        yield start_adbd(supervisor, tmp_path_factory.mktemp("adbd"), farm_cache)


def start_adbd(supervisor: Supervisor, folder: Path, cache_dir: Path) -> AdbdDevice:
    """Start a device with its files below `folder`. Skip the test without adbd, or fail it where parts are required."""
    image = _image(cache_dir)
    if not isinstance(image, Path):
        do_without(f"there is no adbd: {image}")
    root = folder / "device"
    tree = DeviceTree(root, device_properties("SM8550", "adbd", "test", "user"))
    for name in ("product", "product/bin"):
        (root / name).mkdir(mode=0o755)
    for name in ("data", "sdcard"):
        for place, _, files in os.walk(root / name):
            for path in (place, *(os.path.join(place, one) for one in files)):
                os.chown(path, SHELL_USER, SHELL_USER)
    # adbd is a background process of init, which reaps orphans.
    argv = _begin_argv(image, Path(os.fsdecode(tree.root)), f"{_ADBD} & wait $!")
    child = supervisor.spawn(argv, name="adbd", env=_ENVIRONMENT, stderr=folder / "adbd.log")
    until(lambda: _listens(child.pid), child.log_tail, _SECONDS)
    server = start_adb_server(_Inside(supervisor, child.pid), folder / "adb")
    server.connect("127.0.0.1", _PORT, timeout_s=_SECONDS)
    return AdbdDevice(server, root, child)


class _Inside(Supervisor):
    """Supervisor whose processes are in the network of another process; a socket that they inherit is not."""

    def __init__(self, supervisor: Supervisor, pid: int) -> None:
        super().__init__()
        self._outer, self._network = supervisor, f"--net=/proc/{pid}/ns/net"

    def spawn(self, argv: Sequence[str | Path], **options: Any) -> Child:
        return self._outer.spawn(["nsenter", self._network, "--", *argv], **options)


def _begin_argv(image: Path, files: Path, init: str) -> list[str | Path]:
    """Return the command that starts a device with the root folder `image`, and `init` as its first shell command."""
    own = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL"]
    return [sys.executable, "-IS", _WITHOUT_VSOCK, "unshare", *own, "--", "sh", _BEGIN, image, files, init]


def _listens(pid: int) -> bool:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            sockets = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
            return f":{_PORT:04X} " in sockets
    return False


def processes_on(root: Path) -> dict[int, str]:
    """Return the command lines of the processes on the device with its files in `root`, by the device's numbers."""
    found = {}
    data = (root / "data").stat()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if os.path.samestat((folder / "root/data").stat(), data):
                lines = (folder / "status").read_text().splitlines()
                values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                if values["State"][0] not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(values["NSpid"].split()[-1])] = command.decode(errors="replace")
    return found


@cache
def _image(cache_dir: Path) -> Path | str:
    try:
        return device_image(cache_dir)
    except MissingToolError as error:
        return str(error)


def device_image(cache_dir: Path) -> Path:
    """Return the root folder of a device, made once in the cache. Raises MissingToolError where none can be had."""
    if os.geteuid():
        raise MissingToolError("only root can give a device a root folder and namespaces of its own")
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(SHELL_USER).pw_name
        raise MissingToolError(f"the device's processes would belong to this machine's user {user}: uid {SHELL_USER}")
    unpacked = unpack(_PACKAGES, cache_dir)
    made_of = (unpacked.parent.name, Path(__file__).read_text(encoding="utf-8"), *TOOLS.values())
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = published(cache_dir / "debian" / f"android-{key}", lambda new: _fill(new, unpacked))
    with tempfile.TemporaryDirectory(prefix="farm-android-") as scratch:
        tree = DeviceTree(Path(scratch, "files"), device_properties("SM8550", "adbd", "test", "user"))
        files = Path(os.fsdecode(tree.root))
        (files / "product").mkdir()
        _output(_begin_argv(folder, files, f"test -x {_ADBD}"))
    return folder


def _fill(folder: Path, unpacked: Path) -> None:
    shutil.copytree(unpacked / "usr", folder / "usr", symlinks=True, copy_function=os.link)
    for name in (*_MOUNT_POINTS, "etc", "tools"):
        (folder / name).mkdir()
    for name, target in _LINKS.items():
        (folder / name).symlink_to(target)
    for name, text in _ETC.items():
        (folder / "etc" / name).write_text(text, encoding="utf-8")
    tools = folder / "tools"
    (folder / "usr/bin/sh").symlink_to("mksh")
    (tools / "sh").symlink_to("/usr/bin/mksh")
    for program, names in (
        ("busybox", _OF_BUSYBOX),
        ("toybox", _output(["chroot", folder, "/usr/bin/toybox"]).split()),
    ):
        for name in names:
            (tools / name).unlink(missing_ok=True)
            (tools / name).symlink_to(f"/usr/bin/{program}")
    for name in ("getprop", "dumpsys"):
        (tools / name).write_text(TOOLS[name], encoding="utf-8")
        (tools / name).chmod(0o755)


def _output(argv: list[str | Path]) -> str:
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingToolError(f"a device cannot have namespaces of its own here: {error}") from None
    if done.returncode:
        why = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
        raise MissingToolError(f"a device cannot have namespaces of its own here: {why}")
    return done.stdout
