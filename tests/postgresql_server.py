"""Throw-away PostgreSQL clusters, where the server is installed."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# No test has a machine that fails: databases are made with half the writes, and the server does nothing by itself.
_LIGHT = (
    "fsync=off",
    "full_page_writes=off",
    "wal_level=minimal",
    "max_wal_senders=0",
    "autovacuum=off",
    "checkpoint_timeout=1h",
)


def _find_binaries() -> Path | None:
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def server_binaries() -> Path:
    """Return the folder of initdb and pg_ctl; skips the test where they, or the driver, are not installed."""
    binaries = _find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here: initdb and pg_ctl are not installed")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install 'snapdragon-farm[cluster]'")
    return binaries


@contextmanager
def running_cluster(*settings: str, hba: str = "", files: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the folder of the socket of a running cluster, whose superuser `farm` needs no password there.

    `settings` are of postgresql.conf, where `{folder}` is that folder, which gets a copy of `files`; `hba` are lines of
    pg_hba.conf.
    """
    binaries = server_binaries()
    # Not under tmp_path: that is closed to others, its name is too long for a socket, and root may not run a server.
    folder = Path(tempfile.mkdtemp(prefix="farm-pg-", dir="/tmp"))
    prefix: list[str] = []
    if os.geteuid() == 0:
        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            folder.rmdir()
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        prefix = ["runuser", "-u", "postgres", "--"]

    def run(*argv: str) -> None:
        # Not to a pipe, which the server would hold open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run([*prefix, *argv], stdout=output, stderr=output, cwd=folder, check=False)
            output.seek(0)
            assert done.returncode == 0, output.read().decode()

    data = folder / "data"
    try:
        run(str(binaries / "initdb"), "-D", str(data), "-U", "farm", "-A", "trust", "-E", "UTF8", "-N", "--locale=C")
        for file in files:
            copy = folder / file.name
            shutil.copy(file, copy)
            shutil.chown(copy, folder.owner(), folder.group())
            copy.chmod(0o600)
        if hba:
            (data / "pg_hba.conf").write_text(hba)
        chosen = (*_LIGHT, "listen_addresses=''", f"unix_socket_directories={folder}", *settings)
        options = " ".join(f"-c {one.format(folder=folder)}" for one in chosen)
        run(str(binaries / "pg_ctl"), "-D", str(data), "-w", "-o", options, "start")
        try:
            yield str(folder)
        finally:
            run(str(binaries / "pg_ctl"), "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
