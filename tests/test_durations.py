"""Times and ages as people write them."""

from __future__ import annotations

from farm.base.forms import age_in_seconds, in_seconds


def test_units_are_letters_or_words() -> None:
    written = {
        "90s": 90, "90 sec": 90, "10m": 600, "90min": 5400, "5 minutes": 300, "1h30m": 5400, "2 hours": 7200,
        "1.5hr": 5400, "2d": 172_800, "7days": 604_800, "1 week": 604_800,
    }  # fmt: skip
    assert {text: in_seconds(text) for text in written} == written
    wrong = ("", "90", "m", "1 month", "-5m", "5mm", "1h30", "0s", "31d")
    assert {in_seconds(text) for text in wrong} == {None}


def test_an_age_may_be_nothing_and_long() -> None:
    assert [age_in_seconds(text) for text in ("0d", "0 days", "90days", "0")] == [0, 0, 90 * 86400, None]
