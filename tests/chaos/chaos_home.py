"""Folders, suite, databases, devices and processes of one round of chaos.py, and its adb server."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from chaos_farm import HERE, VERSIONS
from chaos_store import Cluster, PostgresStore
from farm_home import processes_marked
from ssh_server import SshServer
from stub_farm import SOC, fill_bundle, words_of

from farm.base.errors import InfraError
from farm.base.processes import Child, Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.protocol import BUILDER_NAME, TEMPLATE_NAME
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.device import AdbAddress
from farm.devices.virtual.boot import boot
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, plan

_COUNTS = "SELECT (SELECT count(*) FROM attempt), (SELECT count(*) FROM health_event)"
_LOCK_S, _ANSWER_S = 5.0, 3


class Disturbed(Protocol):
    """A database that can be away."""

    name: str
    url: str
    ways: Sequence[str]
    """How it can be away."""

    def leave(self, way: str) -> None:
        """Let it be away."""

    def come_back(self) -> None:
        """Let it be there again; may be called when it is."""

    def counts(self) -> tuple[int, ...] | None:
        """Return how much is in it, None where it does not answer."""


class DisturbedSqlite:
    """A file in the state folder of a round; it is away while another process writes and does not end."""

    name = "SQLite"
    ways = ("locked",)

    def __init__(self, file: Path) -> None:
        self._file, self.url = file, f"sqlite:///{file}"
        self._holder: sqlite3.Connection | None = None

    def leave(self, way: str) -> None:
        del way
        if not self._file.exists() or self._holder is not None:
            return
        holder = sqlite3.connect(self._file, timeout=_LOCK_S, isolation_level=None, check_same_thread=False)
        try:
            holder.execute("BEGIN IMMEDIATE")
            self._holder = holder
        except sqlite3.Error:
            holder.close()

    def come_back(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()

    def counts(self) -> tuple[int, ...] | None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=1.0)) as connection:
                return tuple(connection.execute(_COUNTS).fetchone())
        except sqlite3.Error:
            return None


class DisturbedPostgres(PostgresStore):
    """A database of a server that stops, freezes or starts again."""

    name = "PostgreSQL"
    ways = ("stopped", "frozen", "restarted")

    def __init__(self, cluster: Cluster, database: str) -> None:
        super().__init__(cluster, database)
        self._where = (
            f"host={cluster.folder} port={cluster.port} user=farm connect_timeout={_ANSWER_S} dbname={database}"
            f" options='-c statement_timeout={_ANSWER_S}s'"
        )

    def leave(self, way: str) -> None:
        if way == "frozen":
            self._cluster.freeze()
        else:
            self._cluster.stop()
        if way == "restarted":
            self._cluster.start()

    def come_back(self) -> None:
        self._cluster.thaw()
        self._cluster.start()

    def counts(self) -> tuple[int, ...] | None:
        import psycopg

        try:
            with psycopg.connect(self._where) as connection:
                row = connection.execute(_COUNTS).fetchone()  # type: ignore[arg-type]
        except psycopg.Error:
            return None
        return tuple(row) if row else None


SUITE = "chaos"
PRECISION = "8a8w"
PLANTED = {"wrong": 3, "crash": 2, "hang": 1, "refused": 2}
"""Number of failing jobs in forty, by behaviour of the stub runner."""
TMPFS_MB = 256
"""Devices refuse to work with less than 64 MB of room, and up to three share one file system."""
_OF = 40
_ROLES = {
    "virtual device": "farm.devices.virtual",
    "adb server": "server nodaemon",
    "runner": "--serve",
    "builder": BUILDER_NAME,
    "template": TEMPLATE_NAME,
    "tunnel": "farm.devices.ssh.tunnel",
    "worker": PROCESS_NAME,
    "fork server": SERVER_NAME,
    "controller": "chaos_farm.py run",
}
"""Part of the command line of a process, by role."""
_HEAD = """\
[suite]
name = "{name}"
description = "jobs of a stub"
[suite.tolerance.{precision}.fp32]
sqnr_db = 60.0
[suite.tolerance.{precision}.quantized]
sqnr_db = 60.0
"""
_CASE = """
[case.{name}]
module = "stub:Stub"
kwargs = {{ words = "{word} {latency_ms}", seconds = {seconds} }}
inputs = [{{ shape = [16] }}]
"""
_CONFIG = """\
[build]
builders = 2
[leases]
ttl_s = {ttl_s}
[health]
gate_wait_s = 2
"""
LEASE_TTL_S = 10


class Process(NamedTuple):
    """Process of a round."""

    pid: int
    role: str
    command: str


class Home:
    """Files of a round: its own state folder, cache and suite, and its own devices if they are attached."""

    def __init__(self, folder: Path, runner: Path, chance: Random, *, jobs: int, attached: int) -> None:
        """`attached` is how many devices are attached; with 0 every run boots two of its own."""
        self.folder, self.attached = folder, attached
        self.state, self.cache, self.cwd = folder / "state", folder / "cache", folder / "cwd"
        self.stacks = folder / "stacks"
        self.storage = folder / "devices" if attached else self.cache / "virtual"
        """Folder with the files of virtual devices."""
        for each in (self.state, self.cwd / SUITE, self.stacks, self.storage):
            each.mkdir(parents=True)
        self.mounts = [each for each in (self.state, self.storage) if _mount(each)]
        self._runner = runner
        self.behaviours: dict[str, str] = {}
        """Behaviour of each job's code, by id: a key of EXPECTED."""
        (self.cwd / "farm.toml").write_text(_CONFIG.format(ttl_s=LEASE_TTL_S))
        self._write_suite(chance, jobs)
        self._compile_some()

    def environment(self, store_url: str, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of `farm`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
        return {
            **kept,
            "FARM_STATE_DIR": str(self.state),
            "FARM_CACHE_DIR": str(self.cache),
            "FARM_STORE": store_url,
            "CHAOS_RUNNER": str(self._runner),
            "CHAOS_STACKS": str(self.stacks),
            "PYTHONPATH": os.pathsep.join([str(HERE / "chaos_site"), str(HERE.parents[1])]),
            "COLUMNS": "200",
            **more,
        }

    def start(self, arguments: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start `farm`, as a shell does that leaves it to itself."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, str(HERE / "chaos_farm.py"), *arguments],
                env=dict(environment),
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def configure(self, more: str) -> None:
        """Add something to farm.toml."""
        with (self.cwd / "farm.toml").open("a") as file:
            file.write(more)

    def close(self) -> None:
        """Take the file systems away."""
        for folder in self.mounts:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)

    def _write_suite(self, chance: Random, jobs: int) -> None:
        words = [word for word, count in PLANTED.items() for _ in range(max(1, count * jobs // _OF))]
        words += ["pass"] * (jobs - len(words))
        chance.shuffle(words)
        cases = []
        for number, word in enumerate(words):
            name = f"{word}_{number:03}"
            self.behaviours[f"{SUITE}/{name}[{SOC}-htp-{PRECISION}]"] = word
            # Every fifth job has a program of its own, which has to be compiled.
            seconds = 0.2 + number / 1000 if number % 5 == 4 else 0.0
            cases.append(_CASE.format(name=name, word=word, latency_ms=chance.choice((20, 80, 200)), seconds=seconds))
        text = _HEAD.format(name=SUITE, precision=PRECISION) + "".join(cases)
        (self.cwd / SUITE / "suite.toml").write_text(text)

    def _compile_some(self) -> None:
        cache = BundleCache(self.cache)
        jobs = plan([load_suite(self.cwd / SUITE / "suite.toml")], [find_soc(SOC)], "htp")
        for job in (*jobs, *health_check_jobs(jobs)):
            if not job.case.kwargs.get("seconds"):
                _compile(cache, job)


def _compile(cache: BundleCache, job: Job) -> None:
    key = bundle_key(job, VERSIONS)
    cache.build(key, lambda folder: fill_bundle(folder, key, words_of(job.case)))


def _mount(folder: Path) -> bool:
    """Give a folder a small file system of its own; return whether this may be done here."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MB}m,mode=700", "none", str(folder)]
    return (
        bool(os.environ.get("CHAOS_NAMESPACE"))
        and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


def processes_of(folder: Path) -> list[Process]:
    """Return the living processes that have to do with `folder`, and the reapers that watch for them, by id."""
    reapers = {pid: words for pid, words in processes_marked("reaper.py").items() if "reaper.py" in words}
    ours = {pid: words for pid, words in processes_marked(str(folder)).items() if pid not in reapers}
    found = [
        Process(pid, next((role for role, word in _ROLES.items() if word in words), "other"), words)
        for pid, words in ours.items()
    ]
    names = {str(pid) for pid in ours}
    found += [Process(pid, "reaper", words) for pid, words in reapers.items() if words.split()[-2] in names]
    return sorted(one for one in found if one.pid != os.getpid())


_SERVER = "adb server"
_HOST = """
[[host]]
name = "attic"
ssh = "{user}@127.0.0.1:{port}"
adb = "127.0.0.1:{adb_port}"
key_file = "{folder}/user_key"
known_hosts = "{folder}/known_hosts"
"""


def has_sshd() -> bool:
    """Tell whether devices can be behind a tunnel here."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") is not None


# A virtual device at the port of its first argument: a phone that comes back is at its cable as before.
_AT_PORT = """
import socket, sys
from farm.devices.virtual import __main__ as program
number = int(sys.argv.pop(1))
def listen():
    # Connections of its earlier life may linger on the port.
    listener = socket.create_server(("127.0.0.1", number))
    listener.setblocking(False)
    return listener
program.listen = listen
sys.exit(program.main())
"""


class Lab:
    """Devices of one round. With `tunnel` they look to farm like devices of another machine."""

    def __init__(self, supervisor: Supervisor, home: Home, *, tunnel: bool) -> None:
        self._supervisor, self._home = supervisor, home
        self._server = start_adb_server(supervisor, home.folder / "adb")
        self._server_child = supervisor.find(_SERVER)
        self._others: list[Child] = []
        devices = boot(supervisor, self._server, [SOC] * home.attached, home.storage)
        addresses = {device.serial: device.address for device in devices}
        self._ports = {
            serial: int(address.attached_at.rpartition(":")[2])
            for serial, address in addresses.items()
            if isinstance(address, AdbAddress)
        }
        self._children: dict[str, Child] = {serial: supervisor.find(serial) for serial in self._ports}
        self._seen_dead: dict[str, float] = {}
        ordinary = self._server
        if tunnel:
            self._open_sshd()
            # This machine's own server has nothing.
            ordinary = start_adb_server(supervisor, home.folder / "empty")
            self._others.append(supervisor.find(_SERVER))
        self.environment = {"ANDROID_ADB_SERVER_PORT": str(ordinary.port)}

    @property
    def pids(self) -> set[int]:
        """Processes that do not end with a run."""
        return {child.pid for child in (*self._children.values(), *self._others, self._server_child)}

    @property
    def is_whole(self) -> bool:
        """Return whether all processes of the lab run."""
        alive = all(child.process.poll() is None for child in self._children.values())
        return alive and (self._server_child.process.poll() is None or self._foreign_server())

    def tend(self, pause_s: float) -> list[str]:
        """Start again the processes that have been dead for `pause_s`; return their names."""
        now, done = time.monotonic(), []
        for serial, child in self._children.items():
            if child.process.poll() is not None and now > self._seen_dead.setdefault(serial, now) + pause_s:
                del self._seen_dead[serial]
                self._children[serial] = self._boot(serial)
                done.append(serial)
        is_gone = self._server_child.process.poll() is not None and not self._foreign_server()
        if is_gone and now > self._seen_dead.setdefault(_SERVER, now) + pause_s:
            del self._seen_dead[_SERVER]
            with contextlib.suppress(InfraError):
                self._server = start_adb_server(self._supervisor, self._home.folder / "adb", port=self._server.port)
                self._server_child = self._supervisor.find(_SERVER)
                done.append(_SERVER)
        if done:
            self.connect_all()
        return done

    def _foreign_server(self) -> bool:
        """Tell whether another adb server took the port, as `adb start-server` of a farm does."""
        if self._server_child.process.poll() is None:
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server.port), timeout=1.0):
            return True
        return False

    def _boot(self, serial: str) -> Child:
        root = self._home.storage / serial
        program = [sys.executable, "-S", "-c", _AT_PORT, str(self._ports[serial])]
        environment = {"PATH": os.defpath, "PYTHONPATH": str(HERE.parents[1])}
        child = self._supervisor.spawn(
            [*program, "--root", root, "--soc", SOC, "--serial", serial],
            name=serial,
            env=environment,
            stdout_pipe=True,
            stderr=self._home.folder / f"{serial}.log",
        )
        child.first_line(20.0)
        return child

    def connect_all(self) -> None:
        """Let the present adb server see all devices, as it sees phones on its USB."""
        for port in self._ports.values():
            with contextlib.suppress(InfraError):
                AdbServer(self._server.port, self._server.adb).connect("127.0.0.1", port, timeout_s=5.0)

    def _open_sshd(self) -> None:
        """Make the adb server reachable through an SSH tunnel."""
        server = SshServer(self._supervisor, self._home.folder / "ssh").start()
        self._others.append(server.child)
        values = {"port": server.port, "adb_port": self._server.port, "folder": server.folder}
        self._home.configure(_HOST.format(user=getpass.getuser(), **values))


@contextlib.contextmanager
def lab_of(home: Home, *, tunnel: bool) -> Iterator[Lab | None]:
    """Yield the attached devices of a round, None where it has none."""
    if not home.attached:
        yield None
        return
    with Supervisor() as supervisor:
        yield Lab(supervisor, home, tunnel=tunnel)
