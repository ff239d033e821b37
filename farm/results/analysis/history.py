"""History of a series: comparable runs, events between them, and reliability of a job. Pure:
docs/explanation/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

# Differences between the facts (versions, hashes) of two runs, and their names for people. Pure.


CONTENTS = {
    "executorch_content": "sources of executorch",
    "torch_content": "files of torch",
    "torchao_content": "files of torchao",
    "packages_content": "packages beside torch",
    "python_content": "files of Python",
    "qnn_content": "libraries of QNN",
}
"""Names for facts whose values are hashes of content, which readers cannot interpret."""


SHORT_COMMIT = 10
"""Characters of a commit's hash that people are shown."""


def changed_facts(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the differing facts, sorted by name: before and after, empty for a side without the fact.

    A content hash is skipped if one side lacks it, or if the version or commit differs as well.
    """
    return {
        name: (was.get(name, ""), now.get(name, ""))
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name) and not (name in CONTENTS and is_mute(name, was, now))
    }


def is_mute(content: str, was: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the fact `content`, from CONTENTS, adds nothing to the other facts of two runs."""
    names = [content.removesuffix("_content"), *(["commit"] if content == "executorch_content" else [])]
    return content not in was or content not in now or any(was.get(name) != now.get(name) for name in names)


def fact_row(name: str, was: str, now: str) -> tuple[str, str, str]:
    """Return a changed fact for a table: name, before, after."""
    return (CONTENTS[name], "", "changed") if name in CONTENTS else (name, was, now)


def fact_line(name: str, was: str, now: str) -> str:
    """Return a changed fact as text: `qnn: 2.47 -> 2.51`, `sources of executorch: changed`."""
    return f"{CONTENTS[name]}: changed" if name in CONTENTS else f"{name}: {was or 'nothing'} -> {now or 'nothing'}"


# Comparable runs of a series, and events between them. Pure: docs/explanation/statistics.md.


RUNTIME = ("native_runner", "native_runner_of", "runtime", "skel", "qnn", "qnn_product", "qnn_content", "dsp_logs")
"""Facts of what executes a program: runner, libraries and QNN. A side of a comparison has them with its program."""

UNDER_TEST = frozenset(
    {"executorch", "farm", "torch", "torchao", "transformers", "toolchain", "commit", "dirty", *RUNTIME, *CONTENTS}
)
"""Facts under test: they never part a series, because their effect is the subject of the history."""

# The build of a device is no class either: devices and builds have estimated effects.
_APART = UNDER_TEST | {"device_build"}
# Their values are hashes, which are not shown.
_NAMELESS = frozenset({"native_runner", "runtime", "skel"})
_NAMES = {
    "native_runner": "runner",
    "native_runner_of": "runner's ExecuTorch",
    "device_kind": "device kind",
    "device_build": "device build",
}


def side_of(bundle: str, facts: Mapping[str, str]) -> tuple[str, ...]:
    """Return what distinguishes a side of a comparison: its bundle, and the facts of what executed it."""
    return bundle, *(facts.get(name, "") for name in RUNTIME)


class Point(msgspec.Struct, frozen=True, gc=False):
    """Conditions of a series in one run."""

    run_id: str
    started_ms: int
    """Epoch, milliseconds."""
    facts: Mapping[str, str]
    """Facts that the number depends on, name to value: fingerprint of the run, build and governor of the device."""
    device_kind: str
    """`virtual` or `hardware`."""
    case_version: str
    """Hash of the case's definition."""
    bundle: str = ""
    """Key of a bundle that still exists; empty for a pruned one."""
    device: str = ""
    """Serial of its device; empty if unneeded."""

    @property
    def side(self) -> tuple[str, ...]:
        """Return all that was under test: the bundle, empty for a pruned one, and what executed it."""
        return side_of(self.bundle, self.facts)

    @property
    def place(self) -> tuple[str, str]:
        """Return the device and its build."""
        return self.device, self.facts.get("device_build", "")


class SeriesEvent(msgspec.Struct, frozen=True):
    """Something that changed from one run to the next."""

    run_id: str
    """The first run with it."""
    started_ms: int
    text: str
    """`qnn 2.47 -> 2.51`, `runner changed`, `case changed`."""
    parts: bool
    """Numbers from here on are not compared with those before."""


class History(msgspec.Struct, frozen=True):
    """A series, oldest first."""

    points: tuple[Point, ...]
    classes: tuple[int, ...]
    """Class of each point: points of one class can be compared, also across others."""
    events: tuple[SeriesEvent, ...]
    """Events that part points, and new versions of the code under test."""

    def comparable(self) -> tuple[Point, ...]:
        """Return all points that can be compared with the last one, which is among them."""
        return tuple(point for point, one in zip(self.points, self.classes, strict=True) if one == self.classes[-1])


def split(points: Sequence[Point]) -> History:
    """Return the runs of a series, oldest first, in classes that differ in something that numbers depend on.

    A fact that is not known here makes a class as well: a comparison too few is better than a wrong one.
    """
    events = [
        SeriesEvent(now.run_id, now.started_ms, text, parts)
        for was, now in pairwise(points)
        for text, parts in changes(was, now)
    ]
    return History(tuple(points), tuple(_classes(points)), tuple(events))


def _classes(points: Sequence[Point]) -> list[int]:
    numbers: dict[object, int] = {}
    found = []
    for point in points:
        facts = frozenset(fact for fact in point.facts.items() if fact[0] not in _APART)
        found.append(numbers.setdefault((point.device_kind, point.case_version, facts), len(numbers)))
    return found


def changes(was: Point, now: Point) -> list[tuple[str, bool]]:
    """Return the differences between two runs, each with the decision whether it parts them."""
    found = []
    if was.device_kind != now.device_kind:
        found.append((f"device kind {was.device_kind} -> {now.device_kind}", True))
    if was.case_version != now.case_version:
        found.append(("case changed", True))
    for name in sorted(was.facts.keys() | now.facts.keys()):
        old, new = was.facts.get(name), now.facts.get(name)
        if (
            old == new
            or (name == "device_kind" and found)
            or (name in CONTENTS and is_mute(name, was.facts, now.facts))
        ):
            continue
        found.append((fact_text(name, old, new), name not in _APART))
    return found


def runtime_changes(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the differences of what executed two results: `runner r1 -> r2, qnn 2.47 -> 2.51`; empty for none."""
    return ", ".join(
        f"{_NAMES.get(name, name)} {(was.get(name) or 'unknown')[:16]} -> {(now.get(name) or 'unknown')[:16]}"
        for name in RUNTIME
        if was.get(name) != now.get(name)
    )


def fact_text(name: str, old: str | None, new: str | None) -> str:
    """Return what happened to a fact: `qnn 2.47 -> 2.51`, `runner changed`; None is not there."""
    shown = _NAMES.get(name, name)
    if name in CONTENTS:
        return f"{CONTENTS[name]} changed"
    if name == "dirty":
        return "no longer dirty" if new is None else "dirty"
    if name == "commit":
        old, new = old and old[:SHORT_COMMIT], new and new[:SHORT_COMMIT]
        if old and new:
            return f"commits {old}..{new}"
    if name in _NAMELESS:
        return f"{shown} changed"
    if new is None:
        return f"without {shown} {old}"
    return f"{shown} {new}" if old is None else f"{shown} {old} -> {new}"


# Reliability of a job: pass rate, and steady, flaky, newly flaky or healed. Pure: docs/guides/history.md.


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
