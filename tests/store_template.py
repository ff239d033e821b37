"""New stores as copies of a template that each process makes once: a copy is quicker than making all tables.

Tests of revisions, of a store's first moments and of its file's permissions make their stores without a copy.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
import time
from functools import cache
from pathlib import Path

from farm.store.store import open_store

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

    found = re.fullmatch(r"postgresql://farm@/(\w+)\?host=([^\s&]+)(?:&port=(\d+))?", address)
    name, cluster, port = found.groups("5432")  # type: ignore[union-attr]
    with psycopg.connect(f"host={cluster} port={port} user=farm dbname=postgres", autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


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
