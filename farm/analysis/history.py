"""Which runs of a series can be compared, and what happened between them. Pure: docs/regressions.md."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNDER_TEST = frozenset({"executorch", "farm", "torch", "torchao", "transformers"})
"""Facts that make the program: what they do to a number is what is looked for, so they never part a series."""

# A fact that is made from another: where that changes as well, it is a consequence, and under test as that is. The
# runner is built from ExecuTorch, so a new ExecuTorch could otherwise never be found to be slower.
_MADE_FROM = {"native_runner": "executorch"}
# Hashes tell nobody anything.
_NAMELESS = frozenset({"native_runner", "runtime", "skel"})
_NAMES = {"native_runner": "runner", "device_kind": "device kind", "device_build": "device build"}


class Point(msgspec.Struct, frozen=True, gc=False):
    """A series in one run."""

    run_id: str
    started_ms: int
    """Epoch, milliseconds."""
    value: float
    """Median of the run's samples; of an exact metric the value."""
    facts: Mapping[str, str]
    """What the number depends on, name to value: the run's fingerprint, the device's build, governor and the like."""
    device_kind: str
    """`virtual` or `hardware`."""
    case_version: str
    """Hash of what the case is."""
    bundle: str = ""
    """Its key, where the bundle is still there to be run again."""
    mad: float | None = None
    """Of the samples, in the metric's unit: for those who draw it, nothing is decided by it."""


class Event(msgspec.Struct, frozen=True):
    """Something that changed from one run to the next."""

    run_id: str
    """The first run with it."""
    started_ms: int
    text: str
    """`qnn 2.47 -> 2.51`, `runner changed`, `case changed`."""
    parts: bool
    """Numbers from here on are not compared with those before."""


class Segment(msgspec.Struct, frozen=True):
    """Runs one after the other whose numbers can be compared."""

    fingerprint_class: int
    """Segments with the same one can be compared as well, whatever is between them."""
    points: tuple[Point, ...]


class History(msgspec.Struct, frozen=True):
    """A series, oldest first."""

    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    """Those that part segments, and new versions of what is under test."""

    def comparable(self) -> tuple[Point, ...]:
        """Return all points that can be compared with the last one, which is among them."""
        if not self.segments:
            return ()
        last = self.segments[-1].fingerprint_class
        return tuple(point for one in self.segments if one.fingerprint_class == last for point in one.points)


def split(points: Sequence[Point]) -> History:
    """Part the runs of a series, oldest first, where something changed that numbers depend on, and tell what it was.

    A fact that is not known here parts as well: a comparison too few is better than a wrong one.
    """
    classes = _classes(points)
    segments: list[Segment] = []
    begin = 0
    for end in range(1, len(points) + 1):
        if end == len(points) or classes[end] != classes[begin]:
            segments.append(Segment(classes[begin], tuple(points[begin:end])))
            begin = end
    events = [
        Event(now.run_id, now.started_ms, text, parts)
        for (was, now), (class_was, class_now) in zip(pairwise(points), pairwise(classes), strict=True)
        for text, parts in _changes(was, now, parted=class_was != class_now)
    ]
    return History(tuple(segments), tuple(events))


def _classes(points: Sequence[Point]) -> list[int]:
    numbers: dict[object, int] = {}
    lines = {name: _Line(name, source) for name, source in _MADE_FROM.items()}
    found = []
    for point in points:
        facts = {name: value for name, value in point.facts.items() if name not in UNDER_TEST and name not in lines}
        made = tuple(line.of(point.facts) for line in lines.values())
        key = (point.device_kind, point.case_version, made, frozenset(facts.items()))
        found.append(numbers.setdefault(key, len(numbers)))
    return found


class _Line:
    """Tells versions of a fact that changed by itself from those that came with what it is made from."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source
        self._lines: dict[str | None, int] = {}
        self._last: tuple[str | None, int] | None = None

    def of(self, facts: Mapping[str, str]) -> int:
        """Return the number of the line that the next run belongs to."""
        value, source = facts.get(self._name), facts.get(self._source)
        if value not in self._lines:
            follows = self._last is not None and self._last[0] != source
            self._lines[value] = self._last[1] if follows and self._last else len(self._lines)
        self._last = source, self._lines[value]
        return self._lines[value]


def _changes(was: Point, now: Point, *, parted: bool) -> list[tuple[str, bool]]:
    """Return what is different from one run to the next, and whether that parts them."""
    found = []
    if was.device_kind != now.device_kind:
        found.append((f"device kind {was.device_kind} -> {now.device_kind}", True))
    if was.case_version != now.case_version:
        found.append(("case changed", True))
    for name in sorted(was.facts.keys() | now.facts.keys()):
        old, new = was.facts.get(name), now.facts.get(name)
        if old == new or (name == "device_kind" and found):
            continue
        source = _MADE_FROM.get(name)
        follows = source is not None and was.facts.get(source) != now.facts.get(source)
        found.append((fact_text(name, old, new), parted and not follows and name not in UNDER_TEST))
    # Something has to be what parted them: a runner that is known from before, with another ExecuTorch.
    unclear = parted and not any(parts for _, parts in found)
    return [(text, parts or unclear) for text, parts in found]


def fact_text(name: str, old: str | None, new: str | None) -> str:
    """Return what happened to a fact: `qnn 2.47 -> 2.51`, `runner changed`; None is not there."""
    shown = _NAMES.get(name, name)
    if name in _NAMELESS:
        return f"{shown} changed"
    if new is None:
        return f"without {shown} {old}"
    return f"{shown} {new}" if old is None else f"{shown} {old} -> {new}"
