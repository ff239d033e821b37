"""The profile of an execution: ETDump of a device -> blocks of events, cycles per inference and node.
docs/guides/profiles.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from farm.base.text import one_line
from farm.builds.bundles.bundle import NO_ORIGINS, UNKNOWN, Origin, Origins
from farm.builds.program.flatbuffer import Flatbuffer, FlatbufferError, Positions
from farm.devices.execution.raw import ETDUMP_FILE
from farm.results.attempt import Direction, Measurement, OperatorProfile
from farm.results.profile import etdump_schema as schema
from farm.results.profile.event_names import (
    CALL,
    EXECUTE,
    INFERENCE,
    KERNEL,
    WHOLE_CALL,
    is_whole_call,
    names_node,
    node_of,
    sums,
    unit_of,
)
from farm.results.runner_report import RunnerReport

# ETDump, the profile that ExecuTorch's event tracer leaves -> blocks of events.
#
# A flatbuffer; its tables are in etdump_schema.py. The file comes from a device: a malformed one ends in ETDumpError
# and nothing else, and the work is bounded by the size of the file.


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


# The profile of an execution: cycles per inference, and what each node of a program took. docs/guides/profiles.md.


OPERATOR_LIMIT = 10_000
"""Rows that are kept of one attempt, the first ones: twenty times the nodes of a large vision model."""
NAME_LIMIT = 200

# Units of time in the names of events; none is the runtime's clock. What stands before them belongs to the SDK.
_TIMES = ("", "cycles", "us")

# Beyond it, floats that hold a count lose their last digit; an hour at 3 GHz is a thousandth of it.
_GREATEST_CYCLES = 2**53


class ProfileReading(msgspec.Struct, frozen=True):
    """Profile of an execution from its ETDump."""

    measurements: tuple[Measurement, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    notes: tuple[str, ...] = ()
    """Reasons for missing parts."""


def read_profile(
    folder: Path,
    report: RunnerReport,
    delegates: Collection[str] = (),
    *,
    operators: bool = False,
    origins: Origins = NO_ORIGINS,
) -> ProfileReading:
    """Return `htp_cycles`, one sample per sample of `latency`, with `operators` the rows too, and notes on what lacks.

    `delegates` are the names of the backends in the program: calls are named after it where there is one; `origins`,
    where its nodes come from. Nothing at all, and no note, where no profile was asked for.
    """
    try:
        with (folder / ETDUMP_FILE).open("rb") as file:
            blocks = read_etdump(file.read(ETDUMP_LIMIT + 1))
    except FileNotFoundError:
        return ProfileReading()
    except (ETDumpError, OSError) as error:
        return ProfileReading(notes=(f"no profile: {ETDUMP_FILE} is refused: {error}",))
    inferences = timed_inferences(blocks, report)
    if inferences is None:
        found, expected = sum(block.name == INFERENCE for block in blocks), _executions(report)
        return ProfileReading(notes=(f"no profile: {ETDUMP_FILE} has {found} inferences where there were {expected}",))
    measured, notes = _cycles(inferences)
    rows = operator_rows(inferences, delegates, origins) if operators else ()
    if len(rows) > OPERATOR_LIMIT:
        notes = (*notes, f"the profile has {len(rows)} rows: the first {OPERATOR_LIMIT} are kept")
    return ProfileReading(measured, rows[:OPERATOR_LIMIT], notes)


def timed_inferences(blocks: Iterable[Block], report: RunnerReport) -> list[Block] | None:
    """Return the blocks of the iterations, without loading and warm-up; None for a mismatch."""
    executed = [block for block in blocks if block.name == INFERENCE]
    if len(executed) != _executions(report):
        return None
    timed: list[Block] = []
    position = 0
    for inference in report.inferences:
        position += len(inference.warm_up_ns)
        # Without single times, all executions are timed.
        rest = inference.executions - len(inference.warm_up_ns)
        timed += executed[position : position + rest]
        position += rest
    return timed


def operator_rows(
    inferences: Sequence[Block], delegates: Collection[str] = (), origins: Origins = NO_ORIGINS
) -> tuple[OperatorProfile, ...]:
    """Return the rows that make up the time of `inferences`, in the order of execution, the runtime itself last.

    Times of the runtime's clock (ns) exclude other rows' times: a delegate call has no time of nodes its delegate
    timed with the same clock, an inference no time of its calls and kernels. So the rows add up to the inferences.
    """
    samples: dict[_Key, list[int]] = {}
    for block in inferences:
        values: dict[_Key, int] = {}
        for event in block.events:
            key = _Key(event.chain, event.instruction, event.is_delegate, event.name)
            values[key] = values.get(key, 0) + event.value
        for key, value in _exclusive(values).items():
            samples.setdefault(key, []).append(value)
    calls = delegate_calls(samples, delegates)
    rows = [_row(key, label, samples[key], _origin(key, origins)) for key, label in _in_order(samples, calls)]
    whole = sums(rows)
    return tuple(
        row
        if is_whole_call(row) or not whole[row.unit]
        else msgspec.structs.replace(row, share=row.p50 / whole[row.unit])
        for row in rows
    )


def delegate_calls(events: Iterable[_Key], delegates: Collection[str]) -> dict[tuple[int, int], str]:
    """Return the names of a program's delegate calls by chain and instruction: `QnnBackend[0]`."""
    name = next(iter(delegates)) if len(delegates) == 1 else "delegate"
    places = dict.fromkeys(
        (event.chain, event.instruction) for event in events if event.is_delegate or event.name == CALL
    )
    return {place: f"{one_line(name, NAME_LIMIT)}[{number}]" for number, place in enumerate(places)}


class _Key(NamedTuple):
    """Key of equal events in all inferences."""

    chain: int
    instruction: int
    is_delegate: bool
    name: str


def _cycles(inferences: Sequence[Block]) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    counted = [node_cycles(block) for block in inferences]
    cycles = [count for count in counted if count is not None]
    if not cycles:
        return (), ()
    if len(cycles) != len(counted):
        return (), (f"no htp_cycles: {len(cycles)} of {len(counted)} inferences have them",)
    if not all(0 < count <= _GREATEST_CYCLES for count in cycles):
        return (), (f"no htp_cycles: {ETDUMP_FILE} claims {min(cycles)} to {max(cycles)} cycles per inference",)
    return (Measurement("htp_cycles", "cycles", Direction.LOWER, tuple(map(float, cycles))),), ()


def _executions(report: RunnerReport) -> int:
    return sum(inference.executions for inference in report.inferences)


def _exclusive(values: Mapping[_Key, int]) -> dict[_Key, int]:
    """Return the values of rows, each without its contained rows."""
    kept: dict[_Key, int] = {}
    inside: dict[tuple[int, int], int] = {}
    outermost, outer_value, called = None, 0, 0
    for key, value in values.items():
        if key.is_delegate:
            unit = unit_of(key.name)
            if not unit:
                inside[key.chain, key.instruction] = inside.get((key.chain, key.instruction), 0) + value
            if unit in _TIMES:
                kept[key] = value
        elif key.name == EXECUTE:
            outermost, outer_value = key, value
        elif key.name == CALL or key.name.startswith(KERNEL):
            called += value
            kept[key] = value
    for key, value in kept.items():
        if key.name == CALL and not key.is_delegate:
            # A delegate's clock may be coarser than the runtime's.
            kept[key] = max(0, value - inside.get((key.chain, key.instruction), 0))
    if outermost is not None:
        kept[outermost] = max(0, outer_value - called)
    return kept


def _in_order(keys: Iterable[_Key], calls: Mapping[tuple[int, int], str]) -> Iterator[tuple[_Key, str]]:
    """Yield keys and the name of their delegate call: the call, its nodes, the whole of it; at last the runtime."""
    found = list(keys)
    places = {
        place: number for number, place in enumerate(dict.fromkeys((key.chain, key.instruction) for key in found))
    }

    def order(key: _Key) -> tuple[bool, int, bool, bool]:
        return key.name == EXECUTE, places[key.chain, key.instruction], key.is_delegate, _is_whole_call(key)

    for key in sorted(found, key=order):
        inside = key.is_delegate or key.name == CALL
        yield key, calls[key.chain, key.instruction] if inside else ""


def _is_whole_call(key: _Key) -> bool:
    return key.is_delegate and bool(unit_of(key.name)) and not names_node(key.name)


def _origin(key: _Key, origins: Origins) -> Origin:
    if key.is_delegate:
        return origins.calls.get(key.instruction, {}).get(node_of(key.name), UNKNOWN)
    return origins.kernels.get(key.instruction, UNKNOWN) if key.name.startswith(KERNEL) else UNKNOWN


def _row(key: _Key, delegate: str, values: Sequence[int], origin: Origin) -> OperatorProfile:
    unit = unit_of(key.name) if key.is_delegate else ""
    name = one_line(key.name.removesuffix(f" ({unit})"), NAME_LIMIT)
    return OperatorProfile(
        node=f"{WHOLE_CALL}{name}" if _is_whole_call(key) else name,
        delegate=delegate,
        unit=unit or "ns",
        n=len(values),
        p50=float(statistics.median(values)),
        least=float(min(values)),
        greatest=float(max(values)),
        share=0.0,
        module=one_line(origin.module, NAME_LIMIT),
        source=one_line(origin.source, NAME_LIMIT),
    )
