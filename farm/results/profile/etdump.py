"""ETDump, the profile that ExecuTorch's event tracer leaves -> blocks of events.

A flatbuffer; its tables are in etdump_schema.py. The file comes from a device: a malformed one ends in ETDumpError
and nothing else, and the work is bounded by the size of the file.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from farm.builds.program.flatbuffer import Flatbuffer, FlatbufferError, Positions
from farm.results.profile import etdump_schema as schema
from farm.results.profile.event_names import INFERENCE, names_node, unit_of

ETDUMP_LIMIT = 32 * 2**20
"""Greatest size that is read, in bytes: a model of a thousand nodes takes about 100 KiB per inference."""


class ETDumpError(ValueError):
    """A file that is no ETDump."""


class ProfileEvent(msgspec.Struct, frozen=True, gc=False):
    """Profiled event; an event of QNN has its value in `end` and 0 in `start`."""

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

    @property
    def value(self) -> int:
        """Length, or the value that a delegate reports, in `unit`."""
        return self.end - self.start

    @property
    def unit(self) -> str:
        """`cycles`, `us`, `count`, `bytes`: as a QNN event's name ends; empty where it has none."""
        return unit_of(self.name)

    @property
    def is_node(self) -> bool:
        """Return whether this is the row of one node of a QNN graph, not a total over the graph."""
        return self.is_delegate and names_node(self.name)


class Block(msgspec.Struct, frozen=True):
    """Events of the load or of an inference."""

    name: str
    events: tuple[ProfileEvent, ...]


def read_etdump(data: bytes) -> list[Block]:
    """Return the blocks of an ETDump in the order of the file, without its allocation and debug events.

    Takes files with and without a size prefix. Raises ETDumpError for everything that is not an ETDump.
    """
    file, start = _opened(data)
    try:
        return _blocks(file, start)
    except FlatbufferError as error:
        raise ETDumpError(str(error)) from None


def intermediate_outputs(data: bytes) -> tuple[int, ...]:
    """Return how many tensors each inference of an ETDump has from inside of delegates. Raises ETDumpError."""
    file, start = _opened(data)
    try:
        _, runs = file.vectors(file.root(start), schema.ETDumpSlots.RUN_DATA)
        counts, events = file.vectors(runs, schema.RunDataSlots.EVENTS)
        present, tensors = file.tables(events, schema.EventSlots.DEBUG_EVENT)
        names = file.texts(tensors, schema.DebugEventSlots.DELEGATE_DEBUG_ID_STR)
        numbers = file.numbers(tensors, schema.DebugEventSlots.DELEGATE_DEBUG_ID_INT)
        written = np.zeros(len(present) + 1, np.int64)
        # Tensors of a CPU kernel or of the program itself have neither.
        written[1:][present] = np.array([bool(name) for name in names], bool) | (numbers >= 0)
        per_block = np.diff(np.cumsum(written)[np.concatenate(([0], np.cumsum(counts)))]).tolist()
        blocks = zip(file.texts(runs, schema.RunDataSlots.NAME), per_block, strict=True)
        return tuple(count for name, count in blocks if name == INFERENCE)
    except FlatbufferError as error:
        raise ETDumpError(str(error)) from None


def _opened(data: bytes) -> tuple[Flatbuffer, int]:
    """Return the file and the position of its root. Raises ETDumpError for data that is no ETDump."""
    if len(data) > ETDUMP_LIMIT:
        raise ETDumpError(f"has {len(data)} bytes, more than {ETDUMP_LIMIT}")
    start = next((start for start in (4, 0) if data[start + 4 : start + 8] == schema.IDENTIFIER), None)
    if start is None:
        raise ETDumpError("is not an ETDump: its identifier is missing")
    if start and int.from_bytes(data[:4], "little") > len(data) - 4:
        raise ETDumpError(f"is cut short: has {len(data)} bytes of {int.from_bytes(data[:4], 'little') + 4}")
    return Flatbuffer(data), start


def node_cycles(block: Block) -> int | None:
    """Return the HTP cycles of an inference; None where it has none.

    The sum over the node rows of all delegate calls of the block. QNN's own totals are the same sum, under names
    that belong to the SDK.
    """
    rows = [event.value for event in block.events if event.is_node and event.unit == "cycles"]
    return sum(rows) if rows else None


def _blocks(file: Flatbuffer, start: int) -> list[Block]:
    _, runs = file.vectors(file.root(start), schema.ETDumpSlots.RUN_DATA)
    names = file.texts(runs, schema.RunDataSlots.NAME)
    counts, events = file.vectors(runs, schema.RunDataSlots.EVENTS)
    present, profiles = file.tables(events, schema.EventSlots.PROFILE_EVENT)
    # Index after the last profile event of each block.
    profiled = np.concatenate(([0], np.cumsum(present)))
    ends = profiled[np.cumsum(counts)].tolist() if len(runs) else []
    rows = _events(file, profiles)
    return [Block(name, tuple(rows[begin:end])) for name, (begin, end) in zip(names, pairwise([0, *ends]), strict=True)]


def _events(file: Flatbuffer, profiles: Positions) -> list[ProfileEvent]:
    fields = schema.ProfileEventSlots
    names = file.texts(profiles, fields.NAME)
    by_name = file.texts(profiles, fields.DELEGATE_DEBUG_ID_STR)
    by_number = file.numbers(profiles, fields.DELEGATE_DEBUG_ID_INT).tolist()
    starts, ends = file.numbers(profiles, fields.START_TIME), file.numbers(profiles, fields.END_TIME)
    for backwards in np.flatnonzero(ends < starts)[:1].tolist():
        name = names[backwards] or by_name[backwards]
        raise ETDumpError(f"event {name[:80]!r} ends at {ends[backwards]}, before its start at {starts[backwards]}")
    columns = (
        starts.tolist(),
        ends.tolist(),
        file.numbers(profiles, fields.CHAIN_INDEX).tolist(),
        file.numbers(profiles, fields.INSTRUCTION_ID).tolist(),
    )
    return [
        ProfileEvent(name or text, start, end, chain, instruction, bool(text) or number != -1)
        for name, text, number, start, end, chain, instruction in zip(names, by_name, by_number, *columns, strict=True)
    ]
