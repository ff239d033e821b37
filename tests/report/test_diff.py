from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from farm.report.html.page import render_diff
from farm.report.model.diff import DiffGroup, JobDiff, RunDiff, diff_runs
from farm.report.terminal.diff import diff_lines
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.results.measurements import counted
from farm.store.view import DeviceView, JobView, RunView, SkipReason

DEVICE = "phone-1"


def latency(*ms: float) -> Measurement:
    return Measurement("latency", "ns", Direction.LOWER, tuple(one * 1e6 for one in ms))


def exact(metric: str, value: int) -> Measurement:
    return counted(metric, value)


def sqnr(value: float) -> Measurement:
    return Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (value,))


def attempt(verdict: Verdict = Verdict.PASSED, *measured: Measurement, **more: Any) -> Attempt:
    reason = "" if verdict is Verdict.PASSED else "output 0 is off"
    return Attempt("x", verdict, Stage.DONE, reason, more.pop("device", DEVICE), 1, measurements=measured, **more)


def job(case: str, *attempts: Attempt, **more: Any) -> JobView:
    more = {"decisive_attempt": len(attempts), **more}
    return JobView(f"ops/{case}[SM8650-htp-8a8w]", "ops", case, "SM8650", "htp", "8a8w", attempts, **more)


def run(*jobs: JobView, **more: Any) -> RunView:
    fields: dict[str, Any] = {
        "id": "a-run", "command": "farm run", "started_ms": 1_767_261_600_000, "finished_ms": 1_767_261_700_000,
        "exit_code": 0, "user": "somebody", "host": "here", "fingerprint": {},
        "devices": (DeviceView(DEVICE, "SM8650", "hardware", "build"),),
    }  # fmt: skip
    return RunView(jobs=jobs, **{**fields, **more})


def diff(before: RunView, after: RunView) -> RunDiff:
    return diff_runs(before, after)


def changes(before: Measurement, after: Measurement) -> list[tuple[str, bool | None]]:
    found = diff(run(job("a", attempt(Verdict.PASSED, before))), run(job("a", attempt(Verdict.PASSED, after))))
    return [(change.metric, change.worse) for change in found.jobs[0].changes]


def only(found: RunDiff) -> JobDiff:
    (one,) = found.jobs
    return one


FAILED, KNOWN, INFRA = attempt(Verdict.FAILED), attempt(Verdict.FAILED, known_issue="k"), attempt(Verdict.INFRA)


@pytest.mark.parametrize(
    ("before", "after", "group"),
    [
        ((attempt(),), (FAILED,), DiffGroup.NEW_FAILURE),
        ((KNOWN,), (FAILED,), DiffGroup.NEW_FAILURE),
        ((), (FAILED,), DiffGroup.NEW_FAILURE),
        ((FAILED,), (FAILED,), DiffGroup.STILL_FAILING),
        ((FAILED,), (KNOWN,), DiffGroup.STILL_FAILING),
        ((FAILED,), (attempt(),), DiffGroup.FIXED),
        ((KNOWN,), (attempt(),), DiffGroup.FIXED),
        ((attempt(),), (INFRA,), DiffGroup.MISSING),
        ((FAILED,), (), DiffGroup.MISSING),
        ((INFRA,), (attempt(),), DiffGroup.ADDED),
        ((attempt(),), (KNOWN,), DiffGroup.SAME),
        ((attempt(),), (attempt(),), DiffGroup.SAME),
    ],
)
def test_what_became_of_a_job(before: tuple[Attempt, ...], after: tuple[Attempt, ...], group: DiffGroup) -> None:
    assert only(diff(run(job("a", *before)), run(job("a", *after)))).group is group


def test_a_job_that_is_gone_is_missing_and_comes_last() -> None:
    found = diff(run(job("a", attempt()), job("b", attempt())), run(job("b", attempt()), job("c", FAILED)))
    assert [(one.job_id.split("[")[0], one.group) for one in found.jobs] == [
        ("ops/b", DiffGroup.SAME), ("ops/c", DiffGroup.NEW_FAILURE), ("ops/a", DiffGroup.MISSING),
    ]  # fmt: skip


def test_a_skipped_job_is_missing_and_says_why() -> None:
    skipped = job("a", skipped=SkipReason("no time was left"))
    one = only(diff(run(job("a", attempt())), run(skipped)))
    assert (one.group, one.after) == (DiffGroup.MISSING, "skipped")
    assert "no time was left" in one.reason


def test_times_whose_samples_overlap_are_the_same() -> None:
    assert changes(latency(1, 1.1, 1.3), latency(1.2, 1.4, 1.5)) == []


def test_times_that_are_told_apart_differ_in_either_direction() -> None:
    assert changes(latency(1, 1.1, 1.2), latency(1.3, 1.4, 1.5)) == [("latency", True)]
    assert changes(latency(1.3, 1.4, 1.5), latency(1, 1.1, 1.2)) == [("latency", False)]


def test_one_sample_tells_nothing_apart() -> None:
    assert changes(latency(1), latency(9)) == []


def prefill_rate(*rates: float) -> Measurement:
    return Measurement("prefill_rate", "tokens/s", Direction.HIGHER, rates)


def of_one(before: Measurement, after: Measurement, kind: str = "hardware") -> RunDiff:
    device = (DeviceView(DEVICE, "SM8650", kind, "build"),)
    return diff(*(run(job("a", attempt(Verdict.PASSED, one)), devices=device) for one in (before, after)))


def test_a_rate_is_slower_where_it_is_so_after_every_prompt() -> None:
    """Rates of long prompts are far above the rates of short ones, so that their ranges always overlap."""
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(40, 400, 862)) == [("prefill_rate", True)]
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(40, 1001, 862)) == []
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(89, 990, 3960)) == [], "1 %"
    text = "\n".join(diff_lines(of_one(prefill_rate(4000), prefill_rate(862)), 10))
    assert "SLOWER: 1" in text
    assert "prefill_rate: 4,000 tokens/s -> 862 tokens/s, -78.5 %" in text


def test_one_rate_is_told_apart_from_a_tenth_on() -> None:
    assert not of_one(prefill_rate(4000), prefill_rate(3700)).jobs[0].changes


def test_times_and_cycles_of_a_simulator_are_in_no_diff() -> None:
    cycles = [Measurement("htp_cycles", "cycles", Direction.LOWER, (one, one, one)) for one in (174_000.0, 310_000.0)]
    for before, after in ((latency(1, 1, 1), latency(9, 9, 9)), cycles, (prefill_rate(4000), prefill_rate(862))):
        assert not of_one(before, after, "virtual").jobs[0].changes
    assert [one.metric for one in of_one(exact("pte_size", 8), exact("pte_size", 9), "virtual").jobs[0].changes] == [
        "pte_size"
    ]


def test_less_than_two_per_cent_is_not_worth_a_look() -> None:
    assert changes(latency(1, 1.001, 1.002), latency(1.010, 1.011, 1.012)) == []


def test_a_counter_that_differs_at_all_is_a_change() -> None:
    assert changes(exact("fallback_ops", 1), exact("fallback_ops", 2)) == [("fallback_ops", True)]
    assert changes(exact("pte_size", 1001), exact("pte_size", 1000)) == [("pte_size", False)]


def test_a_fusion_is_no_regression() -> None:
    """A fusion takes operators out of delegates; operators lost to the CPU would be fallback."""
    before = attempt(Verdict.PASSED, exact("delegated_ops", 72), exact("partitions", 2), exact("fallback_ops", 0))
    after = attempt(Verdict.PASSED, exact("delegated_ops", 60), exact("partitions", 1), exact("fallback_ops", 0))
    there, back = diff(run(job("a", before)), run(job("a", after))), diff(run(job("a", after)), run(job("a", before)))
    for found in (there, back):
        assert not found.changed(time=False, worse=True)
        assert not found.changed(time=False, worse=False)
    lines = "\n".join(diff_lines(there, 10))
    assert "WORSE" not in lines
    assert "CHANGED" in lines
    assert "delegated_ops: 72 -> 60" in lines


def test_a_drop_of_the_sqnr_is_a_change_for_the_worse_also_from_infinity() -> None:
    assert changes(sqnr(40.0), sqnr(39.0)) == [("sqnr_fp32[0]", True)]
    assert changes(sqnr(math.inf), sqnr(60.0)) == [("sqnr_fp32[0]", True)]
    assert changes(sqnr(40.0), sqnr(39.95)) == []
    assert changes(sqnr(math.inf), sqnr(math.inf)) == []


def test_numbers_of_a_phone_and_of_a_simulator_are_not_compared() -> None:
    simulator = DeviceView("virtual-1", "SM8650", "virtual", "build")
    before = run(job("a", attempt(Verdict.PASSED, latency(1, 1, 1), device="virtual-1")), devices=(simulator,))
    one = only(diff(before, run(job("a", attempt(Verdict.PASSED, latency(9, 9, 9))))))
    assert (one.changes, one.not_compared) == ((), "before on virtual device, after on hardware device")


def test_numbers_of_another_test_are_not_compared() -> None:
    before, after = (
        run(job("a", attempt(Verdict.PASSED, exact("partitions", value)), case_version=str(value))) for value in (1, 2)
    )
    one = only(diff(before, after))
    assert (one.changes, one.not_compared) == ((), "another test under the same name")


def test_what_is_different_about_the_runs_is_told() -> None:
    found = diff(run(fingerprint={"qnn": "2.47", "x": "1"}), run(fingerprint={"qnn": "2.51", "y": "2"}))
    assert found.facts == (("qnn", "2.47", "2.51"), ("x", "1", ""), ("y", "", "2"))


def test_the_text_puts_new_failures_first_and_fits_80_columns() -> None:
    before = run(
        *(job(f"slow{n}", attempt(Verdict.PASSED, latency(1, 1, 1))) for n in range(12)),
        job("red", attempt()), job("green", FAILED), id="before-run", fingerprint={"qnn": "2.47"},
    )  # fmt: skip
    after = run(
        *(job(f"slow{n}", attempt(Verdict.PASSED, latency(2, 2, 2 + n))) for n in range(12)),
        job("red", attempt(Verdict.FAILED)), job("green", attempt()), id="after-run", fingerprint={"qnn": "2.51"},
    )  # fmt: skip
    lines = diff_lines(diff(before, after), limit=10)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "qnn: 2.47 -> 2.51" in text
    assert text.index("NEW FAILURES: 1") < text.index("FIXED: 1") < text.index("SLOWER: 12")
    assert "    passed -> failed: output 0 is off" in lines
    assert "    latency: 1.000 ms -> 2.000 ms, +100.0 %" in lines
    assert "and 2 more" in text
    assert lines[-1] == "12 of 14 jobs ended as before"


def test_a_run_that_goes_on_is_said_to() -> None:
    before, after = run(job("a", attempt()), id="one"), run(id="two", finished_ms=None, exit_code=None)
    old, new, *_ = diff_lines(diff(before, after), limit=10)
    assert (old.startswith("before: one, "), "NOT FINISHED" in old) == (True, False)
    assert (new.startswith("after: two, "), new.endswith(", NOT FINISHED")) == (True, True)
    assert render_diff(diff(before, after), virtual=False).count("not finished") == 1


def test_names_of_jobs_cannot_write_to_the_terminal() -> None:
    evil = msgspec.structs.replace(job("a", FAILED), id="ops/\x1b[31mred")
    assert "\x1b" not in "\n".join(diff_lines(diff(run(), run(evil)), limit=10))


def test_equal_runs_say_so() -> None:
    assert diff_lines(diff(run(job("a", attempt())), run(job("a", attempt()))), 10)[-1] == "1 job, nothing differs"


def test_programs_that_are_the_same_are_said_to_be() -> None:
    slow, fast = attempt(Verdict.PASSED, latency(2, 2, 2)), attempt(Verdict.PASSED, latency(1, 1, 1))
    before = run(job("a", fast, program="x"), job("b", fast, program="y"), job("old", fast), job("gone", program="z"))
    after = run(job("a", slow, program="x"), job("b", slow, program="other"), job("old", slow, program="x"))
    found = diff(before, after)
    assert (found.programs.same, found.programs.changed) == (("ops/a[SM8650-htp-8a8w]",), ("ops/b[SM8650-htp-8a8w]",))
    lines = diff_lines(found, 10, 200)
    assert "1 of 2 programs are the same" in lines
    [place] = [place for place, line in enumerate(lines) if "with the same program" in line]
    assert "ops/a[" in lines[place - 1]
    page = render_diff(found, virtual=False)
    assert "<p>1 of 2 programs are the same</p>" in page


def test_a_commit_that_changes_no_program_is_said_to_change_none() -> None:
    jobs = [job(name, attempt(), program=name) for name in "abc"]
    assert diff_lines(diff(run(*jobs), run(*jobs)), 10)[-2:] == [
        "no program of 3 jobs has changed",
        "3 jobs, nothing differs",
    ]
    assert not diff(run(job("a", attempt())), run(job("a", attempt()))).programs
