from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec
import pytest

from farm.dispatch.nightly.record import JobNote
from farm.dispatch.nightly.render import nightly_annotations, nightly_markdown
from farm.dispatch.nightly.templates import SAMPLE
from farm.report.formats.github import add_summary, escaped, run_markdown
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import JobView, RunView

MIB = 1024 * 1024


@pytest.mark.parametrize("text", ["a|b", "`x`", "<img src=x>", "[a](http://b)", "@all", "**b**", "# h", "a\n| b | c |"])
def test_what_a_device_says_is_no_markdown(text: str) -> None:
    shown = escaped(text)
    assert not set("|`<>[]()@*\n").intersection(shown)


@pytest.mark.parametrize("text", ["@lab/team", "#1", "lab/net#1", "GH-1", "!1", "~bug", "%release", "$1", "&3"])
def test_no_text_of_a_device_mentions_people_or_issues_on_a_forge(text: str) -> None:
    # GitHub and GitLab replace entities before they look for mentions: github/cmark-gfm#181.
    shown = html.unescape(escaped(text))
    assert not re.search(r"[@#!~%$&][\w/]|GH-\d", shown)
    assert shown.replace("\u200b", "") == text


def test_the_summary_tells_every_run_and_what_is_new() -> None:
    text = nightly_markdown(SAMPLE)
    assert "#### New failures: 1" in text
    assert "#### Regressions: 1" in text
    assert text.count("| run | verdict | jobs | trouble |") == 1
    assert all(line.count("|") in (0, 3, 5) for line in text.splitlines())


def test_the_summary_is_appended_and_cut_below_a_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.md"
    add_summary(lambda: "nowhere")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    file.write_text("before\n")
    add_summary(lambda: "first\n")
    add_summary(lambda: "line of text\n" * 200_000)
    data = file.read_bytes()
    assert data.startswith(b"before\nfirst\nline of text\n")
    assert MIB - 100 < len(data) < MIB
    assert data.endswith(b"the report has all of it.*\n")
    add_summary(lambda: "no room for this\n" * 100)
    assert len(file.read_bytes()) < MIB
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "gone" / "summary.md"))
    add_summary(lambda: "nowhere")


def test_a_single_run_is_summed_up_as_well() -> None:
    attempt = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "wrong | <b>`x`")
    job = JobView("s/c[SM8650-htp-8a8w]", "s", "c", "SM8650", "htp", "8a8w", (attempt,), decisive_attempt=1)
    view = RunView(id="r", command="farm run", started_ms=1, finished_ms=2, exit_code=1, user="u", host="h",
                   fingerprint={}, devices=(), jobs=(job,))  # fmt: skip
    text = run_markdown(view)
    assert text.startswith("### farm run: failed\n")
    assert "| s/c&#91;SM8650&#45;htp&#45;8a8w&#93; | wrong &#124; &#60;b&#62;&#96;x&#96; |" in text


def test_annotations_are_escaped_few_and_only_for_github(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = JobNote("smoke/a,b::c[SM8650-htp-8a8w]", "100% wrong\n::error::injected")
    twelve = msgspec.structs.replace(
        SAMPLE, cells=(msgspec.structs.replace(SAMPLE.cells[0], new_failures=(answer,) * 12),)
    )
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert nightly_annotations(twelve) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = nightly_annotations(twelve)
    assert [line.partition(" ")[0] for line in lines] == ["::error"] * 10 + ["::warning"]
    assert lines[0] == (
        "::error title=new failure%3A smoke/a%2Cb%3A%3Ac[SM8650-htp-8a8w]::100%25 wrong ::error::injected"
    )
    assert not any("\n" in line or "\r" in line for line in lines)
