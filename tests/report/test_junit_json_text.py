from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import msgspec
import pytest

from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Cause, Comparison, Stage, Verdict
from farm.store.view import RunView

from .conftest import run_of


def junit(view: RunView) -> tuple[ET.Element, dict[str, str]]:
    """Return the document and the mark of each job."""
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    found = {}
    for case in root.iter("testcase"):
        marks = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        assert len(marks) <= 1
        found[f"{case.get('classname')}/{case.get('name')}"] = marks[0] if marks else "passed"
    return root, found


def test_junit_has_every_job_with_its_reason_and_how_to_run_it_again(
    example_run: RunView, hostile_run: RunView
) -> None:
    root, found = junit(example_run)
    assert set(found) == {job.id for job in example_run.jobs}
    assert {name: mark for name, mark in found.items() if mark != "passed"} == {
        "quantized_ops/group_norm[SM8650-htp-8a8w]": "failure",
        "quantized_ops/index_select[SM8750-htp-16a8w]": "failure",
        "quantized_ops/sdpa[SM8750-htp-8a8w]": "error",
        "quantized_ops/linear_shared_weights[SM8650-htp-8a8w]": "skipped",
        "quantized_ops/linear_shared_weights[SM8750-htp-8a8w]": "skipped",
    }
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["101", "2", "1", "2"]
    for suite in root.iter("testsuite"):
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
    failure = root.find(".//testcase[@name='group_norm[SM8650-htp-8a8w]']/failure")
    assert failure is not None
    assert failure.get("type") == "numerics"
    assert "sqnr 11.8 dB < 20 dB" in failure.get("message", "")
    assert "farm run --soc SM8650 --suite quantized_ops" in (failure.text or "")
    known = root.find(".//testcase[@name='linear_shared_weights[SM8650-htp-8a8w]']/skipped")
    assert known is not None
    assert "known issue: shared weights" in known.get("message", "")
    assert root.find(".//testcase/properties/property[@name='device_kind'][@value='virtual']") is not None
    assert sorted(junit(hostile_run)[1].values()) == ["error", "error", "failure", "passed", "skipped"]
    render_junit(hostile_run).encode()


def test_json_gives_the_run_back_with_counts_and_version(example_run: RunView, hostile_run: RunView) -> None:
    assert parse_json(render_json(example_run)) == example_run
    document = json.loads(render_json(example_run))
    assert document["schema"] == 3
    assert document["summary"]["counts"]["failed"] == 2
    assert document["summary"]["outcomes"]["quantized_ops/sdpa[SM8750-htp-8a8w]"] == "infra"
    render_json(hostile_run).encode()
    assert len(parse_json(render_json(hostile_run)).jobs) == 5
    with pytest.raises(msgspec.ValidationError):
        parse_json('{"id": 1}')


def test_json_keeps_infinity_apart_from_does_not_apply() -> None:
    equal = Comparison(0, "fp32", float("inf"), None, 0.0, None)
    view = run_of((Attempt("j", Verdict.PASSED, Stage.DONE, "", comparisons=(equal,)),))
    document = json.loads(render_json(view))
    comparison = document["jobs"][0]["attempts"][0]["comparisons"][0]
    assert (comparison["sqnr_db"], comparison["cosine"]) == ("inf", None)
    assert parse_json(render_json(view)) == view


def test_the_terminal_summary_is_short_and_names_the_trouble(example_run: RunView) -> None:
    text = render_summary(example_run, 80)
    lines = text.splitlines()
    assert lines[0] == "96 passed, 2 failed, 2 known issues, 1 infra - 3 of 101 jobs need attention"
    assert "VIRTUAL" in text
    assert "FAILED quantized_ops/group_norm[SM8650-htp-8a8w]" in lines
    assert "INFRA quantized_ops/sdpa[SM8750-htp-8a8w]" in lines
    assert "known issues, 2x: shared weights" in text
    assert len(lines) < 20
    assert all(len(line) <= 80 for line in lines if not line.startswith("again:"))
    failed = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "output 0: sqnr 12.0 dB < 20 dB")
    bad_night = render_summary(run_of(*[(failed,)] * 50), 80)
    assert "and 40 more FAILED" in bad_night
    assert len(bad_night.splitlines()) < 40


def test_the_terminal_summary_of_a_success_has_ten_lines_with_the_path_of_the_report(example_run: RunView) -> None:
    good = [job for job in example_run.jobs if job.attempts and job.attempts[-1].verdict is Verdict.PASSED]
    known = [
        msgspec.structs.replace(
            job, attempts=(msgspec.structs.replace(job.attempts[-1], verdict=Verdict.FAILED, known_issue=f"issue {n}"),)
        )
        for n, job in enumerate(good[:40])
    ]
    lines = render_summary(msgspec.structs.replace(example_run, jobs=(*known, *good[40:])), 80).splitlines()
    assert "none of" in lines[0]
    assert len(lines) <= 9
    [line] = [line for line in lines if line.startswith("known issue")]
    assert line.startswith("known issues, 40x: issue 0; issue 1")
    assert len(line) <= 80


def test_details_of_a_success_leave_room_for_the_rest() -> None:
    reasons = [f"no DSP heap: cause {n}" for n in range(20)]
    skipped = [Attempt("j", Verdict.SKIPPED, Stage.EXECUTE, one, "phone-1", cause=Cause.REQUEST) for one in reasons]
    lines = render_summary(run_of(*((one,) for one in skipped)), 80).splitlines()
    assert reasons[0] in "".join(lines)
    assert len(lines) <= 9
    assert lines[-1].startswith("and ")
    assert lines[-1].endswith(" lines more in the report")


def test_the_terminal_summary_has_the_same_words_with_and_without_colours(
    example_run: RunView, hostile_run: RunView
) -> None:
    for view in (example_run, hostile_run):
        coloured = render_summary(view, 80, color=True)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_summary(view, 80)


def test_the_terminal_summary_lets_no_escape_sequence_or_markup_through(hostile_run: RunView) -> None:
    text = render_summary(hostile_run, 80)
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    view = run_of((Attempt("j", Verdict.FAILED, Stage.BUILD, "[bold]loud[/bold] [/nope]"),))
    assert "build: [bold]loud[/bold] [/nope]" in render_summary(view, 80, color=True)
