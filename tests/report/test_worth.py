"""A failed case on other targets, as a reader meets it: terminal, page and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.cross_target import cross_targets
from farm.report.model.summary import summarize
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Comparison, Stage, Verdict
from farm.store.view import CaseResult, DeviceView, JobView, RunView

from .conftest import make_job, make_run

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


def run(*others: CaseResult, jobs: Sequence[JobView] = ()) -> RunView:
    soc = "SM8450"
    red = make_job("ops", "conv2d", soc, "8a8w", attempt(job_id(soc), FAILED), case_version="1", elsewhere=others)
    devices = (DeviceView("v1", soc, "virtual", "simulator"),)
    return make_run((red, *jobs), devices, id="r1", started_ms=NOW, finished_ms=NOW + 1000)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([], ""),
        ([elsewhere("SM8550", INFRA)], ""),
        ([elsewhere("SM8550", PASSED)], "fails on SM8450 (V69) alone, passes on SM8550"),
        ([elsewhere("SM8550", FAILED), elsewhere("SM8650", FAILED, known="so")], "fails on all 3 SoCs that were tried"),
        ([elsewhere("SM8350", FAILED), elsewhere("SM8550", PASSED), elsewhere("SM8650", PASSED)],
         "fails on V68, V69, passes on V73, V75"),
        # Two SoCs of an architecture differ: the architecture is not the cause.
        ([elsewhere("SM8475", PASSED), elsewhere("SM8650", FAILED)], "fails on SM8450, SM8650, passes on SM8475"),
        ([elsewhere("XYZ1", PASSED), elsewhere("XYZ2", FAILED)], "fails on SM8450, XYZ2, passes on XYZ1"),
        ([elsewhere("SM8450", PASSED, "16a8w")], "passes here in 16a8w"),
        ([elsewhere("SM8450", FAILED, "16a8w")], "fails here in every precision that was tried"),
        ([elsewhere("SM8550", FAILED), elsewhere("SM8450", PASSED, "fp32", "xnnpack"),
          elsewhere("SM8450", FAILED, "16a8w")],
         "fails on both SoCs that were tried; passes here in fp32 on xnnpack, fails in 16a8w"),
        ([elsewhere("SM8550", PASSED, kind="hardware")], "fails on SM8450 (V69) alone, passes on SM8550 (hardware)"),
        ([elsewhere(f"S{n}", PASSED) for n in range(9)],
         "fails on SM8450 (V69) alone, passes on S0, S1, S2, S3, S4, S5 and 3 more"),
    ],
)  # fmt: skip
def test_the_conclusion_is_one_line(others: list[CaseResult], says: str) -> None:
    (cross,) = cross_targets(summarize(run(*others))).values()
    assert cross.conclusion == says


def test_the_end_of_a_run_has_a_line_under_each_failure() -> None:
    lines = render_summary(run(elsewhere("SM8550", PASSED), elsewhere("SM8450", PASSED, "16a8w"))).splitlines()
    below = lines[lines.index(f"FAILED {job_id('SM8450')}") + 1 :]
    assert below[0] == "  numerics: output 0: sqnr 12 dB < 30 dB"
    assert below[1].startswith("  elsewhere: passed on SM8550")
    assert max(len(line) for line in lines if ": farm " not in line) <= 80
    assert "elsewhere" not in render_summary(run())


def test_the_page_has_a_row_for_every_place_and_links_to_those_of_the_run() -> None:
    green = make_job("ops", "conv2d", "SM8550", "8a8w", attempt(job_id("SM8550"), PASSED))
    here = elsewhere("SM8550", PASSED, run_id="r1", sqnr=41.25)
    page = render_html(run(here, elsewhere("SM8650", FAILED, days=3, version="0", sqnr=math.nan), jobs=[green]))
    rows = page[page.index("The same case elsewhere") :].partition("</table>")[0]
    for text in ('<a href="#j1" class="passed">', "41.2", "this run", OTHER_RUN, "case changed since", "NaN"):
        assert text in rows
    assert "Fails on V69, V75, passes on V73" in page
    assert "No comparison: this case" in render_html(run())


def test_json_has_results_and_conclusions_and_is_read_back() -> None:
    view = run(elsewhere("SM8550", PASSED, sqnr=math.inf))
    document = json.loads(render_json(view))
    assert document["summary"]["worth"] == {job_id("SM8450"): "fails on SM8450 (V69) alone, passes on SM8550"}
    found = document["jobs"][0]["elsewhere"][0]
    assert (found["soc"], found["attempt"]["verdict"], found["run_id"]) == ("SM8550", "passed", OTHER_RUN)
    assert parse_json(render_json(view)) == view
