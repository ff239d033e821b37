from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import msgspec
import pytest

from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Cause, Comparison, Stage, Verdict
from farm.store.view import RunView


def outcomes(view: RunView) -> dict[str, str]:
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    found = {}
    for case in root.iter("testcase"):
        marks = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        assert len(marks) <= 1
        found[f"{case.get('classname')}/{case.get('name')}"] = marks[0] if marks else "passed"
    return found


def test_junit_maps_every_job(example_run: RunView) -> None:
    found = outcomes(example_run)
    assert set(found) == {job.id for job in example_run.jobs}
    assert found["quantized_ops/group_norm[SM8650-htp-8a8w]"] == "failure"
    assert found["quantized_ops/index_select[SM8750-htp-16a8w]"] == "failure"
    assert found["quantized_ops/sdpa[SM8750-htp-8a8w]"] == "error"
    assert found["quantized_ops/linear_shared_weights[SM8650-htp-8a8w]"] == "skipped"
    assert found["quantized_ops/softmax[SM8650-htp-16a8w]"] == "passed"
    assert list(found.values()).count("passed") == 96


def test_junit_totals_are_what_it_holds(example_run: RunView) -> None:
    root = ET.fromstring(render_junit(example_run))  # noqa: S314
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["101", "2", "1", "2"]
    for suite in root.iter("testsuite"):
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))


def test_junit_tells_why_and_how_to_run_it_again(example_run: RunView) -> None:
    root = ET.fromstring(render_junit(example_run))  # noqa: S314
    failure = root.find(".//testcase[@name='group_norm[SM8650-htp-8a8w]']/failure")
    assert failure is not None
    assert failure.get("type") == "numerics"
    assert "sqnr 11.8 dB < 20 dB" in failure.get("message", "")
    assert "farm run --soc SM8650 --suite quantized_ops" in (failure.text or "")
    known = root.find(".//testcase[@name='linear_shared_weights[SM8650-htp-8a8w]']/skipped")
    assert known is not None
    assert "known issue: shared weights" in known.get("message", "")


def test_junit_says_that_a_device_is_virtual(example_run: RunView) -> None:
    root = ET.fromstring(render_junit(example_run))  # noqa: S314
    assert root.find(".//testcase/properties/property[@name='device_kind'][@value='virtual']") is not None


def test_junit_of_hostile_text_is_well_formed(hostile_run: RunView) -> None:
    assert sorted(outcomes(hostile_run).values()) == ["error", "failure", "passed", "skipped", "skipped"]
    render_junit(hostile_run).encode()


def test_json_gives_the_run_back(example_run: RunView, large_run: RunView) -> None:
    assert parse_json(render_json(example_run)) == example_run
    assert parse_json(render_json(large_run)) == large_run


def test_json_keeps_infinity_apart_from_does_not_apply(run_of: Callable[..., RunView]) -> None:
    equal = Comparison(0, "fp32", float("inf"), None, 0.0, None)
    view = run_of((Attempt("j", Verdict.PASSED, Stage.DONE, "", comparisons=(equal,)),))
    document = json.loads(render_json(view))
    comparison = document["jobs"][0]["attempts"][0]["comparisons"][0]
    assert (comparison["sqnr_db"], comparison["cosine"]) == ("inf", None)
    assert parse_json(render_json(view)) == view


def test_json_carries_the_counts_and_its_version(example_run: RunView) -> None:
    document = json.loads(render_json(example_run))
    assert document["schema"] == 3
    assert document["summary"]["counts"]["failed"] == 2
    assert document["summary"]["outcomes"]["quantized_ops/sdpa[SM8750-htp-8a8w]"] == "infra"


def test_json_of_hostile_text_is_json(hostile_run: RunView) -> None:
    text = render_json(hostile_run)
    text.encode()
    assert len(parse_json(text).jobs) == 5


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        parse_json('{"id": 1}')


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
    assert "\x1b" not in text


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


def test_details_of_a_success_leave_room_for_the_rest(run_of: Callable[..., RunView]) -> None:
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


def test_the_terminal_summary_of_a_bad_nightly_run_stays_short(large_run: RunView) -> None:
    text = render_summary(large_run, 80)
    assert "and 40 more FAILED" in text
    assert len(text.splitlines()) < 40


def test_the_terminal_summary_lets_no_escape_sequence_or_markup_through(
    hostile_run: RunView, run_of: Callable[..., RunView]
) -> None:
    text = render_summary(hostile_run, 80)
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    view = run_of((Attempt("j", Verdict.FAILED, Stage.BUILD, "[bold]loud[/bold] [/nope]"),))
    assert "build: [bold]loud[/bold] [/nope]" in render_summary(view, 80, color=True)


def test_color_is_only_on_request(example_run: RunView) -> None:
    assert "\x1b[" in render_summary(example_run, 80, color=True)
