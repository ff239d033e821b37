"""The same comparison for a terminal, a browser, a program and GitHub."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from compare.made import HOSTILE, everything, job, moved, passed, report, side

from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.numbers.compare.compare import require_no_lone_stub
from farm.report.formats.compare import compare_commands, compare_json, compare_markdown
from farm.report.formats.github import add_summary
from farm.report.formats.review import NEW, NOT_YOURS, REGRESSED, compare_review
from farm.report.html.compare import render_compare
from farm.report.model.compare import CompareSide
from farm.report.model.compare_totals import turns_text
from farm.report.terminal.compare import compare_lines


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [str(found["href"])] if tag == "a" else []
        self.scripts += tag == "script"


def test_terminal_has_what_needs_a_look_first_in_eighty_columns() -> None:
    lines = compare_lines(everything(), limit=20)
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    titles = [line for line in lines if line.isupper() or line.partition(":")[0].isupper()]
    order = ["NEWLY FAILING: 1", "WORSE: 1", "NOT COMPARED: 1", "NEWLY PASSING: 1", "BETTER: 1", "FAILING ON BOTH: 1"]
    assert [line for line in titles if line in order] == order
    assert "B: here: executorch 1.5.1, torch 2.13.0, qnn v2.51, commit 1a2b3c1a2b3c with" in lines
    assert "1 of 8 programs are the same" in lines
    # Columns of the overview stand below each other.
    head = next(line for line in lines if line.split() == ["A", "B", "change"])
    assert next(line for line in lines if line.startswith("partitions"))[head.index("A")] == "5"


def test_jobs_that_are_run_in_turns_are_told_with_what_differs() -> None:
    runners = "the runners or QNN libraries"
    for counts, text in {
        (1, 1, 1): "the program of 1 job is the same, the runners or QNN libraries differ: running it in turns",
        (8, 8, 8): "the programs of 8 jobs are the same, the runners or QNN libraries differ: running them in turns",
        (8, 8, 6): "2 of 8 programs differ, and so do the runners or QNN libraries: running them in turns",
        (2, 8, 0): "2 of 8 jobs differ: running them in turns",
        (1, 1, 0): "1 of 1 job differs: running it in turns",
    }.items():
        assert turns_text(*counts, runners) == text


def test_page_says_it_all_once_and_escapes_it() -> None:
    page = render_compare(everything())
    tags = Tags(page)
    assert tags.scripts == 2  # our own
    assert "&lt;script&gt;alert(1)" in page
    assert len(tags.ids) == len(set(tags.ids))
    assert {"newly_failing", "worse", "not_compared", "newly_passing", "better", "failing"} <= set(tags.ids)
    assert {link[1:] for link in tags.links if link.startswith("#")} <= set(tags.ids)
    assert "✗ B is worse" in page


def test_page_of_what_is_special() -> None:
    same, left_out, infra = (
        job(side("p"), side("p")),
        job(side("p"), side("q"), left_out="interrupted"),
        job(passed(), side(None, "infra", "gone")),
    )
    for one, word in (
        (report(same), "✓ B is not worse"),
        (report(left_out, interrupted=True), "… interrupted"),
        (report(infra), '<header class="top infra">'),
        (report(infra), "△ not every job was compared"),
        (report(same, kind="", devices=()), "Programs alone."),
        (report(), "No job was compiled on both sides."),
    ):
        assert word in render_compare(one)
    assert compare_markdown(report(same)).startswith("### farm perf compare: B is not worse\n")


def test_every_form_of_a_comparison_over_a_stub_has_the_label() -> None:
    usual = report(job(passed(), passed("q"), moved()))
    stub = msgspec.structs.replace(
        usual,
        sides=tuple(msgspec.structs.replace(one, facts={**one.facts, "qnn_product": "stub"}) for one in usual.sides),
    )
    assert "<strong>STUB.</strong>" in render_compare(stub)
    assert "STUB: " in "\n".join(compare_lines(stub, 10))
    assert "STUB: " in compare_markdown(stub)
    for text in (render_compare(usual), "\n".join(compare_lines(usual, 10)), compare_markdown(usual)):
        assert "stub" not in text.lower()


@pytest.mark.parametrize(("products", "label"), [(("stub", ""), "A"), (("QAIRT", "stub"), "B")])
def test_a_stub_is_not_compared_with_qualcomms_libraries(products: tuple[str, str], label: str) -> None:
    def tools(product: str) -> Toolchain:
        return Toolchain({"qnn": "2.51"}, Compiler("", {}), "runner", qnn_product=product)

    with pytest.raises(UsageError, match=rf"side {label} has a stub of QNN \(stub\).*--programs-only"):
        require_no_lone_stub([tools(product) for product in products])
    for product in ("", "QAIRT", "stub"):
        require_no_lone_stub([tools(product), tools(product)])


def test_json_has_the_findings_and_every_number() -> None:
    data = json.loads(compare_json(everything()))
    assert (data["schema"], data["worse"], data["same_programs"]) == (1, True, 1)
    assert data["groups"]["newly_failing"] == 1
    assert [one["group"] for one in data["jobs"]][:2] == ["newly_failing", "worse"]
    assert data["jobs"][1]["metrics"][0]["answer"] == "worse"
    assert data["jobs"][1]["fallback_changes"] == {HOSTILE: [0, 2]}


def test_github_gets_a_summary_and_an_annotation_for_each_job_that_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    add_summary(lambda: compare_markdown(everything()))
    text = (tmp_path / "summary").read_text()
    assert text.startswith("### farm perf compare: B is worse")
    assert "#### Newly failing: 1" in text
    assert "<script>" not in text
    assert "](http" not in text
    commands = compare_commands(everything())
    assert [line.partition("::")[2].partition(" ")[0] for line in commands] == ["error", "error"]


def test_the_review_of_a_pull_request_proves_what_is_not_its_fault() -> None:
    review = compare_review(everything())
    assert review.state == "failed"
    assert review.sections[NEW]
    assert any("%" in what for _, what in review.sections[REGRESSED])
    proofs = [proof for _, proof in review.sections[NOT_YOURS]]
    assert any(proof.startswith("the base fails too: ") for proof in proofs)
    assert "not compared: no device was left" in proofs
    newer = CompareSide(label="B", name="b", facts={"torch": "2.14.1"})
    older = CompareSide(label="A", name="a", facts={"torch": "2.13.0"})
    assert "torch changed as well: 2.13.0 -> 2.14.1" in compare_review(report(sides=(older, newer))).facts
    assert compare_review(report()).state == "passed"
