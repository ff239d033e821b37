"""Layout of a graph: boxes in rows from sources to readers, and the lines between them. Pure.

Upstream draws with Graphviz's `dot`, a program that may be missing, and a layered layout of networkx ignores lines.
This module implements the method of Sugiyama in its simplest form, deterministic for a graph: rows by the longest path
from an input, places in a row by the mean of the connected boxes, and a narrow lane in every row that a line passes. A
line across many rows, such as a mask that every block reads, is left out: its reader names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

MOST_ROWS = 12
"""Most rows that a line spans."""

_SWEEPS = 4
_MOVES = 12
_NEAR = 6
"""Rows above and below that a row stays in line with."""

Point = tuple[float, float]


class Sizes(NamedTuple):
    """Sizes of boxes, of the gaps between them, and of a lane for a line; all in pixels."""

    width: float
    height: float
    between: float
    between_rows: float
    lane: float


class LayerLayout(NamedTuple):
    """Positions of boxes and lines; all coordinates are at least 0."""

    boxes: dict[str, Point]
    """Upper left corners."""
    lines: list[list[Point]]
    """Lines from the bottom of a box to the top of a box that reads it."""
    named: dict[str, list[str]]
    """Sources too many rows above a box for a line, by box."""


class _Place:
    """Box, or lane of a line in a row that the line passes."""

    def __init__(self, width: float) -> None:
        self.width, self.x = width, 0.0
        """`x` is the middle."""
        self.above: list[_Place] = []
        self.below: list[_Place] = []


def lay_out(reads: Mapping[str, Sequence[str]], sizes: Sizes) -> LayerLayout:
    """Return the positions of the boxes of `reads`; each box may read only earlier ones."""
    rank = _ranks(reads)
    slots = {name: _Place(sizes.width) for name in reads}
    rows: list[list[_Place]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    ways: list[tuple[int, list[_Place]]] = []
    named: dict[str, list[str]] = {}
    for name in reads:
        rows[rank[name]].append(slots[name])
    for name, sources in reads.items():
        for source in sources:
            if rank[name] - rank[source] > MOST_ROWS:
                named.setdefault(name, []).append(source)
                continue
            way = [slots[source], *(_Place(sizes.lane) for _ in range(rank[source] + 1, rank[name])), slots[name]]
            for row, lane in enumerate(way[1:-1], rank[source] + 1):
                rows[row].append(lane)
            for upper, lower in pairwise(way):
                upper.below.append(lower)
                lower.above.append(upper)
            ways.append((rank[source], way))
    _order(rows)
    _place(rows, sizes.between)
    left = min((slot.x - slot.width / 2 for row in rows for slot in row), default=0.0)
    pitch = sizes.height + sizes.between_rows
    boxes = {name: (slot.x - slot.width / 2 - left, rank[name] * pitch) for name, slot in slots.items()}
    return LayerLayout(boxes, [_line(way, first, left, pitch, sizes.height) for first, way in ways], named)


def _ranks(reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the row of each box: below all its sources; an input is directly above the first box that reads it."""
    rank: dict[str, int] = {}
    for name, sources in reads.items():
        rank[name] = max((rank[source] + 1 for source in sources), default=0)
    first_reader: dict[str, int] = {}
    for name, sources in reads.items():
        for source in sources:
            first_reader[source] = min(rank[name], first_reader.get(source, rank[name]))
    for name, sources in reads.items():
        if not sources and name in first_reader:
            rank[name] = first_reader[name] - 1
    return rank


def _order(rows: list[list[_Place]]) -> None:
    """Sort each row by the mean place of the connected boxes, above and below in turns."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            places = {id(slot): _mean_place(slot.above if down else slot.below, slot.x) for slot in row}
            row.sort(key=lambda slot, places=places: places[id(slot)])  # type: ignore[misc]
            for number, slot in enumerate(row):
                slot.x = number / len(row)


def _mean_place(others: Sequence[_Place], otherwise: float) -> float:
    return sum(slot.x for slot in others) / len(others) if others else otherwise


def _place(rows: list[list[_Place]], between: float) -> None:
    """Set the `x` of every slot near the mean of its connected slots, without overlap in a row."""
    for row in rows:
        _spread(row, [0.0] * len(row), between)
    for move in range(_MOVES):
        down = move % 2 == 0
        for row in rows if down else reversed(rows):
            _spread(
                row, [_mean_place(_boxes_first(slot.above if down else slot.below), slot.x) for slot in row], between
            )
    # Without this shift, a chain that turns aside at every block drifts to one side.
    middles = [sum(slot.x for slot in row) / len(row) for row in rows]
    for number, row in enumerate(rows):
        near = middles[max(0, number - _NEAR) : number + _NEAR + 1]
        for slot in row:
            slot.x -= sum(near) / len(near)


def _boxes_first(others: Sequence[_Place]) -> Sequence[_Place]:
    """Return the boxes among `others`, or all without a box: a lane beside a chain of boxes must not bend the chain."""
    widest = max((slot.width for slot in others), default=0.0)
    return [slot for slot in others if slot.width == widest]


def _spread(row: list[_Place], wanted: Sequence[float], between: float) -> None:
    """Move the slots of `row` towards the places `wanted`, and apart from each other where these overlap."""

    def weight(slots: Sequence[_Place]) -> float:
        # Lanes yield to boxes.
        return sum(slot.width**2 for slot in slots)

    # Runs of slots that touch each other move together, to the place nearest to the wanted places of their slots.
    runs: list[tuple[float, float, list[_Place]]] = []
    for slot, place in zip(row, wanted, strict=True):
        start, width, inside = place - slot.width / 2, slot.width + between, [slot]
        while runs and runs[-1][0] + runs[-1][1] > start:
            other_start, other_width, others = runs.pop()
            share = weight(others) / (weight(others) + weight(inside))
            start = other_start * share + (start - other_width) * (1 - share)
            width, inside = other_width + width, others + inside
        runs.append((start, width, inside))
    for left, _, inside in runs:
        taken = left
        for slot in inside:
            slot.x = taken + slot.width / 2
            taken += slot.width + between


def _line(way: Sequence[_Place], first: int, left: float, pitch: float, height: float) -> list[Point]:
    points: list[Point] = []
    for row, slot in enumerate(way, first):
        x, top = slot.x - left, row * pitch
        if slot is not way[0]:
            points.append((x, top))
        if slot is not way[-1]:
            points.append((x, top + height))
    return points
