from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.base.text import (
    LOG_LIMIT,
    REASON_LIMIT,
    bounded_log,
    count_of,
    json_document,
    one_line,
    plain_json,
    reason_line,
    spelled,
    visible,
)

HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\u2066e\u200bf\U000e0041g\x7fh\u3164"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv2d[SM8650-htp-8a8w]", "conv2d[SM8650-htp-8a8w]"),
        ("größer ≥ 20 dB", "größer ≥ 20 dB"),
        ("a\x00b", "a␀b"),
        ("safe\u202etxt.exe", "safe\\u202etxt.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\x1b[1;31mred\x1b[0m\x1b]0;title\x07", "red"),
        ("lone \ud800", "lone \\ud800"),
        ("tab\tand\r\nline", "tab\tand\nline"),
        ("line\u2028separator", "line\\u2028separator"),
        ("tag \U000e0041", "tag \\U000e0041"),
    ],
)
def test_nothing_invisible_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_one_line_is_one_line_of_at_most_so_many_characters() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("abcdef", 4) == "abc…"
    assert one_line("abcd", 4) == "abcd"
    assert one_line("word " * 10**6, 13) == "word word wo…"
    assert spelled("\x1b[31mred\r\n\t") == "␛[31mred␍\n\t"


def test_json_says_the_same_in_other_letters() -> None:
    output = json_document({"name": HOSTILE, "größe": "≥ 20 dB 🙂", HOSTILE: [1.5]})
    assert b"gr\xc3\xb6\xc3\x9fe" in output
    assert b"\\udb40\\udc41" in output
    assert output.decode().replace("\n", "") == visible(output.decode()).replace("\n", "")
    assert json.loads(output) == {"name": HOSTILE, "größe": "≥ 20 dB 🙂", HOSTILE: [1.5]}
    assert plain_json(b'"a\x7f"') == rb'"a\u007f"'
    assert json.loads(json_document({"path": "a\udcffb"})) == {"path": "a?b"}


@given(st.text(alphabet=st.characters()))
def test_nothing_of_any_text_is_unseen(text: str) -> None:
    shown = visible(text)
    assert visible(shown) == shown
    shown.encode()
    if text == text.encode("utf-8", "replace").decode():
        escaped = plain_json(json.dumps(text, ensure_ascii=False).encode()).decode()
        assert visible(escaped) == escaped
        assert json.loads(escaped) == text


def test_a_count_is_one_of_ascii_digits_and_no_more_than_64_bits_hold() -> None:
    assert [count_of(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    assert {count_of(text) for text in ("", "-1", "1.0", " 1", "\u0663", "\u00b2", "9" * 19, "9" * 5000)} == {None}


def test_a_reason_is_one_visible_line_and_the_end_of_a_log_is_kept() -> None:
    assert reason_line("\x1b[31mload:\r\n\tno\0 such   file\u202e\n") == "load: no\N{SYMBOL FOR NULL} such file\\u202e"
    assert len(reason_line(f"{HOSTILE}\ud800\n" * 1000)) == REASON_LIMIT
    log = bounded_log("start\n" + "x" * LOG_LIMIT + "\nthe reason\x1b[0m\ud800")
    assert log.startswith("[")
    assert "characters left out]\n" in log
    assert log.endswith("\nthe reason\\ud800")
    assert bounded_log("a\nb\tc") == "a\nb\tc"
