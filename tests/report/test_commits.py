"""Toolchain of a run on pages and in the terminal, with links to web addresses alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.commits import commit_link, range_link, toolchain_text
from farm.report.model.diff import diff_runs
from farm.report.terminal.diff import diff_lines
from farm.report.terminal.run import render_summary
from farm.store.view import RunCommit, RunToolchain, RunView

from .conftest import make_run

OLD, NEW = "a" * 40, "b" * 40
URL = "https://github.com/pytorch/executorch/commit/{commit}"
MAIN = RunToolchain(
    "main", "main", commit=NEW, git_branch="main", subject="Fix <b>pad</b>", before=OLD,
    since=(RunCommit(NEW, "Fix <b>pad</b>"), RunCommit("c" * 40, "Add \x1b[31msoftmax")), more=3, commit_url=URL,
)  # fmt: skip


def run_view(**toolchain: Any) -> RunView:
    """Return a run without jobs, with changes of its toolchain."""
    return make_run((), (), toolchain=msgspec.structs.replace(MAIN, **toolchain))


@pytest.mark.parametrize(
    "template",
    [
        "", "https://example.org/", "javascript:alert('{commit}')", "JAVASCRIPT://x/%0aalert('{commit}')",
        "data:text/html,{commit}", "file:///etc/{commit}", "//example.org/{commit}", "https:///{commit}",
        "https://exa mple.org/{commit}", "https://[bad/{commit}", "https://ada:secret@example.org/{commit}",
        "https://example.org\\@evil.example/{commit}", "https://example.org/\u202e{commit}",
    ],
)  # fmt: skip
def test_only_a_web_address_is_a_link(template: str) -> None:
    assert commit_link(template, NEW) == ""
    page = render_html(run_view(commit_url=template))
    assert 'rel="noreferrer"' not in page
    assert NEW[:10] in page


def test_a_commit_is_a_hash() -> None:
    assert commit_link(URL, NEW) == f"https://github.com/pytorch/executorch/commit/{NEW}"
    assert commit_link(URL, '"><script>') == ""
    assert commit_link(URL, "../../login") == ""
    assert range_link(URL, OLD, NEW) == f"https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"
    assert range_link(URL, NEW, NEW) == range_link(URL, "", NEW) == ""
    assert range_link("https://git.example/?c={commit}", OLD, NEW) == ""


def test_the_page_of_a_run_names_its_commit_and_those_since_the_line_s_run_before() -> None:
    page = render_html(run_view())
    for text in (
        f'<a href="https://github.com/pytorch/executorch/commit/{NEW}"',
        f'<a href="https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"',
        "5 new commits since the previous run of its branch", "Fix &lt;b&gt;pad&lt;/b&gt;",
    ):  # fmt: skip
        assert text in page
    for text in ("<b>pad", "\x1b", "PRIVATE"):
        assert text not in page
    page = render_html(run_view(private=True, dirty=True, branch="release", git_branch="fix/pad"))
    for text in (
        "PRIVATE", "Compared with branch release and not part of its history", "<strong>dirty</strong>", "on fix/pad",
    ):  # fmt: skip
        assert text in page


def test_the_terminal_and_json_say_it_and_a_run_without_a_known_toolchain_says_nothing() -> None:
    view = run_view()
    shown = " ".join(render_summary(view, 100).split())
    assert "main, commit bbbbbbbbbb on branch main: Fix <b>pad</b>" in shown
    assert "5 new commits since the previous run of its branch" in shown
    assert parse_json(render_json(view)).toolchain == MAIN
    plain = msgspec.structs.replace(view, toolchain=msgspec.UNSET)
    assert "toolchain" not in msgspec.json.decode(render_json(plain))
    assert "Toolchain" not in render_html(plain)
    assert toolchain_text(plain.toolchain) == ""


def test_two_runs_lead_to_the_commits_between_them() -> None:
    before, after = run_view(commit=OLD), run_view()
    diff = diff_runs(before, after)
    assert diff.commits_url == f"https://github.com/pytorch/executorch/compare/{OLD}...{NEW}"
    assert diff_lines(diff, 5, 60)[-1] == f"commits: {diff.commits_url}"
    assert not diff_runs(before, before).commits_url
