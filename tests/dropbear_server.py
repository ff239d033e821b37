"""A small board on loopback: a real dropbear in a folder where every tool is busybox's, with an SoC. Needs root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Self

import pytest
from debian import unpack
from parts import do_without
from ssh_server import alive, descendants, name_of
from waiting import free_port, require_listening

from farm.base.errors import MissingToolError
from farm.base.processes import Child, Supervisor
from farm.devices.device import SshAddress

SECONDS = 20.0
_SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_GETPROP = """#!/bin/sh
case $1 in
    ro.soc.model) echo QCS9100 ;;
    ro.serialno) echo {serial} ;;
    ro.farm.virtual) echo {virtual} ;;
    sys.boot_completed) echo 1 ;;
esac
"""
# The mounts end with the last process in the folder.
_BEGIN = """
set -e
mount --make-rprivate /
mount --bind "$2/usr/lib" "$1/usr/lib"
mount --bind "$2/usr/lib64" "$1/usr/lib64"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
root=$1; shift 2
exec chroot "$root" "$@"
"""


def need(program: str, package: str) -> Path:
    """Return where a program is, or skip the test; where parts are required, fail it."""
    found = shutil.which(program, path=_SBIN)
    if found is None:
        do_without(f"there is no {program}: install {package}")
    return Path(found)


def newer_system(cache: Path) -> Path:
    """Return a root folder with Debian sid's dropbear in it, which takes several programs a connection."""
    try:
        return unpack(["dropbear-bin"], cache, suite="sid")
    except MissingToolError as error:
        do_without(f"there is no newer dropbear: {error}")


class DropbearServer:
    """Listens from `start` on; its port stays the same. `root` is the board's root folder.

    `system` is a root folder of Debian, this machine's unless another one is named: dropbear and the libraries are its.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        root: Path,
        *,
        system: Path = Path("/"),
        virtual: bool = True,
    ) -> None:
        busybox, program = need("busybox", "busybox-static"), need("dropbear", "dropbear-bin")
        key_maker = need("dropbearkey", "dropbear-bin")
        if os.geteuid():
            pytest.skip("only root can have a root folder of its own")
        self._supervisor, self._child = supervisor, None
        self.root, self.serial = root, "board-8"
        for folder in ("bin", "etc", "root/.ssh", "dev", "proc", "tmp", "var/tmp", "usr/lib", "usr/lib64", "run"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for link, target in (("lib", "usr/lib"), ("lib64", "usr/lib64"), ("sbin", "bin")):
            (root / link).symlink_to(target)
        for link in ("usr/bin", "usr/sbin"):
            (root / link).symlink_to("../bin")
        shutil.copy(busybox, root / "bin/busybox")
        for applet in subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(FileExistsError):
                (root / "bin" / applet).symlink_to("busybox")
        shutil.copy(program if system == Path("/") else system / "usr/sbin/dropbear", root / "bin/dropbear")
        self.write("bin/getprop", _GETPROP.format(serial=self.serial, virtual=int(virtual)), mode=0o755)
        self.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        self.write("etc/group", "root:x:0:\n")
        self.key = root / "user_key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "user", "-f", str(self.key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(f"{self.key}.pub", root / "root/.ssh/authorized_keys")
        for folder in ("root", "root/.ssh"):
            (root / folder).chmod(0o700)
        made = subprocess.run(
            [key_maker, "-t", "ed25519", "-f", root / "host_key"], check=True, capture_output=True, text=True
        )
        host_key = next(line for line in made.stdout.splitlines() if line.startswith("ssh-ed25519 "))
        self.port = free_port()
        self.known_hosts = root / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        self._system = system

    @property
    def address(self) -> SshAddress:
        """Return the address of the server, with the default folder of farm."""
        return SshAddress("127.0.0.1", "root", self.port, str(self.key), str(self.known_hosts))

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    def start(self) -> Self:
        listen = ["-F", "-E", "-s", "-r", "/host_key", "-P", "/run/dropbear.pid", "-p", f"127.0.0.1:{self.port}"]
        begin = ["unshare", "-m", "sh", "-c", _BEGIN, "sh", self.root, self._system]
        words, path = [*begin, "/bin/dropbear", *listen], f"{os.defpath}:/usr/sbin:/sbin"
        log = self.root / "dropbear.log"
        self._child = self._supervisor.spawn(words, name="dropbear", env={"PATH": path}, stderr=log)
        require_listening(self._child, self.port, SECONDS)
        return self

    def connections(self) -> list[int]:
        """Return the processes that serve a connection each."""
        return [pid for pid in descendants(self.child.pid) if name_of(pid).strip() == "dropbear"]

    def stop(self) -> None:
        """End the server and its connections. Their programs stay, as on a machine whose network was cut."""
        connections = self.connections()
        self.child.terminate()
        for pid in connections:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[str]:
        """Return the programs, dropbear excluded, that still run in the server's folder."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                inside = folder.name.isdigit() and os.readlink(folder / "root") == str(self.root)
                if inside and "dropbear" not in name_of(int(folder.name)) and alive(int(folder.name)):
                    found.append(shlex.join((folder / "cmdline").read_bytes().decode().split("\0")[:-1]))
        return found

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the board."""
        path = self.root / name
        path.write_text(text)
        path.chmod(mode)
