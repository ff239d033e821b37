from __future__ import annotations

from farm.devices.text import clean_text


def test_lines_stay_only_when_asked_for_and_length_is_bounded() -> None:
    assert clean_text(b" a\nb\r\nc \x00\xff") == "a␤b␤c ␀\N{REPLACEMENT CHARACTER}"
    assert clean_text(b"a\r\nb\tc", lines=True) == "a\nb\tc"
    assert clean_text("\N{GRINNING FACE}".encode() * 1000, 7) == "\N{GRINNING FACE}" * 7
