"""Toolchain of a run on pages and in the terminal, with links to web addresses alone."""

from __future__ import annotations

import msgspec
import pytest

from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.commits import commit_link, range_link, toolchain_text
from farm.report.model.diff import diff_runs
from farm.report.terminal.diff import diff_lines
from farm.report.terminal.run import render_summary
from farm.store.view import RunCommit, RunToolchain, RunView

OLD, NEW = "a" * 40, "b" * 40
URL = "https://github.com/pytorch/executorch/commit/{commit}"
MAIN = RunToolchain(
    "main", "main", commit=NEW, git_branch="main", subject="Fix <b>pad</b>", before=OLD,
    since=(RunCommit(NEW, "Fix <b>pad</b>"), RunCommit("c" * 40, "Add \x1b[31msoftmax")), more=3, commit_url=URL,
)  # fmt: skip


def run_view() -> RunView:
    """A run without jobs."""
    return RunView(
        "20261121-014501-4f7a12", "farm run", 1_790_000_000_000, 1_790_000_060_000, 0, "ada", "bench",
        {"executorch": "1.5.1", "device_kind": "virtual"}, (), (),
    )  # fmt: skip


@pytest.mark.parametrize(
    "template",
    [
        "",
        "https://example.org/",
        "javascript:alert('{commit}')",
        "JAVASCRIPT://x/%0aalert('{commit}')",
        "data:text/html,{commit}",
        "file:///etc/{commit}",
        "//example.org/{commit}",
        "https:///{commit}",
        "https://exa mple.org/{commit}",
        "https://[bad/{commit}",
        "https://ada:secret@example.org/{commit}",
        "https://example.org\\@evil.example/{commit}",
        "https://example.org/\u202e{commit}",
    ],
)
def test_only_a_web_address_is_a_link(template: str) -> None:
    assert commit_link(template, NEW) == ""
    page = render_html(
        msgspec.structs.replace(run_view(), toolchain=msgspec.structs.replace(MAIN, commit_url=template))
    )
    assert 'rel="noreferrer"' not in page
    assert NEW[:10] in page


def test_a_page_names_both_the_branch_and_the_branch_of_git() -> None:
    page = render_html(
        msgspec.structs.replace(
            run_view(), toolchain=msgspec.structs.replace(MAIN, branch="release", git_branch="fix/pad")
        )
    )
    assert "(branch release)" in page
    assert "on fix/pad" in page


def test_a_commit_is_a_hash() -> None:
    assert commit_link(URL, NEW) == f"https://github.com/pytorch/executorch/commit/{NEW}"
    assert commit_link(URL, '"><script>') == ""
    assert commit_link(URL, "../../login") == ""
    assert range_link(URL, OLD, NEW) == f"https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"
    assert range_link(URL, NEW, NEW) == range_link(URL, "", NEW) == ""
    assert range_link("https://git.example/?c={commit}", OLD, NEW) == ""


def test_the_page_of_a_run_names_its_commit_and_those_since_the_line_s_run_before() -> None:
    page = render_html(msgspec.structs.replace(run_view(), toolchain=MAIN))
    assert f'<a href="https://github.com/pytorch/executorch/commit/{NEW}"' in page
    assert f'<a href="https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"' in page
    assert "5 new commits since the previous run of its branch" in page
    assert "Fix &lt;b&gt;pad&lt;/b&gt;" in page
    assert "<b>pad" not in page
    assert "\x1b" not in page
    assert "PRIVATE" not in page
    mine = msgspec.structs.replace(MAIN, private=True, dirty=True)
    page = render_html(msgspec.structs.replace(run_view(), toolchain=mine))
    assert "PRIVATE" in page
    assert "Compared with branch main and not part of its history" in page
    assert "<strong>dirty</strong>" in page


def test_the_terminal_and_json_say_it_and_a_run_of_which_nothing_is_known_is_as_ever() -> None:
    view = msgspec.structs.replace(run_view(), toolchain=MAIN)
    shown = " ".join(render_summary(view, 100).split())
    assert "main, commit bbbbbbbbbb on branch main: Fix <b>pad</b>" in shown
    assert "5 new commits since the previous run of its branch" in shown
    assert parse_json(render_json(view)).toolchain == MAIN
    plain = run_view()
    assert "toolchain" not in msgspec.json.decode(render_json(plain))
    assert "Toolchain" not in render_html(plain)
    assert toolchain_text(plain.toolchain) == ""


def test_two_runs_lead_to_the_commits_between_them() -> None:
    before = msgspec.structs.replace(run_view(), toolchain=msgspec.structs.replace(MAIN, commit=OLD))
    after = msgspec.structs.replace(run_view(), toolchain=MAIN)
    diff = diff_runs(before, after)
    assert diff.commits_url == f"https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"
    assert diff_lines(diff, 5, 60)[-1] == f"commits: {diff.commits_url}"
    assert not diff_runs(before, before).commits_url
