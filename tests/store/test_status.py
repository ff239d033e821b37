"""Data of `farm status`, newest results of jobs and results on other targets, on both databases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from query_plans import plans, statements

from farm.results.attempt import Stage, Verdict
from farm.store.records import BuildRecord, JobStatus, RunRecord
from farm.store.store import Store
from farm.store.view import SkipReason

if TYPE_CHECKING:
    from conftest import Make

P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table


def by_case(store: Store, run_id: str) -> dict[str, JobStatus]:
    return {job.job_id.split("/")[1].split("[")[0]: job for job in store.status.of_run(run_id).jobs}


def test_each_job_has_its_last_verdict_before_the_run(store: Store, make: Make) -> None:
    a, b, c, d, e = (make.job(name) for name in "abcde")
    first = make.run(store, 9, (a, P), (b, F))
    second = make.run(store, 8, (a, I), (b, P))
    # Verdicts on another kind of device and of the debugger do not count.
    make.run(store, 8, (c, F), kind="hardware")
    make.run(store, 8, (c, F), debug="intermediate outputs")
    third = make.run(store, 7, (a, F), (b, P), (c, P), (d, ""), (e, ""))
    make.run(store, 6, (a, P), (b, F), (c, F))
    store.mark_skipped(third, {d.id: SkipReason("no time was left")})
    # Trouble takes no verdict back.
    store.record_attempt(third, make.attempt(a, verdict=I, stage=Stage.PUSH, started_ms=5))
    found = by_case(store, third)
    assert [found[name].verdict for name in "abcde"] == ["failed", "passed", "passed", "", ""]
    assert [(one.run_id, one.verdict) for name in "ab" if (one := found[name].before)] == [
        (first, "passed"), (second, "passed"),
    ]  # fmt: skip
    assert found["c"].before is None
    assert found["a"].reason == f"failed in {third}"
    assert [(found[name].skipped, found[name].reason) for name in "de"] == [(True, "no time was left"), (False, "")]


def test_the_kind_of_a_run_is_that_of_its_devices(store: Store, make: Make) -> None:
    facts = {"device_kind": "hardware", "executorch": "1.5.1"}
    for kind, devices in (
        ("virtual", [make.device()]),
        ("mixed", [make.device(), make.device("phone-1", "hardware")]),
        ("hardware", []),
    ):
        run_id = store.begin_run(RunRecord("farm run --soc SM8650", "ada", "bench", facts))
        for device in devices:
            store.record_device(run_id, device)
        assert store.status.of_run(run_id).device_kind == kind
        assert store.runs.view(run_id).fingerprint == {**facts, "device_kind": kind}


def test_the_run_to_show_is_the_newest_nightly_one_of_late_or_the_newest(store: Store, make: Make) -> None:
    a = make.job("a")
    assert store.status.run_to_show() is None
    make.run(store, 24 * 30, (a, P), priority="nightly")
    newest = make.run(store, 20, (a, P))
    assert store.status.run_to_show() == newest
    nightly = make.run(store, 24, (a, P), priority="nightly")
    make.run(store, 1, (a, P), debug="intermediate outputs")
    assert store.status.run_to_show() == nightly
    # Runs of today without an end are unfinished.
    for hours_ago in (100, 2):
        make.run(store, hours_ago, user="eve", finished=False)
    (one,) = store.status.unfinished_runs()
    assert (one.user, one.host) == ("eve", "bench")


def test_the_newest_result_is_of_a_run_that_tried_the_job_and_of_no_debugging(store: Store, make: type[Make]) -> None:
    relu, conv = make.job(), make.job("conv2d")
    first = make.run(store, 9, (relu, P), (conv, P))
    store.record_builds(
        first, [BuildRecord(relu.id, seconds=1.0, cached=False, bundle_key="b", operators={"aten.relu.default": 2})]
    )
    figures = (make.comparison(sqnr_db=math.nan), make.comparison(reference="quantized", sqnr_db=math.inf))
    # Trouble of the farm takes no verdict back.
    second = make.run(store, 8, (relu, F, {"comparisons": figures, "log": "long"}), (relu, I), (conv, ""))
    make.run(store, 7, (relu, P), debug="intermediate outputs")

    found = {row.result.job_id: row for row in store.status.job_results([relu.id, conv.id, make.job("never").id])}
    assert found.keys() == {relu.id, conv.id}
    newest, attempt = found[relu.id], found[relu.id].result.attempt
    assert (newest.result.run_id, newest.result.kind, newest.operators, newest.newer_run) == (
        second, "virtual", None, "",
    )  # fmt: skip
    assert (attempt.verdict, attempt.reason) == (F, f"failed in {second}")
    assert newest.result.time_ms == attempt.started_ms
    assert [str(c.sqnr_db) for c in attempt.comparisons] == ["nan", "inf"]
    assert (attempt.log, attempt.measurements) == ("", ())
    assert (found[conv.id].result.run_id, found[conv.id].newer_run) == (first, second)

    (of_first,) = store.status.job_results([relu.id], [first])
    assert (of_first.result.attempt.verdict, of_first.operators) == (P, {"aten.relu.default": 2})
    assert store.status.job_results([conv.id], [second]) == []


def test_a_failure_comes_with_other_socs_and_other_precisions_and_nothing_else(store: Store, make: type[Make]) -> None:
    red, green = make.job("conv2d"), make.job("relu")
    there, here = make.job("conv2d", soc="SM8450"), make.job("conv2d", "16a8w")
    both = make.job("conv2d", "16a8w", "SM8450")
    other_module = make.job("conv2d", soc="SM8750", module="torch.nn:Conv1d")
    shared = make.job("conv2d", "fp16", suite="fp_ops")
    # Suites share a case: the suite that defines it goes first.
    smoke = make.job("conv2d", soc="SM8450", suite="smoke")
    jobs = (there, here, both, other_module, shared, smoke, make.job("relu", soc="SM8450"))
    make.run(store, 9, *((job, P) for job in jobs))
    view = store.runs.view(make.run(store, 8, (red, F), (green, P)))
    assert [found.job_id for found in view.jobs[0].elsewhere] == [there.id, here.id, shared.id]
    assert view.jobs[0].elsewhere[0].case_version == view.jobs[0].case_version
    assert view.jobs[1].elsewhere == ()


def test_planned_jobs_are_those_of_one_soc_in_the_order_of_the_run(store: Store, make: type[Make]) -> None:
    jobs = [make.job("b"), make.job("a"), make.job("a", soc="SM8450")]
    first = make.run(store, 9, *((job, "") for job in jobs))
    second = make.run(store, 8, (make.job("c"), ""), (jobs[0], ""))
    found = store.runs.planned_jobs([first, second], "SM8650", "htp")
    assert [job.job_id for job in found] == [jobs[0].id, jobs[1].id, make.job("c").id]
    assert (found[1].module, found[1].case, found[1].precision) == ("torch.nn:ReLU", "a", "8a8w")
    assert store.runs.planned_jobs([first], "SM8650", "gpu") == []


def test_newest_results_are_found_along_indices(sqlite_store: Store, make: type[Make]) -> None:
    socs, precisions = ("SM8450", "SM8550", "SM8650"), ("8a8w", "16a8w")
    jobs = [make.job(case, precision, soc) for case in ("a", "b") for precision in precisions for soc in socs]
    make.run(sqlite_store, 9, (jobs[0], P), debug="intermediate outputs")
    for hours in range(3):
        run_id = make.run(sqlite_store, 8 - hours, *((job, F) for job in jobs))
    with statements(sqlite_store) as asked:
        assert len(sqlite_store.status.job_results([job.id for job in jobs])) == len(jobs)
        sqlite_store.runs.view(run_id)
    newest = [one for one in asked if "AS tried" in one[0]]
    assert len(newest) == 2
    # The following statements name rows by their keys.
    of_rows = [one for one in asked if "attempt.run_job_id IN" in one[0]]
    for steps in plans(sqlite_store, newest + of_rows):
        assert [step for step in steps if step.startswith("SCAN") and step != "SCAN CONSTANT ROW"] == [], steps
        assert not any("TEMP B-TREE" in step and "CORRELATED" in step for step in steps)
