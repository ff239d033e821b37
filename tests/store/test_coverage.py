"""Newest result of every job, and results of a failed job's case on other targets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from farm.results.attempt import Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import Store
from farm.suites.suite import Job

if TYPE_CHECKING:
    from conftest import Make

_NIGHT = 1_790_000_000_000
_DAY = 86_400_000


def _run(store: Store, make: type[Make], day: int, *verdicts: tuple[Job, Verdict | None], **facts: str) -> str:
    """Record a run with one attempt of each job, or none."""
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {"qnn": "2.51", **facts}, _NIGHT + day * _DAY))
    store.plan_jobs(run_id, [job for job, _ in verdicts])
    for job, verdict in verdicts:
        if verdict is not None:
            store.record_attempt(run_id, _attempt(make, job, verdict, day), make.device())
    return run_id


def _attempt(make: type[Make], job: Job, verdict: Verdict, day: int = 0, **more: Any) -> Any:
    reason = "" if verdict is Verdict.PASSED else f"{verdict} on day {day}"
    stage = Stage.DONE if verdict is Verdict.PASSED else Stage.NUMERICS
    facts = {"verdict": verdict, "stage": stage, "reason": reason, "started_ms": _NIGHT + day * _DAY, **more}
    return make.attempt(job, **facts)


def test_it_is_the_newest_that_was_tried_and_no_debugging(store: Store, make: type[Make]) -> None:
    relu, conv = make.job(), make.job("conv2d")
    first = _run(store, make, 0, (relu, Verdict.PASSED), (conv, Verdict.PASSED))
    store.record_build(first, relu.id, seconds=1.0, cached=False, bundle_key="b", operators={"aten.relu.default": 2})
    second = _run(store, make, 1, (relu, Verdict.FAILED), (conv, None))
    _run(store, make, 2, (relu, Verdict.PASSED), debug="intermediate outputs")

    found = {row.result.job_id: row for row in store.status.job_results([relu.id, conv.id, make.job("never").id])}
    assert found.keys() == {relu.id, conv.id}
    newest = found[relu.id]
    assert (newest.result.run_id, newest.result.attempt.verdict) == (second, Verdict.FAILED)
    assert newest.result.attempt.reason == "failed on day 1"
    assert (newest.operators, newest.newer_run) == (None, "")
    assert (newest.result.kind, newest.result.time_ms) == ("virtual", _NIGHT + _DAY)
    assert (found[conv.id].result.run_id, found[conv.id].newer_run) == (first, second)

    (of_first,) = store.status.job_results([relu.id], [first])
    assert (of_first.result.attempt.verdict, of_first.operators) == (Verdict.PASSED, {"aten.relu.default": 2})
    assert store.status.job_results([conv.id], [second]) == []


def test_trouble_of_the_farm_takes_no_verdict_back_and_figures_are_there(store: Store, make: type[Make]) -> None:
    job = make.job()
    run_id = _run(store, make, 0, (job, None))
    figures = (make.comparison(sqnr_db=math.nan), make.comparison(reference="quantized", sqnr_db=math.inf))
    for verdict, comparisons in ((Verdict.FAILED, figures), (Verdict.INFRA, ())):
        store.record_attempt(run_id, _attempt(make, job, verdict, comparisons=comparisons, log="long"), make.device())

    (found,) = store.status.job_results([job.id])
    attempt = found.result.attempt
    assert attempt.verdict is Verdict.FAILED
    assert [str(c.sqnr_db) for c in attempt.comparisons] == ["nan", "inf"]
    assert (attempt.log, attempt.measurements) == ("", ())


def test_a_failure_comes_with_other_socs_and_other_precisions_and_nothing_else(store: Store, make: type[Make]) -> None:
    red = make.job("conv2d")
    there, here = make.job("conv2d", soc="SM8450"), make.job("conv2d", "16a8w")
    both = make.job("conv2d", "16a8w", "SM8450")
    other_module = make.job("conv2d", soc="SM8750", module="torch.nn:Conv1d")
    shared = make.job("conv2d", "fp16", suite="fp_ops")
    green = make.job("relu")
    jobs = (there, here, both, other_module, shared, make.job("relu", soc="SM8450"))
    _run(store, make, 0, *((job, Verdict.PASSED) for job in jobs))
    run_id = _run(store, make, 1, (red, Verdict.FAILED), (green, Verdict.PASSED))

    view = store.runs.view(run_id)
    assert [found.job_id for found in view.jobs[0].elsewhere] == [there.id, here.id, shared.id]
    assert view.jobs[0].elsewhere[0].case_version == view.jobs[0].case_version
    assert view.jobs[1].elsewhere == ()


def test_of_suites_that_share_a_case_its_own_goes_before(store: Store, make: type[Make]) -> None:
    red = make.job("conv2d")
    own = make.job("conv2d", soc="SM8450")
    smoke, elsewhere = (make.job("conv2d", soc=soc, suite="smoke") for soc in ("SM8450", "SM8750"))
    _run(store, make, 0, (own, Verdict.FAILED))
    same_target = make.job("conv2d", suite="smoke")
    _run(store, make, 1, (smoke, Verdict.PASSED), (elsewhere, Verdict.PASSED), (same_target, Verdict.PASSED))
    run_id = _run(store, make, 2, (red, Verdict.FAILED))

    assert [found.job_id for found in store.runs.view(run_id).jobs[0].elsewhere] == [own.id, elsewhere.id]


def test_planned_jobs_are_those_of_one_soc_in_the_order_of_the_run(store: Store, make: type[Make]) -> None:
    jobs = [make.job("b"), make.job("a"), make.job("a", soc="SM8450")]
    first = _run(store, make, 0, *((job, None) for job in jobs))
    second = _run(store, make, 1, (make.job("c"), None), (jobs[0], None))
    found = store.runs.planned_jobs([first, second], "SM8650", "htp")
    assert [job.job_id for job in found] == [jobs[0].id, jobs[1].id, make.job("c").id]
    assert (found[1].module, found[1].case, found[1].precision) == ("torch.nn:ReLU", "a", "8a8w")
    assert store.runs.planned_jobs([first], "SM8650", "gpu") == []


def test_no_step_goes_over_a_whole_table(sqlite_store: Store, make: type[Make]) -> None:
    socs, precisions = ("SM8450", "SM8550", "SM8650"), ("8a8w", "16a8w")
    jobs = [make.job(case, precision, soc) for case in ("a", "b") for precision in precisions for soc in socs]
    _run(sqlite_store, make, 9, (jobs[0], Verdict.PASSED), debug="intermediate outputs")
    for day in range(3):
        run_id = _run(sqlite_store, make, day, *((job, Verdict.FAILED) for job in jobs))
    engine = sqlite_store._database._engine
    view = sqlite_store.runs.view(run_id)
    asked: list[tuple[str, Any]] = []

    def listen(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", listen)
    assert len(sqlite_store.status.job_results([job.id for job in jobs])) == len(jobs)
    assert sqlite_store.runs.view(run_id) == view
    event.remove(engine, "before_cursor_execute", listen)
    newest = [(statement, parameters) for statement, parameters in asked if "AS tried" in statement]
    assert len(newest) == 2
    # The following statements name rows by their keys.
    of_rows = [(statement, parameters) for statement, parameters in asked if "attempt.run_job_id IN" in statement]
    with engine.connect() as connection:
        for statement, parameters in newest + of_rows:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            steps = [row.detail for row in plan]
            assert [step for step in steps if step.startswith("SCAN") and step != "SCAN CONSTANT ROW"] == [], steps
            assert not any("TEMP B-TREE" in step and "CORRELATED" in step for step in steps)
