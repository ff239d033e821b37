"""A process is killed at every step of making a store: nothing is left that the next one has to repair."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from old_store import revision
from stores import drop_database, kill_before_statements

from farm.base.errors import FIRST_RUN, StoreError
from farm.store.schema import REVISION
from farm.store.store import open_store

NO_STORE = f"there is no store yet: '{FIRST_RUN}' makes one"
# A process that reads the remains of the one before, and then makes the store.
_BORN = f"""
wanted, last = last, 0
try:
    open_store(address, readonly=True).close()
except Exception as error:
    assert {NO_STORE!r} in str(error) or "a process was killed while it made the store" in str(error), error
done, last = 0, wanted
open_store(address).close()
"""


@pytest.mark.parametrize("step", [9, pytest.param(2, marks=pytest.mark.whole)])
def test_a_store_whose_making_is_killed_is_none_or_whole_and_is_completed(empty_address: str, step: int) -> None:
    address, first = empty_address, f"{empty_address}.first"
    if "://" in address:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE first_{step}".encode())
        first = re.sub(r"@/\w+", f"@/first_{step}", address)
    with pytest.raises(StoreError, match=NO_STORE):
        open_store(address, readonly=True)
    assert kill_before_statements(address, _BORN, first, step) > 3
    with open_store(address) as store:
        assert store.runs.latest_id() is None
    assert revision(address) == REVISION
    if "://" in address:
        drop_database(first)


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
    with pytest.raises(StoreError, match=NO_STORE):
        open_store(tmp_path / "farm.db", readonly=True)
    open_store(tmp_path / "farm.db").close()
    open_store(tmp_path / "farm.db", readonly=True).close()
