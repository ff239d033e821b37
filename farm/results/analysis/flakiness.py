"""Reliability of a job: pass rate, and steady, flaky, newly flaky or healed. Pure: docs/guides/history.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

WINDOW = 20
"""Number of runs in the newest window, which has the pass rate; the window before it has as many."""
LOOKED_AT = 2 * WINDOW
"""Runs of a job that the statistics use."""

# Quantile of the 95 % interval of a pass rate.
_Z = 1.959964
# Probability below which a row of passes counts as healed, for a job as flaky as before.
_IMPROBABLE = 0.05


class Try(msgspec.Struct, frozen=True):
    """An attempt with a verdict about the code."""

    run_id: str
    code: str
    """Hash of program, tools and limits; empty if unknown."""
    passed: bool
    """False for a known issue, too."""


class Reliability(StrEnum):
    """Agreement of a job's verdicts for unchanged code."""

    STEADY = "steady"
    """The verdicts agreed."""
    FLAKY = "flaky"
    NEWLY_FLAKY = "newly flaky"
    """Flaky in the newest window and not in the window before."""
    HEALED = "healed"
    """The job was flaky and has passed since then too often for chance."""


class Record(msgspec.Struct, frozen=True):
    """Statistics of the last runs of a job."""

    passed: int
    tries: int
    """Attempts of the newest window with a verdict about the code."""
    low: float
    """Lower bound of the pass rate by Wilson's 95 % interval."""
    high: float
    reliability: Reliability
    since: str = ""
    """Id of the run with the first slip (`record_of`); for a healed job the run from which it counts as healed."""


def record_of(tries: Sequence[Try]) -> Record:
    """Return the record of a job; `tries`, at least one and oldest first, come from its last `LOOKED_AT` runs.

    A job slips if it fails although the try before with the same code passed, or passes after a failure in the same
    run. A window with a slip is flaky. A job that failed and passes since some run was fixed: it has no slip.
    """
    runs = list(dict.fromkeys(one.run_id for one in tries))
    newest = set(runs[-WINDOW:])
    recent = [one for one in tries if one.run_id in newest]
    passed = sum(one.passed for one in recent)
    low, high = wilson(passed, len(recent))
    reliability, since = _reliability(tries, newest)
    return Record(passed, len(recent), low, high, reliability, since)


def wilson(passed: int, tries: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share; 0 to 1 without tries."""
    if not tries:
        return 0.0, 1.0
    rate, spread = passed / tries, _Z * _Z / tries
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(rate * (1 - rate) / tries + spread / (4 * tries)) / (1 + spread)
    # Rounding must not exclude a pass rate of 1 for a job that always passed.
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
    """Return pairs of consecutive tries with the same code."""
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
    """Return the run at which the passes since the last failure are too many for chance; empty for too few."""
    end = max(number for number, one in enumerate(tries) if not one.passed) + 1
    before = [one for one in tries[:end] if _code(one) in flaky]
    # Add one to the number of tries, because `before` ends with a failure by construction.
    failure_rate = sum(not one.passed for one in before) / (len(before) + 1)
    needed = math.floor(math.log(_IMPROBABLE) / math.log1p(-failure_rate)) + 1
    return tries[end + needed - 1].run_id if end + needed <= len(tries) else ""
