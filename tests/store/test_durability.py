"""Several writers at once lose nothing, and neither does a writer that is killed."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from sqlalchemy import Connection
from store_forks import Fork, run_forks
from waiting import until

from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make

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


def test_writers_at_once_lose_nothing(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
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


def test_a_killed_writer_loses_nothing_that_it_said_was_recorded(
    sqlite_store: Store, make: type[Make], tmp_path: Path
) -> None:
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


def test_threads_may_share_a_store(sqlite_store: Store, make: type[Make]) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)

    def record(name: str) -> None:
        for number in range(20):
            sqlite_store.record_attempt(run_id, make.attempt(job, reason=f"{name} {number}"))

    threads = [threading.Thread(target=record, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(_recorded(sqlite_store, run_id))) == 80


def test_a_writer_waits_for_a_reader_and_another_writer(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
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
