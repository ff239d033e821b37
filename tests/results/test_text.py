from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farm.base.text import LOG_LIMIT, REASON_LIMIT, bounded_log, one_line, reason_line

from .conftest import PATIENT


def test_a_reason_is_one_visible_line() -> None:
    assert reason_line("\x1b[31mload:\r\n\tno\0 such   file\u202e\n") == "load: no\N{SYMBOL FOR NULL} such file\\u202e"


@PATIENT
@given(st.text(max_size=2000, alphabet=st.characters()))
def test_any_text_is_bounded_and_can_be_stored(text: str) -> None:
    for shown in (reason_line(text), bounded_log(text, 100)):
        shown.encode()
        assert "\x1b" not in shown
    assert len(reason_line(text)) <= REASON_LIMIT
    assert "\n" not in reason_line(text)


def test_a_long_reason_says_that_it_is_cut() -> None:
    assert one_line("word " * 1000, limit=13) == "word word wo…"
    assert one_line("word word", limit=9) == "word word"


def test_the_end_of_a_log_is_kept() -> None:
    log = bounded_log("start\n" + "x" * LOG_LIMIT + "\nthe reason")
    assert log.startswith("[")
    assert "characters left out]\n" in log
    assert log.endswith("\nthe reason")
    assert bounded_log("a\nb\tc") == "a\nb\tc"
