from __future__ import annotations

import json
from email import message_from_bytes
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from farm.base.errors import UsageError
from farm.dispatch.nightly.plan import MailTable
from farm.dispatch.nightly.record import JobNote
from farm.dispatch.nightly.render import render_nightly_run
from farm.dispatch.nightly.templates import SAMPLE, check_template, context, render, subject
from farm.dispatch.notify.mail import message

HOSTILE = "<script>alert(1)</script>\"'\\ {{ 7 * 7 }} <!channel> \x1b[31m\u202e\r\nBcc: all@example.com"
NIGHT = msgspec.structs.replace(
    SAMPLE,
    user=HOSTILE,
    cells=tuple(
        msgspec.structs.replace(cell, new_failures=(JobNote(HOSTILE, HOSTILE),), problem=HOSTILE)
        for cell in SAMPLE.cells
    ),
)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.seen.add(tag)


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
    assert "script" not in Tags(html).seen
    assert "&lt;script&gt;" in html
    table = MailTable(host="h", sender="farm@example.com", to=("a@example.com", "b@example.com"))
    made = message(table, f"night\r\nBcc: all@example.com {HOSTILE}", text, html)
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
        return "; ".join(check_template(str(tmp_path / "t.j2"), form))

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
    (tmp_path / "t.j2").write_bytes(b"\xff")
    assert "UTF-8" in check_template(str(tmp_path / "t.j2"), "text")[0]
    with pytest.raises(UsageError, match="No such file"):
        render(str(tmp_path / "gone.j2"), "text", SAMPLE)
