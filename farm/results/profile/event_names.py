"""Names of profiled events: their node, unit and kind."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.results.attempt import OperatorProfile

CALL = "DELEGATE_CALL"
"""ExecuTorch's name of the event around everything that a delegate does in one call."""
EXECUTE = "Method::execute"
"""ExecuTorch's name of the event around one inference."""
KERNEL = "native_call_"
"""Prefix of ExecuTorch's name of the event around one kernel on the CPU."""
INFERENCE = "Execute"
"""ExecuTorch's name of the block of one execution: 1.5, runtime/executor/method.cpp."""
WHOLE_CALL = "whole call: "
"""Prefix of farm's name for a row with a delegate's figure of a whole call, not of a node: no part of any sum."""

_UNIT = re.compile(r" \(([a-z]{1,16})\)$")
# The row of one node of a QNN graph: `aten_relu_default:OpId_80 (cycles)`, `Input OpId_2 (cycles)`.
_NODE = re.compile(r"(?:^|[: ])OpId_\d+ \([a-z]{1,16}\)$")
_OP_ID = re.compile(r"(?:^|[: ])OpId_\d+$")


# A program has few names, and a dump repeats them in every inference; the bound is for hostile dumps.
@functools.lru_cache(4096)
def unit_of(name: str) -> str:
    """Return the unit at the end of the name of a QNN event: `cycles`, `us`, `count`; empty without a unit."""
    found = _UNIT.search(name)
    return found[1] if found else ""


@functools.lru_cache(4096)
def node_of(name: str) -> str:
    """Return the name of an event's node in the graph of the delegate: `aten_relu_default`; empty for other events."""
    return _OP_ID.sub("", name.removesuffix(f" ({unit_of(name)})")) if names_node(name) else ""


@functools.lru_cache(4096)
def names_node(name: str) -> bool:
    """Return whether QNN gives this name to the row of a node, not to a total over the graph."""
    return _NODE.search(name) is not None


class _Named(Protocol):
    @property
    def node(self) -> str: ...


def is_whole_call(row: _Named) -> bool:
    """Return whether a row is about a delegate call as a whole: it stays out of sums and has no share."""
    return row.node.startswith(WHOLE_CALL)


def sums(rows: Iterable[OperatorProfile]) -> dict[str, float]:
    """Return the sum of the medians by unit, without the rows of whole calls."""
    found: dict[str, float] = {}
    for row in rows:
        if not is_whole_call(row):
            found[row.unit] = found.get(row.unit, 0.0) + row.p50
    return found
