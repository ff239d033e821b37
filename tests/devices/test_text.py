from __future__ import annotations

from farm.devices.text import clean_text


def test_lines_stay_only_when_asked_for() -> None:
    assert clean_text(b" a\nb\r\nc \x00\xff") == "a␤b␤c ␀\N{REPLACEMENT CHARACTER}"
    assert clean_text(b"a\r\nb\tc", lines=True) == "a\nb\tc"


def test_length_is_bounded_in_characters() -> None:
    assert clean_text("\N{GRINNING FACE}".encode() * 1000, 7) == "\N{GRINNING FACE}" * 7
    assert clean_text("x" * 10**6) == "x" * 200
