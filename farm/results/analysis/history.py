"""Comparable runs of a series, and events between them. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from farm.results.analysis.facts import CONTENTS, SHORT_COMMIT, is_mute

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

UNDER_TEST = frozenset(
    {"executorch", "farm", "torch", "torchao", "transformers", "toolchain", "commit", "dirty", "native_runner_of"}
) | CONTENTS.keys() - {"qnn_content"}
"""Facts of the program under test: they never part a series, because their effect is the subject of the history."""

# Facts that follow from another, and are under test with it: the runner is built from ExecuTorch, so that a new
# ExecuTorch could otherwise never be found to be slower.
_MADE_FROM = {"native_runner": ("executorch", "executorch_content", "commit")}
_APART = UNDER_TEST | _MADE_FROM.keys() | CONTENTS.keys()
# Their values are hashes, which are not shown.
_NAMELESS = frozenset({"native_runner", "runtime", "skel"})
_NAMES = {
    "native_runner": "runner",
    "native_runner_of": "runner's ExecuTorch",
    "device_kind": "device kind",
    "device_build": "device build",
}


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
    mad: float | None = None
    """Median absolute deviation of the samples in the metric's unit, for charts alone."""


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
    classes = _classes(points)
    segments = [
        SeriesSegment(number, tuple(point for _, point in run))
        for number, run in groupby(zip(classes, points, strict=True), key=itemgetter(0))
    ]
    events = [
        SeriesEvent(now.run_id, now.started_ms, text, parts)
        for (was, now), (class_was, class_now) in zip(pairwise(points), pairwise(classes), strict=True)
        for text, parts in _changes(was, now, parted=class_was != class_now)
    ]
    return History(tuple(segments), tuple(events))


def _classes(points: Sequence[Point]) -> list[int]:
    numbers: dict[object, int] = {}
    lineages = [_lineage(points, name, source) for name, source in _MADE_FROM.items()]
    lineages.append(_known_states(points, "qnn_content"))
    found = []
    for point, *made in zip(points, *lineages, strict=True):
        facts = frozenset(fact for fact in point.facts.items() if fact[0] not in _APART)
        key = (point.device_kind, point.case_version, tuple(made), facts)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _lineage(points: Sequence[Point], name: str, sources: Sequence[str]) -> list[int]:
    """Return a number for each run, equal if versions of the fact `name` changed only together with `sources`."""
    numbers: dict[str | None, int] = {}
    found: list[int] = []
    for place, point in enumerate(points):
        value = point.facts.get(name)
        if value not in numbers:
            follows = place > 0 and _changed(points[place - 1], point, sources)
            numbers[value] = found[-1] if follows else len(numbers)
        found.append(numbers[value])
    return found


def _changed(was: Point, now: Point, sources: Sequence[str]) -> bool:
    """Return whether a fact of `sources` differs; a missing fact counts as equal, except for the first of them."""
    first, *others = sources
    if was.facts.get(first) != now.facts.get(first):
        return True
    pairs = ((was.facts.get(name), now.facts.get(name)) for name in others)
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _known_states(points: Iterable[Point], name: str) -> list[int]:
    """Return a number for each run by its value of the fact; a run without the fact gets the number before it."""
    numbers: dict[str, int] = {}
    found: list[int] = []
    for point in points:
        value = point.facts.get(name)
        before = found[-1] if found else 0
        found.append(before if value is None else numbers.setdefault(value, len(numbers)))
    return found


def _changes(was: Point, now: Point, *, parted: bool) -> list[tuple[str, bool]]:
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
        sources = _MADE_FROM.get(name)
        follows = sources is not None and _changed(was, now, sources)
        found.append((fact_text(name, old, new), parted and not follows and name not in UNDER_TEST))
    # Something has to be what parted them: a runner that is known from before, with another ExecuTorch.
    unclear = parted and not any(parts for _, parts in found)
    return [(text, parts or unclear) for text, parts in found]


def fact_text(name: str, old: str | None, new: str | None) -> str:
    """Return what happened to a fact: `qnn 2.47 -> 2.51`, `runner changed`; None is not there."""
    shown = _NAMES.get(name, name)
    if name in CONTENTS:
        return f"{CONTENTS[name]} changed"
    if name == "dirty":
        return "not dirty any more" if new is None else "dirty"
    if name == "commit":
        old, new = old and old[:SHORT_COMMIT], new and new[:SHORT_COMMIT]
        if old and new:
            return f"commits {old}..{new}"
    if name in _NAMELESS:
        return f"{shown} changed"
    if new is None:
        return f"without {shown} {old}"
    return f"{shown} {new}" if old is None else f"{shown} {old} -> {new}"
