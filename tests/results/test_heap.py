"""Heap of the DSP: files of a device, read as untrusted input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from farm.devices.execution.raw import HEAP_FILE, HEAP_LIMIT
from farm.results.heap import HeapState, parse_heap, read_heap

BEFORE = b"DSP:before_context_created (bytes), 928212\n"
AFTER = b"DSP:after_context_freed (bytes), 930000\n"


@pytest.mark.parametrize(
    ("data", "state", "before", "after", "problem"),
    [
        (BEFORE + AFTER, "complete", 928212, 930000, ""),
        (AFTER + b"\r\n\n" + BEFORE, "complete", 928212, 930000, ""),
        (BEFORE + AFTER + b"DSP:", "complete", 928212, 930000, ""),
        (BEFORE, "partial", 928212, None, "after_context_freed is missing"),
        (AFTER, "partial", None, 930000, "before_context_created is missing"),
        (BEFORE + AFTER + AFTER, "partial", 928212, None, "after_context_freed stands 2 times"),
        (BEFORE + BEFORE, "partial", None, None, "stands 2 times"),
        (BEFORE + b"DSP:peak (bytes), 5\n" + AFTER, "complete", 928212, 930000, ""),
        (b"", "malformed", None, None, "neither"),
        (b"DSP:peak (bytes), 5\n", "malformed", None, None, "neither"),
        (BEFORE.replace(b"bytes", b"kilobytes") + AFTER, "malformed", None, None, "line 1 is"),
        (BEFORE + b"DSP:after_context_freed (bytes), -4\n", "malformed", None, None, "line 2 is"),
        (BEFORE + b"DSP:after_context_freed (bytes)\n", "malformed", None, None, "behind the last comma"),
        (BEFORE + b"DSP:after_context_freed (bytes), 99999999999999999999\n", "malformed", None, None, "line 2"),
        (BEFORE + b"DSP:after_context_freed (bytes), 12, 13\n", "malformed", None, None, "line 2"),
        (BEFORE[:-3], "malformed", None, None, "ends in the middle of one"),
        (BEFORE + AFTER[:-3], "partial", 928212, None, "after_context_freed is missing and the last line is cut short"),
        (b"\x1b[31mhello\n", "malformed", None, None, "not about the DSP"),
        (b"DSP:x" + b" " * 60_000 + b"x\n" + BEFORE + AFTER, "complete", 928212, 930000, ""),
        (BEFORE * 2000, "malformed", None, None, f"more than {HEAP_LIMIT} bytes"),
    ],
)
def test_a_number_is_one_that_exactly_one_line_states(
    data: bytes, state: str, before: int | None, after: int | None, problem: str
) -> None:
    heap = parse_heap(data)
    assert (heap.state, heap.before, heap.after) == (state, before, after)
    assert heap.difference == (after - before if after and before else None)
    assert problem in heap.problem
    assert bool(heap.problem) == (state != "complete")
    assert "\x1b" not in heap.problem


def test_no_file_is_absent_and_a_folder_is_no_file(tmp_path: Path) -> None:
    assert read_heap(tmp_path).state is HeapState.ABSENT
    (tmp_path / HEAP_FILE).mkdir()
    assert read_heap(tmp_path).state is HeapState.MALFORMED


# Pieces of files, by the bytes that hypothesis draws: it draws strings of bytes fastest.
_PIECES = [
    b"DSP:", b"before_context_created", b"after_context_freed", b" (bytes)", b" (cycles)", b",", b", ", b"\n",
    b"\r\n", b"928212", b"0", b"-1", b"9" * 30, b"\xd9\xa5", b"\x00", BEFORE, AFTER, BEFORE[:20], AFTER[:-2],
    BEFORE[:-7], AFTER[:-7], b"1\n", b"5" * 15 + b"\n", b"DSP:peak (bytes), 5\n", b" ", b"\t",
]  # fmt: skip
# A draw costs many times the check of a file, so that each draw makes several files.
_MOST_PIECES, _FILES = 10, 8


def _file(drawn: bytes) -> bytes:
    """Make a file of as many pieces as the first byte states."""
    return b"".join(
        _PIECES[byte] if byte < len(_PIECES) else _PIECES[byte % 2 + 15] if byte < 160 else bytes([byte])
        for byte in drawn[1 : 1 + drawn[0] % (_MOST_PIECES + 1)]
    )


_size = _FILES * (1 + _MOST_PIECES)
_files = st.binary(min_size=_size, max_size=_size).map(
    lambda drawn: [_file(drawn[start : start + 1 + _MOST_PIECES]) for start in range(0, _size, 1 + _MOST_PIECES)]
)


@settings(max_examples=3_000 // _FILES, deadline=None, suppress_health_check=list(HealthCheck))
@example([BEFORE + AFTER])
@given(_files)
def test_no_file_crashes_it_or_makes_it_tell_a_number_that_is_not_there(files: list[bytes]) -> None:
    for data in files:
        _require_true(data)


def _require_true(data: bytes) -> None:
    heap = parse_heap(data)
    for identifier, value in ((b"DSP:before_context_created", heap.before), (b"DSP:after_context_freed", heap.after)):
        if value is None:
            continue
        stated = [line.strip() for line in data.split(b"\n")[:-1] if line.strip(b" \t\r").startswith(identifier)]
        assert len(stated) == 1
        assert stated[0].rpartition(b",")[2].strip().lstrip(b"0") in (str(value).encode(), b"")
        assert b"(bytes)" in stated[0]
    complete = heap.before is not None and heap.after is not None
    assert (heap.state is HeapState.COMPLETE) == complete
    assert (heap.difference is None) == (not complete)
    assert bool(heap.problem) == (heap.state is not HeapState.COMPLETE)
