"""Data of `farm status`, on both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.results.attempt import Stage, Verdict
from farm.store.records import JobStatus, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.store.view import SkipReason
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

HOUR = 3_600_000


def run(store: Store, make: Make, hours_ago: int, *verdicts: tuple[Job, Verdict | None], **facts: str) -> str:
    """Record a run of jobs; None is a planned job without an attempt."""
    priority, kind = facts.pop("priority", "person"), facts.pop("kind", "virtual")
    started_ms = now_ms() - hours_ago * HOUR
    record = RunRecord("farm run", "ada", "bench", {"device_kind": kind, **facts}, started_ms, priority)
    run_id = store.begin_run(record)
    store.plan_jobs(run_id, [job for job, _ in verdicts])
    store.record_device(run_id, make.device(kind=kind))
    for job, verdict in verdicts:
        if verdict is not None:
            reason = "" if verdict is Verdict.PASSED else f"{verdict} in {run_id}"
            attempt = make.attempt(job, verdict=verdict, reason=reason, started_ms=now_ms() - hours_ago * HOUR)
            store.record_attempt(run_id, attempt)
    store.finish_run(run_id, 0)
    return run_id


def by_case(store: Store, run_id: str) -> dict[str, JobStatus]:
    return {job.job_id.split("/")[1].split("[")[0]: job for job in store.status.of_run(run_id).jobs}


def test_each_job_has_its_last_verdict_before_the_run(store: Store, make: Make) -> None:
    a, b, c = (make.job(name) for name in "abc")
    first = run(store, make, 9, (a, Verdict.PASSED), (b, Verdict.FAILED))
    second = run(store, make, 8, (a, Verdict.INFRA), (b, Verdict.PASSED))
    third = run(store, make, 7, (a, Verdict.FAILED), (b, Verdict.PASSED), (c, Verdict.PASSED))
    run(store, make, 6, (a, Verdict.PASSED), (b, Verdict.FAILED), (c, Verdict.FAILED))
    found = by_case(store, third)
    assert [found[name].verdict for name in "abc"] == ["failed", "passed", "passed"]
    assert [(one.run_id, one.verdict) for name in "ab" if (one := found[name].before)] == [
        (first, "passed"), (second, "passed"),
    ]  # fmt: skip
    assert found["c"].before is None
    assert found["a"].reason == f"failed in {third}"


def test_verdicts_on_another_kind_of_device_and_of_the_debugger_are_none(store: Store, make: Make) -> None:
    a = make.job("a")
    run(store, make, 9, (a, Verdict.FAILED), kind="hardware")
    run(store, make, 8, (a, Verdict.FAILED), debug="intermediate outputs")
    assert by_case(store, run(store, make, 7, (a, Verdict.FAILED)))["a"].before is None


def test_the_kind_of_a_run_is_that_of_its_devices(store: Store, make: Make) -> None:
    facts = {"device_kind": "hardware", "executorch": "1.5.1"}
    kinds, known = [], []
    for devices in ((make.device(),), (make.device(), make.device("phone-1", "hardware")), ()):
        run_id = store.begin_run(RunRecord("farm run --soc SM8650", "ada", "bench", facts))
        for device in devices:
            store.record_device(run_id, device)
        kinds.append(store.status.of_run(run_id).device_kind)
        known.append(store.runs.view(run_id).fingerprint)
    assert kinds == ["virtual", "mixed", "hardware"]
    assert known == [{**facts, "device_kind": kind} for kind in kinds]


def test_trouble_takes_no_verdict_back(store: Store, make: Make) -> None:
    a = make.job("a")
    run_id = run(store, make, 9, (a, Verdict.FAILED))
    store.record_attempt(run_id, make.attempt(a, verdict=Verdict.INFRA, stage=Stage.PUSH, started_ms=5))
    assert by_case(store, run_id)["a"].verdict == "failed"


def test_a_job_that_was_left_out_says_why(store: Store, make: Make) -> None:
    a, b = make.job("a"), make.job("b")
    run_id = run(store, make, 9, (a, None), (b, None))
    store.mark_skipped(run_id, {a.id: SkipReason("no time was left")})
    found = by_case(store, run_id)
    assert (found["a"].verdict, found["a"].skipped, found["a"].reason) == ("", True, "no time was left")
    assert (found["b"].verdict, found["b"].skipped) == ("", False)


def test_the_run_to_show_is_the_newest_nightly_one_of_late_or_the_newest(store: Store, make: Make) -> None:
    a = make.job("a")
    assert store.status.run_to_show() is None
    run(store, make, 24 * 30, (a, Verdict.PASSED), priority="nightly")
    newest = run(store, make, 20, (a, Verdict.PASSED))
    assert store.status.run_to_show() == newest
    nightly = run(store, make, 24, (a, Verdict.PASSED), priority="nightly")
    run(store, make, 1, (a, Verdict.PASSED), debug="intermediate outputs")
    assert store.status.run_to_show() == nightly


def test_runs_of_today_without_an_end_are_unfinished(store: Store) -> None:
    for hours_ago in (100, 2):
        store.begin_run(RunRecord("farm run", "ada", "bench", {}, now_ms() - hours_ago * HOUR))
    (one,) = store.status.unfinished_runs()
    assert (one.user, one.host) == ("ada", "bench")
