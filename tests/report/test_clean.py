from __future__ import annotations

import math

import pytest

from farm.report import format as fmt
from farm.report.clean import cut_log, one_line, visible, xml_text


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
    visible(text).encode()


def test_one_line_is_one_line_of_at_most_so_many_characters() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("abcdef", 4) == "abc…"
    assert one_line("abcd", 4) == "abcd"


def test_xml_text_has_only_what_xml_allows() -> None:
    assert xml_text("a\x00\x0b\ud800\ufffeb\tc\n🙂") == "ab\tc\n🙂"


@pytest.mark.parametrize("limit", [0, 1, 10, 99, 100, 101])
def test_a_cut_log_says_how_much_is_missing(limit: int) -> None:
    text = "".join(chr(33 + i % 90) for i in range(100))
    head, cut, tail = cut_log(text, limit)
    assert len(head) + len(tail) <= max(limit, 100 if not cut else 0)
    assert len(head) + cut + len(tail) == 100
    assert text.startswith(head)
    assert text.endswith(tail)


def test_numbers_read_as_a_person_writes_them() -> None:
    assert fmt.count(1234567.0) == "1,234,567"
    assert [fmt.milliseconds(value) for value in (0.7312, 12.345, 234.56, 12345.6)] == [
        "0.731", "12.35", "234.6", "12,346",
    ]  # fmt: skip
    assert fmt.decibel(math.inf) == "∞"
    assert fmt.cosine(math.nan) == "NaN"
    assert {fmt.count(None), fmt.small(None), fmt.seconds(None)} == {fmt.NOTHING}
    assert fmt.quantity(7_310_000, "ns") == "7.310 ms"
    assert fmt.quantity(4096, "bytes") == "4,096 bytes"
    assert fmt.quantity(0.25, "1") == "0.25"
    assert [fmt.duration(value) for value in (0.44, 12.2, 185, 3725)] == ["0.4 s", "12 s", "3 min 05 s", "1 h 02 min"]


def test_times_are_local_and_name_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert fmt.clock(1_767_261_600_000) == "2026-01-01 11:00:00 CET (UTC+01:00)"
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()
        assert fmt.clock(1_767_261_600_000) == "2026-01-01 10:00:00 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert fmt.clock(10**18) == "unknown time"
