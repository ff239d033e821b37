"""The table operator x precision: which job counts where, and how it reads."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from farm.base.text import without_colours
from farm.report.model.coverage import (
    Coverage,
    CoverageCell,
    CoveredJob,
    MadeOfOthers,
    coverage,
    facts,
    items_of,
    listed,
    made_of_others,
)
from farm.report.model.summary import Outcome
from farm.report.terminal.coverage import coverage_lines, coverage_markdown
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import CaseResult, JobResult
from farm.suites.suite import Case, InputSpec, Job, Target

PRECISIONS = ("8a8w", "16a16w", "16a4w_block", "fp16")
BUILDERS = {
    "conv": ("aten.convolution.default",),
    "rand": ("aten.rand.default", "aten.rand_like.default"),
    "relu": ("aten.relu.default",),
    "resize": ("aten.upsample.vec",),
    "transpose": ("aten.permute_copy.default",),
}
CONV, RELU, TRANSPOSE = (BUILDERS[name][0] for name in ("conv", "relu", "transpose"))
NIGHT = 1_795_225_501_000


def item(
    case: str, state: Outcome, *operators: str, precision: str = "8a8w", reason: str = "", **more: Any
) -> CoveredJob:
    return CoveredJob(f"ops/{case}[X-htp-{precision}]", case, precision, state, reason, operators or None, **more)


def table(*items: CoveredJob, **without: str) -> Coverage:
    return coverage("SM8650", "htp", PRECISIONS, items, BUILDERS, without)


def job(case: str, precision: str = "8a8w") -> Job:
    made = Case("ops", case, module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),))
    return Job(made, Target("SM8650", "htp", precision))


def result(of: Job, verdict: Verdict = Verdict.PASSED, **more: Any) -> JobResult:
    stage = more.pop("stage", Stage.DONE)
    attempt = Attempt(of.id, verdict, stage, more.pop("reason", ""), "v1", NIGHT, known_issue=more.pop("known", ""))
    found = CaseResult(of.id, "SM8650", "htp", of.target.precision, "r1", NIGHT, "virtual", attempt, "1")
    facts: dict[str, Any] = {"operators": None, **more}
    return JobResult("ops", of.case.name, of.case.module, {}, found, "f", **facts)


def one_item(of: Job, found: JobResult | None, version: str = "1", **declared: tuple[str, ...]) -> CoveredJob:
    output = {("torch.nn:ReLU", case): operators for case, operators in declared.items()}
    (made,) = items_of([listed(of)], {} if found is None else {of.id: found}, {of.id: version}, output)
    return made


def cell(found: Coverage, name: str) -> CoverageCell:
    (row,) = (row for row in found.rows + found.beyond if row.name == name)
    return row.cells["8a8w"]


def test_an_operator_that_no_job_is_about_passes_where_one_of_them_does_and_others_have_the_worst() -> None:
    failing = item("conv", Outcome.FAILED, CONV, TRANSPOSE)
    passing = cell(table(failing, item("relu", Outcome.PASSED, RELU, TRANSPOSE)), "transpose")
    assert (passing.in_passing, passing.state, passing.count, len(passing.items)) == (True, Outcome.PASSED, 1, 2)
    known = cell(table(failing, item("relu", Outcome.KNOWN, RELU, TRANSPOSE)), "transpose")
    assert known.state is Outcome.FAILED
    order = [Outcome.PASSED, Outcome.KNOWN, Outcome.NOT_RUN, Outcome.OUTDATED, Outcome.INFRA, Outcome.FAILED]
    items = [item(f"relu{n}", state, RELU) for n, state in enumerate(order)]
    for n, state in enumerate(order):
        own = cell(table(*items[: n + 1]), "relu")
        assert (own.state, own.count) == (state, 1)


def test_a_result_is_outdated_when_something_has_come_after_it() -> None:
    a, failed, newer = job("a"), Verdict.FAILED, "but a newer run did not come to it"
    build = result(a, failed, stage=Stage.BUILD, reason="1002", known="needs V73")
    for found, version, state, reason in (
        (None, "1", Outcome.NOT_RUN, ""),
        (result(a), "1", Outcome.PASSED, ""),
        (result(a, failed, stage=Stage.NUMERICS, reason="off"), "1", Outcome.FAILED, "off"),
        (result(a, failed, stage=Stage.NUMERICS, reason="off", known="so"), "1", Outcome.KNOWN, "so"),
        (build, "1", Outcome.KNOWN, "does not compile: needs V73"),
        (result(a, Verdict.INFRA, stage=Stage.PUSH, reason="cable"), "1", Outcome.INFRA, "cable"),
        (result(a), "2", Outcome.OUTDATED, "passed, but the case has changed since"),
        (result(a, newer_run="r2"), "1", Outcome.OUTDATED, f"passed, {newer}"),
        (result(a, failed, known="so", newer_run="r2"), "1", Outcome.OUTDATED, f"was a known issue, {newer}"),
    ):
        made = one_item(a, found, version)
        assert (made.state, made.reason) == (state, reason)


def example() -> Coverage:
    made = table(
        item("conv", Outcome.PASSED, CONV, TRANSPOSE, run_id="r1", time_ms=NIGHT, kind="virtual"),
        item("conv3d", Outcome.KNOWN, CONV, TRANSPOSE, reason="HTP | is\nwrong <b>", run_id="r1", time_ms=NIGHT),
        item("conv", Outcome.KNOWN, CONV, precision="16a4w_block", reason="HTP | is\nwrong <b>", run_id="r2"),
        item("relu", Outcome.FAILED, RELU, TRANSPOSE, reason=f"[x](http://evil) \x1b[31m\u202e{'long ' * 40}"),
        item("never", Outcome.NOT_RUN, precision="fp16"),
        rand="it has no reference",
    )
    others = (MadeOfOthers("relu6", ("hardtanh", "add"), ("hardtanh", "add")),)
    return structs.replace(made, tested=("erf", "relu", "relu6"), made_of_others=others, untested=("erf",))


UNTESTED = (
    "1 of 3 ATen operators that ExecuTorch's own tests name are in a case, 1 are made of others there: below; not erf"
)


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_a_terminal_and_every_sign_is_explained(width: int) -> None:
    coloured = coverage_lines(example(), facts(example().items, [{"qnn": "2.51"}]), width)
    lines = [without_colours(line) for line in coloured]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "5 jobs: 1 passed, 2 known issues, 1 not run, 1 failed" in text
    rows = {line.split()[0]: line.partition(" ")[2].split() for line in lines if line.split()[:1]}
    for name, cells in (
        ("conv", "◇ 1/2 ◇ 1 –"), ("relu", "✗ 1 – –"), ("transpose", "(✓ 1) – –"), ("rand", "n/a n/a n/a"),  # noqa: RUF001
    ):  # fmt: skip
        assert rows[name] == cells.split()
    assert "  rand: it has no reference" in lines
    assert "  resize: may be in 1 case whose operators are not known" in lines
    assert "◇ known issue, conv3d 8a8w, conv 16a4w_block: HTP | is wrong <b>"[: width - 1] in text
    assert "\x1b" not in text
    for sign in ("✓ passed", "◇ known issue", "✗ failed", "· not run"):
        assert sign in text
    plain = " ".join(text.split())
    assert UNTESTED in plain
    assert "relu6: hardtanh, add, in cases hardtanh, add" in plain


def test_the_page_has_a_footnote_for_every_reason_and_no_markup_of_others() -> None:
    command = "farm jobs coverage --soc SM8650 --markdown docs/reference/operators.md"
    page = coverage_markdown(example(), ["3 results"], command)
    lines = page.splitlines()
    assert command in lines[0]
    for line in (
        "| operator | 8a8w | 16a4w_block | fp16 |",
        "| conv | ◇ 1/2 [^2] | ◇ 1 [^2] | – |",  # noqa: RUF001
        "| relu | ✗ 1 [^1] | – | – |",  # noqa: RUF001
        "| transpose | (✓ 1) | – | – |",  # noqa: RUF001
        "| case never | – | – | · 1 |",  # noqa: RUF001
        "* rand: it has no reference",
        r"[^2]: known issue, conv3d 8a8w, conv 16a4w_block: HTP \| is wrong \<b\>",
        f"* {UNTESTED}",
        "* relu6: hardtanh, add, in cases hardtanh, add",
    ):
        assert line in lines
    (relu,) = (line for line in lines if line.startswith("[^1]: failed, relu 8a8w: "))
    assert r"\[x\](http://evil)" in relu
    assert not {"\x1b", "\u202e"} & set(page)


def test_an_operator_whose_tests_are_made_of_others_has_the_cases_of_these() -> None:
    cases = {"relu6": ("hardtanh",), "mlp": ("add", "hardtanh", "linear"), "add": ("add",), "where": ("where", "eq")}
    tests = {
        "relu6": ("hardtanh",), "pdist": ("add", "linear", "pdist"), "_masked_softmax": ("add", "where"),
        "log10": ("log10",), "erf": ("add", "erf_"),
    }  # fmt: skip
    assert made_of_others(["_masked_softmax", "erf", "flatten", "log10", "pdist", "relu6"], tests, cases) == (
        MadeOfOthers("_masked_softmax", ("add", "where"), ("add", "where")),
        MadeOfOthers("pdist", ("add", "linear"), ("mlp",)),
        MadeOfOthers("relu6", ("hardtanh",), ("relu6",)),
    )


def test_where_results_are_from_names_tools_kinds_and_days() -> None:
    items = [
        item("a", Outcome.PASSED, RELU, run_id="r1", time_ms=NIGHT, kind="virtual"),
        item("b", Outcome.PASSED, RELU, run_id="r2", time_ms=NIGHT - 3 * 86_400_000, kind="hardware"),
        item("c", Outcome.NOT_RUN, RELU),
    ]
    (output,) = facts(items, [{"executorch": "1.5.1", "qnn": "2.51"}, {"executorch": "1.6", "qnn": "2.51"}])
    assert output.startswith("2 results of 2 runs, on hardware and on VIRTUAL devices, Qualcomm's HTP simulator, ")
    assert "ExecuTorch 1.5.1, 1.6, QNN 2.51, 2026-11-1" in output
    assert facts(items[2:], []) == ["no result yet"]
