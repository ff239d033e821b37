"""Writers that compete, are killed or interrupted lose nothing; a store that is away, deleted, replaced or damaged."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, text
from stores import Fork, allow_connections, create_store, drop_database, place_store, run_forks
from stub_home import make_stub_home, write_stub_suite
from waiting import Started, until

from farm.base.errors import StoreError, StoreLostError
from farm.devices.transport import SILENCE_SECONDS
from farm.store import database
from farm.store.database import Database
from farm.store.store import Store, open_store
from farm.suites.suite import Job

from . import make

# Several writers at once lose nothing, and neither does a writer that is killed.


# Records attempt after attempt, and prints each one after its record.
_WRITER = """
import itertools
import msgspec
from farm.results.attempt import Attempt
from farm.store.store import open_store

address, run_id, name, count, attempt = argv
template = msgspec.json.decode(attempt, type=Attempt)
store = open_store(address)
for number in range(int(count)) if int(count) else itertools.count():
    store.record_attempt(run_id, msgspec.structs.replace(template, reason=f"{name} {number}"))
    print(f"{name} {number}", flush=True)
"""


def _recorded(store: Store, run_id: str) -> list[str]:
    return [attempt.reason for job in store.runs.view(run_id).jobs for attempt in job.attempts]


def test_writers_at_once_lose_nothing(sqlite_store: Store, tmp_path: Path) -> None:
    jobs = [make.job(f"case_{n}") for n in range(4)]
    run_id = make.begin(sqlite_store, *jobs)
    calls = [
        [tmp_path / "farm.db", run_id, f"w{n}", 100, msgspec.json.encode(make.attempt(job)).decode()]
        for n, job in enumerate(jobs)
    ]
    writers = run_forks(_WRITER, calls)

    assert [writer.code for writer in writers] == [0] * 4
    output = [writer.output.splitlines() for writer in writers]
    assert [len(lines) for lines in output] == [100] * 4
    assert sorted(_recorded(sqlite_store, run_id)) == sorted(itertools.chain(*output))
    numbers = [m for job in sqlite_store.runs.view(run_id).jobs for a in job.attempts for m in a.measurements]
    assert numbers == [make.latency(1.0, 2.0, 3.0)] * 400


def test_a_killed_writer_loses_nothing_that_it_said_was_recorded(sqlite_store: Store, tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    output: list[str] = []
    attempt = msgspec.json.encode(make.attempt(job, log="x" * 5_000)).decode()
    code = f"import sys; argv = sys.argv[1:]\n{_WRITER}"
    for name in ("first", "second"):
        argv = [sys.executable, "-c", code, str(tmp_path / "farm.db"), run_id, name, "0", attempt]
        with subprocess.Popen(argv, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            output += itertools.islice(writer.stdout, 25)
            os.kill(writer.pid, signal.SIGKILL)
            # Lines printed between the last line read and the kill count as well.
            output += [line for line in writer.stdout if line.endswith("\n")]
        recorded = _recorded(sqlite_store, run_id)
        assert set(map(str.strip, output)) <= set(recorded)
        # Each writer may have committed one more attempt than it could print.
        assert len(recorded) <= len(output) + len({line.split()[0] for line in output})
    view = sqlite_store.runs.view(run_id)
    assert (view.finished_ms, view.exit_code) == (None, None)
    assert all(attempt.measurements for attempt in view.jobs[0].attempts)
    connection = sqlite3.connect(tmp_path / "farm.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def test_processes_that_make_the_same_store_at_once_all_get_it(empty_address: str) -> None:
    assert run_forks("print(open_store(argv[0]).runs.latest_id())", [[empty_address]] * 3) == [Fork(0, "None\n")] * 3


def test_threads_may_share_a_store(sqlite_store: Store) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)

    def record(name: str) -> None:
        for number in range(20):
            sqlite_store.record_attempt(run_id, make.attempt(job, reason=f"{name} {number}"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(record, ("t0", "t1", "t2", "t3")))

    assert len(set(_recorded(sqlite_store, run_id))) == 80


def test_a_writer_waits_for_a_reader_and_another_writer(sqlite_store: Store, tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    other = sqlite3.connect(tmp_path / "farm.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    thread = threading.Thread(target=sqlite_store.record_attempt, args=(run_id, make.attempt(job)))
    thread.start()
    assert _recorded(sqlite_store, run_id) == []
    other.execute("COMMIT")
    other.close()
    thread.join()
    assert len(_recorded(sqlite_store, run_id)) == 1


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_a_write_whose_transaction_stood_still_is_made_again(address: str) -> None:
    sessions: list[int] = []
    with (
        open_store(f"{address}&options=-c idle_in_transaction_session_timeout%3D100ms") as store,
        open_store(address) as observer,
    ):

        def is_open(session: int) -> bool:
            with observer._database.reading() as connection:
                found = connection.exec_driver_sql("SELECT pid FROM pg_stat_activity")
                return session in found.scalars()

        def stand_still_once(connection: Connection) -> str:
            sessions.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
            if len(sessions) == 1:
                until(lambda: not is_open(sessions[0]), "the end of the session")
            return str(connection.exec_driver_sql("SELECT 'written'").scalar_one())

        assert store._database.write(stand_still_once) == "written"
    assert len(set(sessions)) == 2


# Ctrl-C at any moment of a write: the transaction is whole, and the next write does not wait for it.


LIBRARIES = ("/farm/store/", "/sqlalchemy/")
STEPS = 7
"""Lines of the store between two moments at which the test sends Ctrl-C."""


class Interrupted:
    """Raises SIGINT before the line of a number, among the lines of SQLAlchemy and the store."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in LIBRARIES):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace

    @property
    def came(self) -> bool:
        """True once the line of that number was reached."""
        return self._left <= 0


def test_a_write_after_ctrl_c_waits_for_no_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`farm debug` records the end of its run in the process whose write was interrupted, as this test does."""
    monkeypatch.setattr(database, "PATIENCE_S", 0.0)
    store = Database(tmp_path / "farm.db")
    store.write(lambda connection: connection.execute(text("CREATE TABLE seen (line INTEGER)")))
    line, heard = 1, 0
    kept: list[BaseException] = []
    gc.disable()
    try:
        while True:
            interrupted = Interrupted(line)
            try:
                with interrupted:
                    store.write(lambda connection: connection.execute(text("SELECT 1")))
            except KeyboardInterrupt as error:
                kept.append(error)  # as long as a traceback lives, so does the connection in it
                heard += 1
            if not interrupted.came:
                break
            store.write(lambda connection: connection.execute(text("INSERT INTO seen VALUES (1)")))
            kept.clear()
            line += STEPS
    finally:
        gc.enable()
        store.close()
    assert heard > 10


# Detection of a store that is deleted, replaced or damaged during a record.


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

    def __init__(self, store: Store) -> None:
        self.store = store
        self._jobs: list[Job] = [make.job(f"case_{number}") for number in range(20)]
        self.run_id = make.begin(store, *self._jobs)
        self._number = 0

    def record(self) -> None:
        job = self._jobs[self._number % len(self._jobs)]
        self._number += 1
        # A second attempt with the same start would count as recorded already.
        attempt = make.attempt(job, log="x" * 5_000, started_ms=1_790_000_000_000 + self._number)
        self.store.record_attempt(self.run_id, attempt)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "farm.db"


@pytest.fixture
def recorder(path: Path) -> Iterator[Recorder]:
    place_store(path)
    with open_store(path) as store:
        recorder = Recorder(store)
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
        with ThreadPoolExecutor(8) as threads:
            recorded = [threads.submit(recorder.record) for _ in range(8)]
        assert [type(one.exception()) for one in recorded] == [StoreLostError] * 8
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
    postgresql_cluster: str, how: str, output: str
) -> None:
    address = create_store(postgresql_cluster, "lost")
    name = urlsplit(address).path[1:]
    with (
        psycopg.connect(f"host={postgresql_cluster} user=farm dbname=postgres", autocommit=True) as server,
        open_store(address) as store,
    ):
        recorder = Recorder(store)
        recorder.record()
        if how.startswith("dropped"):
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        if how == "dropped and made anew":
            server.execute(f"CREATE DATABASE {name}".encode())
        if how == "its run deleted":
            with psycopg.connect(address, autocommit=True) as inside:
                inside.execute(b"TRUNCATE run CASCADE")
        if how == "away":
            allow_connections(address, allowed=False)
        with pytest.raises(StoreError, match=output or None) as caught:
            recorder.record()
        assert isinstance(caught.value, StoreLostError) == (how != "away")
        assert "\n" not in str(caught.value)
        if how == "away":
            allow_connections(address, allowed=True)
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


# A database that is away for a while under a run on devices of its own: nothing is lost, nothing has to be resumed.


RUN = ("run", "--soc", "SM8650", "--suite", "./mine", "--virtual", "2", "--json")


def attempts(address: str) -> int:
    with psycopg.connect(address) as connection:
        try:
            return connection.execute("select count(*) from attempt").fetchone()[0]
        except psycopg.errors.UndefinedTable:
            return 0


@pytest.mark.whole
def test_a_run_outlasts_a_database_that_is_away(tmp_path: Path, new_database: Callable[[str], str]) -> None:
    address = new_database("away")
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {f"case{number}": 600 for number in range(8)})
    with home.running(*RUN, env={"FARM_STORE": address}) as process:
        until(lambda: attempts(address), "a first job")
        allow_connections(address, allowed=False)
        # Longer than a device may be silent, or a program stall.
        time.sleep(SILENCE_SECONDS + 3)
        allow_connections(address, allowed=True)
        out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    view = json.loads(out[out.index("\n{") :])
    assert [[a["verdict"] for a in job["attempts"]] for job in view["jobs"]] == [["passed"]] * 8
