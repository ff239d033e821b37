"""Comparable runs of a series, and events between them. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter

import msgspec

from farm.results.analysis.facts import CONTENTS, SHORT_COMMIT, is_mute

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
    """A series in one run."""

    run_id: str
    started_ms: int
    """Epoch, milliseconds."""
    value: float
    """Median of the run's samples; of an exact metric the value."""
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


class SeriesSegment(msgspec.Struct, frozen=True):
    """Runs one after the other whose numbers can be compared."""

    fingerprint_class: int
    """Class of the segment: segments of equal class are comparable across others."""
    points: tuple[Point, ...]


class History(msgspec.Struct, frozen=True):
    """A series, oldest first."""

    segments: tuple[SeriesSegment, ...]
    events: tuple[SeriesEvent, ...]
    """Events that part segments, and new versions of the code under test."""

    def comparable(self) -> tuple[Point, ...]:
        """Return all points that can be compared with the last one, which is among them."""
        if not self.segments:
            return ()
        last = self.segments[-1].fingerprint_class
        return tuple(point for one in self.segments if one.fingerprint_class == last for point in one.points)


def split(points: Sequence[Point]) -> History:
    """Return the runs of a series, oldest first, in segments that end where something changed that numbers depend on.

    A fact that is not known here ends a segment as well: a comparison too few is better than a wrong one.
    """
    segments = [
        SeriesSegment(number, tuple(point for _, point in run))
        for number, run in groupby(zip(_classes(points), points, strict=True), key=itemgetter(0))
    ]
    events = [
        SeriesEvent(now.run_id, now.started_ms, text, parts)
        for was, now in pairwise(points)
        for text, parts in changes(was, now)
    ]
    return History(tuple(segments), tuple(events))


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
