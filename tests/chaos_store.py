"""PostgreSQL servers for tests, which may be stopped and frozen, and their databases."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_CONNECT_SECONDS = 3


class Cluster:
    """A PostgreSQL server of its own, on a socket in a folder of its own; root runs it as the user `postgres`."""

    def __init__(self, binaries: Path, *settings: str, hba: str = "", files: Sequence[Path] = ()) -> None:
        """Make and start a server.

        `settings` are of postgresql.conf, `NAME=VALUE`, where `{folder}` is the folder of the server, which gets a copy
        of `files`; `hba` are lines of pg_hba.conf in place of its own.
        """
        self._binaries, self._settings = binaries, settings
        # The name of the socket contains the port, even without a listener on the port.
        self.port = int(dict(setting.split("=", 1) for setting in settings).get("port", 5432))
        # The scratch folder has too long a name for a socket, and `postgres` may not enter it.
        self.folder = Path(tempfile.mkdtemp(prefix="farm-pg-", dir="/tmp"))
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self._prefix = ["runuser", "-u", "postgres", "--"]
        self._call("initdb", "-U", "farm", "-A", "trust", "-E", "UTF8", "-N", "--locale=C")
        for file in files:
            copy = Path(shutil.copy(file, self.folder))
            shutil.chown(copy, self.folder.owner(), self.folder.group())
            copy.chmod(0o600)
        if hba:
            (self.folder / "data/pg_hba.conf").write_text(hba)
        self._stopped: list[int] = []
        self.start()

    def start(self, more: Sequence[str] = ()) -> None:
        """Start the server, unless it runs, with `more` settings."""
        chosen = ("listen_addresses=''", f"unix_socket_directories={self.folder}", "fsync=off", *self._settings, *more)
        options = " ".join(f"-c {setting.format(folder=self.folder)}" for setting in chosen)
        if not self._is_up():
            self._call("pg_ctl", "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop the server at once, as a machine that loses power does."""
        if self._is_up():
            self._call("pg_ctl", "-w", "-m", "immediate", "stop")

    def freeze(self) -> None:
        """Stop every process of the server: it answers nothing, and closes nothing."""
        self._stopped = self._processes()
        for pid in self._stopped:
            _send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped = []

    def close(self) -> None:
        """End the server and remove its files."""
        self.thaw()
        with contextlib.suppress(subprocess.SubprocessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_up(self) -> bool:
        return self._call("pg_ctl", "status", check=False) == 0

    def _processes(self) -> list[int]:
        try:
            leader = int((self.folder / "data/postmaster.pid").read_text().split()[0])
            children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        except (OSError, ValueError, IndexError):
            return []
        return [leader, *map(int, children)]

    def _call(self, program: str, *argv: str, check: bool = True) -> int:
        command = [*self._prefix, str(self._binaries / program), "-D", str(self.folder / "data"), *argv]
        # Not into a pipe, which the server would hold open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(command, stdout=output, stderr=output, cwd=self.folder, check=False, timeout=60)
            if check and done.returncode:
                output.seek(0)
                raise subprocess.SubprocessError(f"{' '.join(command)}: {output.read().decode()}")
            return done.returncode


class PostgresStore:
    """A new database of a server of this run."""

    def __init__(self, cluster: Cluster, database: str) -> None:
        import psycopg

        self._cluster = cluster
        where = f"host={cluster.folder} port={cluster.port} user=farm connect_timeout={_CONNECT_SECONDS}"
        with psycopg.connect(f"{where} dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}")  # type: ignore[arg-type]
        self.url = f"postgresql://farm@/{database}?host={cluster.folder}&port={cluster.port}"


def server_binaries() -> Path | str:
    """Return the folder of initdb and pg_ctl, or why no server can run."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    binaries = next((one for one in folders if (one / "initdb").exists() and (one / "pg_ctl").exists()), None)
    if binaries is None:
        return "initdb and pg_ctl are not installed"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'snapdragon-farm[cluster]'"
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return binaries


@contextlib.contextmanager
def postgres_cluster(*settings: str, hba: str = "", files: Sequence[Path] = ()) -> Iterator[Cluster | str]:
    """Yield a running server with these `settings`, as Cluster takes them, or why there is none."""
    binaries = server_binaries()
    if isinstance(binaries, str):
        yield binaries
        return
    with contextlib.closing(Cluster(binaries, *settings, hba=hba, files=files)) as cluster:
        yield cluster


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
