"""Findings of a comparison of two sides: pure values."""

from __future__ import annotations

import pytest
from compare.made import broken, compiled, job, moved, passed, report, side

from farm.report.html.compare import render_compare
from farm.report.model.compare import ComparedJob, CompareGroup
from farm.report.model.compare_totals import compile_cost, overview, sentence
from farm.results.analysis.confirmation import Answer

FAILED = {"verdict": "failed", "reason": "output 0: sqnr 12 dB < 20 dB"}
MUL_ADD = {"aten.mul.Tensor": 1, "aten.add.Tensor": 1}


@pytest.mark.parametrize(
    ("one", "group"),
    [
        (job(side("p"), side("p")), CompareGroup.SAME),
        (job(passed("p"), passed("q")), CompareGroup.DIFFERENT),
        (job(passed("p"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), side("q", **FAILED)), CompareGroup.NEWLY_FAILING),
        (job(side("p"), broken()), CompareGroup.NEWLY_FAILING),
        (job(broken(), broken("another reason")), CompareGroup.FAILING),
        (job(side("p", **FAILED), broken()), CompareGroup.FAILING),
        (job(broken(), passed("q")), CompareGroup.NEWLY_PASSING),
        (job(side("p", **FAILED), passed("q")), CompareGroup.NEWLY_PASSING),
        # A known issue is no news on either side.
        (job(passed("p"), side("q", **FAILED, known_issue="#12"), moved(answer="none")), CompareGroup.DIFFERENT),
        (job(side("p", **FAILED, known_issue="#12"), side("q", **FAILED, known_issue="#12")), CompareGroup.FAILING),
        (job(side("p", **FAILED, known_issue="#12"), passed("q")), CompareGroup.NEWLY_PASSING),
        # A failure other than the known one is news.
        (job(side("p", **FAILED, known_issue="#12"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), passed("q"), moved()), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), moved("sqnr_fp32[0]", -3.0)), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), moved("latency", decides=False)), CompareGroup.DIFFERENT),
        (job(passed("p"), passed("q"), moved(answer="better", change=-0.1)), CompareGroup.BETTER),
        (job(passed("p"), passed("q"), moved(), moved(answer="better")), CompareGroup.WORSE),
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1})), CompareGroup.WORSE),
        (job(side("p", fallback_ops={"aten.add.Tensor": 2}), side("q")), CompareGroup.BETTER),
        # A fusion: less in delegates, or two operators on the CPU that became one. Neither is worse.
        (job(side("p", delegated_ops=72, partitions=2), side("q", delegated_ops=60)), CompareGroup.DIFFERENT),
        (job(side("p", delegated_ops=60), side("q", delegated_ops=72, partitions=2)), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1})), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops={"aten.addmm": 1}), side("q", fallback_ops=MUL_ADD)), CompareGroup.WORSE),
        # Trouble of the farm and jobs that were not reached count against neither side.
        (job(side("p"), side("q", "infra", "the device is gone")), CompareGroup.NOT_COMPARED),
        (job(side(None, "infra", "no builder"), broken()), CompareGroup.NOT_COMPARED),
        (job(side(None), side(None)), CompareGroup.NOT_COMPARED),
        (job(side("p"), side("q"), left_out="interrupted"), CompareGroup.NOT_COMPARED),
        (job(broken(), side("q"), left_out="no device"), CompareGroup.NOT_COMPARED),
        # Differences of the programs alone are known without a device.
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1}), left_out="no device"), CompareGroup.WORSE),
        # Both modes of a program compute the same; of two toolchains other bytes are no finding.
        (job(passed("p"), passed("q"), outputs=(3, 4), modes_alone=True), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), outputs=(4, 4), modes_alone=True), CompareGroup.DIFFERENT),
        (job(passed("p"), passed("q"), outputs=(3, 4)), CompareGroup.DIFFERENT),
        # The same program can run worse with another runner.
        (job(passed("p"), passed("p"), moved()), CompareGroup.WORSE),
        (job(passed("p"), passed("p"), moved(answer="none")), CompareGroup.SAME),
    ],
)
def test_group_of_a_job(one: ComparedJob, group: CompareGroup) -> None:
    assert one.group is group
    assert report(one).is_worse is (group in (CompareGroup.NEWLY_FAILING, CompareGroup.WORSE))


def test_other_inputs_or_references_are_another_job_although_the_program_is_the_same() -> None:
    assert not job(side("p"), side("p", data="others")).same


def test_why_a_job_is_worse_names_numbers_and_operators() -> None:
    more = {"fallback_ops": {"aten.add.Tensor": 2, "aten.mul.Tensor": 1}}
    one = job(passed("p", fallback_ops={"aten.mul.Tensor": 1}), passed("q", **more), moved(change=0.0953))
    assert one.text == (
        "htp_cycles 1,000 -> 1,100 cycles, +10.0 % (+4.9 % to +21.0 %); aten.add.Tensor 0 -> 2 on the CPU"
    )


def test_operators_on_the_cpu_that_became_others_are_named() -> None:
    one = job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1}))
    texts = (f"aten.{name} on the CPU" for name in ("add.Tensor 1 -> 0", "addmm 0 -> 1", "mul.Tensor 1 -> 0"))
    assert one.text == "; ".join(texts)


def test_a_newly_failing_job_tells_stage_and_reason() -> None:
    assert job(passed("p"), broken("ValueError: no")).text == "build: ValueError: no"


def test_a_job_that_fails_otherwise_on_each_side_tells_both() -> None:
    assert job(broken("old"), broken("new")).text == "build: new; A: build: old"


def test_a_known_issue_is_called_so() -> None:
    one = job(broken("old"), side("q", **FAILED, known_issue="#12"))
    assert one.text == "numerics: output 0: sqnr 12 dB < 20 dB (known issue: #12); A: build: old"


def test_nothing_changed_is_said_in_one_sentence() -> None:
    assert sentence(report(job(side("p"), side("p")), job(side("q"), side("q")))) == (
        "B changes no program of these 2 jobs"
    )


def test_what_changed_is_counted_by_what_needs_a_look_first() -> None:
    jobs = (job(side("p"), side("p")), job(passed("p"), broken()), job(passed("p"), passed("q"), moved()))
    assert sentence(report(*jobs)) == "3 jobs: 1 newly failing, 1 worse, 1 the same program"


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
    assert kept is not None
    assert not kept.fresh


def test_one_bundle_that_both_sides_share_costs_nothing_to_compare() -> None:
    assert compile_cost([job(side("p"), side("p"))]) is None


def test_overview_has_sizes_partitions_and_the_median_of_changes() -> None:
    jobs = [job(passed("p"), passed("q", pte_bytes=1100), moved(change=change)) for change in (-0.1, 0.0, 0.3)]
    rows = {row.what: row for row in overview(report(*jobs))}
    assert (rows["size of programs"].a, rows["size of programs"].change) == ("3.0 kB", "+10.0 %")
    assert rows["partitions"].change == "same"
    assert rows["HTP cycles"].change == "+0.0 % in the median"
    assert rows["HTP cycles"].over == "3 jobs run in turns, -9.5 % to +35.0 %"


def test_builders_that_recorded_what_they_ran_on_one_side_only_are_said_to_have_taken_longer_for_it() -> None:
    rows = {row.what: row for row in overview(report(job(side("p"), side("q", traced=True))))}
    assert "B's builders also recorded what they ran" in rows["compile time"].over
    rows = {row.what: row for row in overview(report(job(side("p", traced=True), side("q", traced=True))))}
    assert "recorded" not in rows["compile time"].over


@pytest.mark.parametrize(
    ("worse", "better", "word"),
    [
        (Answer.CONFIRMED, Answer.REFUTED, "worse"),
        (Answer.REFUTED, Answer.CONFIRMED, "better"),
        (Answer.REFUTED, Answer.REFUTED, "same"),
        (Answer.UNKNOWN, Answer.REFUTED, "unknown"),
    ],
)
def test_not_decided_is_not_the_same(worse: Answer, better: Answer, word: str) -> None:
    assert moved(worse=worse, better=better).answer == word


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
