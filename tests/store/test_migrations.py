"""Migration of a store of farm 0.2.0: all content stays, and an interruption leaves the old store."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from old_store import INF, INTEGERS, JOBS, RUNS, SAMPLES, connected, make_old_store, old_rows, revision, snapshot
from sqlalchemy import Engine, event, text
from stores import Fork, kill_before_changes, run_forks

from farm.base.errors import StoreError
from farm.store.records import RunToolchain, SkipReason
from farm.store.schema import REVISION
from farm.store.store import open_store

from . import make


def test_every_number_and_text_of_an_old_store_stays_and_the_store_goes_on(
    empty_address: str,
) -> None:
    old, rows = make_old_store(empty_address), old_rows()
    assert {name: len(found) - 1 for name, found in old.items()} == {name: len(found) for name, found in rows.items()}
    with open_store(empty_address) as store:
        assert revision(empty_address) == REVISION
        new = snapshot(empty_address, like=old)
        for table, found in old.items():
            assert new[table] == found, table

        assert [store.runs.resolve(f"latest~{n}", own=False) for n in range(3)] == list(reversed(RUNS))
        view = store.runs.view(RUNS[2])
        assert (view.finished_ms, view.exit_code, view.priority, view.user) == (None, None, "person", "ada ü")
        assert len(view.jobs) == JOBS
        of_run = {row["id"] for row in rows["run_job"] if row["run_id"] == RUNS[2]}
        attempts = [row for row in rows["attempt"] if row["run_job_id"] in of_run]
        shown = [attempt for job in view.jobs for attempt in job.attempts]
        assert [(a.verdict, a.reason, a.log, a.seconds, a.cause) for a in shown] == [
            (row["verdict"], row["reason"], row["log"], row["seconds"], "") for row in attempts
        ]
        for attempt, row in zip(shown, attempts, strict=True):
            latency, _, sqnr = attempt.measurements
            for measured in (latency, sqnr):
                assert struct.pack("<6d", *measured.samples) == struct.pack("<6d", *SAMPLES)
            [comparison] = attempt.comparisons
            assert math.isnan(comparison.cosine or 0) == (row["id"] % 5 == 0)
            assert comparison.steps is None
        exact = [point.value for point in store.history.points("quantized_ops/*", "pte_size", limit=100)]
        assert {2**63 - 1, -(2**63), 2**53 + 1} <= set(exact) <= set(INTEGERS)
        assert INF in [point.value for point in store.history.points("quantized_ops/*", "sqnr", limit=100)]

        job = make.job("case_2")
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


def test_a_migration_that_is_killed_leaves_the_old_store_and_is_made_up_for(empty_address: str) -> None:
    old = make_old_store(empty_address)
    whole = snapshot(empty_address)
    assert kill_before_changes(empty_address, "open_store(address).close()", step=5) > 3
    assert (revision(empty_address), snapshot(empty_address) == whole) == ("0015", True)
    open_store(empty_address).close()
    assert (revision(empty_address), snapshot(empty_address, like=old) == old) == (REVISION, True)


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


@pytest.mark.parametrize("more", [0, 2])
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


_OPENS = """
from farm.store.records import RunRecord
store = open_store(argv[0])
store.begin_run(RunRecord("farm run", "bob", "bench", {}, 1_790_000_000_000))
print(len(store.history.points("quantized_ops/*", "latency", limit=100)))
"""


def test_processes_that_open_an_old_store_at_once_all_work(empty_address: str) -> None:
    old = make_old_store(empty_address)
    assert run_forks(_OPENS, [[empty_address]] * 3) == [Fork(0, f"{len(old_rows()['attempt'])}\n")] * 3
    assert revision(empty_address) == REVISION
    with open_store(empty_address, readonly=True) as store:
        assert sum(store.runs.view(store.runs.resolve(f"latest~{n}", own=False)).user == "bob" for n in range(6)) == 3
    del old["run"]
    del old["fingerprint"]
    assert snapshot(empty_address, like=old) == old
