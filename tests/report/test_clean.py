from __future__ import annotations

import math
import time

import pytest

from farm.report.formats.junit import xml_text
from farm.report.model import format as fmt
from farm.report.model.format import cut_log


def test_xml_text_has_only_what_xml_allows() -> None:
    assert xml_text("a\x00\x0b\ud800\ufffeb\tc\n🙂") == "ab\tc\n🙂"


def test_a_cut_log_says_how_much_is_missing() -> None:
    text = "".join(chr(33 + i % 90) for i in range(100))
    for limit in (0, 1, 10, 99, 100, 101):
        head, cut, tail = cut_log(text, limit)
        assert len(head) + len(tail) <= max(limit, 100 if not cut else 0)
        assert len(head) + cut + len(tail) == 100
        assert (text.startswith(head), text.endswith(tail)) == (True, True)


def test_numbers_read_as_a_person_writes_them() -> None:
    assert fmt.count(1234567.0) == "1,234,567"
    milliseconds = [fmt.milliseconds(value) for value in (0.7312, 12.345, 234.56, 12345.6)]
    assert milliseconds == ["0.731", "12.35", "234.6", "12,346"]
    assert (fmt.decibel(math.inf), fmt.cosine(math.nan)) == ("∞", "NaN")
    assert {fmt.count(None), fmt.small(None), fmt.seconds(None)} == {fmt.NOTHING}
    quantities = [fmt.quantity(*one) for one in ((7_310_000, "ns"), (4096, "bytes"), (0.25, "1"))]
    assert quantities == ["7.310 ms", "4,096 bytes", "0.25"]
    assert [fmt.duration(value) for value in (0.44, 12.2, 185, 3725)] == ["0.4 s", "12 s", "3 min 05 s", "1 h 02 min"]


def test_times_are_local_and_name_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for zone, text in (
            ("Europe/Berlin", "2026-01-01 11:00:00 CET (UTC+01:00)"),
            ("UTC", "2026-01-01 10:00:00 UTC"),
        ):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert fmt.clock(1_767_261_600_000) == text
    finally:
        monkeypatch.undo()
        time.tzset()
    assert fmt.clock(10**18) == "unknown time"
