from __future__ import annotations

import base64
import hashlib
import re
import stat
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from report_pages import in_full, unpacked

from farm.report.html.page_of_run import render_html, write_html
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import DeviceView, RunView

from .conftest import run_of

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """A page as a parser sees it: which elements there are, and whether they are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def example_html(example_run: RunView) -> str:
    return render_html(example_run)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(example_html: str) -> None:
    page = Page(example_html)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {(attrs["href"] or "")[1:] for attrs in page.all("a")}
    assert targets <= set(ids)
    assert {f"j{i}" for i in range(101)} <= set(ids)


def test_the_page_asks_for_nothing_from_outside(example_html: str) -> None:
    page = Page(example_html)
    for tag, attrs in page.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith(("#", "data:,"))
    assert "@import" not in example_html
    assert "url(" not in example_html


def test_the_policy_allows_exactly_the_inlined_style_and_scripts(example_html: str) -> None:
    page = Page(example_html)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    inlined = page.texts["style"] + [page.texts["script"][0], page.texts["script"][-1]]
    data = "application/octet-stream"
    assert [script.get("type") for script in page.all("script")] == [None, data, data, None]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inlined}
    assert hashes == set(re.findall(r"'sha256-([^']+)'", policy))


def test_the_page_says_what_a_reader_needs_first(example_html: str) -> None:
    page = Page(example_html)
    assert page.texts["h1"] == ["96 passed, 2 failed, 2 known issues, 1 infra - 3 of 101 jobs need attention"]
    assert page.texts["p"][1] == "2 failures, 1 job could not be judged and 1 job needed another attempt."
    assert [text.strip() for text in page.texts["h2"]] == [
        "Failures", "Known issues", "Infra trouble", "Notes", "Matrix", "Jobs", "Devices", "Fingerprint", "Keys",
    ]  # fmt: skip
    for text in (
        "a job failed", "2 min 23 s", "VIRTUAL DEVICES", "not comparable with hardware",
        # Every attempt of a job that was tried again.
        "push timed out after 10 s", "adb: error: failed to copy: timeout",
    ):  # fmt: skip
        assert text in example_html


def test_tables_are_accessible(example_html: str) -> None:
    page = Page(example_html)
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(th.get("scope") in {"col", "row", "colgroup", "rowgroup"} for th in page.all("th"))


def test_hardware_is_not_labelled_virtual() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", device="R5CT1")
    view = msgspec.structs.replace(run_of((attempt,)), devices=(DeviceView("R5CT1", "SM8650", "hardware", "b"),))
    html = render_html(view)
    assert "VIRTUAL" not in Page(html).texts.get("strong", []) and "virtual devices" not in html.lower()  # noqa: PT018
    assert 'class="tag virtual"' not in html


def test_a_baseline_on_the_cpu_is_not_told_to_come_from_a_simulator() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", device="virtual-SM8650-0")
    view = run_of((attempt,))
    jobs = tuple(
        msgspec.structs.replace(job, backend="xnnpack", precision="fp32", fallback_ops={"aten.sort.default": 1})
        for job in view.jobs
    )
    html = unescape(in_full(render_html(msgspec.structs.replace(view, jobs=jobs))))
    assert "Everything ran on the host's processor" in html
    assert "Latency and load time on VIRTUAL devices are time of the host's processor" in html
    assert "Not delegated" in html
    for wrong in ("HTP simulator", "of a simulator", "On the CPU", "CPU fallback"):
        assert wrong not in html
        assert wrong in in_full(render_html(view)) or wrong == "On the CPU"
    assert "latency is time of the host's processor" in render_summary(msgspec.structs.replace(view, jobs=jobs), 120)


def test_unfinished_and_empty_runs_are_pages_too() -> None:
    html = render_html(run_of((), finished_ms=None, exit_code=None))
    for text in ("<strong>Unfinished.</strong>", "the run has not finished", "1 not run yet"):
        assert text in html
    html = render_html(msgspec.structs.replace(run_of(exit_code=5), devices=(), fingerprint={}))
    assert Page(html).texts["h1"] == ["no job was selected"]
    assert "nothing was selected" in html


def test_hostile_text_is_text(hostile_run: RunView) -> None:
    html = render_html(hostile_run)
    html.encode()
    page = Page(html)
    assert [script.get("type") for script in page.all("script")] == [None, "application/octet-stream", None]
    assert page.all("img") == []
    for packed in unpacked(html).values():
        assert {"script", "img"}.isdisjoint(tag for tag, _ in Page(packed).tags)
        assert "&lt;script&gt;window.pwned=1" in packed
    assert not any("pwned" in text for text in page.texts["script"])
    assert "<script>window.pwned=3</script>" in "".join(page.texts["pre"])
    assert "{{ 7*7 }}" in html
    html = in_full(html)
    for hidden in ("\x00", "\x1b", "\x07", "\u202e", "\u2066", "\u200b", "\u2028"):
        assert hidden not in html
    assert "\\u202eevil" in html


def test_writing_replaces_the_file_or_leaves_the_old_one(example_run: RunView, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.html"
    write_html(example_run, path)
    path.write_text("old", encoding="utf-8")
    write_html(example_run, path)
    assert path.read_text(encoding="utf-8") == render_html(example_run)
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400
    taken = tmp_path / "taken" / "report.html"
    (taken / "kept").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_html(example_run, taken)
    assert [one.name for one in taken.parent.iterdir()] == ["report.html"]
