"""A process is killed at every step of making a store: nothing is left that the next one has to repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from old_store import revision

from farm.errors import FIRST_RUN, StoreError
from farm.store.schema import REVISION
from farm.store.store import open_store

_ROOT = str(Path(__file__).parents[2])

# Makes stores and kills itself before every nth statement, one process for each: forked, as it has loaded all by then.
_BORN = """
import os, signal, sys
import alembic.command, alembic.config, farm.store.migrations
from sqlalchemy import Engine, event
from farm.store.store import open_store

address, step = sys.argv[1], int(sys.argv[2])
last = done = 0

def count(*_):
    global done
    done += 1
    if done == last:
        os.kill(os.getpid(), signal.SIGKILL)

def connected(connection, record):
    if hasattr(connection, "set_trace_callback"):
        # Also what begins and ends a transaction, and what sets up the connection.
        connection.set_trace_callback(count)

event.listen(Engine, "connect", connected)
if address.startswith("postgresql"):
    event.listen(Engine, "before_cursor_execute", count)
    event.listen(Engine, "commit", count)
while True:
    last += step
    child = os.fork()
    if not child:
        open_store(address.format(last)).close()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    print(last, flush=True)
"""


def _killed_at(address: str, step: int) -> list[int]:
    """Return the statements before which a process was killed that made the store at `address`."""
    done = subprocess.run(
        [sys.executable, "-c", _BORN, address, str(step)], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.whole)])
def test_sqlite(tmp_path: Path, step: int) -> None:
    killed = _killed_at(str(tmp_path / "{}.db"), step)
    assert len(killed) > 5
    for number in killed:
        path = tmp_path / f"{number}.db"
        _is_none_or_whole(str(path))
        with open_store(path) as store:
            assert store.runs.latest_id() is None
        assert revision(str(path)) == REVISION


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.whole)])
def test_postgresql(postgresql_cluster: str, step: int) -> None:
    import psycopg

    name = f"birth_{step}"
    with psycopg.connect(f"host={postgresql_cluster} user=farm dbname=postgres", autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
    address = f"postgresql://farm@/{name}?host={postgresql_cluster}"
    # Always the same database: the next begins with what the last one left.
    assert len(_killed_at(address, step)) > 5
    _is_none_or_whole(address)
    with open_store(address) as store:
        assert store.runs.latest_id() is None
    assert revision(address) == REVISION


def _is_none_or_whole(address: str) -> None:
    said = ""
    try:
        with open_store(address, readonly=True) as store:
            assert store.runs.latest_id() is None
    except StoreError as error:
        said = str(error)
    assert not said or f"there is no store yet: '{FIRST_RUN}' makes one" in said


def test_what_was_killed_within_a_step_is_completed(tmp_path: Path) -> None:
    """Its first page is half written, and a journal says what was there before."""
    path = tmp_path / "farm.db"
    code = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.executescript("PRAGMA cache_size=1; BEGIN IMMEDIATE; CREATE TABLE half (x)")
for _ in range(100):
    connection.execute("INSERT INTO half VALUES (zeroblob(4000))")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert Path(f"{path}-journal").exists()
    with pytest.raises(StoreError, match="a process was killed as it made it: 'farm devices' completes it"):
        open_store(path, readonly=True)
    open_store(path).close()
    open_store(path, readonly=True).close()


def test_a_reader_of_an_empty_file_is_told_that_there_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "farm.db").write_bytes(b"")
    with pytest.raises(StoreError, match=f"there is no store yet: '{FIRST_RUN}' makes one"):
        open_store(tmp_path / "farm.db", readonly=True)
    open_store(tmp_path / "farm.db").close()
    open_store(tmp_path / "farm.db", readonly=True).close()


@pytest.mark.parametrize("empty_address", ["postgresql"], indirect=True)
def test_a_reader_of_an_empty_database_is_told_that_there_is_no_store(empty_address: str) -> None:
    with pytest.raises(StoreError, match=f"there is no store yet: '{FIRST_RUN}' makes one"):
        open_store(empty_address, readonly=True)
