"""Pass rates and flakiness as the store has them, on both databases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from farm.results.analysis.flakiness import LOOKED_AT, Reliability
from farm.results.attempt import Verdict
from farm.store.records import RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

HOUR = 3_600_000
VERDICTS = {"p": Verdict.PASSED, "f": Verdict.FAILED, "i": Verdict.INFRA}


def run(store: Store, make: type[Make], hours_ago: int, *verdicts: tuple[Job, str], **facts: str) -> str:
    """Record a run of jobs, an attempt for each letter: passed, failed, infra."""
    started_ms = now_ms() - hours_ago * HOUR
    kind = facts.pop("kind", "virtual")
    bundle_key = facts.pop("bundle_key", "b" * 64)
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {"device_kind": kind, **facts}, started_ms))
    store.plan_jobs(run_id, [job for job, _ in verdicts])
    store.record_device(run_id, make.device(kind=kind))
    for job, letters in verdicts:
        for number, letter in enumerate(letters):
            attempt = make.attempt(
                job, verdict=VERDICTS[letter], started_ms=started_ms + number, bundle_key=bundle_key,
                known_issue="is wrong" if facts.get("known") and letter == "f" else "",
            )  # fmt: skip
            store.record_attempt(run_id, attempt)
    store.finish_run(run_id, 0)
    return run_id


def test_verdicts_of_the_same_code_that_disagree_are_flaky(store: Store, make: type[Make]) -> None:
    a, b, c = (make.job(name) for name in "abc")
    run(store, make, 9, (a, "p"), (b, "p"), (c, "p"))
    slipped = run(store, make, 8, (a, "f"), (b, "if"), (c, "p"), bundle_key="b" * 64)
    last = run(store, make, 7, (a, "p"), (b, "f"), (c, "ip"))
    found = store.history.reliability([a.id, b.id, c.id], "virtual")
    assert {job: (one.reliability, one.passed, one.tries, one.since) for job, one in found.items()} == {
        a.id: (Reliability.NEWLY_FLAKY, 2, 3, slipped),
        b.id: (Reliability.NEWLY_FLAKY, 1, 3, slipped),
        c.id: (Reliability.STEADY, 3, 3, ""),
    }
    assert set(store.history.reliability([a.id, b.id, c.id], "virtual", last, failed_of_late=True)) == {a.id, b.id}
    assert store.history.reliability([a.id, c.id], "virtual", slipped)[a.id].tries == 2


def test_other_code_kinds_and_the_debugger_are_not_mixed_in(store: Store, make: type[Make]) -> None:
    a = make.job("a")
    run(store, make, 9, (a, "p"))
    run(store, make, 8, (a, "f"), qnn="2.52")
    run(store, make, 7, (a, "f"), bundle_key="c" * 64)
    run(store, make, 6, (a, "f"), kind="hardware")
    run(store, make, 5, (a, "ff"), debug="intermediate outputs")
    found = store.history.reliability([a.id], "virtual")[a.id]
    assert (found.reliability, found.passed, found.tries) == (Reliability.STEADY, 1, 3)
    assert store.history.reliability([a.id], "hardware")[a.id].tries == 1
    assert store.history.reliability([a.id, "no/such[job]"], "unknown") == {}


def test_a_retry_tells_as_well_and_trouble_tells_nothing(store: Store, make: type[Make]) -> None:
    a, b = make.job("a"), make.job("b")
    run_id = run(store, make, 9, (a, "fp"), (b, "iip"), bundle_key="")
    found = store.history.reliability([a.id, b.id], "virtual")
    assert (found[a.id].reliability, found[a.id].since) == (Reliability.NEWLY_FLAKY, run_id)
    assert (found[b.id].reliability, found[b.id].tries) == (Reliability.STEADY, 1)


def test_a_known_issue_is_a_failure(store: Store, make: type[Make]) -> None:
    a = make.job("a")
    run(store, make, 9, (a, "f"), known="yes")
    assert store.history.reliability([a.id], "virtual", failed_of_late=True)[a.id].passed == 0


def test_only_the_last_runs_of_a_job_are_looked_at_along_indices(sqlite_store: Store, make: type[Make]) -> None:
    a, b = make.job("a"), make.job("b")
    store = sqlite_store
    run(store, make, 99, (a, "fp"), (b, "p"))
    for hour in range(LOOKED_AT):
        last = run(store, make, 90 - hour, (a, "p"))
        run(store, make, 90 - hour, (b, "p"), kind="hardware")
    asked: list[tuple[str, Any]] = []

    def listen(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        asked.append((statement, parameters))

    engine = store._database._engine
    event.listen(engine, "before_cursor_execute", listen)
    assert store.history.reliability([a.id, b.id], "virtual", last, failed_of_late=True) == {}
    assert store.history.reliability([a.id], "virtual")[a.id].reliability is Reliability.STEADY
    event.remove(engine, "before_cursor_execute", listen)
    with engine.connect() as connection:
        for statement, parameters in asked:
            if statement.startswith("SELECT"):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
                assert [row.detail for row in plan if re.match("SCAN (attempt|run_job|run)", row.detail)] == []
