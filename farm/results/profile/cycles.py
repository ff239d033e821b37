"""The profile of an execution: cycles per inference, and what each node of a program took. docs/guides/profiles.md."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.text import one_line
from farm.builds.bundles.origins import NO_ORIGINS, UNKNOWN, Origin, Origins
from farm.devices.execution.raw import ETDUMP_FILE
from farm.results.attempt import Direction, Measurement, OperatorProfile
from farm.results.profile.etdump import ETDUMP_LIMIT, Block, ETDumpError, ProfileEvent, node_cycles, read_etdump
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

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.results.runner_report import RunnerReport

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


def delegate_calls(events: Iterable[_Key | ProfileEvent], delegates: Collection[str]) -> dict[tuple[int, int], str]:
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
