"""Results of jobs in nightly runs, on both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.results.attempt import Stage, Verdict
from farm.store.queries.grid import JobFilter
from farm.store.records import RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.store.view import RunToolchain, SkipReason

if TYPE_CHECKING:
    from conftest import Make

DAY = 86_400_000


def nightly_run(store: Store, make: Make, days_ago: int, name: str, branch: str = "", **verdicts: str) -> str:
    """Record a nightly run; a verdict is a word, `known` or `skipped`."""
    record = RunRecord(
        "farm run", "ada", "bench", {"qnn": f"2.{50 - days_ago}", "device_kind": "virtual"}, now_ms() - days_ago * DAY,
        priority="nightly", nightly_run=name, toolchain=RunToolchain(branch=branch),
    )  # fmt: skip
    run_id = store.begin_run(record)
    jobs = {case: make.job(case) for case in verdicts}
    store.plan_jobs(run_id, list(jobs.values()))
    store.record_device(run_id, make.device())
    for case, word in verdicts.items():
        if word == "skipped":
            store.mark_skipped(run_id, {jobs[case].id: SkipReason("no time")})
        elif word:
            verdict = Verdict.FAILED if word == "known" else Verdict(word)
            issue = "#12" if word == "known" else ""
            ended = {"verdict": verdict, "stage": Stage.NUMERICS, "known_issue": issue, "reason": "it ended so"}
            store.record_attempt(run_id, make.attempt(jobs[case], **ended))
    store.finish_run(run_id, 0)
    return run_id


def test_each_nightly_run_is_a_column_and_the_newest_run_of_a_job_counts(store: Store, make: Make) -> None:
    nightly_run(store, make, 2, "n1", add="passed", relu="passed", conv="infra", pad="skipped")
    first = nightly_run(store, make, 1, "n2", add="failed", relu="known", conv="", pad="skipped")
    second = nightly_run(store, make, 1, "n2", add="passed")
    nightly_run(store, make, 1, "other", branch="release", add="passed")
    nightly_runs = store.grid.nightly_runs("", 10)
    assert [one.id for one in nightly_runs] == ["n2", "n1"]
    assert [run.run_id for run in nightly_runs[0].runs] == [first, second]
    assert nightly_runs[1].facts["qnn"] == "2.48"
    cells = {job.case: job.cells for job in store.grid.jobs(nightly_runs, JobFilter())}
    assert cells == {"add": "pp", "relu": "kp", "conv": "ni", "pad": "ss"}
    assert [one.id for one in store.grid.nightly_runs("", 1)] == ["n2"]
    assert [one.id for one in store.grid.nightly_runs(None, 10)] == ["other", "n2", "n1"]
    assert [one.id for one in store.grid.nightly_runs("", 10, before_ms=nightly_runs[0].started_ms)] == ["n1"]
    found = store.grid.nightly_run("n2")
    assert found == nightly_runs[0]
    assert store.grid.nightly_run("n' OR 1=1 --\0") is None


def test_jobs_are_filtered_by_target_and_by_words(store: Store, make: Make) -> None:
    nightly_run(store, make, 1, "n1", add="passed", conv_1="passed", conv12="failed")
    nightly_runs = store.grid.nightly_runs("", 10)

    def cases(**wanted: str) -> list[str]:
        return [job.case for job in store.grid.jobs(nightly_runs, JobFilter(**wanted))]

    assert cases() == ["add", "conv12", "conv_1"]
    assert cases(text="CONV") == ["conv12", "conv_1"]
    assert cases(text="v_1 SM8650") == ["conv_1"]
    assert cases(soc="SM8750") == cases(suite="' OR 1=1 --\0") == []
    assert cases(soc="SM8650", suite="quantized_ops", backend="htp", precision="8a8w") == cases()
    targets = store.grid.targets()
    assert (targets.socs, targets.suites, targets.precisions) == (("SM8650",), ("quantized_ops",), ("8a8w",))
    assert store.grid.jobs([], JobFilter()) == []
