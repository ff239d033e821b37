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

import pytest
from store_template import place_store
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
        self._store, self._make = store, make
        self._jobs: list[Job] = [make.job(f"case_{number}") for number in range(20)]
        self.run_id = make.begin(store, *self._jobs)
        self._number = 0

    def record(self) -> None:
        job = self._jobs[self._number % len(self._jobs)]
        self._number += 1
        # A second attempt with the same start would count as recorded already.
        attempt = self._make.attempt(job, log="x" * 5_000, started_ms=1_790_000_000_000 + self._number)
        self._store.record_attempt(self.run_id, attempt)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder / "farm.db"


@pytest.fixture
def recorder(path: Path, make: type[Make]) -> Iterator[Recorder]:
    place_store(path)
    with open_store(path) as store:
        recorder = Recorder(store, make)
        for _ in range(5):
            recorder.record()
        yield recorder


def _checkpoint(path: Path) -> None:
    # The checkpoint runs in another process, as closing a file here would drop the store's locks on it.
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint(TRUNCATE)')"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


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
        assert output in str(caught.value) or "is not a database" in str(caught.value) or "damaged" in str(caught.value)
        assert "\n" not in str(caught.value)
    # A missing store is not created again by the process that lost it.
    assert path.exists() == before


def test_a_loss_within_a_transaction_is_noticed_as_well(path: Path, recorder: Recorder) -> None:
    def act(connection: object) -> None:
        del connection
        path.unlink()

    with pytest.raises(StoreLostError, match="was deleted"):
        recorder._store._database.write(act)


def test_reading_a_lost_store_says_so_and_makes_no_file(path: Path, recorder: Recorder) -> None:
    path.unlink()
    with pytest.raises(StoreLostError, match="was deleted"):
        recorder._store.runs.view(recorder.run_id)
    assert not path.exists()


def test_a_reader_notices_that_its_store_is_another(path: Path, recorder: Recorder) -> None:
    with open_store(path, readonly=True) as reader:
        assert reader.runs.latest_id() == recorder.run_id
        _replace(path)
        with pytest.raises(StoreLostError, match="was replaced"):
            reader.runs.latest_id()


def test_what_is_put_back_goes_on(path: Path, recorder: Recorder) -> None:
    away = path.with_name("away.db")
    path.rename(away)
    with pytest.raises(StoreLostError):
        recorder.record()
    away.rename(path)
    recorder.record()


def test_what_others_do_to_a_store_is_no_loss(path: Path, recorder: Recorder) -> None:
    with Started([sys.executable, "-c", _BUSY, str(path)], stdout=subprocess.PIPE) as other:
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
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    for _ in range(3):
        recorder.record()


def test_several_threads_lose_it_at_the_same_time(path: Path, recorder: Recorder) -> None:
    caught: list[StoreError] = []

    def record() -> None:
        try:
            recorder.record()
        except StoreError as error:
            caught.append(error)

    path.unlink()
    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in caught] == [StoreLostError] * 8


@pytest.mark.parametrize("how", ["dropped", "dropped and made anew", "emptied", "its run deleted"])
def test_a_database_that_is_dropped_is_noticed(postgresql_cluster: str, make: type[Make], how: str) -> None:
    import psycopg

    name = f"lost_{how.replace(' ', '_')}"
    with psycopg.connect(f"host={postgresql_cluster} user=farm dbname=postgres", autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
        address = f"postgresql://farm@/{name}?host={postgresql_cluster}"
        with open_store(address) as store:
            recorder = Recorder(store, make)
            recorder.record()
            if how.startswith("dropped"):
                server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            if how == "dropped and made anew":
                server.execute(f"CREATE DATABASE {name}".encode())
            if how in ("emptied", "its run deleted"):
                with psycopg.connect(f"host={postgresql_cluster} user=farm dbname={name}", autocommit=True) as inside:
                    inside.execute(
                        b"DROP SCHEMA public CASCADE; CREATE SCHEMA public"
                        if how == "emptied"
                        else b"TRUNCATE run CASCADE"
                    )
            output = {
                "dropped": "there is no such database, or none any more",
                "dropped and made anew": "its tables are gone",
                "emptied": "its tables are gone",
                "its run deleted": "has no job",
            }[how]
            with pytest.raises(StoreLostError, match=output) as caught:
                recorder.record()
            assert "\n" not in str(caught.value)


def test_a_database_that_is_away_is_not_lost(postgresql_cluster: str, make: type[Make]) -> None:
    import psycopg

    name = "away_for_a_moment"
    with psycopg.connect(f"host={postgresql_cluster} user=farm dbname=postgres", autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
        with open_store(f"postgresql://farm@/{name}?host={postgresql_cluster}") as store:
            recorder = Recorder(store, make)
            recorder.record()
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
            server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            with pytest.raises(StoreError) as caught:
                recorder.record()
            assert not isinstance(caught.value, StoreLostError)
            server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
            recorder.record()


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
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert Path(f"{path}-wal").exists()
    recorder.record()
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*) FROM attempt").fetchone() == (8,)
