"""ETDump, the profile that ExecuTorch's event tracer leaves -> blocks of events.

A flatbuffer, schema: executorch 1.5, devtools/etdump/etdump_schema_flatcc.fbs. The file comes from a device: every
offset is checked before it is followed, and the work is bounded by the size of the file, so that a malformed one
ends in ETDumpError and nothing else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
from flatbuffers import number_types
from flatbuffers.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ETDUMP_LIMIT = 32 * 2**20
"""Greatest size that is read, in bytes: a model of a thousand nodes takes about 100 KiB per inference."""

# What one element of a vector takes at least in an honest file: its offset and its tables.
_ELEMENT_BYTES = 24

_IDENTIFIER = b"ED00"
_UNIT = re.compile(r" \(([a-z]{1,16})\)$")
# The row of one node of a QNN graph: `aten_relu_default:OpId_80 (cycles)`, `Input OpId_2 (cycles)`.
_NODE = re.compile(r"(?:^|[: ])OpId_\d+ \([a-z]{1,16}\)$")


class ETDumpError(ValueError):
    """A file that is no ETDump."""


class ProfileEvent(msgspec.Struct, frozen=True, gc=False):
    """One profiled event; a delegate's events have their value in `end` and 0 in `start`."""

    name: str
    """Given by the runtime, or by the delegate."""
    start: int
    """Ticks of the runtime's clock, ns on Android and Linux."""
    end: int
    chain: int
    instruction: int
    """Index of the runtime instruction, so of the delegate call or operator."""
    is_delegate: bool
    """Reported by a delegate, about its inside."""
    delegate_debug_id: int | None
    """Debug handle given ahead of time; None where events are identified by name."""

    @property
    def value(self) -> int:
        """Length, or the value that a delegate reports, in `unit`."""
        return self.end - self.start

    @property
    def unit(self) -> str:
        """`cycles`, `us`, `count`, `bytes`: as a QNN event's name says; empty when it says nothing."""
        found = _UNIT.search(self.name)
        return found[1] if found else ""

    @property
    def is_node(self) -> bool:
        """Tell whether this is the row of one node of a QNN graph, not a total over the graph."""
        return self.is_delegate and _NODE.search(self.name) is not None


class Block(msgspec.Struct, frozen=True):
    """One run: loading, or one inference."""

    name: str
    events: tuple[ProfileEvent, ...]


def read_etdump(data: bytes) -> list[Block]:
    """Return the blocks of an ETDump in the order of the file, without its allocation and debug events.

    Takes files with and without a size prefix. Raises ETDumpError for everything that is not an ETDump.
    """
    if len(data) > ETDUMP_LIMIT:
        raise ETDumpError(f"has {len(data)} bytes, more than {ETDUMP_LIMIT}")
    start = next((start for start in (4, 0) if data[start + 4 : start + 8] == _IDENTIFIER), None)
    if start is None:
        raise ETDumpError("is not an ETDump: its identifier is missing")
    if start and int.from_bytes(data[:4], "little") > len(data) - 4:
        raise ETDumpError(f"is cut short: has {len(data)} bytes of {int.from_bytes(data[:4], 'little') + 4}")
    reader = _Reader(data)
    root = reader.table(reader.follow(start))
    return [_block(run) for run in root.tables(_ETDUMP_RUN_DATA)]


def node_cycles(blocks: Sequence[Block]) -> list[int]:
    """Return the HTP cycles of each block that has any, in order: one number per profiled inference.

    The sum over the node rows of all delegate calls of the block. QNN's own totals are the same sum, under names
    that belong to the SDK.
    """
    totals = []
    for block in blocks:
        rows = [event.value for event in block.events if event.is_node and event.unit == "cycles"]
        if rows:
            totals.append(sum(rows))
    return totals


# Slots of the schema's tables, in the order of their fields.
_ETDUMP_RUN_DATA = 1
_RUN_NAME, _RUN_EVENTS = 0, 3
_EVENT_PROFILE = 0
_PROFILE_NAME, _PROFILE_CHAIN, _PROFILE_INSTRUCTION, _PROFILE_DELEGATE_INT, _PROFILE_DELEGATE_STR = range(5)
_PROFILE_START, _PROFILE_END = 6, 7


def _block(run: _CheckedTable) -> Block:
    profiles = (event.table(_EVENT_PROFILE) for event in run.tables(_RUN_EVENTS))
    return Block(run.text(_RUN_NAME) or "", tuple(_event(profile) for profile in profiles if profile is not None))


def _event(profile: _CheckedTable) -> ProfileEvent:
    by_name = profile.text(_PROFILE_DELEGATE_STR)
    by_number = profile.number(_PROFILE_DELEGATE_INT, number_types.Int32Flags, -1)
    event = ProfileEvent(
        name=profile.text(_PROFILE_NAME) or by_name or "",
        start=profile.number(_PROFILE_START, number_types.Uint64Flags, 0),
        end=profile.number(_PROFILE_END, number_types.Uint64Flags, 0),
        chain=profile.number(_PROFILE_CHAIN, number_types.Int32Flags, 0),
        instruction=profile.number(_PROFILE_INSTRUCTION, number_types.Int32Flags, -1),
        is_delegate=bool(by_name) or by_number != -1,
        delegate_debug_id=by_number if by_number != -1 else None,
    )
    if event.end < event.start:
        raise ETDumpError(f"event {event.name[:80]!r} ends at {event.end}, before its start at {event.start}")
    return event


class _Reader:
    """Checked access to the bytes of one file, and the budget of work that its size allows."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Elements and texts cost their length, unless a hostile file points at the same place many times over.
        self._budget = len(data)
        self._texts: dict[int, str] = {}

    def spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise ETDumpError("is malformed: its parts overlap")

    def get(self, flags: Any, offset: int) -> int:
        if not 0 <= offset <= len(self.data) - flags.bytewidth:
            raise ETDumpError(f"is malformed: points at byte {offset} of {len(self.data)}")
        return int(flags.packer_type.unpack_from(self.data, offset)[0])

    def follow(self, offset: int) -> int:
        """Return where the offset stored at `offset` points, which is inside the file."""
        target = offset + self.get(number_types.UOffsetTFlags, offset)
        self.get(number_types.UOffsetTFlags, target)
        return target

    def table(self, offset: int) -> _CheckedTable:
        return _CheckedTable(self, offset)

    def text(self, offset: int) -> str:
        if offset not in self._texts:
            start, size = offset + 4, self.get(number_types.UOffsetTFlags, offset)
            self.spend(size)
            if start + size > len(self.data):
                raise ETDumpError(f"is malformed: a text ends at byte {start + size} of {len(self.data)}")
            self._texts[offset] = self.data[start : start + size].decode("utf-8", "replace")
        return self._texts[offset]


class _CheckedTable(Table):  # type: ignore[misc]
    """flatbuffers' Table, whose own access trusts the file, over checked reads."""

    __slots__ = ("_reader",)

    def __init__(self, reader: _Reader, offset: int) -> None:
        super().__init__(reader.data, offset)
        self._reader = reader

    def Get(self, flags: Any, off: int) -> int:  # noqa: N802 - flatbuffers' name, which its Offset calls
        return self._reader.get(flags, off)

    def _field(self, slot: int) -> int | None:
        offset = self.Offset(4 + 2 * slot)
        return self.Pos + offset if offset else None

    def number(self, slot: int, flags: Any, default: int) -> int:
        field = self._field(slot)
        return default if field is None else self._reader.get(flags, field)

    def text(self, slot: int) -> str | None:
        field = self._field(slot)
        return None if field is None else self._reader.text(self._reader.follow(field))

    def table(self, slot: int) -> _CheckedTable | None:
        field = self._field(slot)
        return None if field is None else self._reader.table(self._reader.follow(field))

    def tables(self, slot: int) -> Iterator[_CheckedTable]:
        field = self._field(slot)
        if field is None:
            return
        vector = self._reader.follow(field)
        count = self._reader.get(number_types.UOffsetTFlags, vector)
        self._reader.spend(_ELEMENT_BYTES * count)
        for index in range(count):
            yield self._reader.table(self._reader.follow(vector + 4 + 4 * index))
