"""A failed case on other targets, as a reader meets it: terminal, page and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.cross_target import cross_targets, elsewhere_line
from farm.report.model.summary import summarize
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Comparison, Stage, Verdict
from farm.store.view import CaseResult, DeviceView, JobView, RunView

NOW = 1_795_225_501_000
DAY = 86_400_000
PASSED, FAILED, INFRA = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA
OTHER_RUN = "20261101-010101-aaaaaa"


def job_id(soc: str, precision: str = "8a8w", backend: str = "htp") -> str:
    return f"ops/conv2d[{soc}-{backend}-{precision}]"


def attempt(name: str, verdict: Verdict, days: int = 0, known: str = "", sqnr: float = 12.0) -> Attempt:
    reason = "" if verdict is PASSED else "output 0: sqnr 12 dB < 30 dB"
    figures = (Comparison(0, "fp32", sqnr, 0.9, 0.1, None),)
    stage = Stage.DONE if verdict is PASSED else Stage.NUMERICS
    return Attempt(
        name, verdict, stage, reason, "v1", NOW - days * DAY, 0.1, known_issue=known, comparisons=figures, log="a log"
    )


def elsewhere(soc: str, verdict: Verdict, precision: str = "8a8w", backend: str = "htp", **more: Any) -> CaseResult:
    run_id, kind, version = more.pop("run_id", OTHER_RUN), more.pop("kind", "virtual"), more.pop("version", "1")
    name = job_id(soc, precision, backend)
    found = attempt(name, verdict, **more)
    return CaseResult(name, soc, backend, precision, run_id, NOW - 9 * DAY, kind, found, version)


def run(*others: CaseResult, soc: str = "SM8450", known: str = "", jobs: Sequence[JobView] = ()) -> RunView:
    name = job_id(soc)
    red = JobView(
        name, "ops", "conv2d", soc, "htp", "8a8w", (attempt(name, FAILED, known=known),), case_version="1",
        elsewhere=others, decisive_attempt=1,
    )  # fmt: skip
    device = DeviceView("v1", soc, "virtual", "simulator")
    return RunView("r1", "farm run", NOW, NOW + 1000, 1, "ada", "bench", {}, (device,), (red, *jobs))


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([], ""),
        ([elsewhere("SM8550", INFRA)], ""),
        ([elsewhere("SM8550", PASSED)], "fails on SM8450 (V69) alone, passes on SM8550"),
        ([elsewhere("SM8550", FAILED)], "fails on both SoCs that were tried"),
        ([elsewhere("SM8550", FAILED), elsewhere("SM8650", FAILED, known="so")], "fails on all 3 SoCs that were tried"),
        (
            [elsewhere("SM8350", FAILED), elsewhere("SM8550", PASSED), elsewhere("SM8650", PASSED)],
            "fails on V68, V69, passes on V73, V75",
        ),
        # Two SoCs of an architecture differ: the architecture is not the cause.
        (
            [elsewhere("SM8475", PASSED), elsewhere("SM8650", FAILED)],
            "fails on SM8450, SM8650, passes on SM8475",
        ),
        ([elsewhere("XYZ1", PASSED), elsewhere("XYZ2", FAILED)], "fails on SM8450, XYZ2, passes on XYZ1"),
        ([elsewhere("SM8450", PASSED, "16a8w")], "passes here in 16a8w"),
        ([elsewhere("SM8450", FAILED, "16a8w")], "fails here in every precision that was tried"),
        (
            [elsewhere("SM8550", FAILED), elsewhere("SM8450", PASSED, "fp32", "xnnpack"),
             elsewhere("SM8450", FAILED, "16a8w")],
            "fails on both SoCs that were tried; passes here in fp32 on xnnpack, fails in 16a8w",
        ),
        ([elsewhere("SM8550", PASSED, kind="hardware")], "fails on SM8450 (V69) alone, passes on SM8550 (hardware)"),
        (
            [elsewhere(f"S{n}", PASSED) for n in range(9)],
            "fails on SM8450 (V69) alone, passes on S0, S1, S2, S3, S4, S5 and 3 more",
        ),
    ],
)  # fmt: skip
def test_the_conclusion_is_one_line(others: list[CaseResult], says: str) -> None:
    (cross,) = cross_targets(summarize(run(*others))).values()
    assert cross.conclusion == says


def test_the_line_tells_verdicts_and_how_old_they_are() -> None:
    others = [
        elsewhere("SM8550", PASSED), elsewhere("SM8750", PASSED), elsewhere("SM8350", FAILED, days=3),
        elsewhere("SM8650", FAILED, days=1, known="so"), elsewhere("SM8850", INFRA, days=2),
        elsewhere("SM8845", INFRA, days=0), elsewhere("SM8450", PASSED, "16a8w", days=1),
    ]  # fmt: skip
    (cross,) = cross_targets(summarize(run(*others))).values()
    assert elsewhere_line(cross, NOW) == (
        "passed on SM8550, SM8750; failed on SM8350 (3 days ago); known issue on SM8650 (1 day ago); "
        "infra trouble on SM8850, SM8845 (up to 2 days ago); passed here in 16a8w (1 day ago)"
    )


def test_the_end_of_a_run_has_a_line_under_each_failure_and_one_for_known_issues() -> None:
    view = run(elsewhere("SM8550", PASSED), elsewhere("SM8450", PASSED, "16a8w"))
    lines = render_summary(view).splitlines()
    below = lines[lines.index(f"FAILED {job_id('SM8450')}") + 1 :]
    assert below[0] == "  numerics: output 0: sqnr 12 dB < 30 dB"
    assert below[1].startswith("  elsewhere: passed on SM8550")
    assert max(len(line) for line in lines if ": farm " not in line) <= 80

    known = render_summary(run(elsewhere("SM8550", PASSED), known="the scale is wrong")).splitlines()
    assert "known issues, 1x: the scale is wrong" in known
    assert "elsewhere" not in render_summary(run())


def test_the_page_has_a_row_for_every_place_and_links_to_those_of_the_run() -> None:
    green = JobView(
        job_id("SM8550"), "ops", "conv2d", "SM8550", "htp", "8a8w", (attempt(job_id("SM8550"), PASSED, sqnr=41.25),),
        case_version="1", decisive_attempt=1,
    )  # fmt: skip
    page = render_html(
        run(
            elsewhere("SM8550", PASSED, run_id="r1", sqnr=41.25),
            elsewhere("SM8650", FAILED, days=3, version="0", sqnr=math.nan),
            jobs=[green],
        )
    )
    rows = page[page.index("The same case elsewhere") :].partition("</table>")[0]
    assert '<a href="#j1" class="passed">' in rows
    assert "41.2" in rows
    assert "this run" in rows
    assert OTHER_RUN in rows
    assert "case changed since" in rows
    assert "NaN" in rows
    assert "Fails on V69, V75, passes on V73" in page
    assert "No comparison: this case" in render_html(run())
    assert "No comparison: this case" not in render_html(run(elsewhere("SM8550", PASSED)))


def test_json_has_results_and_conclusions_and_is_read_back() -> None:
    view = run(elsewhere("SM8550", PASSED, sqnr=math.inf))
    text = render_json(view)
    document = json.loads(text)
    assert document["summary"]["worth"] == {job_id("SM8450"): "fails on SM8450 (V69) alone, passes on SM8550"}
    found = document["jobs"][0]["elsewhere"][0]
    assert (found["soc"], found["attempt"]["verdict"], found["run_id"]) == ("SM8550", "passed", OTHER_RUN)
    assert parse_json(text) == view
