"""History of jobs: pass rates, flakiness and trends, on both databases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from query_plans import plans, statements

from farm.results.analysis.flakiness import LOOKED_AT, Reliability
from farm.results.attempt import Direction, Measurement, Verdict
from farm.store.records import ArtifactRecord, JobFile
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table
VERDICTS = {"p": "passed", "f": "failed", "i": "infra"}


def tried(store: Store, make: type[Make], hours_ago: int, *verdicts: tuple[Job, str], **facts: Any) -> str:
    """Record a run of jobs, an attempt for each letter: passed, failed, infra."""
    more = {"bundle_key": facts.pop("bundle_key", "b" * 64), "known_issue": facts.pop("known_issue", "")}
    results = [(job, VERDICTS[letter], more) for job, letters in verdicts for letter in letters]
    return make.run(store, hours_ago, *results, **facts)


def test_verdicts_of_the_same_code_that_disagree_are_flaky(store: Store, make: type[Make]) -> None:
    a, b, c = (make.job(name) for name in "abc")
    tried(store, make, 9, (a, "p"), (b, "p"), (c, "p"))
    slipped = tried(store, make, 8, (a, "f"), (b, "if"), (c, "p"))
    last = tried(store, make, 7, (a, "p"), (b, "f"), (c, "ip"))
    found = store.history.reliability([a.id, b.id, c.id], "virtual")
    assert {job: (one.reliability, one.passed, one.tries, one.since) for job, one in found.items()} == {
        a.id: (Reliability.NEWLY_FLAKY, 2, 3, slipped),
        b.id: (Reliability.NEWLY_FLAKY, 1, 3, slipped),
        c.id: (Reliability.STEADY, 3, 3, ""),
    }
    assert set(store.history.reliability([a.id, b.id, c.id], "virtual", last, failed_of_late=True)) == {a.id, b.id}
    assert store.history.reliability([a.id, c.id], "virtual", slipped)[a.id].tries == 2


def test_other_code_kinds_and_the_debugger_are_not_mixed_in(sqlite_store: Store, make: type[Make]) -> None:
    store, a = sqlite_store, make.job("a")
    tried(store, make, 9, (a, "p"))
    tried(store, make, 8, (a, "f"), qnn="2.52")
    tried(store, make, 7, (a, "f"), bundle_key="c" * 64)
    tried(store, make, 6, (a, "f"), kind="hardware")
    tried(store, make, 5, (a, "ff"), debug="intermediate outputs")
    found = store.history.reliability([a.id], "virtual")[a.id]
    assert (found.reliability, found.passed, found.tries) == (Reliability.STEADY, 1, 3)
    assert store.history.reliability([a.id], "hardware")[a.id].tries == 1
    assert store.history.reliability([a.id, "no/such[job]"], "unknown") == {}


def test_retries_and_known_issues_count_and_trouble_does_not(sqlite_store: Store, make: type[Make]) -> None:
    store, a, b, c = sqlite_store, *(make.job(name) for name in "abc")
    run_id = tried(store, make, 9, (a, "fp"), (b, "iip"), bundle_key="")
    tried(store, make, 8, (c, "f"), known_issue="is wrong")
    found = store.history.reliability([a.id, b.id, c.id], "virtual")
    assert (found[a.id].reliability, found[a.id].since) == (Reliability.NEWLY_FLAKY, run_id)
    assert (found[b.id].reliability, found[b.id].tries) == (Reliability.STEADY, 1)
    assert found[c.id].passed == 0


def test_flakiness_is_of_the_last_runs_of_a_job_along_indices(sqlite_store: Store, make: type[Make]) -> None:
    a, b = make.job("a"), make.job("b")
    store = sqlite_store
    tried(store, make, 99, (a, "fp"), (b, "p"))
    for hour in range(LOOKED_AT):
        last = tried(store, make, 90 - hour, (a, "p"))
        tried(store, make, 90 - hour, (b, "p"), kind="hardware")
    with statements(store) as asked:
        assert store.history.reliability([a.id, b.id], "virtual", last, failed_of_late=True) == {}
        assert store.history.reliability([a.id], "virtual")[a.id].reliability is Reliability.STEADY
    steps = [step for plan in plans(store, asked) for step in plan]
    assert len(steps) > 3
    assert [step for step in steps if re.match("SCAN (attempt|run_job|run)", step)] == []


def measured(store: Store, make: Make, hours_ago: int, *found: tuple[Job, Verdict, float], **facts: str) -> str:
    """Record a run of jobs with their verdict and latency."""

    def metrics(latency: float) -> tuple[Measurement, ...]:
        cycles = Measurement("htp_cycles", "cycles", Direction.LOWER, (latency * 10,), exact=True)
        return make.latency(latency - 1, latency, latency + 1), cycles, make.counter(7.0)

    results = [(job, verdict, {"measurements": metrics(latency)}) for job, verdict, latency in found]
    return make.run(store, hours_ago, *results, **facts)  # type: ignore[arg-type]


def latencies(store: Store, run_id: str, job: Job, runs: int = 30) -> list[float | None]:
    series = {one.metric: one for one in store.history.background(run_id, runs).trends.get(job.id, ())}
    return [point.value for point in series["latency"].points] if "latency" in series else []


def test_trends_are_of_the_newest_runs_up_to_this_one_oldest_first(store: Store, make: Make) -> None:
    a, b, c = (make.job(name) for name in "abc")
    measured(store, make, 10, (c, P, 1))
    ids = [measured(store, make, 9 - n, (a, P, 10.0 + n), (b, F, 20.0 + n)) for n in range(4)]
    assert latencies(store, ids[2], a) == [10, 11, 12]
    assert latencies(store, ids[3], b, runs=2) == [22, 23]
    found = store.history.background(ids[3])
    (cycles, latency) = found.trends[a.id]
    assert (cycles.metric, cycles.unit, cycles.direction) == ("htp_cycles", "cycles", "lower")
    assert [point.value for point in cycles.points] == [100, 110, 120, 130]
    assert [point.run_id for point in latency.points] == ids
    assert found.facts[latency.points[0].fingerprint]["device_kind"] == "virtual"
    # A job that was left out of some runs goes further back.
    assert latencies(store, measured(store, make, 5, (c, P, 3)), c, runs=2) == [1, 3]
    # The last of two attempts in a run counts.
    store.record_attempt(ids[3], make.attempt(a, started_ms=now_ms(), measurements=(make.latency(5, 6, 7),)))
    assert latencies(store, ids[3], a, runs=1) == [6]


def test_other_kinds_of_device_the_debugger_and_trouble_are_no_part_of_a_trend(sqlite_store: Store, make: Make) -> None:
    store, a, b = sqlite_store, make.job("a"), make.job("b")
    measured(store, make, 9, (a, P, 1), kind="hardware")
    measured(store, make, 8, (a, P, 2), debug="layers")
    measured(store, make, 7, (a, I, 3))
    run_id = measured(store, make, 6, (a, P, 4), (b, P, 1))
    assert latencies(store, run_id, a) == [4]
    kept = ArtifactRecord("ab" * 32, 12, "etdump")
    store.record_attempt(run_id, make.attempt(b, started_ms=7), artifacts=(kept,))
    assert store.history.background(run_id).artifacts == {b.id: (JobFile("ab" * 32, 12, "etdump", attempt=2),)}
    nothing = store.history.background("20200101-000000-000000")
    assert (nothing.trends, nothing.facts, nothing.artifacts) == ({}, {}, {})


def test_no_step_of_a_trend_goes_over_a_whole_table(sqlite_store: Store, make: Make) -> None:
    a = make.job("a")
    for hours in range(3):
        run_id = measured(sqlite_store, make, 5 - hours, (a, P, 1))
    with statements(sqlite_store) as asked:
        assert sqlite_store.history.background(run_id).trends
    found = plans(sqlite_store, asked)
    assert len(found) > 3
    growing = re.compile("SCAN (attempt|measurement|counter|run_job|comparison|artifact)")
    assert not [step for plan in found for step in plan if growing.match(step)]
