"""SSH servers of tests: OpenSSH's and Dropbear's."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import pytest
from debian import unpack
from parts import do_without
from waiting import alive, free_port, require_listening

from farm.base.errors import MissingToolError
from farm.base.processes import Child, Supervisor
from farm.devices.device import SshAddress
from farm.devices.virtual.tree import DeviceTree, device_properties

# A real OpenSSH server on loopback, with keys of its own, behind which this machine is a device with an SoC.


SECONDS = 20.0
_Server = TypeVar("_Server", bound="Server")


class Server:
    """SSH server that listens from `start` on; its port stays the same."""

    name: str
    """Name of the server's processes, also of its process per connection."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self._supervisor, self._child = supervisor, None
        self.port = free_port()
        self.known_hosts = folder / "known_hosts"

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    def start(self) -> Self:
        raise NotImplementedError

    def connections(self) -> list[int]:
        """Return the processes that serve a connection each."""
        return [pid for pid in descendants(self.child.pid) if name_of(pid).startswith(self.name)]

    def stop(self) -> None:
        """End the server and its connections, which run in sessions of their own and may show no environment.

        Programs that they started stay, as on a machine whose network was cut.
        """
        connections = self.connections()
        self.child.terminate()
        for pid in connections:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _listen(self, words: Sequence[str | Path], path: str, log: Path) -> Self:
        self._child = self._supervisor.spawn(words, name=self.name, env={"PATH": path}, stderr=log)
        require_listening(self._child, self.port, SECONDS)
        return self


class SshServer(Server):
    """OpenSSH's server. What runs over it sees the `getprop` of a device.

    `sftp` is the command of its SFTP server, `force` the command that runs in place of every other, `options` are more
    lines of its configuration.
    """

    name = "sshd"

    def __init__(
        self,
        supervisor: Supervisor,
        folder: Path,
        soc: str = "QCS9100",
        serial: str = "board-1",
        *,
        sftp: str = "internal-sftp",
        force: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if program is None:
            do_without("there is no sshd: install openssh-server", "FARM_REQUIRE_SSHD")
        super().__init__(supervisor, folder)
        self._program, self.folder = program, folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("host_key", "user_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        key = (folder / "host_key.pub").read_text()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key}")
        self.tree = DeviceTree(folder / "device", device_properties(soc, serial, "1"))
        self.tools = folder / "device/system/bin"
        lines = [
            f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys", f"PidFile {folder}/pid", "StrictModes no", "UsePAM no",
            "PasswordAuthentication no", "KbdInteractiveAuthentication no",
            *([f"Subsystem sftp {sftp}"] if sftp else []), *([f"ForceCommand {force}"] if force else []), *options,
            # HOME as well: the ~/.bashrc of this user is no part of the device.
            f"SetEnv PATH={self.tools}:/usr/local/bin:/usr/bin:/bin HOME={folder}/device",
        ]  # fmt: skip
        (folder / "sshd_config").write_text("".join(f"{line}\n" for line in lines))

    @property
    def address(self) -> SshAddress:
        files = (self.folder / name for name in ("user_key", "known_hosts", "storage"))
        return SshAddress("127.0.0.1", getpass.getuser(), self.port, *map(str, files))

    def start(self) -> Self:
        if os.geteuid() == 0:
            # As Debian's unit does before it starts one.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        words = [self._program, "-D", "-e", "-f", self.folder / "sshd_config"]
        return self._listen(words, os.defpath, self.folder / "sshd.log")


@contextlib.contextmanager
def running(kind: Callable[..., _Server], *words: object, **options: object) -> Iterator[_Server]:
    """Start a server of a kind; end it and its connections afterwards."""
    with Supervisor() as supervisor:
        server = kind(supervisor, *words, **options).start()
        yield server
        server.stop()


def login(server: SshServer) -> str:
    """Return the lines of farm.toml that log in at a server."""
    return (
        f'ssh = "{getpass.getuser()}@127.0.0.1:{server.port}"\n'
        f'key_file = "{server.folder}/user_key"\nknown_hosts = "{server.known_hosts}"\n'
    )


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the children of a process and all their descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found[1:]


# A small board on loopback: a real dropbear in a folder where every tool is busybox's, with an SoC. Needs root.


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


class DropbearServer(Server):
    """dropbear. `root` is the board's root folder.

    `system` is a root folder of Debian, this machine's unless another one is named: dropbear and the libraries are its.
    """

    name = "dropbear"

    def __init__(self, supervisor: Supervisor, root: Path, *, system: Path = Path("/"), virtual: bool = True) -> None:
        busybox, program = need("busybox", "busybox-static"), need("dropbear", "dropbear-bin")
        key_maker = need("dropbearkey", "dropbear-bin")
        if os.geteuid():
            pytest.skip("only root can have a root folder of its own")
        super().__init__(supervisor, root)
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
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        self._system = system

    @property
    def address(self) -> SshAddress:
        """Return the address of the server, with the default folder of farm."""
        return SshAddress("127.0.0.1", "root", self.port, str(self.key), str(self.known_hosts))

    def start(self) -> Self:
        listen = ["-F", "-E", "-s", "-r", "/host_key", "-P", "/run/dropbear.pid", "-p", f"127.0.0.1:{self.port}"]
        begin = ["unshare", "-m", "sh", "-c", _BEGIN, "sh", self.root, self._system]
        words, path = [*begin, "/bin/dropbear", *listen], f"{os.defpath}:/usr/sbin:/sbin"
        return self._listen(words, path, self.root / "dropbear.log")

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
