"""Reader of untrusted flatbuffers, from devices and users, by columns: one field of many tables at once.

Each position is compared with the length of the file before it is read, and the amount of data read is bounded by that
length, so that a malformed file ends in FlatbufferError and nothing else. Google's package `flatbuffers` checks
neither, and reads one field of one table at a time. The format: https://flatbuffers.dev/internals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

Positions = NDArray[np.int64]

# Least size of an element in a vector of tables of an honest file: its offset, its table and a table in that.
_ELEMENT_BYTES = 24


class FlatbufferError(ValueError):
    """File that contradicts itself."""


class Slot(NamedTuple):
    """Field of a table."""

    place: int
    """Index in a table's list of fields."""
    kind: str
    """Type: `text`, `table`, or a scalar as numpy writes it (`<i4`, `?`); for a vector in brackets."""
    default: int = 0
    """Value of a field that a file leaves out."""


class FieldColumn(NamedTuple):
    """Field of several tables; absent in tables that leave it out."""

    present: NDArray[np.bool_]
    """True for each table with the field."""
    positions: Positions
    """Positions of the present fields, in the order of the tables."""


class Flatbuffer:
    """Flatbuffer of one file, with checked access."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._views: dict[str, NDArray[Any]] = {}
        # Elements and texts cost their length, unless a hostile file points at the same place many times over.
        self._budget = len(data)
        self._texts: dict[int, str] = {}

    def root(self, start: int) -> Positions:
        """Return the table that the offset at `start` leads to."""
        return self._follow(np.array([start], np.int64))

    def numbers(self, tables: Positions, slot: Slot) -> NDArray[Any]:
        """Return a scalar of each of `tables`."""
        column = self._column(tables, slot)
        values = np.full(len(tables), slot.default, np.dtype(slot.kind))
        values[column.present] = self._scalars(column.positions, slot.kind)
        return values

    def fields(self, tables: Positions, slot: Slot) -> FieldColumn:
        """Return the position of a field of each of `tables`: of its value, or of the offset to the value."""
        column = self._column(tables, slot)
        self._check(column.positions, 1)
        return column

    def tables(self, tables: Positions, slot: Slot) -> FieldColumn:
        """Return the tables that `tables` lead to."""
        column = self._column(tables, slot)
        return FieldColumn(column.present, self._follow(column.positions))

    def vectors(self, tables: Positions, slot: Slot) -> tuple[NDArray[np.int64], Positions]:
        """Return the length of the vector of tables in each of `tables`, and all elements, one vector after another."""
        column, starts, sizes = self._sized(tables, slot)
        self._spend(_ELEMENT_BYTES * int(sizes.sum()))
        before = np.cumsum(sizes) - sizes
        elements = np.repeat(starts + 4 - 4 * before, sizes) + 4 * np.arange(sizes.sum(), dtype=np.int64)
        counts = np.zeros(len(tables), np.int64)
        counts[column.present] = sizes
        return counts, self._follow(elements)

    def lists(self, tables: Positions, slot: Slot) -> list[NDArray[Any]]:
        """Return the scalars of a vector of each of `tables`; empty for a table without the vector."""
        dtype = np.dtype(slot.kind.strip("[]"))
        found: list[NDArray[Any]] = [np.empty(0, dtype)] * len(tables)
        for index, start, size in self._parts(tables, slot):
            self._spend(size * dtype.itemsize)
            if start + 4 + size * dtype.itemsize > len(self._data):
                raise FlatbufferError(f"is malformed: a vector of {size} ends behind byte {len(self._data)}")
            found[index] = np.frombuffer(self._data, dtype, size, start + 4)
        return found

    def texts(self, tables: Positions, slot: Slot) -> list[str]:
        """Return a text of each of `tables`; empty for a table without the text."""
        found = [""] * len(tables)
        for index, start, size in self._parts(tables, slot):
            if start not in self._texts:
                self._spend(size)
                end = start + 4 + size
                if end > len(self._data):
                    raise FlatbufferError(f"is malformed: a text ends at byte {end} of {len(self._data)}")
                self._texts[start] = self._data[start + 4 : end].decode("utf-8", "replace")
            found[index] = self._texts[start]
        return found

    def _parts(self, tables: Positions, slot: Slot) -> Iterator[tuple[int, int, int]]:
        """Yield number of the table, start and length of each vector or text."""
        column, starts, sizes = self._sized(tables, slot)
        return zip(np.flatnonzero(column.present).tolist(), starts.tolist(), sizes.tolist(), strict=True)

    def _sized(self, tables: Positions, slot: Slot) -> tuple[FieldColumn, Positions, Positions]:
        """Return the column of a field, and starts and lengths of the vectors or texts that it leads to."""
        column = self._column(tables, slot)
        starts = self._follow(column.positions)
        return column, starts, self._scalars(starts, "<u4").astype(np.int64)

    def _column(self, tables: Positions, slot: Slot) -> FieldColumn:
        lists = tables - self._scalars(tables, "<i4")
        places = 4 + 2 * slot.place
        # A file of an older schema has shorter lists.
        listed = self._scalars(lists, "<u2") >= places + 2
        offsets = np.zeros(len(tables), np.int64)
        offsets[listed] = self._scalars(lists[listed] + places, "<u2")
        present = offsets != 0
        return FieldColumn(present, tables[present] + offsets[present])

    def _follow(self, positions: Positions) -> Positions:
        targets: Positions = positions + self._scalars(positions, "<u4")
        # Each target, table or vector, begins with four bytes.
        self._check(targets, 4)
        return targets

    def _scalars(self, positions: Positions, kind: str) -> NDArray[Any]:
        dtype = np.dtype(kind)
        self._check(positions, dtype.itemsize)
        if not len(positions):
            return np.empty(0, dtype)
        if kind not in self._views:
            # The view has an element per byte, as a flatbuffer is aligned to its own beginning at any address.
            count = len(self._data) - dtype.itemsize + 1
            self._views[kind] = np.ndarray((count,), dtype, self._data, strides=(1,))
        return self._views[kind][positions]

    def _check(self, positions: Positions, size: int) -> None:
        if len(positions) and (positions.min() < 0 or positions.max() > len(self._data) - size):
            outside = positions[(positions < 0) | (positions > len(self._data) - size)][0]
            raise FlatbufferError(f"is malformed: points at byte {outside} of {len(self._data)}")

    def _spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise FlatbufferError("is malformed: its parts overlap")
