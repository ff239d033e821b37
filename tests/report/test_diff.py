from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from farm.report.html.page import render_diff
from farm.report.model.diff import DiffGroup, RunDiff, diff_runs
from farm.report.terminal.compare import diff_lines
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.results.measurements import counted
from farm.store.records import DeviceView, JobView, RunView, SkipReason

from .conftest import make_job, make_run

DEVICE = "phone-1"


def latency(*ms: float) -> Measurement:
    return Measurement("latency", "ns", Direction.LOWER, tuple(one * 1e6 for one in ms))


def sqnr(value: float) -> Measurement:
    return Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (value,))


def attempt(verdict: Verdict = Verdict.PASSED, *measured: Measurement, **more: Any) -> Attempt:
    reason = "" if verdict is Verdict.PASSED else "output 0 is off"
    return Attempt("x", verdict, Stage.DONE, reason, more.pop("device", DEVICE), 1, measurements=measured, **more)


def job(case: str, *attempts: Attempt, **more: Any) -> JobView:
    return make_job("ops", case, "SM8650", "8a8w", *attempts, **more)


def run(*jobs: JobView, **more: Any) -> RunView:
    return make_run(
        jobs, **{"fingerprint": {}, "devices": (DeviceView(DEVICE, "SM8650", "hardware", "build"),), **more}
    )


def changes(before: Measurement, after: Measurement) -> list[tuple[str, bool | None]]:
    [job] = of_one(before, after).jobs
    return [(change.metric, change.worse) for change in job.changes]


FAILED, KNOWN, INFRA = attempt(Verdict.FAILED), attempt(Verdict.FAILED, known_issue="k"), attempt(Verdict.INFRA)


@pytest.mark.parametrize(
    ("before", "after", "group"),
    [
        (attempt(), FAILED, DiffGroup.NEW_FAILURE),
        (KNOWN, FAILED, DiffGroup.NEW_FAILURE),
        (None, FAILED, DiffGroup.NEW_FAILURE),
        (FAILED, FAILED, DiffGroup.STILL_FAILING),
        (FAILED, KNOWN, DiffGroup.STILL_FAILING),
        (FAILED, attempt(), DiffGroup.FIXED),
        (KNOWN, attempt(), DiffGroup.FIXED),
        (attempt(), INFRA, DiffGroup.MISSING),
        (FAILED, None, DiffGroup.MISSING),
        (INFRA, attempt(), DiffGroup.ADDED),
        (attempt(), KNOWN, DiffGroup.SAME),
        (attempt(), attempt(), DiffGroup.SAME),
    ],
)
def test_what_became_of_a_job(before: Attempt | None, after: Attempt | None, group: DiffGroup) -> None:
    [one] = diff_runs(*(run(job("a", *([side] if side else []))) for side in (before, after))).jobs
    assert one.group is group


def test_a_job_that_is_gone_is_missing_and_comes_last() -> None:
    found = diff_runs(run(job("a", attempt()), job("b", attempt())), run(job("b", attempt()), job("c", FAILED)))
    assert [(one.job_id.split("[")[0], one.group) for one in found.jobs] == [
        ("ops/b", DiffGroup.SAME), ("ops/c", DiffGroup.NEW_FAILURE), ("ops/a", DiffGroup.MISSING),
    ]  # fmt: skip
    [one] = diff_runs(run(job("a", attempt())), run(job("a", skipped=SkipReason("no time was left")))).jobs
    assert (one.group, one.after) == (DiffGroup.MISSING, "skipped")
    assert "no time was left" in one.reason


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (latency(1, 1.1, 1.3), latency(1.2, 1.4, 1.5), None),
        (latency(1, 1.1, 1.2), latency(1.3, 1.4, 1.5), True),
        (latency(1.3, 1.4, 1.5), latency(1, 1.1, 1.2), False),
        # A single sample is not enough, and a change below two per cent is not worth a look.
        (latency(1), latency(9), None),
        (latency(1, 1.001, 1.002), latency(1.010, 1.011, 1.012), None),
        (counted("fallback_ops", 1), counted("fallback_ops", 2), True),
        (counted("pte_size", 1001), counted("pte_size", 1000), False),
        (sqnr(40.0), sqnr(39.0), True),
        (sqnr(math.inf), sqnr(60.0), True),
        (sqnr(40.0), sqnr(39.95), None),
        (sqnr(math.inf), sqnr(math.inf), None),
    ],
)
def test_a_number_has_changed_where_its_samples_are_told_apart(
    before: Measurement, after: Measurement, worse: bool | None
) -> None:
    assert changes(before, after) == ([] if worse is None else [(before.metric, worse)])


def prefill_rate(*rates: float) -> Measurement:
    return Measurement("prefill_rate", "tokens/s", Direction.HIGHER, rates)


def of_one(before: Measurement, after: Measurement, kind: str = "hardware") -> RunDiff:
    device = (DeviceView(DEVICE, "SM8650", kind, "build"),)
    return diff_runs(*(run(job("a", attempt(Verdict.PASSED, one)), devices=device) for one in (before, after)))


def test_a_rate_is_slower_where_it_is_so_after_every_prompt() -> None:
    """Rates of long prompts are far above the rates of short ones, so that their ranges always overlap."""
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(40, 400, 862)) == [("prefill_rate", True)]
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(40, 1001, 862)) == []
    assert changes(prefill_rate(90, 1000, 4000), prefill_rate(89, 990, 3960)) == [], "1 %"
    assert changes(prefill_rate(4000), prefill_rate(3700)) == [], "one rate is told apart from a tenth on"
    text = "\n".join(diff_lines(of_one(prefill_rate(4000), prefill_rate(862)), 10))
    assert "SLOWER: 1" in text
    assert "prefill_rate: 4,000 tokens/s -> 862 tokens/s, -78.5 %" in text


def test_times_and_cycles_of_a_simulator_are_in_no_diff() -> None:
    cycles = [Measurement("htp_cycles", "cycles", Direction.LOWER, (one, one, one)) for one in (174_000.0, 310_000.0)]
    for before, after in ((latency(1, 1, 1), latency(9, 9, 9)), cycles, (prefill_rate(4000), prefill_rate(862))):
        assert not of_one(before, after, "virtual").jobs[0].changes
    [size] = of_one(counted("pte_size", 8), counted("pte_size", 9), "virtual").jobs[0].changes
    assert size.metric == "pte_size"


def test_a_fusion_is_no_regression() -> None:
    """A fusion takes operators out of delegates; operators lost to the CPU would be fallback."""
    unfused, fused = (
        run(job("a", attempt(Verdict.PASSED, counted("delegated_ops", delegated), counted("partitions", partitions))))
        for delegated, partitions in ((72, 2), (60, 1))
    )
    for found in (diff_runs(unfused, fused), diff_runs(fused, unfused)):
        assert not found.changed(time=False, worse=True)
        assert not found.changed(time=False, worse=False)
    lines = "\n".join(diff_lines(diff_runs(unfused, fused), 10))
    assert "WORSE" not in lines
    assert "CHANGED" in lines
    assert "delegated_ops: 72 -> 60" in lines


def test_numbers_of_another_kind_of_device_or_of_another_test_are_not_compared() -> None:
    simulator = DeviceView("virtual-1", "SM8650", "virtual", "build")
    before = run(job("a", attempt(Verdict.PASSED, latency(1, 1, 1), device="virtual-1")), devices=(simulator,))
    [one] = diff_runs(before, run(job("a", attempt(Verdict.PASSED, latency(9, 9, 9))))).jobs
    assert (one.changes, one.not_compared) == ((), "before on virtual device, after on hardware device")
    sides = (run(job("a", attempt(Verdict.PASSED, counted("partitions", n)), case_version=str(n))) for n in (1, 2))
    [one] = diff_runs(*sides).jobs
    assert (one.changes, one.not_compared) == ((), "another test under the same name")


def test_the_text_puts_new_failures_first_and_fits_80_columns() -> None:
    before = run(
        *(job(f"slow{n}", attempt(Verdict.PASSED, latency(1, 1, 1))) for n in range(12)),
        job("red", attempt()), job("green", FAILED), id="before-run", fingerprint={"qnn": "2.47"},
    )  # fmt: skip
    after = run(
        *(job(f"slow{n}", attempt(Verdict.PASSED, latency(2, 2, 2 + n))) for n in range(12)),
        job("red", attempt(Verdict.FAILED)), job("green", attempt()), id="after-run", fingerprint={"qnn": "2.51"},
    )  # fmt: skip
    lines = diff_lines(diff_runs(before, after), limit=10)
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
    old, new, *_ = diff_lines(diff_runs(before, after), limit=10)
    assert (old.startswith("before: one, "), "NOT FINISHED" in old) == (True, False)
    assert (new.startswith("after: two, "), new.endswith(", NOT FINISHED")) == (True, True)
    assert render_diff(diff_runs(before, after), virtual=False).count("not finished") == 1


def test_programs_that_are_the_same_are_said_to_be() -> None:
    slow, fast = attempt(Verdict.PASSED, latency(2, 2, 2)), attempt(Verdict.PASSED, latency(1, 1, 1))
    before = run(job("a", fast, program="x"), job("b", fast, program="y"), job("old", fast), job("gone", program="z"))
    after = run(job("a", slow, program="x"), job("b", slow, program="other"), job("old", slow, program="x"))
    found = diff_runs(before, after)
    assert (found.programs.same, found.programs.changed) == (("ops/a[SM8650-htp-8a8w]",), ("ops/b[SM8650-htp-8a8w]",))
    lines = diff_lines(found, 10, 200)
    assert "1 of 2 programs are the same" in lines
    [place] = [place for place, line in enumerate(lines) if "with the same program" in line]
    assert "ops/a[" in lines[place - 1]
    page = render_diff(found, virtual=False)
    assert "<p>1 of 2 programs are the same</p>" in page


def test_a_commit_that_changes_no_program_is_said_to_change_none() -> None:
    jobs = [job(name, attempt(), program=name) for name in "abc"]
    assert diff_lines(diff_runs(run(*jobs), run(*jobs)), 10)[-2:] == [
        "no program of 3 jobs has changed",
        "3 jobs, nothing differs",
    ]
    same = diff_runs(run(job("a", attempt())), run(job("a", attempt())))
    assert not same.programs
    assert diff_lines(same, 10)[-1] == "1 job, nothing differs"
    evil = msgspec.structs.replace(job("a", FAILED), id="ops/\x1b[31mred")
    assert "\x1b" not in "\n".join(diff_lines(diff_runs(run(), run(evil)), limit=10))
