"""What QNN and FastRPC print of troubles that are known -> what they are, and what to do, as part of a reason. Pure.

The lines are those of QNN 2.51's libQnnHtp.so and of ExecuTorch's issues; most are in the known issues of its QNN
backend (`.wiki/backends/qnn/known-issues.md`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.results.attempt import Attempt, Ending, Verdict, infra
from farm.system.text import reason_line

if TYPE_CHECKING:
    from collections.abc import Iterable

_SPLIT = "divide it into more contexts, or make its weights smaller"


class Trouble(NamedTuple):
    """One that is known."""

    text: str
    """What it is, and what to do: part of a reason."""
    of_runtime: bool = False
    """The files beside the program are to blame, or where they lie: never the program."""


class _TroubleWords(NamedTuple):
    pattern: re.Pattern[str]
    text: str
    """With names for the groups of the pattern."""
    of_runtime: bool = False


# Every repetition is bounded: a log is as long as a hostile device wants.
_KNOWN = (
    _TroubleWords(
        re.compile(
            r"(?:Stub|Skel) lib id mismatch: (?:devKey=\{[\w= ]{1,60}\} )?"
            r"expected \((?P<wanted>[\w.-]{1,60})\), detected \((?P<found>[\w.-]{1,60})\)"
        ),
        "stub and skel are of two QNN SDKs (expected {wanted}, found {found}): take all libraries from one SDK, and "
        "look for another skel on the device that the system finds first (executorch #8762)",
        of_runtime=True,
    ),
    _TroubleWords(
        re.compile(r"Unable to load Skel Library|Failed to load skel, error|Unable to load Remote symbols 1008"),
        "the DSP does not load the skel: it is not in ADSP_LIBRARY_PATH, is for another Hexagon, or has to be signed "
        "(executorch #8762)",
        of_runtime=True,
    ),
    _TroubleWords(
        re.compile(r"Using newer context binary on old SDK"),
        "the program was compiled with a newer QNN than the runtime is of, and only the same or a newer one runs it: "
        "take another runtime, as with --toolchain, or compile the program with an older QNN",
    ),
    _TroubleWords(
        re.compile(r"requires estimated allocation of (?P<size>\d{1,15}) KB, limit is (?P<limit>\d{1,15}) KB"),
        "a context of {size:,} KB is larger than the {limit:,} KB that the DSP, which addresses 4 GB, has for one: "
        f"{_SPLIT}",
    ),
    _TroubleWords(
        re.compile(r"Cannot map larger than 4GB|Size should be <= 4GB|exceeds 4GiB|(?i:spill[ /]fill) >= 4GB"),
        f"a context is larger than the 4 GB that the DSP addresses: {_SPLIT}",
    ),
    _TroubleWords(
        re.compile(r"Failed to find available PD for context"),
        "no process domain of the DSP has room for one more context: make fewer or smaller ones (executorch #14985)",
    ),
    _TroubleWords(
        re.compile(
            r"SMMU fastrpc mmap error|SMMU mapping of .{1,60} failed|Could not SMMU map|Unable to map fd \d{1,10} len|"
            r"Failed to map weights buffer|fastrpc memory map for fd: \d{1,10} with length: \d{1,15} failed|"
            r"Context create from binary failed .{1,80}err 1002"
        ),
        "the DSP's SMMU cannot map the weights of a context (QNN error 1002), which devices do up to some hundred MB: "
        f"{_SPLIT} (executorch #18862)",
    ),
)
"""What comes first is the cause of what comes after it."""


def known_trouble(log: str) -> Trouble | None:
    """Return the trouble that `log` tells of, if it is known; of several the one that causes the others."""
    for known in _KNOWN:
        if found := known.pattern.search(log):
            groups = {name: int(text) if text.isdecimal() else text for name, text in found.groupdict().items()}
            return Trouble(known.text.format(**groups), known.of_runtime)
    return None


def explain_ending(ending: Ending, log: str) -> Ending:
    """Return an ending that is none of success, with the known trouble that the runner's own log tells of.

    Of a runtime that does not fit together the farm is to blame.
    """
    trouble = known_trouble(log)
    if trouble is None:
        return ending
    reason = reason_line(f"{ending.reason}; {trouble.text}")
    if trouble.of_runtime and ending.verdict is Verdict.FAILED:
        return ending.ended_as(infra(ending.stage, reason))
    return msgspec.structs.replace(ending, reason=reason)


def explain_by_logs(attempt: Attempt, logs: Iterable[str]) -> Attempt:
    """Return an attempt with the known trouble that the device's logs tell of; they are of all that runs there."""
    found = (trouble for log in logs if (trouble := known_trouble(log)) is not None)
    text = next((trouble.text for trouble in found), "")
    if not text or text in attempt.reason:
        return attempt
    return msgspec.structs.replace(attempt, reason=reason_line(f"{attempt.reason}; by the device's logs {text}"))
