"""Findings of a comparison of two sides: pure values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from compare.made import broken, compiled, job, moved, passed, report, side

from farm.numbers.compare.building import BuiltJob
from farm.numbers.compare.compare import side_result
from farm.report.html.compare import render_compare
from farm.report.model.compare import ComparedJob, CompareGroup, SideResult
from farm.report.model.compare_totals import compile_cost, overview, sentence
from farm.suites.suite import Case, InputSpec, Job, Target

FAILED = {"verdict": "failed", "reason": "output 0: sqnr 12 dB < 20 dB"}
MUL_ADD = {"aten.mul.Tensor": 1, "aten.add.Tensor": 1}


@pytest.mark.parametrize(
    ("one", "group"),
    [
        (job(side("p"), side("p")), CompareGroup.SAME),
        (job(passed("p"), passed("q")), CompareGroup.DIFFERENT),
        (job(passed("p"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), side("q", **FAILED)), CompareGroup.NEWLY_FAILING),
        (job(broken(), broken("another reason")), CompareGroup.FAILING),
        (job(broken(), passed("q")), CompareGroup.NEWLY_PASSING),
        # A known issue is no news on either side.
        (job(passed("p"), side("q", **FAILED, known_issue="#12"), moved(answer="none")), CompareGroup.DIFFERENT),
        (job(side("p", **FAILED, known_issue="#12"), side("q", **FAILED, known_issue="#12")), CompareGroup.FAILING),
        (job(side("p", **FAILED, known_issue="#12"), passed("q")), CompareGroup.NEWLY_PASSING),
        # A failure other than the known one is news.
        (job(side("p", **FAILED, known_issue="#12"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), passed("q"), moved()), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), moved("latency", decides=False)), CompareGroup.DIFFERENT),
        (job(passed("p"), passed("q"), moved(answer="better", change=-0.1)), CompareGroup.BETTER),
        (job(passed("p"), passed("q"), moved(), moved(answer="better")), CompareGroup.WORSE),
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1})), CompareGroup.WORSE),
        (job(side("p", fallback_ops={"aten.add.Tensor": 2}), side("q")), CompareGroup.BETTER),
        # A fusion: less in delegates, or two operators on the CPU that became one. Neither is worse.
        (job(side("p", delegated_ops=72, partitions=2), side("q", delegated_ops=60)), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1})), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops={"aten.addmm": 1}), side("q", fallback_ops=MUL_ADD)), CompareGroup.WORSE),
        # Trouble of the farm and jobs that were not reached count against neither side.
        (job(side("p"), side("q", "infra", "the device is gone")), CompareGroup.NOT_COMPARED),
        (job(side(None, "infra", "no builder"), broken()), CompareGroup.NOT_COMPARED),
        (job(side("p"), side("q"), left_out="interrupted"), CompareGroup.NOT_COMPARED),
        (job(broken(), side("q"), left_out="no device"), CompareGroup.NOT_COMPARED),
        # Differences of the programs alone are known without a device.
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1}), left_out="no device"), CompareGroup.WORSE),
        # Both modes of a program compute the same; of two toolchains other bytes are no finding.
        (job(passed("p"), passed("q"), outputs=(3, 4), modes_alone=True), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), outputs=(3, 4)), CompareGroup.DIFFERENT),
        # The same program can run worse with another runner.
        (job(passed("p"), passed("p"), moved()), CompareGroup.WORSE),
    ],
)
def test_group_of_a_job(one: ComparedJob, group: CompareGroup) -> None:
    assert one.group is group
    assert report(one).is_worse is (group in (CompareGroup.NEWLY_FAILING, CompareGroup.WORSE))


def test_a_program_that_lacks_a_write_fails_without_an_execution() -> None:
    planned = Job(Case("ops", "add", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "xnnpack", "fp32"))

    def result(*lost: str) -> SideResult:
        bundle: Any = SimpleNamespace(manifest=SimpleNamespace(partitions=1, lost_writes=lost))
        return side_result(planned, BuiltJob(bundle=bundle), None, compiled(data=str(lost)))

    assert job(result(), result()).group is CompareGroup.SAME
    worse = job(result(), result("input x"))
    assert (worse.group, worse.b.stage) == (CompareGroup.NEWLY_FAILING, "build")
    assert "does not write to its input x" in worse.text


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            job(
                passed("p", fallback_ops={"aten.mul.Tensor": 1}),
                passed("q", fallback_ops={"aten.add.Tensor": 2, "aten.mul.Tensor": 1}),
                moved(change=0.0953),
            ),
            "htp_cycles 1,000 -> 1,100 cycles, +10.0 % (+4.9 % to +21.0 %); aten.add.Tensor 0 -> 2 on the CPU",
        ),
        (
            job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1})),
            "aten.add.Tensor 1 -> 0 on the CPU; aten.addmm 0 -> 1 on the CPU; aten.mul.Tensor 1 -> 0 on the CPU",
        ),
        (job(passed("p"), broken("ValueError: no")), "build: ValueError: no"),
        (job(broken("old"), broken("new")), "build: new; A: build: old"),
        (
            job(broken("old"), side("q", **FAILED, known_issue="#12")),
            "numerics: output 0: sqnr 12 dB < 20 dB (known issue: #12); A: build: old",
        ),
    ],
)
def test_the_reason_names_stage_numbers_and_operators(one: ComparedJob, text: str) -> None:
    assert one.text == text


def test_changes_are_counted_in_one_sentence_by_what_needs_a_look_first() -> None:
    same = job(side("p"), side("p"))
    assert sentence(report(same, same)) == "B changes no program of these 2 jobs"
    jobs = (same, job(passed("p"), broken()), job(passed("p"), passed("q"), moved()))
    assert sentence(report(*jobs)) == "3 jobs: 1 newly failing, 1 worse, 1 the same program"
    # Other inputs or references are another job, although the program is the same.
    assert not job(side("p"), side("p", data="others")).same


def test_compile_time_is_that_of_bundles_made_side_by_side_where_there_are_some() -> None:
    old = job(side("p", cached=True, seconds={"total": 100.0}), side("q", seconds={"total": 1.0}))
    new = job(
        side("r", seconds={"lower": 3.0, "total": 4.0}, peak_bytes=10),
        side("s", seconds={"lower": 5.0, "total": 6.0}, peak_bytes=20),
    )
    cost = compile_cost([old, new])
    assert cost is not None
    assert (cost.jobs, cost.fresh, cost.seconds, cost.peak_bytes) == (1, True, (4.0, 6.0), (10, 20))
    assert cost.steps == (("lower", 3.0, 5.0),)
    kept = compile_cost([old])
    assert (kept is not None, kept and kept.fresh) == (True, False)
    assert compile_cost([job(side("p"), side("p"))]) is None


def test_overview_has_sizes_partitions_and_the_median_of_changes() -> None:
    jobs = [job(passed("p"), passed("q", pte_bytes=1100), moved(change=change)) for change in (-0.1, 0.0, 0.3)]
    rows = {row.what: row for row in overview(report(*jobs))}
    assert (rows["size of programs"].a, rows["size of programs"].change) == ("3.0 kB", "+10.0 %")
    assert rows["partitions"].change == "same"
    assert rows["HTP cycles"].change == "+0.0 % in the median"
    assert rows["HTP cycles"].over == "3 jobs run in turns, -9.5 % to +35.0 %"


def test_resized_programs_come_with_the_greatest_change_first() -> None:
    jobs = [job(side("p"), side("q", pte_bytes=size)) for size in (1000, 1100, 300)]
    assert [one.b.compiled for one in report(*jobs).resized] == [compiled("q", pte_bytes=size) for size in (300, 1100)]


def test_outputs_that_are_not_equal_are_counted_in_text_overview_and_page() -> None:
    equal = job(passed("p"), passed("q"), outputs=(4, 4), modes_alone=True)
    other = job(passed("p"), passed("q"), outputs=(3, 4), modes_alone=True)
    assert other.text == "1 of 4 outputs not equal byte for byte"
    [row] = [one for one in overview(report(equal, other)) if "outputs" in one.what]
    assert (row.change, row.over) == ("1 of 2 differ", "2 jobs run on both sides")
    [row] = [one for one in overview(report(equal)) if "outputs" in one.what]
    assert row.change == "equal"
    page = render_compare(report(equal, other))
    assert "1 of 2 jobs equal byte for byte" in page
    assert page.count("outputs not equal byte for byte") == 1
    assert "byte for byte</span>" not in render_compare(report(job(side("p"), side("q"))))
