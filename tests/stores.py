"""Stores for tests: copies of a template, processes that use one, statements and query plans."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from forked_command import call, fork
from sqlalchemy import event

from farm.store.store import Store, open_store

# New stores as copies of a template that each process makes once: a copy is quicker than making all tables.
#
# Tests of revisions, of a store's first moments and of its file's permissions make their stores without a copy.


_DATABASE = "store_template"


def place_store(path: Path) -> None:
    """Make an empty SQLite store at `path`, where no file is; the folder is made as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as copy:
        copy.write(_sqlite_template())
    # As SQLite makes its files.
    Path(name).chmod(0o644)
    # A link, unlike a new name, leaves the file of another process that was quicker.
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(name)
    Path(name).unlink()


@cache
def _sqlite_template() -> bytes:
    with tempfile.TemporaryDirectory(prefix="farm-template-") as folder:
        path = Path(folder, "farm.db")
        # An empty file: tests place copies of the template where no file is, also here.
        path.touch()
        open_store(path).close()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.read_bytes()


def create_database(cluster: str, name: str, template: str = "template1") -> str:
    """Make a database in the cluster whose socket is in a folder, and return its address."""
    import psycopg

    with psycopg.connect(f"host={cluster} user=farm dbname=postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy".encode())
    return f"postgresql://farm@/{name}?host={cluster}"


def drop_database(address: str) -> None:
    """Remove a database and its sessions: its nine megabytes would be written to the disk."""
    import psycopg

    name, server = _server_of(address)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


def allow_connections(address: str, *, allowed: bool) -> None:
    """Allow or refuse connections to a database, and end its sessions on refusal."""
    import psycopg

    name, server = _server_of(address)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}".encode())
        if not allowed:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])


def _server_of(address: str) -> tuple[str, str]:
    """Return the name of a database, and the arguments of a connection to its server."""
    found = re.fullmatch(r"postgresql://farm@/(\w+)\?host=([^\s&]+)(?:&port=(\d+))?", address)
    name, cluster, port = found.groups("5432")  # type: ignore[union-attr]
    return name, f"host={cluster} port={port} user=farm dbname=postgres"


def create_store(cluster: str, name: str) -> str:
    """Make a database with an empty store in the cluster whose socket is in a folder, and return its address.

    The database's name begins with `name`: in random order a fixture of a module may be set up twice.
    """
    _make_template(cluster)
    return create_database(cluster, f"{name}_{time.time_ns()}", _DATABASE)


def empty_store(address: str) -> None:
    """Delete all rows of a store on PostgreSQL, and number from 1 again; much quicker than a new database."""
    import psycopg

    # A replica checks neither triggers nor foreign keys, so that the order of tables does not matter.
    statement = """
        SET session_replication_role = replica;
        DO $$ DECLARE one text; BEGIN
            FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
                AND tablename NOT IN ('farm_schema', 'farm_messages') LOOP
                EXECUTE 'DELETE FROM ' || one;
            END LOOP;
            PERFORM setval(oid, 1, false) FROM pg_class WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace;
        END $$
    """
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(statement.encode())


@cache
def _make_template(cluster: str) -> None:
    open_store(create_database(cluster, _DATABASE)).close()


# Processes that use a store: forks of a process that has imported farm, as imports take half a second each time.


class Fork(NamedTuple):
    """Process that has ended."""

    code: int
    output: str


_BEGIN = "import sys; from farm.store.store import open_store; argv = sys.argv[1:]; sys.stdin.read()\n"


def run_forks(code: str, calls: Sequence[Sequence[object]], *, one_by_one: bool = False) -> list[Fork]:
    """Execute `code` in a fork for each call, whose words are `argv` there; all at once, or one after the other."""
    words = [[sys.executable, "-c", f"{_BEGIN}{code}", *map(str, one)] for one in calls]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    if one_by_one:
        ended = [call(one, env=env) for one in words]
        return [Fork(one.returncode, f"{one.stdout}{one.stderr}") for one in ended]
    wait, begin = os.pipe()
    streams = {"stdin": wait, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [fork(one, env=env, text=True, **streams) for one in words]
    # All of them read this pipe to its end.
    os.close(begin)
    os.close(wait)
    outputs = [one.communicate()[0] for one in processes]
    return [Fork(one.wait(), output) for one, output in zip(processes, outputs, strict=True)]


_KILLED = """
import os, signal
from sqlalchemy import Engine, event
address, last, how, *more = argv
done = 0

def count():
    global done
    done += 1
    if done == int(last):
        os.kill(os.getpid(), signal.SIGKILL)

def execute(connection, cursor, statement, *_):
    if how == "every" or statement.split()[0] in ("CREATE", "ALTER", "DROP", "UPDATE", "INSERT", "DELETE"):
        count()

def commit(connection):
    if how == "every":
        count()
    elif done:
        os.write(1, str(done).encode())
        os.kill(os.getpid(), signal.SIGKILL)

def connect(connection, record):
    # Also what begins and ends a transaction, and what sets up the connection.
    connection.set_trace_callback(lambda statement: count())

store = open_store(address) if more else None
if how == "every" and "://" not in address:
    event.listen(Engine, "connect", connect)
else:
    event.listen(Engine, "before_cursor_execute", execute)
    event.listen(Engine, "commit", commit)
"""


def kill_before_changes(address: str, action: str, *more: str, step: int = 1) -> int:
    """Kill processes that execute `action`, each before another change or before the commit; return their number.

    With `more`, the words of the action, `store` is open before.
    """
    [commit] = run_forks(_KILLED + action, [[address, -1, "", *more]])
    assert commit.code == -signal.SIGKILL, commit.output
    calls = [[address, number, "", *more] for number in range(1, int(commit.output) + 1, step)]
    killed = run_forks(_KILLED + action, calls, one_by_one=True)
    assert {one.code for one in killed} == {-signal.SIGKILL}, killed
    return len(killed)


def kill_before_statements(address: str, action: str, first: str, step: int) -> int:
    """Kill processes that execute `action`, each before another statement, until it is done; return their number.

    Statements are counted at `first`, where the action comes to its end.
    """
    [whole] = run_forks(f"{_KILLED}{action}\nprint(done)", [[first, 0, "every"]])
    assert whole.code == 0, whole.output
    calls = [[address, number, "every"] for number in range(step, int(whole.output) + 1, step)]
    ended = run_forks(_KILLED + action, calls, one_by_one=True)
    assert {one.code for one in ended} <= {0, -signal.SIGKILL}, ended
    return sum(one.code != 0 for one in ended)


# Statements that a store executes, and SQLite's plans for its queries.


@contextmanager
def statements(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Yield the list of statements, with their parameters, that a store executes in the block."""
    asked: list[tuple[str, Any]] = []

    def listen(*call: Any) -> None:
        asked.append((call[2], call[3]))

    event.listen(store._database._engine, "before_cursor_execute", listen)
    yield asked
    event.remove(store._database._engine, "before_cursor_execute", listen)


def plans(store: Store, asked: list[tuple[str, Any]]) -> list[list[str]]:
    """Return the steps of SQLite's plans for the queries among statements."""
    queries = [one for one in asked if one[0].lstrip().startswith("SELECT")]
    with store._database.reading() as connection:
        return [
            [str(row.detail) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", parameters)]
            for query, parameters in queries
        ]
