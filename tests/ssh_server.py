"""A real OpenSSH server on loopback, with keys of its own, behind which this machine is a device with an SoC."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, Self, TypeVar

from parts import do_without
from waiting import free_port, require_listening

from farm.base.processes import Child, Supervisor
from farm.devices.device import SshAddress
from farm.devices.virtual.tree import DeviceTree, device_properties

SECONDS = 20.0
_Server = TypeVar("_Server", bound="Server")


class SshServer:
    """Listens from `start` on; its port stays the same. What runs over it sees the `getprop` of a device.

    `sftp` is the command of its SFTP server, `force` the command that runs in place of every other, `options` are more
    lines of its configuration.
    """

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
        self._supervisor, self._program, self._child = supervisor, program, None
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("host_key", "user_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self.port = free_port()
        key = (folder / "host_key.pub").read_text()
        self.known_hosts = folder / "known_hosts"
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

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    def start(self) -> Self:
        if os.geteuid() == 0:
            # As Debian's unit does before it starts one.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        words = [self._program, "-D", "-e", "-f", self.folder / "sshd_config"]
        log = self.folder / "sshd.log"
        self._child = self._supervisor.spawn(words, name="sshd", env={"PATH": os.defpath}, stderr=log)
        require_listening(self._child, self.port, SECONDS)
        return self

    def stop(self) -> None:
        """End the server and its connections, which run in sessions of their own and show no environment.

        Programs that they started stay, as on a machine whose network was cut.
        """
        connections = [pid for pid in descendants(self.child.pid) if name_of(pid).startswith("sshd")]
        self.child.terminate()
        for pid in connections:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Server(Protocol):
    """SSH server for tests, of this module or of dropbear_server."""

    def start(self) -> Self: ...

    def stop(self) -> None: ...


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


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the children of a process and all their descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]
