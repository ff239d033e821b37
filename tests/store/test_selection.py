"""Queries for the selection of jobs: durations, last results, and reasons of skipped jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.records import RunRecord
from farm.store.store import Store
from farm.store.values import judged_by
from farm.store.view import SkipReason
from farm.suites.suite import Expectation, Job, KnownIssue, Limits, Tolerance

if TYPE_CHECKING:
    from conftest import Make

P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table


def begin(store: Store, *jobs: Job, user: str = "ada", kind: str = "virtual") -> str:
    run_id = store.begin_run(RunRecord("farm run", user, "bench", {"device_kind": kind}))
    store.plan_jobs(run_id, jobs)
    return run_id


def run(store: Store, make: type[Make], job: Job, *verdicts: Verdict, seconds: float = 1.0, **more: str) -> str:
    """Record a run of one job with these attempts."""
    run_id = begin(store, job, **more)
    for number, verdict in enumerate(verdicts):
        attempt = make.attempt(job, verdict=verdict, seconds=seconds, started_ms=1 + number)
        store.record_attempt(run_id, attempt, make.device(kind=more.get("kind", "virtual")))
    return run_id


def test_what_a_job_takes_is_the_median_of_its_recent_runs(store: Store, make: type[Make]) -> None:
    job, never = make.job(), make.job("never")
    for seconds, build_seconds, cached in ((1.0, 10.0, False), (9.0, 0.0, True), (2.0, 30.0, False)):
        run_id = run(store, make, job, I, P, seconds=seconds)
        store.record_build(run_id, job.id, seconds=build_seconds, cached=cached, bundle_key="k")
    run(store, make, job, I, seconds=500.0)
    run(store, make, job, P, seconds=500.0, kind="hardware")

    [past] = store.selection.expected([job.id, never.id, "unknown"], "virtual").values()

    assert (past.build_seconds, past.run_seconds, past.total_seconds) == (20.0, 2.0, 11.0)
    assert store.selection.expected([], "virtual") == {}
    assert store.selection.expected([job.id], "hardware")[job.id].build_seconds is None


def test_the_newest_verdict_tells_what_it_is_about(store: Store, make: type[Make]) -> None:
    job = make.job()
    strict = {"8a8w": Tolerance(fp32=Limits(sqnr_db=40.0))}
    stricter = msgspec.structs.replace(job, case=msgspec.structs.replace(job.case, tolerances=strict))
    assert judged_by(job) != judged_by(stricter)
    run(store, make, job, F)
    first = run(store, make, stricter, P, I)
    store.record_build(first, job.id, seconds=1.0, cached=False, bundle_key="key")
    newest = run(store, make, job, I)

    last = store.selection.expected([job.id], "virtual")[job.id].last
    assert (last.run_id, last.outcome, last.bundle_key) == (first, "passed", "key")
    assert last.judged_by == judged_by(stricter)
    assert store.runs.verdicts(first) == {job.id: last}
    assert store.runs.verdicts(newest) == {}


@pytest.mark.parametrize(
    ("backend", "changed"),
    [
        ("xnnpack", {"expect": (Expectation(least_decode_rate=9.0),)}),
        ("htp", {"deterministic": True}),
        ("htp", {"deterministic": False}),
        ("htp", {"known_issues": (KnownIssue("stub", virtual=True), KnownIssue("weak"))}),
    ],
)
def test_all_that_a_verdict_depends_on_makes_a_case_worth_another_run(
    make: type[Make], backend: str, changed: dict[str, Any]
) -> None:
    job = make.job()
    target = msgspec.structs.replace(job.target, backend=backend)
    case = msgspec.structs.replace(job.case, known_issues=(KnownIssue("stub", virtual=True),))
    other = msgspec.structs.replace(case, **changed)
    before, after = (msgspec.structs.replace(job, case=one, target=target) for one in (case, other))
    assert judged_by(before) != judged_by(after)


@pytest.mark.parametrize(
    ("attempts", "failed"),
    [((P,), False), ((F,), True), ((I,), True), ((I, P), False), ((P, I), False), ((F, I), True)],
)
def test_what_failed_last_is_the_final_attempt_of_the_newest_run(
    store: Store, make: type[Make], attempts: tuple[Verdict, ...], failed: bool
) -> None:
    job = make.job()
    run(store, make, job, *((P,) if failed else (F,)))
    run(store, make, job, *attempts)
    # None of these runs changes the selection: a run without attempts, another job, user and kind of device.
    begin(store, job)
    run(store, make, make.job("other"), P)
    run(store, make, job, *((P,) if failed else (F,)), user="bob")
    run(store, make, job, *((P,) if failed else (F,)), kind="hardware")

    assert store.selection.failed_last([job.id], "virtual", "ada") == ({job.id} if failed else set())
    assert store.selection.failed_last([job.id], "virtual", "bob") == (set() if failed else {job.id})


def test_a_known_issue_has_not_failed(store: Store, make: type[Make]) -> None:
    job = make.job()
    run_id = begin(store, job)
    store.record_attempt(run_id, make.attempt(job, verdict=F, known_issue="understood"), make.device())
    assert store.selection.failed_last([job.id], "virtual", "ada") == set()
    assert store.selection.expected([job.id], "virtual")[job.id].last.outcome == "known issue"


def test_shards_agree_on_what_the_first_of_them_knew(address: str) -> None:
    from farm.store.database import Database
    from farm.store.store import Store

    now = [1_000_000_000_000]
    with Store(Database(address), lambda _: now[0]) as first, Store(Database(address), lambda _: now[0]) as second:
        assert first.selection.agree_on_seconds({"b": 2.0, "a": 1.0}, "virtual") == {"a": 1.0, "b": 2.0}
        assert second.selection.agree_on_seconds({"a": 5.0, "b": 5.0}, "virtual") == {"a": 1.0, "b": 2.0}
        assert second.selection.agree_on_seconds({"a": 5.0, "b": 5.0}, "hardware") == {"a": 5.0, "b": 5.0}
        assert second.selection.agree_on_seconds({"a": 5.0}, "virtual") == {"a": 5.0}
        for _ in range(3):
            # Each request prolongs the agreement.
            now[0] += 11 * 3_600_000
            assert first.selection.agree_on_seconds({"a": 7.0, "b": 7.0}, "virtual") == {"a": 1.0, "b": 2.0}
        now[0] += 13 * 3_600_000
        assert second.selection.agree_on_seconds({"a": 8.0, "b": 8.0}, "virtual") == {"a": 8.0, "b": 8.0}
        now[0] += 31 * 86_400_000
        first.selection.agree_on_seconds({"c": 1.0}, "virtual")
        with first._database.reading() as connection:
            assert len(connection.execute(schema.shard_weights.select()).all()) == 1


def test_what_was_left_out_is_told_until_it_is_not(store: Store, make: type[Make]) -> None:
    job, other = make.job(), make.job("other")
    run_id = begin(store, job, other)
    why = SkipReason("no time", 1_790_000_000_000, "passed", "an earlier run")

    store.mark_skipped(run_id, {job.id: why, other.id: None})
    assert [one.skipped for one in store.runs.view(run_id).jobs] == [why, None]

    store.mark_skipped(run_id, {job.id: None})
    store.mark_skipped(run_id, {})
    assert [one.skipped for one in store.runs.view(run_id).jobs] == [None, None]
