"""What ExecuTorch writes of the DSP's heap -> numbers, and how much of it is there. Hostile: it comes from a device.

ExecuTorch 1.5 writes one line before the first context of a process is made and appends one after the last is freed:

    DSP:before_context_created (bytes), 928212
    DSP:after_context_freed (bytes), 928212
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.execution.raw import HEAP_FILE, HEAP_LIMIT
from farm.results.attempt import Direction, Measurement
from farm.results.measurements import counted
from farm.system.text import one_line, reason_line

if TYPE_CHECKING:
    from pathlib import Path

    from farm.execution.raw import RawResult
    from farm.results.runner_report import RunnerReport

_IDENTIFIERS = {b"DSP:before_context_created": "before", b"DSP:after_context_freed": "after"}
# The identifier may hold commas; what the number is stands behind the last one.
_LINE = re.compile(rb"([^\n]*?)[ \t]*\(([^()\n]*)\)[ \t]*,[ \t]*([0-9]{1,15})")
_UNIT = b"bytes"
# Several times what ExecuTorch writes: the pattern above takes the square of a line's length.
_LINE_BYTES = 200


class HeapState(StrEnum):
    """How much of the two numbers is there."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    ABSENT = "absent"
    MALFORMED = "malformed"


class DspHeap(msgspec.Struct, frozen=True):
    """The DSP's heap around one execution, in bytes."""

    state: HeapState
    before: int | None = None
    """In use before the first context of the process was made."""
    after: int | None = None
    """In use after its last context was freed: what it kept is the difference."""
    problem: str = ""
    """What is wrong, in one line; empty when complete."""

    @property
    def difference(self) -> int | None:
        """What stayed in use, may be negative; None unless both numbers are there."""
        return None if self.before is None or self.after is None else self.after - self.before


def parse_heap(data: bytes) -> DspHeap:
    """Return what `data` says. Never raises; a number is given only where exactly one line states it. Pure."""
    if len(data) > HEAP_LIMIT:
        return _malformed(f"has more than {HEAP_LIMIT} bytes")
    found: dict[str, list[int]] = {"before": [], "after": []}
    # ExecuTorch ends every line: what stands behind the last end was cut, and so is its number.
    *lines, cut = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        stripped = line.strip(b" \t\r")
        if not stripped:
            continue
        match = _LINE.fullmatch(stripped) if len(stripped) <= _LINE_BYTES else None
        name = _IDENTIFIERS.get(match[1]) if match else None
        if match and name and match[2] == _UNIT:
            found[name].append(int(match[3]))
        elif name or stripped.startswith(tuple(_IDENTIFIERS)):
            return _malformed(f"line {number} is {_shown(stripped)}, expected a number of bytes behind the last comma")
        elif not stripped.startswith(b"DSP:"):
            return _malformed(f"line {number} is {_shown(stripped)}, which says nothing of the DSP")
    return _both(found["before"], found["after"], cut=bool(cut.strip()))


def read_heap(folder: Path) -> DspHeap:
    """Return what the heap's file in `folder` says. Never raises."""
    try:
        with (folder / HEAP_FILE).open("rb") as file:
            return parse_heap(file.read(HEAP_LIMIT + 1))
    except FileNotFoundError:
        return DspHeap(HeapState.ABSENT, problem="the backend wrote no heap profile")
    except OSError as error:
        return _malformed(f"cannot be read: {error.strerror}")


def heap_measurements(raw: RawResult, report: RunnerReport | None) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return what a run for the heap measured, and notes on what is not there.

    Of the simulator, which has no DSP, that is the peak memory of the runner on this machine, under its own name.
    """
    if raw.simulated:
        note = "no DSP heap: the simulator has no DSP; host_peak_memory is that of the runner on this machine"
        peak = report.peak_memory_bytes if report is not None else None
        if peak is None:
            return (), (note,)
        return (Measurement("host_peak_memory", "bytes", Direction.LOWER, (float(peak),)),), (note,)
    heap = read_heap(raw.folder)
    values = {"before": heap.before, "after": heap.after, "difference": heap.difference}
    measured = tuple(counted(f"dsp_heap_{name}", value) for name, value in values.items() if value is not None)
    return measured, (reason_line(f"DSP heap: {heap.state}{f': {heap.problem}' if heap.problem else ''}"),)


def _both(before: list[int], after: list[int], *, cut: bool) -> DspHeap:
    values = {"before_context_created": before, "after_context_freed": after}
    if not before and not after:
        return _malformed("has neither of its two lines" + (", and ends in the middle of one" if cut else ""))
    problems = [f"{name} is missing" for name, stated in values.items() if not stated]
    problems += [f"{name} stands {len(stated)} times" for name, stated in values.items() if len(stated) > 1]
    problems += ["the last line is cut short"] if cut else []
    first, second = (stated[0] if len(stated) == 1 else None for stated in values.values())
    if first is not None and second is not None:
        return DspHeap(HeapState.COMPLETE, first, second)
    return DspHeap(HeapState.PARTIAL, first, second, " and ".join(problems))


def _malformed(problem: str) -> DspHeap:
    return DspHeap(HeapState.MALFORMED, problem=problem)


def _shown(line: bytes) -> str:
    return repr(one_line(line[:80].decode("utf-8", "replace"), 80))
