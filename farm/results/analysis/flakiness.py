"""How reliable a job is: its pass rate, whether it is flaky, newly so, or healed. Pure: docs/guides/history.md."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 20
"""Runs that a pass rate is of, and that are compared with as many before them."""
LOOKED_AT = 2 * WINDOW
"""Runs of a job that anything is told from."""

# Of a pass rate: 95 %.
_Z = 1.959964
# So many passes in a row are healed when a job as flaky as before would come to them less often than that.
_IMPROBABLE = 0.05


class Try(msgspec.Struct, frozen=True):
    """An attempt with a verdict about the code."""

    run_id: str
    code: str
    """Equal where program, tools and limits are; empty where that is not known."""
    passed: bool
    """A known issue is a failure."""


class Reliability(StrEnum):
    """What becomes of a job's verdicts while its code stays the same."""

    STEADY = "steady"
    """They agreed."""
    FLAKY = "flaky"
    NEWLY_FLAKY = "newly flaky"
    """In the newest window, and not in the one before."""
    HEALED = "healed"
    """It was flaky, and has passed too often since for that to be chance."""


class Record(msgspec.Struct, frozen=True):
    """How a job did in its last runs."""

    passed: int
    tries: int
    """With a verdict about the code, in the newest window."""
    low: float
    """Of the pass rate, the 95 % interval of Wilson."""
    high: float
    reliability: Reliability
    since: str = ""
    """The run where it slipped first, of those looked at; of a healed job the run that was one pass too many."""


def record_of(tries: Sequence[Try]) -> Record:
    """Return how a job did; `tries`, at least one and oldest first, are those of its last `LOOKED_AT` runs.

    A job slips where it fails although the try before it of the same code passed, or passes where that failed in the
    same run. It is flaky in a window in which it slips. What failed and from some run on passes was mended.
    """
    runs = list(dict.fromkeys(one.run_id for one in tries))
    newest = set(runs[-WINDOW:])
    recent = [one for one in tries if one.run_id in newest]
    passed = sum(one.passed for one in recent)
    low, high = wilson(passed, len(recent))
    reliability, since = _reliability(tries, newest)
    return Record(passed, len(recent), low, high, reliability, since)


def wilson(passed: int, tries: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson of a pass rate; of no tries it is all of it."""
    if not tries:
        return 0.0, 1.0
    rate, spread = passed / tries, _Z * _Z / tries
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(rate * (1 - rate) / tries + spread / (4 * tries)) / (1 + spread)
    # Rounding must not say that a job that always passed may not.
    return (0.0 if not passed else max(0.0, middle - half)), (1.0 if passed == tries else min(1.0, middle + half))


def _reliability(tries: Sequence[Try], newest: set[str]) -> tuple[Reliability, str]:
    slips = [now for was, now in _pairs(tries) if was.passed != now.passed and (was.passed or was.run_id == now.run_id)]
    if not slips:
        return Reliability.STEADY, ""
    healed = _healed_in(tries, {_code(one) for one in slips})
    if healed:
        return Reliability.HEALED, healed
    first = slips[0].run_id
    return (Reliability.NEWLY_FLAKY if first in newest else Reliability.FLAKY), first


def _pairs(tries: Sequence[Try]) -> list[tuple[Try, Try]]:
    """Return each try with the one before it of the same code."""
    last: dict[tuple[str, str], Try] = {}
    found = []
    for one in tries:
        was = last.get(_code(one))
        if was is not None:
            found.append((was, one))
        last[_code(one)] = one
    return found


def _code(one: Try) -> tuple[str, str]:
    return (one.code, "") if one.code else ("", one.run_id)


def _healed_in(tries: Sequence[Try], flaky: set[tuple[str, str]]) -> str:
    """Return the run with the pass that was one too many for a job as flaky as it was; empty where none was."""
    end = max(number for number, one in enumerate(tries) if not one.passed) + 1
    before = [one for one in tries[:end] if _code(one) in flaky]
    # One try more than there were: the last of them is a failure because that is where it was cut.
    failure_rate = sum(not one.passed for one in before) / (len(before) + 1)
    needed = math.floor(math.log(_IMPROBABLE) / math.log1p(-failure_rate)) + 1
    return tries[end + needed - 1].run_id if end + needed <= len(tries) else ""
