"""Data of `farm status`, of lists and of the selection of jobs, on both databases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from stores import plans, statements

from farm.base.errors import StoreError, UnknownNameError
from farm.devices.device import HealthEvent
from farm.results.attempt import Stage, Verdict
from farm.serve.pages.all import PAGES
from farm.serve.pages.devices import DeviceQuery, device_page
from farm.serve.pages.progress import ProgressQuery, progress_page
from farm.serve.render import Address, html_of
from farm.store import schema
from farm.store.database import Database
from farm.store.leases.registry import Seen
from farm.store.queries.browse import RunFilter
from farm.store.queries.grid import JobFilter
from farm.store.records import ArtifactRecord, BuildRecord, JobStatus, RunRecord, RunToolchain, SkipReason
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.store.values import judged_by
from farm.suites.suite import Expectation, Job, KnownIssue, Limits, Tolerance

from . import make

# Data of `farm status`, newest results of jobs and results on other targets, on both databases.


P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table


def by_case(store: Store, run_id: str) -> dict[str, JobStatus]:
    return {job.job_id.split("/")[1].split("[")[0]: job for job in store.status.of_run(run_id).jobs}


def test_each_job_has_its_last_verdict_before_the_run(store: Store) -> None:
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


def test_the_kind_of_a_run_is_that_of_its_devices(store: Store) -> None:
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


def test_the_run_to_show_is_the_newest_nightly_one_of_late_or_the_newest(store: Store) -> None:
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


def test_the_newest_result_is_of_a_run_that_tried_the_job_and_of_no_debugging(store: Store) -> None:
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


def test_a_failure_comes_with_other_socs_and_other_precisions_and_nothing_else(store: Store) -> None:
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


def test_planned_jobs_are_those_of_one_soc_in_the_order_of_the_run(store: Store) -> None:
    jobs = [make.job("b"), make.job("a"), make.job("a", soc="SM8450")]
    first = make.run(store, 9, *((job, "") for job in jobs))
    second = make.run(store, 8, (make.job("c"), ""), (jobs[0], ""))
    found = store.runs.planned_jobs([first, second], "SM8650", "htp")
    assert [job.job_id for job in found] == [jobs[0].id, jobs[1].id, make.job("c").id]
    assert (found[1].module, found[1].case, found[1].precision) == ("torch.nn:ReLU", "a", "8a8w")
    assert store.runs.planned_jobs([first], "SM8650", "gpu") == []


def test_newest_results_are_found_along_indices(sqlite_store: Store) -> None:
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


# Lists for the web page and `farm runs list`, and the grid of nightly runs, on both databases.


def test_runs_are_listed_newest_first_in_pages(store: Store) -> None:
    old = make.run(store, 3, (make.job("a", soc="SM8750"), ""))
    mine = make.run(store, 2, (make.job("a"), ""), (make.job("b"), ""), user="grace", finished=False)
    store.finish_run(mine, 4)
    new = make.run(store, 1, finished=False)
    runs, total = store.browse.runs(RunFilter(), 2)
    assert ([run.run_id for run in runs], total) == ([new, mine], 3)
    assert [run.run_id for run in store.browse.runs(RunFilter(), 2, 2)[0]] == [old]
    assert (runs[0].socs, runs[0].progress.planned, runs[1].socs, runs[1].suites) == (
        (), 0, ("SM8650",), ("quantized_ops",),
    )  # fmt: skip
    for wanted, found in (
        (RunFilter(user="grace"), [mine]),
        (RunFilter(soc="SM8650", suite="quantized_ops"), [mine]),
        (RunFilter(soc="SM8650", suite="fp_ops"), []),
        (RunFilter(state="other"), [mine]),
        (RunFilter(state="passed"), [old]),
        (RunFilter(state="unfinished"), [new]),
        (RunFilter(user="' OR 1=1 --\0"), []),
    ):
        listed, total = store.browse.runs(wanted, 10)
        assert ([run.run_id for run in listed], total) == (found, len(found)), wanted
    known = store.browse.known()
    assert (known.users, known.socs, known.suites) == (("ada", "grace"), ("SM8650", "SM8750"), ("quantized_ops",))


def test_progress_counts_the_attempt_that_decides(store: Store) -> None:
    tries = {"a": (I, P), "b": (F, I), "c": (I, I), "d": (Verdict.SKIPPED,), "f": ("",)}
    results = [(make.job(case), verdict) for case, verdicts in tries.items() for verdict in verdicts]
    run_id = make.run(store, 1, *results, (make.job("e"), F, {"known_issue": "wrong scale"}), finished=False)
    store.mark_skipped(run_id, {make.job("f").id: SkipReason("no time")})
    (progress,) = store.browse.progress()
    assert progress.counts == {"failed": 1, "infra": 1, "known": 1, "passed": 1, "skipped": 1}
    assert (progress.planned, progress.done, progress.skipped, progress.exit_code) == (6, 5, 1, None)
    assert abs(progress.last_ms - now_ms()) < 3_600_000
    store.finish_run(run_id, 1)
    assert store.browse.progress()[0].exit_code == 1
    make.run(store, 30, (make.job("a"), ""))
    assert [one.run_id for one in store.browse.progress()] == [run_id]


def test_attempts_on_a_device_and_the_number_of_files_of_a_run(store: Store) -> None:
    a, b = make.job("a"), make.job("b")
    first = make.run(store, 2, (a, P))
    second = make.run(store, 1, (a, ""), (b, F, {"reason": "sqnr", "measurements": ()}))
    store.record_attempt(second, make.attempt(a, device="phone-9"), make.device("phone-9", "hardware"))
    found = store.browse.on_device("virtual-1", "virtual", 10)
    assert [(one.run_id, one.verdict, one.latency_ns, one.reason) for one in found] == [
        (second, "failed", None, "sqnr"), (first, "passed", 2.0, ""),
    ]  # fmt: skip
    assert len(store.browse.on_device("virtual-1", "virtual", 1)) == 1
    assert store.browse.on_device("virtual-1", "hardware", 10) == []

    sha = "0" * 64
    store.record_attempt(second, make.attempt(b), artifacts=[ArtifactRecord(sha, 7, "etdump")])
    assert store.browse.runs(RunFilter(), 1)[0][0].files == 1
    assert (store.browse.file_kind(sha), store.browse.file_kind("1" * 64)) == ("etdump", None)
    assert store.history.job_names("quantized_ops/*", None) == [a.id, b.id]
    assert store.browse.cases(1) == ["quantized_ops/a"]
    for pattern, soc in (("*?" * 40 + "!", None), ("quantized_ops/a", "SM1")):
        with pytest.raises(UnknownNameError):
            store.history.job_names(pattern, soc)


def test_a_reader_sees_what_another_process_writes_and_writes_nothing(store: Store, address: str) -> None:
    run_id = make.run(store, 1, (make.job("a"), ""), finished=False)
    with open_store(address, readonly=True) as reader:
        assert reader.browse.progress()[0].done == 0
        store.record_attempt(run_id, make.attempt(make.job("a")))
        assert reader.browse.progress()[0].done == 1
        with pytest.raises(StoreError, match="read.only"):
            reader.finish_run(run_id, 0)


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_every_page_is_made_of_postgresql(store: Store) -> None:
    device = make.device()
    store.devices.see([Seen(device, "device", None)])
    store.devices.record_health(HealthEvent(device.id, "check_passed", "healthy", "", {}, (1e6, 2e6)))
    for hours_ago in (3, 2, 1):
        verdict = F if hours_ago == 1 else P
        run_id = make.run(store, hours_ago, (make.job("a"), P), (make.job("b"), verdict), finished=False)
    known = {page.path.partition("{")[0]: page for page in PAGES}
    for path, query, shown in (
        ("/", {}, "New failures"),
        ("/runs", {"soc": "SM8650", "suite": "quantized_ops", "state": "unfinished"}, run_id),
        ("/diff", {}, "ended as before"),
        ("/devices", {}, device.id),
        ("/devices/", {"device": device.id}, device.id),
        ("/history", {"job": "quantized_ops/a"}, "latency"),
    ):
        page = known[path]
        facts = page.make(store, page.query(**query))
        assert shown in html_of(facts, None, Address(path, query), may=lambda _: False)
        assert msgspec.json.encode(facts)
    assert len(device_page(store, DeviceQuery(device=device.id)).attempts) == 6
    assert progress_page(store, ProgressQuery()).runs[0].text == "2 of 2 jobs: 1 failed, 1 passed"


def nightly_run(store: Store, days_ago: int, name: str, branch: str = "", **verdicts: str) -> str:
    """Record a nightly run; a verdict is a word, `known` or `skipped`."""
    jobs = {case: make.job(case) for case in verdicts}
    words = {"known": "failed", "skipped": ""}
    results = [
        (jobs[case], words.get(word, word), {"stage": Stage.NUMERICS, "known_issue": "#12" * (word == "known")})
        for case, word in verdicts.items()
    ]
    toolchain = RunToolchain(branch=branch)
    run_id = make.run(
        store,
        24 * days_ago,
        *results,
        toolchain=toolchain,
        nightly_run=name,
        priority="nightly",
        qnn=f"2.{50 - days_ago}",
    )
    skipped = {jobs[case].id: SkipReason("no time") for case, word in verdicts.items() if word == "skipped"}
    store.mark_skipped(run_id, skipped)
    return run_id


def test_each_nightly_run_is_a_column_and_the_newest_run_of_a_job_counts(store: Store) -> None:
    nightly_run(store, 2, "n1", add="passed", relu_1="passed", relu12="infra", pad="skipped")
    first = nightly_run(store, 1, "n2", add="failed", relu_1="known", relu12="", pad="skipped")
    second = nightly_run(store, 1, "n2", add="passed")
    nightly_run(store, 1, "other", branch="release", add="passed")
    nightly_runs = store.grid.nightly_runs("", 10)
    assert [one.id for one in nightly_runs] == ["n2", "n1"]
    assert [run.run_id for run in nightly_runs[0].runs] == [first, second]
    assert nightly_runs[1].facts["qnn"] == "2.48"
    cells = {job.case: job.cells for job in store.grid.jobs(nightly_runs, JobFilter())}
    assert cells == {"add": "pp", "relu_1": "kp", "relu12": "ni", "pad": "ss"}
    assert [one.id for one in store.grid.nightly_runs("", 1)] == ["n2"]
    assert [one.id for one in store.grid.nightly_runs(None, 10)] == ["other", "n2", "n1"]
    assert [one.id for one in store.grid.nightly_runs("", 10, before_ms=nightly_runs[0].started_ms)] == ["n1"]
    assert store.grid.nightly_run("n2") == nightly_runs[0]
    assert store.grid.nightly_run("n' OR 1=1 --\0") is None

    # Jobs are filtered by target and by words.
    def cases(**wanted: str) -> list[str]:
        return [job.case for job in store.grid.jobs(nightly_runs, JobFilter(**wanted))]

    assert cases() == ["add", "pad", "relu12", "relu_1"]
    assert cases(text="RELU") == ["relu12", "relu_1"]
    assert cases(text="u_1 SM8650") == ["relu_1"]
    assert cases(soc="SM8750") == cases(suite="' OR 1=1 --\0") == []
    assert cases(soc="SM8650", suite="quantized_ops", backend="htp", precision="8a8w") == cases()
    targets = store.grid.targets()
    assert (targets.socs, targets.suites, targets.precisions) == (("SM8650",), ("quantized_ops",), ("8a8w",))
    assert store.grid.jobs([], JobFilter()) == []


# Queries for the selection of jobs: durations, last results, and reasons of skipped jobs.


def new_run(store: Store, job: Job, *verdicts: Verdict, seconds: float = 1.0, **more: Any) -> str:
    """Record a run of one job with these attempts."""
    return make.run(store, 0, *((job, verdict, {"seconds": seconds}) for verdict in verdicts or [""]), **more)


def test_duration_of_a_job_is_the_median_of_its_recent_runs(store: Store) -> None:
    job, never = make.job(), make.job("never")
    for seconds, build_seconds, cached in ((1.0, 10.0, False), (9.0, 0.0, True), (2.0, 30.0, False)):
        run_id = new_run(store, job, I, P, seconds=seconds)
        store.record_builds(run_id, [BuildRecord(job.id, seconds=build_seconds, cached=cached, bundle_key="k")])
    new_run(store, job, I, seconds=500.0)
    new_run(store, job, P, seconds=500.0, kind="hardware")

    [past] = store.selection.expected([job.id, never.id, "unknown"], "virtual").values()

    assert (past.build_seconds, past.run_seconds, past.total_seconds) == (20.0, 2.0, 11.0)
    assert store.selection.expected([], "virtual") == {}
    assert store.selection.expected([job.id], "hardware")[job.id].build_seconds is None


def test_the_newest_verdict_has_its_limits_and_bundle(store: Store) -> None:
    job = make.job()
    strict = {"8a8w": Tolerance(fp32=Limits(sqnr_db=40.0))}
    stricter = msgspec.structs.replace(job, case=msgspec.structs.replace(job.case, tolerances=strict))
    assert judged_by(job) != judged_by(stricter)
    new_run(store, job, F)
    first = new_run(store, stricter, P, I)
    store.record_builds(first, [BuildRecord(job.id, seconds=1.0, cached=False, bundle_key="key")])
    newest = new_run(store, job, I)

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
def test_all_that_a_verdict_depends_on_makes_a_case_worth_another_run(backend: str, changed: dict[str, Any]) -> None:
    job = make.job(known_issues=(KnownIssue("stub", virtual=True),))
    before = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, backend=backend))
    after = msgspec.structs.replace(before, case=msgspec.structs.replace(job.case, **changed))
    assert judged_by(before) != judged_by(after)


def test_the_final_attempt_of_the_newest_run_decides_whether_a_job_failed_last(store: Store) -> None:
    for number, (attempts, failed) in enumerate(
        [((P,), False), ((F,), True), ((I,), True), ((I, P), False), ((P, I), False), ((F, I), True)]
    ):
        job, opposite = make.job(f"case_{number}"), P if failed else F
        new_run(store, job, opposite)
        new_run(store, job, *attempts)
        # None of these runs changes the selection: a run without attempts, another job, user and kind of device.
        new_run(store, job)
        new_run(store, make.job("other"), P)
        new_run(store, job, opposite, user="bob")
        new_run(store, job, opposite, kind="hardware")
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


def test_the_reason_of_a_skipped_job_stays_until_it_is_taken_back(sqlite_store: Store) -> None:
    job, other = make.job(), make.job("other")
    run_id = make.begin(sqlite_store, job, other)
    why = SkipReason("no time", 1_790_000_000_000, "passed", "an earlier run")
    sqlite_store.mark_skipped(run_id, {job.id: why, other.id: None})
    assert [one.skipped for one in sqlite_store.runs.view(run_id).jobs] == [why, None]
    sqlite_store.mark_skipped(run_id, {job.id: None})
    sqlite_store.mark_skipped(run_id, {})
    assert [one.skipped for one in sqlite_store.runs.view(run_id).jobs] == [None, None]
