"""ExecuTorch's file about the DSP's heap -> numbers, and a verdict. Hostile: it comes from a device.

ExecuTorch 1.5 writes one line before the first context of a process is made and appends one after the last is freed:

    DSP:before_context_created (bytes), 928212
    DSP:after_context_freed (bytes), 928212
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from farm.base.text import one_line, reason_line
from farm.devices.execution.raw import HEAP_FILE, HEAP_LIMIT, RawResult, heap_folders
from farm.results.attempt import Attempt, Cause, Ending, Measurement, Stage, Verdict, failed, infra
from farm.results.measurements import counted
from farm.suites.suite import Expectation, Job

_IDENTIFIERS = {b"DSP:before_context_created": "before", b"DSP:after_context_freed": "after"}
# The identifier may contain commas; the unit of the number follows the last one.
_LINE = re.compile(rb"([^\n]*?)[ \t]*\(([^()\n]*)\)[ \t]*,[ \t]*([0-9]{1,15})")
_UNIT = b"bytes"
_NO_FILE = (
    "ExecuTorch wrote no profile of it; it does on Android and QNX, for HTP programs that were compiled ahead of time"
)
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
    """Bytes in use after its last context was freed; the difference is the kept heap."""
    problem: str = ""
    """Problem in one line; empty if complete."""

    @property
    def difference(self) -> int | None:
        """Bytes that stayed in use, may be negative; None unless both numbers are known."""
        return None if self.before is None or self.after is None else self.after - self.before


def parse_heap(data: bytes) -> DspHeap:
    """Return the heap numbers in `data`. Never raises; a number needs exactly one line that states it. Pure."""
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
            return _malformed(f"line {number} is {_shown(stripped)}, which is not about the DSP")
    return _both(found["before"], found["after"], cut=bool(cut.strip()))


def read_heap(folder: Path) -> DspHeap:
    """Return the numbers of the heap file in `folder`. Never raises."""
    try:
        with (folder / HEAP_FILE).open("rb") as file:
            return parse_heap(file.read(HEAP_LIMIT + 1))
    except FileNotFoundError:
        return DspHeap(HeapState.ABSENT, problem=_NO_FILE)
    except OSError as error:
        return _malformed(f"cannot be read: {error.strerror}")


def read_heaps(raw: RawResult) -> tuple[DspHeap, ...]:
    """Return the heap around each process of an execution, in their order. Never raises."""
    return tuple(read_heap(folder) for folder in heap_folders(raw.folder))


def heap_measurements(heaps: Sequence[DspHeap]) -> tuple[Measurement, ...]:
    """Return the numbers that were found, a sample a process."""
    found = {
        "dsp_heap_before": [heap.before for heap in heaps],
        "dsp_heap_after": [heap.after for heap in heaps],
        "dsp_heap_difference": [heap.difference for heap in heaps],
    }
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    return tuple(counted(name, *values) for name, values in known.items() if values)


def judge_heap(heaps: Sequence[DspHeap], expected: Expectation | None, *, simulated: bool) -> Ending | None:
    """Return how a program ended that passed otherwise; None where both numbers are there and within the limits.

    The median of several processes decides. A heap that was not measured is no fault of the device or of the program.
    """
    for heap in heaps:
        if heap.state is HeapState.ABSENT:
            why = "the simulator has no DSP" if simulated else heap.problem
            return Ending(Verdict.SKIPPED, Stage.PULL, f"no DSP heap: {why}", cause=Cause.REQUEST)
        if heap.state is HeapState.MALFORMED:
            return infra(Stage.PULL, _state_text(heap), Cause.REQUEST)
        if heap.state is HeapState.PARTIAL:
            return failed(Stage.EXECUTE, _state_text(heap), Cause.NONE)
    problem = _limit_problem(heaps, expected)
    return failed(Stage.EXECUTE, f"DSP heap: {problem}", Cause.NONE) if problem else None


def heap_note(heaps: Sequence[DspHeap]) -> str:
    """Return in one line how much of the numbers is there."""
    worst = next((heap for heap in heaps if heap.problem), heaps[0])
    return _state_text(worst)


def unmeasured(job: Job, bundle_key: str, device: str, reason: str) -> Attempt:
    """Return the attempt of a job that was not executed, as `device` has no heap to measure for a `reason`."""
    return Attempt(
        job.id, Verdict.SKIPPED, Stage.EXECUTE, reason, device=device, bundle_key=bundle_key, cause=Cause.REQUEST
    )


def no_heap(attempt: Attempt) -> str:
    """Return the reason of an attempt for which there was no heap to measure, "" for any other attempt."""
    return attempt.reason if (attempt.verdict, attempt.cause) == (Verdict.SKIPPED, Cause.REQUEST) else ""


def _limit_problem(heaps: Sequence[DspHeap], expected: Expectation | None) -> str:
    """Return the first limit that complete `heaps` break; "" where they break none."""
    after = int(statistics.median(heap.after or 0 for heap in heaps))
    kept = int(statistics.median(heap.difference or 0 for heap in heaps))
    if kept < 0:
        # As the test of upstream demands.
        return f"{-kept:,} bytes less after the last context than before the first: something else freed them"
    most = expected.most_dsp_heap_bytes if expected is not None else None
    if most is not None and after > most:
        return f"{after:,} bytes in use after the last context, expected {most:,} or less"
    most = expected.most_dsp_heap_kept_bytes if expected is not None else None
    return f"{kept:,} bytes kept, expected {most:,} or less" if most is not None and kept > most else ""


def _state_text(heap: DspHeap) -> str:
    return reason_line(f"DSP heap: {heap.state}{f': {heap.problem}' if heap.problem else ''}")


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
