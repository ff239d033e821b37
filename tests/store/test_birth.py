"""A process is killed at every step of making a store: nothing is left that the next one has to repair."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from old_store import revision
from programs import run_program

from farm.base.errors import FIRST_RUN, StoreError
from farm.store.schema import REVISION
from farm.store.store import open_store

_ROOT = str(Path(__file__).parents[2])

# Program that makes stores in forked processes, each killed before a statement; the fork saves repeated imports. The
# kill comes before every nth statement, or at the borders of the transactions that make a store: all statements within
# a transaction are equivalent.
_BORN = """
import json, os, signal, sys
from sqlalchemy import Engine, event
from farm.store.store import open_store

address, first, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
last = done = 0
edges, within = set(), False

def count(*_):
    global done
    done += 1
    if done == last:
        os.kill(os.getpid(), signal.SIGKILL)

def edge(*_):
    edges.update(range(done - 1, done + 3))

def traced(statement):
    global within
    is_edge = statement.split()[0] in ("BEGIN", "COMMIT", "ROLLBACK")
    within = statement.startswith("BEGIN") if is_edge else within
    count()
    if is_edge or not within:
        edge()

def connected(connection, record):
    if hasattr(connection, "set_trace_callback"):
        # Also what begins and ends a transaction, and what sets up the connection.
        connection.set_trace_callback(traced)

event.listen(Engine, "connect", connected)
if address.startswith("postgresql"):
    event.listen(Engine, "before_cursor_execute", count)
    for name in ("begin", "commit", "rollback"):
        event.listen(Engine, name, edge)
    event.listen(Engine, "commit", count)

def killed(number, address):
    global last, done
    last = number
    read, write = os.pipe()
    child = os.fork()
    if not child:
        done = 0
        open_store(address).close()
        os.write(write, json.dumps([done, sorted(edges)]).encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        found = told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (0 if found else -signal.SIGKILL), code
    return found

count_of_all, where = json.loads(killed(0, first))
numbers = range(step, count_of_all + 1, step) if step else [n for n in where if 0 < n <= count_of_all]
for number in numbers:
    if killed(number, address.format(number)):
        break
    print(number, flush=True)
"""
_EDGES = 0
"""Step of a store that is killed where transactions begin and end."""


def _killed_at(address: str, first: str, step: int) -> list[int]:
    """Return the statements before which a process was killed that made the store at `address`.

    A store is made at `first` before, without an interruption.
    """
    done = run_program([sys.executable, "-c", _BORN, address, first, str(step)], cwd=_ROOT)
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("step", [9, pytest.param(_EDGES, marks=pytest.mark.whole)])
def test_sqlite(tmp_path: Path, step: int) -> None:
    killed = _killed_at(str(tmp_path / "{}.db"), str(tmp_path / "first.db"), step)
    assert len(killed) > 5
    for number in killed:
        path = tmp_path / f"{number}.db"
        _is_none_or_whole(str(path))
        with open_store(path) as store:
            assert store.runs.latest_id() is None
        assert revision(str(path)) == REVISION


@pytest.mark.parametrize("step", [9, pytest.param(_EDGES, marks=pytest.mark.whole)])
def test_postgresql(new_database: Callable[[str], str], step: int) -> None:
    address, first = new_database(f"birth_{step}"), new_database(f"birth_first_{step}")
    # All processes use the same database: each begins with the remains of the one before.
    assert len(_killed_at(address, first, step)) > 5
    _is_none_or_whole(address)
    with open_store(address) as store:
        assert store.runs.latest_id() is None
    assert revision(address) == REVISION


def _is_none_or_whole(address: str) -> None:
    output = ""
    try:
        with open_store(address, readonly=True) as store:
            assert store.runs.latest_id() is None
    except StoreError as error:
        output = str(error)
    assert not output or f"there is no store yet: '{FIRST_RUN}' makes one" in output


def test_what_was_killed_within_a_step_is_completed(tmp_path: Path) -> None:
    """The kill leaves the first page half written, and its old content in a journal."""
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
    with pytest.raises(StoreError, match="a process was killed while it made the store: 'farm devices' completes it"):
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
