"""Records of nightly runs, and their texts: notices, pages, the summary and the annotations of GitHub."""

from __future__ import annotations

import html
import itertools
import json
import re
from email import message_from_bytes
from pathlib import Path

import msgspec
import pytest

from farm.base.errors import InfraError, UsageError
from farm.dispatch.nightly.plan import MailTable
from farm.dispatch.nightly.record import (
    CellResult,
    Findings,
    JobNote,
    NightlyRuns,
    cell_code,
    has_changed,
    new_id,
    nightly_code,
    write_whole,
)
from farm.dispatch.nightly.render import (
    SAMPLE,
    context,
    nightly_annotations,
    nightly_lines,
    nightly_markdown,
    render,
    render_nightly_run,
    subject,
)
from farm.dispatch.notify.channels import mail_message
from farm.report.formats.github import add_summary, escaped, run_markdown
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import JobView, RunView

# Records of nightly runs: exit codes, files and texts.


CELL = CellResult(name="c", socs=("SM8650",), suites=("smoke",), backend="htp", virtual=False)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 5], 5),
        ([0, 4, 5], 4),
        ([0, 3, 4], 3),
        ([0, 1, 3, 4, 5], 1),
        ([None, 0], 0),
        ([None, None], 5),
    ],
)
def test_the_worst_cell_decides_whatever_the_order(codes: list[int | None], code: int) -> None:
    for order in itertools.permutations(codes):
        cells = tuple(msgspec.structs.replace(CELL, code=one) for one in order)
        assert nightly_code(cells, interrupted=False) == code
        assert nightly_code(cells, interrupted=True) == 130


def test_regressions_are_found_where_nothing_failed() -> None:
    found = Findings((JobNote("j", "slower"),))
    assert [cell_code(code, found) for code in (0, 1, 2, 4, 130)] == [3, 1, 3, 3, 130]
    assert [cell_code(code, Findings()) for code in (0, 1, 2, 4, 5)] == [0, 1, 4, 4, 5]


def test_a_nightly_run_has_changed_when_something_else_is_wrong() -> None:
    good = msgspec.structs.replace(SAMPLE, code=0, cells=())
    other = msgspec.structs.replace(
        SAMPLE, cells=(msgspec.structs.replace(SAMPLE.cells[0], new_failures=(JobNote("smoke/else", ""),)),)
    )
    new_yesterday = msgspec.structs.replace(
        SAMPLE.cells[0],
        new_failures=(),
        still_failing=(*SAMPLE.cells[0].new_failures, *SAMPLE.cells[0].still_failing),
    )
    still = msgspec.structs.replace(SAMPLE, cells=(new_yesterday, *SAMPLE.cells[1:]))
    assert has_changed(SAMPLE, None)
    assert not has_changed(good, None)
    assert has_changed(SAMPLE, good)
    assert has_changed(good, SAMPLE)
    assert has_changed(other, SAMPLE)
    assert not has_changed(still, SAMPLE), "what failed yesterday fails today"


def test_the_summary_is_as_wide_as_the_terminal_and_no_line_is_a_command_of_github() -> None:
    hostile = JobNote("smoke/" + "x" * 200, "::add-mask::\x1b[31m" + "y" * 500 + "\n::error::z")
    cell = msgspec.structs.replace(
        SAMPLE.cells[0], name="n" * 80, new_failures=(hostile,) * 12, infra=(hostile,), problem="::error:: " * 30
    )
    lines = nightly_lines(msgspec.structs.replace(SAMPLE, cells=(cell,)), 80)
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert not any(line.lstrip().startswith("::") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "  and 2 more: the report has them" in lines


def test_only_an_unfinished_nightly_run_with_the_same_runs_is_resumed(tmp_path: Path) -> None:
    nightly_runs = NightlyRuns(tmp_path / "n")
    nightly_runs.folder.mkdir()
    with pytest.raises(UsageError, match="there is none yet called 'n'"):
        nightly_runs.unfinished("d")
    killed = msgspec.structs.replace(SAMPLE, code=None, digest="d", finished_ms=None)
    nightly_runs.save(killed)
    assert nightly_runs.unfinished("d") == killed
    with pytest.raises(UsageError, match="the file has changed since"):
        nightly_runs.unfinished("e")
    nightly_runs.save(msgspec.structs.replace(killed, code=130))
    assert nightly_runs.unfinished("d").code == 130
    nightly_runs.save(msgspec.structs.replace(killed, code=1))
    with pytest.raises(UsageError, match="is finished"):
        nightly_runs.unfinished("d")


def test_old_nightly_runs_and_their_pages_are_removed_and_nothing_else(tmp_path: Path) -> None:
    nightly_runs, reports = NightlyRuns(tmp_path / "n"), tmp_path / "reports"
    ids = [f"2026030{day}-020000-00000{day}" for day in range(1, 6)]
    for number, one in enumerate(ids):
        write_whole(reports / one / "index.html", b"")
        nightly_runs.save(msgspec.structs.replace(SAMPLE, id=one, started_ms=number))
    (reports / "mine").mkdir()
    nightly_runs.forget(2, reports)
    assert [nightly_run.id for nightly_run in nightly_runs.all()] == ids[3:]
    assert sorted(path.name for path in reports.iterdir()) == [*ids[3:], "mine"]
    (nightly_runs.folder / f"{new_id()}.json").write_text("half of a ni")
    assert len(nightly_runs.all()) == 2


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "lock").symlink_to("/dev/full")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InfraError, match="cannot write .*File exists"):
        write_whole(blocked / "x.json", b"{}")
    with pytest.raises(InfraError, match="cannot write .*/n: "), NightlyRuns(tmp_path / "n").alone():
        pass


# Texts of nightly runs: notices, pages, the summary and the annotations of GitHub.


HOSTILE = "<script>alert(1)</script>\"'\\ {{ 7 * 7 }} <!channel> \x1b[31m\u202e\r\nBcc: all@example.com"
NIGHT = msgspec.structs.replace(
    SAMPLE,
    user=HOSTILE,
    cells=tuple(
        msgspec.structs.replace(cell, new_failures=(JobNote(HOSTILE, HOSTILE),), problem=HOSTILE)
        for cell in SAMPLE.cells
    ),
)


def test_the_generic_template_is_all_of_the_nightly_run_as_json() -> None:
    answer = json.loads(render("json", "json", NIGHT))
    assert answer == context(NIGHT)
    assert answer["schema"] == 2
    assert (answer["verdict"], answer["exit_code"]) == ("failed", 1)
    assert [run["name"] for run in answer["runs"]] == ["smoke-htp", "smoke-gpu"]
    assert "\x1b" not in answer["new_failures"][0]["reason"]
    assert "\n" not in answer["new_failures"][0]["reason"]


def test_slack_gets_text_that_mentions_nobody() -> None:
    answer = json.loads(render("slack", "json", NIGHT))
    assert list(answer) == ["text"]
    assert "FAILED" in answer["text"]
    assert "<" not in answer["text"]
    assert "&lt;!channel&gt;" in answer["text"]
    assert "{{ 7 * 7 }}" in answer["text"], "what a device says is no template"


def test_mail_has_text_and_html_in_which_nothing_of_a_device_is_markup() -> None:
    text, html = render("", "text", NIGHT), render("", "html", NIGHT)
    assert "NEW FAILURES: 2" in text
    assert "\x1b" not in text
    assert "<script" not in html.lower()
    assert "&lt;script&gt;" in html
    table = MailTable(host="h", sender="farm@example.com", to=("a@example.com", "b@example.com"))
    made = mail_message(table, f"night\r\nBcc: all@example.com {HOSTILE}", text, html)
    sent = message_from_bytes(made.as_bytes())
    assert sent["Bcc"] is None
    assert sent["To"] == "a@example.com, b@example.com"
    assert [part.get_content_type() for part in sent.walk()] == ["multipart/alternative", "text/plain", "text/html"]
    assert "\n" not in subject(NIGHT)


def test_the_page_of_a_nightly_run_has_no_markup_of_a_device() -> None:
    page = render_nightly_run(NIGHT, [msgspec.structs.replace(SAMPLE, id="20260228-020000-000000")], "x/", "")
    assert "<script>alert" not in page
    assert 'href="x/smoke-htp.html"' in page
    assert 'href="20260228-020000-000000/index.html"' in page


def test_a_template_of_ones_own_is_tried_before_anything_runs(tmp_path: Path) -> None:
    def problems(text: str, form: str = "json") -> str:
        (tmp_path / "t.j2").write_text(text)
        try:
            render(str(tmp_path / "t.j2"), form, SAMPLE)
        except UsageError as error:
            return str(error)
        return ""

    assert problems('{"n": {{ nightly_run.new_failures | length }}, "who": {{ nightly_run.name | tojson }} }') == ""
    assert "does not give JSON" in problems('{"n": {{ nightly_run.name }} }')
    assert "has no attribute 'nam'" in problems("{{ nightly_run.nam.x | tojson }}")
    assert "line 2" in problems('{"n":\n{% if %}}')
    assert "t.j2" in problems("{{ 1 / 0 }}")
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ nightly_run.__class__.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ nightly_run.update({'x': 1}) }}",
        "{{ range(10 ** 9) | list }}",
    ):
        assert problems(attack, "text"), attack
    (tmp_path / "binary.j2").write_bytes(b"\xff")
    for name, problem in (("binary.j2", "UTF-8"), ("gone.j2", "No such file")):
        with pytest.raises(UsageError, match=problem):
            render(str(tmp_path / name), "text", SAMPLE)


MIB = 1024 * 1024


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


def test_a_single_run_is_summed_up_and_what_a_device_says_is_no_markdown() -> None:
    hostile = "a|b `x` <img src=x> [a](http://b) @all **b** \n# h\n| b | c |"
    job = JobView("s/c[SM8650-htp-8a8w]", "s", "c", "SM8650", "htp", "8a8w",
                  (Attempt("j", Verdict.FAILED, Stage.NUMERICS, hostile),), decisive_attempt=1)  # fmt: skip
    view = RunView(id="r", command="farm run", started_ms=1, finished_ms=2, exit_code=1, user="u", host="h",
                   fingerprint={}, devices=(), jobs=(job,))  # fmt: skip
    text = run_markdown(view)
    assert text.startswith("### farm run: failed\n")
    [row] = [line for line in text.splitlines() if "s/c" in line]
    assert row.startswith("| s/c&#91;SM8650&#45;htp&#45;8a8w&#93; | a&#124;b &#96;x&#96; &#60;img")
    assert row.count("|") == 3
    assert not set("`<>[]()@*\n").intersection(row)


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
