"""Queries for the selection of jobs: durations, last results, and reasons of skipped jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.database import Database
from farm.store.records import BuildRecord
from farm.store.store import Store
from farm.store.values import judged_by
from farm.store.view import SkipReason
from farm.suites.suite import Expectation, Job, KnownIssue, Limits, Tolerance

if TYPE_CHECKING:
    from conftest import Make

P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table


def run(store: Store, make: type[Make], job: Job, *verdicts: Verdict, seconds: float = 1.0, **more: Any) -> str:
    """Record a run of one job with these attempts."""
    return make.run(store, 0, *((job, verdict, {"seconds": seconds}) for verdict in verdicts or [""]), **more)


def test_duration_of_a_job_is_the_median_of_its_recent_runs(store: Store, make: type[Make]) -> None:
    job, never = make.job(), make.job("never")
    for seconds, build_seconds, cached in ((1.0, 10.0, False), (9.0, 0.0, True), (2.0, 30.0, False)):
        run_id = run(store, make, job, I, P, seconds=seconds)
        store.record_builds(run_id, [BuildRecord(job.id, seconds=build_seconds, cached=cached, bundle_key="k")])
    run(store, make, job, I, seconds=500.0)
    run(store, make, job, P, seconds=500.0, kind="hardware")

    [past] = store.selection.expected([job.id, never.id, "unknown"], "virtual").values()

    assert (past.build_seconds, past.run_seconds, past.total_seconds) == (20.0, 2.0, 11.0)
    assert store.selection.expected([], "virtual") == {}
    assert store.selection.expected([job.id], "hardware")[job.id].build_seconds is None


def test_the_newest_verdict_has_its_limits_and_bundle(store: Store, make: type[Make]) -> None:
    job = make.job()
    strict = {"8a8w": Tolerance(fp32=Limits(sqnr_db=40.0))}
    stricter = msgspec.structs.replace(job, case=msgspec.structs.replace(job.case, tolerances=strict))
    assert judged_by(job) != judged_by(stricter)
    run(store, make, job, F)
    first = run(store, make, stricter, P, I)
    store.record_builds(first, [BuildRecord(job.id, seconds=1.0, cached=False, bundle_key="key")])
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
    job = make.job(known_issues=(KnownIssue("stub", virtual=True),))
    before = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, backend=backend))
    after = msgspec.structs.replace(before, case=msgspec.structs.replace(job.case, **changed))
    assert judged_by(before) != judged_by(after)


def test_the_final_attempt_of_the_newest_run_decides_whether_a_job_failed_last(store: Store, make: type[Make]) -> None:
    for number, (attempts, failed) in enumerate(
        [((P,), False), ((F,), True), ((I,), True), ((I, P), False), ((P, I), False), ((F, I), True)]
    ):
        job, opposite = make.job(f"case_{number}"), P if failed else F
        run(store, make, job, opposite)
        run(store, make, job, *attempts)
        # None of these runs changes the selection: a run without attempts, another job, user and kind of device.
        run(store, make, job)
        run(store, make, make.job("other"), P)
        run(store, make, job, opposite, user="bob")
        run(store, make, job, opposite, kind="hardware")
        assert store.selection.failed_last([job.id], "virtual", "ada") == ({job.id} if failed else set()), attempts
        assert store.selection.failed_last([job.id], "virtual", "bob") == (set() if failed else {job.id}), attempts
    known = make.job("known")
    make.run(store, 0, (known, F, {"known_issue": "understood"}))
    assert store.selection.failed_last([known.id], "virtual", "ada") == set()
    assert store.selection.expected([known.id], "virtual")[known.id].last.outcome == "known issue"


def test_shards_agree_on_durations_that_the_first_of_them_knew(address: str) -> None:
    now = [1_000_000_000_000]
    with Store(Database(address), lambda _: now[0]) as first, Store(Database(address), lambda _: now[0]) as second:
        agreed = {"a": 1.0, "b": 2.0}
        assert first.selection.agree_on_seconds({"b": 2.0, "a": 1.0}, "virtual") == agreed
        assert second.selection.agree_on_seconds({"a": 5.0, "b": 5.0}, "virtual") == agreed
        assert second.selection.agree_on_seconds({"a": 5.0, "b": 5.0}, "hardware") == {"a": 5.0, "b": 5.0}
        assert second.selection.agree_on_seconds({"a": 5.0}, "virtual") == {"a": 5.0}
        for _ in range(3):
            # Each request prolongs the agreement.
            now[0] += 11 * 3_600_000
            assert first.selection.agree_on_seconds({"a": 7.0, "b": 7.0}, "virtual") == agreed
        now[0] += 13 * 3_600_000
        assert second.selection.agree_on_seconds({"a": 8.0, "b": 8.0}, "virtual") == {"a": 8.0, "b": 8.0}
        now[0] += 31 * 86_400_000
        first.selection.agree_on_seconds({"c": 1.0}, "virtual")
        with first._database.reading() as connection:
            assert len(connection.execute(schema.shard_weights.select()).all()) == 1


def test_the_reason_of_a_skipped_job_stays_until_it_is_taken_back(sqlite_store: Store, make: type[Make]) -> None:
    job, other = make.job(), make.job("other")
    run_id = make.begin(sqlite_store, job, other)
    why = SkipReason("no time", 1_790_000_000_000, "passed", "an earlier run")
    sqlite_store.mark_skipped(run_id, {job.id: why, other.id: None})
    assert [one.skipped for one in sqlite_store.runs.view(run_id).jobs] == [why, None]
    sqlite_store.mark_skipped(run_id, {job.id: None})
    sqlite_store.mark_skipped(run_id, {})
    assert [one.skipped for one in sqlite_store.runs.view(run_id).jobs] == [None, None]
