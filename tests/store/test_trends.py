"""History that a report shows beside a run, on both databases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from farm.results.attempt import Direction, Measurement, Verdict
from farm.store.records import ArtifactRecord, JobFile, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

HOUR = 3_600_000
GROWING = re.compile(r"^SCAN (attempt|measurement|counter|run_job|comparison|artifact)", re.MULTILINE)


def run(store: Store, make: Make, hours_ago: int, *found: tuple[Job, Verdict, float], **facts: str) -> str:
    """Record a run of jobs with their verdict and latency."""
    started_ms = now_ms() - hours_ago * HOUR
    record = RunRecord("farm run", "ada", "bench", {"device_kind": "virtual", **facts}, started_ms)
    run_id = store.begin_run(record)
    store.plan_jobs(run_id, [job for job, _, _ in found])
    store.record_device(run_id, make.device(kind=facts.get("device_kind", "virtual")))
    for place, (job, verdict, latency) in enumerate(found):
        measured = (
            make.latency(latency - 1, latency, latency + 1),
            Measurement("htp_cycles", "cycles", Direction.LOWER, (latency * 10,), exact=True),
            Measurement("pte_size", "bytes", Direction.LOWER, (7.0,), exact=True),
        )
        attempt = make.attempt(job, verdict=verdict, started_ms=started_ms + place, measurements=measured)
        store.record_attempt(run_id, attempt)
    store.finish_run(run_id, 0)
    return run_id


def latencies(store: Store, run_id: str, job: Job, runs: int = 30) -> list[float | None]:
    series = {one.metric: one for one in store.history.background(run_id, runs).trends.get(job.id, ())}
    return [point.value for point in series["latency"].points] if "latency" in series else []


def test_medians_are_of_the_newest_runs_up_to_this_one_oldest_first(store: Store, make: Make) -> None:
    a, b = make.job("a"), make.job("b")
    ids = [run(store, make, 9 - n, (a, Verdict.PASSED, 10.0 + n), (b, Verdict.FAILED, 20.0 + n)) for n in range(4)]
    assert latencies(store, ids[2], a) == [10, 11, 12]
    assert latencies(store, ids[3], a, runs=2) == [12, 13]
    assert latencies(store, ids[3], b, runs=2) == [22, 23]
    found = store.history.background(ids[3])
    (cycles, latency) = found.trends[a.id]
    assert (cycles.metric, cycles.unit, cycles.direction) == ("htp_cycles", "cycles", "lower")
    assert [point.value for point in cycles.points] == [100, 110, 120, 130]
    assert [point.run_id for point in latency.points] == ids
    assert found.facts[latency.points[0].fingerprint]["device_kind"] == "virtual"


def test_a_job_that_was_left_out_of_some_runs_goes_further_back(store: Store, make: Make) -> None:
    a, b = make.job("a"), make.job("b")
    run(store, make, 9, (a, Verdict.PASSED, 1), (b, Verdict.PASSED, 1))
    run(store, make, 8, (a, Verdict.PASSED, 2))
    last = run(store, make, 7, (a, Verdict.PASSED, 3), (b, Verdict.PASSED, 3))
    assert latencies(store, last, a, runs=2) == [2, 3]
    assert latencies(store, last, b, runs=2) == [1, 3]


def test_other_kinds_of_device_the_debugger_and_trouble_are_no_part_of_it(store: Store, make: Make) -> None:
    a = make.job("a")
    run(store, make, 9, (a, Verdict.PASSED, 1), device_kind="hardware")
    run(store, make, 8, (a, Verdict.PASSED, 2), debug="layers")
    run(store, make, 7, (a, Verdict.INFRA, 3))
    assert latencies(store, run(store, make, 6, (a, Verdict.PASSED, 4)), a) == [4]


def test_of_two_attempts_in_a_run_the_last_counts(store: Store, make: Make) -> None:
    a = make.job("a")
    run_id = run(store, make, 5, (a, Verdict.FAILED, 1))
    again = make.attempt(a, started_ms=now_ms(), measurements=(make.latency(5, 6, 7),))
    store.record_attempt(run_id, again)
    assert latencies(store, run_id, a) == [6]


def test_files_are_told_by_job_and_a_run_that_is_not_there_has_nothing(store: Store, make: Make) -> None:
    a, b = make.job("a"), make.job("b")
    run_id = run(store, make, 5, (a, Verdict.PASSED, 1), (b, Verdict.PASSED, 1))
    kept = ArtifactRecord("ab" * 32, 12, "etdump")
    store.record_attempt(run_id, make.attempt(b, started_ms=7), artifacts=(kept,))
    assert store.history.background(run_id).artifacts == {b.id: (JobFile("ab" * 32, 12, "etdump", attempt=2),)}
    nothing = store.history.background("20200101-000000-000000")
    assert (nothing.trends, nothing.facts, nothing.artifacts) == ({}, {}, {})


def test_no_step_goes_over_a_whole_table(sqlite_store: Store, make: Make) -> None:
    a = make.job("a")
    for hours in range(3):
        run_id = run(sqlite_store, make, 5 - hours, (a, Verdict.PASSED, 1))
    statements: list[tuple[str, Any]] = []
    with sqlite_store._database.reading() as connection:
        event.listen(connection.engine, "before_cursor_execute", lambda *call: statements.append((call[2], call[3])))
    assert sqlite_store.history.background(run_id).trends
    with sqlite_store._database.reading() as connection:
        plans = [
            "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters))
            for sql, parameters in list(statements)
            if sql.lstrip().startswith("SELECT")
        ]
    assert len(plans) > 3
    assert not [plan for plan in plans if GROWING.search(plan)]
