"""Detection of a store that is deleted, replaced or damaged during a record."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pytest
from store_template import create_store, drop_database, place_store
from waiting import Started

from farm.base.errors import StoreError, StoreLostError
from farm.store.store import Store, open_store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

# Damage to the file, with the expected message.
LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, "was deleted or moved away while it was in use"),
    "deleted with its log": (lambda path: [p.unlink() for p in path.parent.glob("farm.db*")], "was deleted"),
    "its folder deleted": (lambda path: shutil.rmtree(path.parent), "was deleted or moved away while it was in use"),
    "moved away": (lambda path: path.rename(path.with_name("old.db")), "was deleted or moved away while it was in use"),
    "replaced": (lambda path: _replace(path), "was replaced while it was in use"),
    "emptied": (lambda path: os.truncate(path, 0), "was overwritten or cut off"),
    "cut off": (lambda path: os.truncate(path, 50_000), "was overwritten or cut off"),
    "overwritten": (lambda path: path.write_bytes(os.urandom(path.stat().st_size)), "was overwritten or cut off"),
    "without its log": (lambda path: Path(f"{path}-wal").unlink(), "write-ahead log (-wal) was deleted or replaced"),
}

# Checkpoints a store like commands of other processes do, also when the file shrinks.
_BUSY = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
print(flush=True)
for number in range(1000):
    try:
        connection.execute(("PRAGMA wal_checkpoint(PASSIVE)", "PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM")[number % 3])
    except sqlite3.OperationalError:
        pass
"""


def _replace(path: Path) -> None:
    place_store(path.with_name("other.db"))
    path.with_name("other.db").rename(path)


class Recorder:
    """A run that records one attempt after the other."""

    def __init__(self, store: Store, make: type[Make]) -> None:
        self.store, self._make = store, make
        self._jobs: list[Job] = [make.job(f"case_{number}") for number in range(20)]
        self.run_id = make.begin(store, *self._jobs)
        self._number = 0

    def record(self) -> None:
        job = self._jobs[self._number % len(self._jobs)]
        self._number += 1
        # A second attempt with the same start would count as recorded already.
        attempt = self._make.attempt(job, log="x" * 5_000, started_ms=1_790_000_000_000 + self._number)
        self.store.record_attempt(self.run_id, attempt)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "farm.db"


@pytest.fixture
def recorder(path: Path, make: type[Make]) -> Iterator[Recorder]:
    place_store(path)
    with open_store(path) as store:
        recorder = Recorder(store, make)
        for _ in range(5):
            recorder.record()
        yield recorder


def _run(code: str, path: Path) -> None:
    # Another process, as closing a file here would drop the store's locks on it.
    subprocess.run([sys.executable, "-ISc", code, str(path)], check=True)


def _checkpoint(path: Path) -> None:
    _run("import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint(TRUNCATE)')", path)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_is_noticed_by_the_next_attempt(path: Path, recorder: Recorder, how: str, checkpointed: bool) -> None:
    if checkpointed:
        _checkpoint(path)
        recorder.record()
    act, output = LOSSES[how]
    act(path)
    before = path.exists()
    for _ in range(2):
        with pytest.raises(StoreLostError) as caught:
            recorder.record()
        assert str(caught.value).startswith(f"{path}: ")
        assert any(words in str(caught.value) for words in (output, "is not a database", "damaged"))
        assert "\n" not in str(caught.value)
    # A missing store is not created again by the process that lost it.
    assert path.exists() == before


def test_every_way_to_use_a_lost_store_says_so_and_makes_no_file(path: Path, recorder: Recorder) -> None:
    with open_store(path, readonly=True) as reader:
        assert reader.runs.latest_id() == recorder.run_id
        away = path.with_name("away.db")
        with pytest.raises(StoreLostError, match="was deleted"):
            recorder.store._database.write(lambda _: path.rename(away))
        with pytest.raises(StoreLostError, match="was deleted"):
            recorder.store.runs.view(recorder.run_id)
        caught: list[StoreError] = []

        def record() -> None:
            try:
                recorder.record()
            except StoreError as error:
                caught.append(error)

        threads = [threading.Thread(target=record) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(error) for error in caught] == [StoreLostError] * 8
        assert not path.exists()
        # A file that is put back goes on, and another one is noticed.
        away.rename(path)
        recorder.record()
        assert reader.runs.latest_id() == recorder.run_id
        _replace(path)
        with pytest.raises(StoreLostError, match="was replaced"):
            reader.runs.latest_id()


def test_what_others_do_to_a_store_is_no_loss(path: Path, recorder: Recorder) -> None:
    with Started([sys.executable, "-ISc", _BUSY, str(path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            for _ in range(150):
                recorder.record()
        finally:
            other.kill()
    os.utime(path)
    path.chmod(0o600)
    shutil.copy(path, path.with_name("backup.db"))
    recorder.record()
    with open_store(path, readonly=True) as reader:
        assert sum(len(job.attempts) for job in reader.runs.view(recorder.run_id).jobs) == 156


def test_a_checkpoint_that_was_killed_is_no_loss(path: Path, recorder: Recorder) -> None:
    """The checkpoint has written the first page, with the new size of the file, and the log has all pages."""
    code = """
import os, sys
number = os.open(sys.argv[1], os.O_RDWR)
pages = int.from_bytes(os.pread(number, 4, 28), "big")
os.pwrite(number, (pages + 50).to_bytes(4, "big"), 28)
"""
    _run(code, path)
    for _ in range(3):
        recorder.record()


@pytest.mark.parametrize(
    ("how", "output"),
    [
        ("dropped", "there is no such database"),
        ("dropped and made anew", "its tables are gone"),
        ("its run deleted", "has no job"),
        ("away", ""),
    ],
)
def test_a_database_that_is_dropped_is_lost_and_one_that_is_away_is_not(
    postgresql_cluster: str, make: type[Make], how: str, output: str
) -> None:
    address = create_store(postgresql_cluster, "lost")
    name = urlsplit(address).path[1:]
    with (
        psycopg.connect(f"host={postgresql_cluster} user=farm dbname=postgres", autocommit=True) as server,
        open_store(address) as store,
    ):
        recorder = Recorder(store, make)
        recorder.record()
        if how.startswith("dropped"):
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        if how == "dropped and made anew":
            server.execute(f"CREATE DATABASE {name}".encode())
        if how == "its run deleted":
            with psycopg.connect(address, autocommit=True) as inside:
                inside.execute(b"TRUNCATE run CASCADE")
        if how == "away":
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
            server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        with pytest.raises(StoreError, match=output or None) as caught:
            recorder.record()
        assert isinstance(caught.value, StoreLostError) == (how != "away")
        assert "\n" not in str(caught.value)
        if how == "away":
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
            recorder.record()
    drop_database(address)


def test_two_stores_of_one_process_do_not_unlock_each_other(path: Path, recorder: Recorder) -> None:
    """Closing a descriptor of a file drops the locks of the process on it: nothing here may do so."""
    _checkpoint(path)
    recorder.record()
    _checkpoint(path)
    with open_store(path) as other:
        other.runs.latest_id()
    recorder.record()
    # SQLite removes the log when the last connection closes: this process still has the file open, so the log stays.
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM run').fetchall(); c.close()"
    _run(code, path)
    assert Path(f"{path}-wal").exists()
    recorder.record()
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*) FROM attempt").fetchone() == (8,)
