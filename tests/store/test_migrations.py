"""Migration of a store of farm 0.2.0: all content stays, and an interruption leaves the old store."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from old_store import INF, INTEGERS, JOBS, RUNS, SAMPLES, connected, make_old_store, old_rows, revision, snapshot
from sqlalchemy import Engine, event, text

from farm.base.errors import StoreError
from farm.store.schema import REVISION
from farm.store.store import open_store
from farm.store.view import RunToolchain, SkipReason

if TYPE_CHECKING:
    from conftest import Make

_ROOT = str(Path(__file__).parents[2])


def test_every_number_and_text_of_an_old_store_stays(empty_address: str) -> None:
    old = make_old_store(empty_address)
    assert {name: len(rows) - 1 for name, rows in old.items()} == {name: len(r) for name, r in old_rows().items()}

    open_store(empty_address).close()

    assert revision(empty_address) == REVISION
    new = snapshot(empty_address, like=old)
    for table, rows in old.items():
        assert new[table] == rows, table


def test_what_an_old_store_holds_is_read_as_of_today(empty_address: str) -> None:
    make_old_store(empty_address)
    rows = old_rows()
    with open_store(empty_address) as store:
        assert [store.runs.resolve(f"latest~{n}", own=False) for n in range(3)] == list(reversed(RUNS))
        view = store.runs.view(RUNS[2])
        assert (view.finished_ms, view.exit_code, view.priority, view.user) == (None, None, "person", "ada ü")
        assert len(view.jobs) == JOBS
        of_run = {row["id"]: row for row in rows["run_job"] if row["run_id"] == RUNS[2]}
        attempts = {row["id"]: row for row in rows["attempt"] if row["run_job_id"] in of_run}
        shown = [attempt for job in view.jobs for attempt in job.attempts]
        assert [(a.verdict, a.reason, a.log, a.seconds, a.cause) for a in shown] == [
            (row["verdict"], row["reason"], row["log"], row["seconds"], "") for row in attempts.values()
        ]
        counters = {row["attempt_id"]: row for row in rows["counter"]}
        comparisons = {row["attempt_id"]: row for row in rows["comparison"]}
        for attempt, number in zip(shown, attempts, strict=True):
            latency, size, sqnr = attempt.measurements
            for measured in (latency, sqnr):
                assert struct.pack("<6d", *measured.samples) == struct.pack("<6d", *SAMPLES)
            assert list(size.samples) == [counters[number]["value"], counters[number]["max"]]
            [comparison] = attempt.comparisons
            nan = number % 5 == 0
            assert comparison.sqnr_db == comparisons[number]["sqnr_db"]
            assert math.isnan(comparison.cosine or 0) if nan else comparison.cosine == comparisons[number]["cosine"]
            assert comparison.steps is None
        points = store.history.points("quantized_ops/case_2", "latency", limit=100)
        medians = [row["p50"] for row in rows["measurement"] if row["series_id"] == 6]
        assert sorted(repr(point.value) for point in points) == sorted(map(repr, medians))
        exact = [point.value for point in store.history.points("quantized_ops/*", "pte_size", limit=100)]
        assert {2**63 - 1, -(2**63), 2**53 + 1} <= set(exact) <= set(INTEGERS)
        assert INF in [point.value for point in store.history.points("quantized_ops/*", "sqnr", limit=100)]


def test_an_old_store_goes_on(empty_address: str, make: type[Make]) -> None:
    make_old_store(empty_address)
    job = make.job("case_2")
    with open_store(empty_address) as store:
        run_id = make.begin(store, job)
        store.record_attempt(run_id, make.attempt(job))
        assert store.status.of_run(run_id).jobs[0].job_id == job.id
        assert len({point.run_id for point in store.history.points("quantized_ops/case_2", "latency")}) == len(RUNS) + 1


def test_branches_nightly_runs_and_skipped_jobs_stay_under_their_new_names(empty_address: str) -> None:
    make_old_store(empty_address)
    source = {"branch": "fix-pad", "subject": "Fix pad"}
    with connected(empty_address) as old:
        old.execute(
            text("UPDATE run SET run_line = 'main', run_night = :night, run_source = :source WHERE id = :run"),
            {"night": RUNS[0], "source": json.dumps(source), "run": RUNS[1]},
        )
        skipped = {"reason": "no time", "last_ms": 5, "last_outcome": "passed", "last_run_id": RUNS[0]}
        old.execute(text("UPDATE run_job SET stale = :why WHERE job_id = 1"), {"why": json.dumps(skipped)})
        old.execute(text("INSERT INTO night_start VALUES ('ci', 5, 'ended', 'bench', 't', 6, 7, 0, '')"))
    with open_store(empty_address) as store:
        view = store.runs.view(RUNS[1])
        assert view.toolchain == RunToolchain(branch="main", git_branch="fix-pad", subject="Fix pad")
        [job] = [job for job in view.jobs if job.skipped]
        assert job.skipped == SkipReason(**skipped)
    with connected(empty_address) as new:
        assert new.execute(text("SELECT run_nightly FROM run WHERE id = :run"), {"run": RUNS[1]}).scalar() == RUNS[0]
        assert new.execute(text("SELECT name, due_ms, exit_code FROM nightly_start")).all() == [("ci", 5, 0)]


# Kills itself before its nth statement that changes something, or before it commits (0).
_KILLED = """
import os, signal, sys
from sqlalchemy import Engine, event, text
from farm.store.store import open_store

address, last = sys.argv[1], int(sys.argv[2])
done = 0

def before(connection, cursor, statement, *more):
    global done
    done += statement.split()[0] in ("CREATE", "ALTER", "DROP", "UPDATE", "INSERT", "DELETE")
    if last and done == last:
        os.kill(os.getpid(), signal.SIGKILL)

def commit(connection):
    if not last and done:
        os.kill(os.getpid(), signal.SIGKILL)

event.listen(Engine, "before_cursor_execute", before)
event.listen(Engine, "commit", commit)
open_store(address).close()
"""


def _opened_and_killed(address: str, last: int) -> int:
    argv = [sys.executable, "-c", _KILLED, address, str(last)]
    return subprocess.run(argv, cwd=_ROOT, stderr=subprocess.DEVNULL, check=False).returncode


def test_a_migration_that_is_killed_leaves_the_old_store_and_is_made_up_for(empty_address: str) -> None:
    old = make_old_store(empty_address)
    whole = snapshot(empty_address)
    killed = 0
    for last in itertools.count():
        code = _opened_and_killed(empty_address, last)
        if code != -signal.SIGKILL:
            break
        killed += 1
        assert revision(empty_address) == "0015", last
        assert snapshot(empty_address) == whole, last
    assert (code, killed > 3) == (0, True)
    assert revision(empty_address) == REVISION
    assert snapshot(empty_address, like=old) == old


@pytest.fixture
def room() -> Iterator[list[int]]:
    """The most pages that a database may have; 0 is no limit."""
    limit = [0]

    def connected(connection: object, record: object) -> None:
        del record
        if limit[0]:
            connection.execute(f"PRAGMA max_page_count={limit[0]}")  # type: ignore[attr-defined]

    event.listen(Engine, "connect", connected)
    yield limit
    event.remove(Engine, "connect", connected)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_store_that_cannot_grow_is_left_as_it_was(tmp_path: Path, room: list[int], more: int) -> None:
    address = str(tmp_path / "farm.db")
    old = make_old_store(address)
    whole = snapshot(address)
    room[0] = Path(address).stat().st_size // 4096 + more
    with pytest.raises(StoreError, match="the disk is full: make room and run again"):
        open_store(address)
    room[0] = 0
    assert (revision(address), snapshot(address) == whole) == ("0015", True)
    open_store(address).close()
    assert (revision(address), snapshot(address, like=old) == old) == (REVISION, True)


_FULL = """
import os, sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests"]
from pathlib import Path
from old_store import make_old_store, revision, snapshot
from farm.base.errors import StoreError
from farm.results.measurements import counted
from farm.store.store import open_store

address, filler = sys.argv[1], Path(sys.argv[1]).with_name("filler")
old, whole = make_old_store(address), snapshot(address)
left = os.statvfs(filler.parent)
filler.write_bytes(bytes(left.f_bavail * left.f_bsize - int(sys.argv[3])))
try:
    open_store(address)
except StoreError as error:
    print(error)
filler.unlink()
print(revision(address), snapshot(address) == whole)
open_store(address).close()
print(revision(address), snapshot(address, like=old) == old)
"""


@pytest.mark.parametrize("left", [0, 16_384, 32_768])
def test_a_full_disk_leaves_the_old_store(tmp_path: Path, left: int) -> None:
    # A file system of its own, in a mount namespace that ends with the process.
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace to make a small disk in")
    script = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -c "$3" "$1/farm.db" "$4" "$5"'
    argv = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, _FULL, _ROOT, str(left)]
    done = subprocess.run([unshare, "-rm", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    output, intact, finished = done.stdout.splitlines()
    assert "the disk" in output
    assert "full" in output
    assert (intact, finished) == ("0015 True", f"{REVISION} True")


_OPENS = """
import sys
from farm.store.records import RunRecord
from farm.store.store import open_store
print("ready", flush=True)
sys.stdin.read()
store = open_store(sys.argv[1])
store.begin_run(RunRecord("farm run", "bob", "bench", {}, 1_790_000_000_000))
print(len(store.history.points("quantized_ops/*", "latency", limit=100)))
"""


def test_processes_that_open_an_old_store_at_once_all_work(empty_address: str) -> None:
    old = make_old_store(empty_address)
    argv = [sys.executable, "-c", _OPENS, empty_address]
    processes = [
        subprocess.Popen(argv, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.close()
        process.stdin = None
    output = [process.communicate()[0] for process in processes]
    assert output == [f"{len(old_rows()['attempt'])}\n"] * 3
    assert revision(empty_address) == REVISION
    with open_store(empty_address, readonly=True) as store:
        assert sum(store.runs.view(store.runs.resolve(f"latest~{n}", own=False)).user == "bob" for n in range(6)) == 3
    del old["run"]
    del old["fingerprint"]
    assert snapshot(empty_address, like=old) == old
