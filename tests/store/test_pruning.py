"""Old runs leave the store whole, and nothing else does, on both databases; rules of retention."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from old_store import snapshot
from sqlalchemy import select, update
from stores import kill_before_changes

from farm.base.config.runs import KeepReason, Rules, RunFacts, age_ms, decide
from farm.results.attempt import LayerComparison, LayerStep, OperatorProfile, Verdict
from farm.store import schema
from farm.store.artifacts import GRACE_S, ArtifactStore
from farm.store.records import ArtifactRecord, NewAlert, Remark, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.suites.suite import Job

from . import make

# Old runs leave the store whole, and nothing else does, on both databases.


DAY = 86_400_000
ETDUMP = ArtifactRecord("e" * 64, 1_000, "etdump")


def run(store: Store, days: float, *jobs: Job, **changes: str) -> str:
    """Record a run of `days` ago, without any later write to it."""
    started_ms = now_ms() - round(days * DAY)
    details = {
        "verdict": Verdict(changes.pop("verdict", "passed")),
        "started_ms": started_ms,
        "comparisons": (make.comparison(),),
        "operators": (OperatorProfile("n", "d", "ns", 1, 1.0, 1.0, 1.0, 1.0),),
        "layers": (LayerComparison("a", "relu", LayerStep.DEVICE, 1.0, 1.0, 1.0),),
    }
    run_id = make.run(store, 24 * days, *((job, "") for job in jobs), **changes)  # type: ignore[arg-type]
    for job in jobs:
        attempt = make.attempt(job, **details)
        store.record_attempt(run_id, attempt, artifacts=[ETDUMP, ArtifactRecord(own(run_id), 7, "output")])
    attempt, run_job = schema.attempt, schema.run_job
    of_run = attempt.c.run_job_id.in_(select(run_job.c.id).where(run_job.c.run_id == run_id))
    store._database.write(lambda c: c.execute(update(attempt).where(of_run).values(recorded_ms=started_ms)))
    return run_id


def own(run_id: str) -> str:
    """Return the SHA-256 of the artifact that only this run has."""
    return hashlib.sha256(run_id.encode()).hexdigest()


def counts(address: str) -> dict[str, int]:
    # Other tests install the tables of messages, and no run goes with their version.
    found = {table: len(rows) - 1 for table, rows in snapshot(address).items() if table != "farm_messages"}
    return {table: count for table, count in found.items() if count}


def old(decided: dict[str, KeepReason | None]) -> list[str]:
    return [run_id for run_id, why in decided.items() if why is None]


def test_a_run_goes_with_all_its_rows_and_what_others_share_stays(store: Store, address: str) -> None:
    a, b = make.job("a"), make.job("b")
    first = run(store, 100, a, b, qnn="2.50")
    second = run(store, 50, a)
    before = counts(address)
    assert before["attempt"] == 3
    holding = store.pruning.holding([first])
    assert (holding.artifacts, holding.database_bytes > 0) == ({own(first): 7}, True)
    assert store.pruning.remove(first) == [own(first)]
    assert holding.rows == sum(before.values()) - sum(counts(address).values())
    assert store.pruning.sweep() == 4
    assert counts(address) == {
        "artifact": 2, "attempt": 1, "comparison": 1, "device": 1, "fingerprint": 1, "job": 1, "layer": 1,
        "measurement": 1, "op_profile": 1, "run": 1, "run_device": 1, "run_job": 1, "series": 1, "suite_case": 1,
    }  # fmt: skip
    assert [job.id for job in store.runs.view(second).jobs] == [a.id]
    assert store.pruning.remove(first) is None
    assert store.pruning.sweep() == 0
    assert store.pruning.remove(second) == sorted([ETDUMP.sha256, own(second)])
    store.pruning.sweep()
    assert counts(address) == {}


def test_the_newest_results_of_every_job_on_each_kind_of_device_stay(store: Store) -> None:
    a, b = make.job("a"), make.job("b")
    hardware = run(store, 99, a, kind="hardware")
    only_b = run(store, 98, b)
    runs = [run(store, 90 - n, a) for n in range(5)]
    trouble = run(store, 60, a, verdict="infra")
    debugged = run(store, 59, a, debug="intermediate outputs")
    decided = store.pruning.decide(Rules(keep_ms=30 * DAY, keep_results=2))
    assert old(decided) == [debugged, trouble, *runs[2::-1]]
    assert {decided[one] for one in (hardware, only_b, *runs[3:])} == {KeepReason.RESULTS}
    assert store.pruning.decide(Rules(keep_ms=30 * DAY))[runs[0]] is KeepReason.RESULTS


def test_what_is_written_to_stays(store: Store) -> None:
    a = make.job("a")
    run(store, 1, a)
    ended = run(store, 90, a)
    killed = store.begin_run(RunRecord("farm run", "ada", "bench", {}, now_ms() - 80 * DAY))
    begun = store.begin_run(RunRecord("farm run", "ada", "bench", {}, now_ms() - 3_600_000))
    resumed = run(store, 85, a)
    store.record_attempt(resumed, make.attempt(a, reason="again"))
    rules = Rules(keep_runs=1, keep_results=1)
    decided = store.pruning.decide(rules)
    assert old(decided) == [killed, ended]
    assert decided[resumed] is KeepReason.GOING_ON
    assert store.pruning.decide(Rules(keep_ms=0, keep_results=1))[begun] is KeepReason.GOING_ON
    # A user continues the run after the decision.
    store.record_attempt(ended, make.attempt(a, reason="again"))
    assert [store.pruning.remove(one) for one in (ended, resumed, begun, killed)] == [None, None, None, []]
    assert {point.run_id for point in store.history.points(a.id)} >= {ended, resumed}


def test_a_run_whose_removal_is_killed_is_whole(store: Store, address: str) -> None:
    run_id = run(store, 100, make.job("a"), make.job("b"))
    before = snapshot(address)
    assert kill_before_changes(address, "store.pruning.remove(more[0])", run_id, step=6) > 1
    assert snapshot(address) == before


def test_two_at_once_and_a_run_that_begins_meanwhile(store: Store, address: str) -> None:
    jobs = [make.job(f"case_{n}") for n in range(4)]
    for days in range(60, 72):
        run(store, days, jobs[days % 4], qnn=str(days % 3))
    written: list[str] = []
    stop = threading.Event()

    def prune() -> None:
        with open_store(address) as mine:
            for run_id in old(mine.pruning.decide(Rules(keep_ms=DAY, keep_results=1))):
                mine.pruning.remove(run_id)
                mine.pruning.sweep()

    def write() -> None:
        # With the same jobs, series, devices and fingerprints, of which nothing but these rows may be left.
        with open_store(address) as mine:
            for number in itertools.count():
                job = jobs[number % 4]
                run_id = mine.begin_run(RunRecord("farm run", "ada", "bench", {"qnn": str(number % 3)}))
                mine.plan_jobs(run_id, [job])
                mine.record_device(run_id, make.device())
                mine.record_attempt(run_id, make.attempt(job, reason=str(number)))
                written.append(run_id)
                if stop.is_set():
                    break

    with ThreadPoolExecutor(3) as threads:
        writing, *pruning = [threads.submit(action) for action in (write, prune, prune)]
        wait(pruning)
        stop.set()
    for action in (writing, *pruning):
        action.result()
    for run_id in written:
        [job] = store.runs.view(run_id).jobs
        assert [attempt.measurements for attempt in job.attempts] == [(make.latency(1.0, 2.0, 3.0),)]


def test_an_sqlite_file_shrinks_when_nobody_writes(sqlite_store: Store, tmp_path: Path) -> None:
    jobs = [make.job(f"case_{n}") for n in range(100)]
    run_id = run(sqlite_store, 100, *jobs)
    other = sqlite_store.begin_run(RunRecord("farm run", "ada", "bench", {}))
    sqlite_store.pruning.remove(run_id)
    sqlite_store.pruning.sweep()
    size = (tmp_path / "farm.db").stat().st_size
    assert f"run {other} may be going on" in sqlite_store.pruning.shrink()
    sqlite_store.finish_run(other, 0)
    assert sqlite_store.pruning.shrink() == ""
    assert (tmp_path / "farm.db").stat().st_size < size
    assert sqlite_store.runs.view(other).exit_code == 0


def test_an_artifact_goes_when_it_is_old_and_not_when_it_was_put_again(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    first, second = artifacts.put(b"first"), artifacts.put(b"second")
    assert (artifacts.discard(first), list(artifacts.all())) == (None, [])
    long_ago = artifacts.path(first).stat().st_mtime - GRACE_S - 60
    for one in (first, second):
        os.utime(artifacts.path(one), (long_ago, long_ago))
    assert sorted(artifacts.all()) == sorted([first, second])
    artifacts.put(b"second")
    assert (artifacts.discard(first), artifacts.discard(second)) == (5, None)
    assert (artifacts.size(first), artifacts.size(second)) == (None, 6)
    assert artifacts.discard(first) is None
    assert artifacts.put(b"first") == first
    assert artifacts.size(first) == 5


def test_runs_of_an_open_alert_stay_and_what_came_to_nothing_goes_with_its_run(store: Store) -> None:
    job = make.job("conv")
    first, second, third, fourth = (run(store, days, job) for days in (400, 399, 398, 397))
    [series] = store.history.pasts_of_jobs(job.id)[0].series

    def alert(state: str, good: str, bad: str) -> None:
        found = NewAlert(
            series_id=series.id, device_kind="virtual", finding="regression", state=state, last_good=good,
            first_bad=bad, change=0.1, low=0.1, high=0.1, p_value=0.0, reason="1 -> 2",
        )  # fmt: skip
        store.alerts.record(bad, [found])

    alert("exact", first, second)
    alert("refuted", second, third)
    kept = store.pruning.decide(Rules(keep_ms=DAY, keep_results=0))
    assert [kept[one] for one in (first, second, third, fourth)] == [KeepReason.ALERT, KeepReason.ALERT, None, None]
    assert store.pruning.remove(second) is None
    alert("suspected", third, fourth)
    [suspected] = store.alerts.of_run(fourth)
    store.alerts.remark(f"alert:{suspected.id}", Remark("accepted", "ada", "", "right"))
    for one in (third, fourth):
        assert store.pruning.remove(one) is not None
    # An accepted change stays a level, also without its run.
    assert [one.state for one in store.alerts.of_jobs([job.id])] == ["exact", "accepted"]


# Runs that are kept, and the reasons.


NOW = 1_000 * DAY


def facts_of(name: str, days: float, priority: str = "person") -> RunFacts:
    return RunFacts(name, int(NOW - days * DAY), priority)


def test_a_run_stays_for_any_one_reason() -> None:
    runs = [facts_of("a", 1), facts_of("b", 10), facts_of("c", 20), facts_of("d", 30), facts_of("e", 40)]
    rules = Rules(keep_ms=5 * DAY, keep_runs=2)
    assert decide(runs, rules, NOW, {"d": KeepReason.RESULTS, "a": KeepReason.ALERT}) == {
        "a": KeepReason.AGE, "b": KeepReason.NEWEST, "c": None, "d": KeepReason.RESULTS, "e": None,
    }  # fmt: skip


def test_nightly_runs_have_an_age_of_their_own() -> None:
    runs = [facts_of("person", 20), facts_of("night", 20, "nightly"), facts_of("old night", 50, "nightly")]
    age = KeepReason.AGE
    assert decide(runs, Rules(10 * DAY, 40 * DAY), NOW, {}) == {"person": None, "night": age, "old night": None}
    assert decide(runs, Rules(30 * DAY), NOW, {}) == {"person": age, "night": age, "old night": None}
    assert list(decide(runs, Rules(keep_runs=1), NOW, {}).values()) == [KeepReason.NEWEST, None, None]


def test_a_run_goes_at_the_very_age_and_one_of_the_future_stays() -> None:
    assert decide([facts_of("ahead", -3), facts_of("at", 10), facts_of("before", 9.9)], Rules(10 * DAY), NOW, {}) == {
        "ahead": KeepReason.AGE, "at": None, "before": KeepReason.AGE,
    }  # fmt: skip


def test_ages() -> None:
    for text, days in (("90d", 90), (" 12w ", 84), ("36h", 1.5), ("0d", 0)):
        assert age_ms(text) == days * DAY
    assert {age_ms(text) for text in ("", "90", "-1d", "90 moons", "9999999d")} == {None}
