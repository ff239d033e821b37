"""Hash of a program in a `.pte` file, without times and running numbers: equal for the same program. Torch-free.

Two compilations of a job give different files. QNN numbers its objects through the life of a process, and ExecuTorch
writes the time beside them. `program_hash` leaves these out, and nothing else:

* the time (nanoseconds since 1970), in the header that ExecuTorch writes before each context;
* ids of tensors, counted from 1: the inputs and outputs of a graph;
* ids of nodes (operators and constants), counted from 16: in the list of operators, and in the second word of every
  node's id in the graph that HTP loads;
* ids of graphs, counted from 256, also as text: `PICKLE/265/forward`.

An id becomes its distance from the least id in the context, so that the connections of a graph still count, as do
weights, scales, attributes, names, their order, and every byte that is not named above.

This is the layout of QNN 2.50 and 2.51 as observed in 1,600 programs for HTP V68 to V81 in 8a8w to fp16; it is
published nowhere. Each step is therefore checked against other places of the file (versions, sizes, the number of
nodes, the graph of a name). A context that contradicts the layout or has another version is hashed unchanged: then
equal programs may count as different, never the other way round. Programs without QNN are hashed unchanged as well;
they are the same bytes each time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farm.builds.program.flatbuffer import Flatbuffer, FlatbufferError, Positions, Slot
from farm.builds.program.pte import qnn_payloads

# Header that ExecuTorch writes before a context: magic number, time, size of the context, zeros to the end.
_MAGIC, _TIME, _SIZE, _HEADER_BYTES = 0x5678ABCD, slice(4, 12), slice(12, 20), 256

# Context: version, three sizes and places, a description for QnnSystem, then the blob that the HTP backend reads.
_CONTEXT_VERSION = (2, 3, 0, 1)
_DESCRIPTION_AT = 40
_DESCRIPTION_KIND = 3
_HTP = 6  # QNN_BACKEND_ID_HTP
# Versions of the blob in QNN 2.50 and 2.51; QNN 2.47 to 2.49 write other versions, and number nodes in other ways.
_BLOB_VERSIONS = ((4, 0, 5), (4, 0, 6))
_BLOB_HEADER_BYTES = 32

_ROOT = "ROOT"
_GRAPH_NAME = re.compile(r"PICKLE/(\d{3,})/(.+)", re.DOTALL)

# Nodes of a graph, one after another: number, type, id (node, part), operands. The number is combined with a constant
# by XOR; its four highest bits are flags, and one flag marks an additional word before the type.
_FIRST_NUMBER = 0x1303EE71
_NUMBER_BITS = 0x0FFFFFFF
_FLAGS, _WIDE = (0x1, 0x5, 0x9, 0xD), 0x4
_END_OF_NODES = 0xBEEFF00D
_END_WITHIN = 64
# Parts of ids that hold the value of a constant in place of a node.
_BY_VALUE = (0x4001, 0x4002, 0x4003)
_FIRST_NODE = 16
"""Lowest id of a node; lower ids are the graph's inputs, outputs and the graph itself."""
_NODE_LIMIT = 2**31
_AT_ONCE = 2**20
"""Bytes per step of the search for nodes, which ends before the weights behind them."""

# Description of a context: root -> versioned -> info -> graphs -> tensors.
_VERSIONED, _KIND, _KIND_BYTE, _HELD = Slot(0, "table"), Slot(0, "<u4"), Slot(1, "<u1"), Slot(2, "table")
_BACKEND, _GRAPHS = Slot(0, "<u4"), Slot(10, "[table]")
_GRAPH_INPUTS, _GRAPH_OUTPUTS, _ID = Slot(2, "[table]"), Slot(4, "[table]"), Slot(0, "<u4")
# Table of contents of the blob.
_ENTRIES = Slot(2, "[table]")
_ENTRY_NAME, _ENTRY_BYTES, _ENTRY_PLACE = Slot(0, "text"), Slot(1, "<u8"), Slot(4, "<u8")
# Entry ROOT of the blob: the graphs, with their operators and tensors, each with its kind.
_KIND_FIRST, _HELD_SECOND = Slot(0, "<u1"), Slot(1, "table")
_ROOT_GRAPHS = Slot(3, "[table]")
_OPERATORS, _INPUTS, _OUTPUTS, _GRAPH_ID = Slot(0, "[table]"), Slot(1, "[table]"), Slot(2, "[table]"), Slot(4, "<u8")
_PRODUCER = Slot(1, "<u4")


def program_hash(pte: Path | bytes) -> str:
    """Return a SHA-256, as hex, that two `.pte` files share if they are the same program.

    The unchanged file is hashed for a program without such numbers, for an unknown layout, and for a file that is no
    program.
    """
    data = pte if isinstance(pte, bytes) else pte.read_bytes()
    try:
        payloads = qnn_payloads(data)
    except ValueError:
        return hashlib.sha256(data).hexdigest()
    digest, view, end = hashlib.sha256(), memoryview(data), 0
    for start, stop in payloads:
        try:
            replacements = _in_order(_replacements(data[start:stop]))
        except (_UnknownLayoutError, FlatbufferError):
            continue
        for place, value in replacements:
            digest.update(view[end : start + place])
            digest.update(value)
            end = start + place + len(value)
    digest.update(view[end:])
    return digest.hexdigest()


class _UnknownLayoutError(ValueError):
    """Context with an unknown layout."""


def _in_order(replacements: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the distinct replacements by position. Raises _UnknownLayoutError if two overlap."""
    # A flatbuffer may store equal fields once, so that two replacements have the same position.
    found = sorted(set(replacements))
    for (place, value), (following, _) in pairwise(found):
        _require(place + len(value) <= following)
    return found


class _Entry(NamedTuple):
    """Entry of the blob that HTP reads."""

    name: str
    name_at: int
    """Position of the length of its name in the payload."""
    start: int
    """Position of its first byte in the payload."""
    nbytes: int


class _Ids(NamedTuple):
    """Positions of the ids in the list of graphs."""

    tensors: list[int]
    """Positions in the payload, of 4 bytes each."""
    nodes: list[int]
    graphs: dict[int, int]
    """Position of each graph's id, of 8 bytes, by the id."""


def _replacements(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the replacements of time and running numbers: position and bytes. Raises _UnknownLayoutError."""
    description, blob = _parts(payload)
    entries = _entries(payload, blob)
    ids = _listed_ids(payload, entries)
    tensors = [*_described_tensors(payload, *description), *ids.tensors]
    nodes = [position for position in ids.nodes if _u32(payload, position) >= _FIRST_NODE]
    _require(tensors and nodes and ids.graphs)
    yield _TIME.start, bytes(_TIME.stop - _TIME.start)
    yield from _from_least(payload, tensors)
    yield from _from_least(payload, nodes)
    first_graph = min(ids.graphs)
    for number, position in ids.graphs.items():
        yield position, (number - first_graph).to_bytes(8, "little")
    first_node = min(_u32(payload, position) for position in nodes)
    named = set()
    for entry in entries:
        if entry.name == _ROOT:
            continue
        match = _GRAPH_NAME.fullmatch(entry.name)
        if match is None:
            raise _UnknownLayoutError
        number = int(match[1])
        named.add(number)
        text = f"PICKLE/{number - first_graph}/{match[2]}".encode()
        # A name consists of its length, its characters, and zeros up to the next multiple of 4.
        whole = 4 + (len(entry.name.encode()) + 1 + 3) // 4 * 4
        yield entry.name_at, (bytes(4) + text).ljust(whole, b"\0")
        for place, node in _node_ids(payload, entry):
            yield place, ((node - first_node) % 2**32).to_bytes(4, "little")
    _require(named == set(ids.graphs))


def _parts(payload: bytes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return start and end of the description, and of the blob that HTP reads."""
    _require(len(payload) > _HEADER_BYTES and _u32(payload, 0) == _MAGIC)
    _require(not any(payload[_SIZE.stop : _HEADER_BYTES]))
    end = _HEADER_BYTES + int.from_bytes(payload[_SIZE], "little")
    start = _HEADER_BYTES + _DESCRIPTION_AT
    head = payload[_HEADER_BYTES:start]
    _require(end <= len(payload) and len(head) == _DESCRIPTION_AT)
    _require(tuple(int.from_bytes(head[n : n + 4], "big") for n in range(0, 16, 4)) == _CONTEXT_VERSION)
    nbytes, offset, size = (int.from_bytes(head[n : n + 8], "little") for n in (16, 24, 32))
    blob = _HEADER_BYTES + offset
    _require(start + nbytes <= blob and blob + size <= end)
    return (start, start + nbytes), (blob, blob + size)


def _described_tensors(payload: bytes, start: int, end: int) -> list[int]:
    """Return the positions of the ids of tensors in the description."""
    file = Flatbuffer(payload[start:end])
    versioned = file.tables(file.root(0), _VERSIONED).positions
    info = _of_kind(file, versioned)
    _require(len(info) == 1 and int(file.numbers(info, _BACKEND)[0]) == _HTP)
    _, graphs = file.vectors(info, _GRAPHS)
    held = _of_kind(file, graphs)
    graphs = file.tables(file.tables(held, _VERSIONED).positions, _VERSIONED).positions
    tensors = np.concatenate([file.vectors(graphs, slot)[1] for slot in (_GRAPH_INPUTS, _GRAPH_OUTPUTS)])
    return [start + place for place in _everywhere(file, tensors, _ID)]


def _of_kind(file: Flatbuffer, versioned: Positions) -> Positions:
    """Return the contents of versioned tables. Raises _UnknownLayoutError for an unknown version."""
    for slot in (_KIND, _KIND_BYTE):
        _require((file.numbers(versioned, slot) == _DESCRIPTION_KIND).all())
    held = file.tables(versioned, _HELD)
    _require(held.present.all())
    return held.positions


def _entries(payload: bytes, blob: tuple[int, int]) -> list[_Entry]:
    """Return the entries of the blob by its table of contents."""
    start, end = blob
    head = payload[start : start + _BLOB_HEADER_BYTES]
    _require(tuple(int.from_bytes(head[n : n + 8], "little") for n in (0, 8, 16)) in _BLOB_VERSIONS)
    nbytes = int.from_bytes(head[24:32], "little")
    first = start + _BLOB_HEADER_BYTES
    _require(first + nbytes <= end)
    file = Flatbuffer(payload[first : first + nbytes])
    _, tables = file.vectors(file.root(0), _ENTRIES)
    names = file.texts(tables, _ENTRY_NAME)
    found = []
    for name, name_at, size, offset in zip(
        names,
        _everywhere(file, tables, _ENTRY_NAME),
        file.numbers(tables, _ENTRY_BYTES).tolist(),
        file.numbers(tables, _ENTRY_PLACE).tolist(),
        strict=True,
    ):
        _require(start + offset + size <= end and offset % 4 == 0)
        offset_at = first + name_at
        found.append(_Entry(name, offset_at + _u32(payload, offset_at), start + offset, size))
    return found


def _listed_ids(payload: bytes, entries: Sequence[_Entry]) -> _Ids:
    """Return the positions of the ids in the list of graphs."""
    roots = [entry for entry in entries if entry.name == _ROOT]
    _require(len(roots) == 1)
    [root] = roots
    file = Flatbuffer(payload[root.start : root.start + root.nbytes])
    top = _of_first_kind(file, file.root(0))
    _, graphs = file.vectors(top, _ROOT_GRAPHS)
    graphs = _of_first_kind(file, graphs)
    _, operators = file.vectors(graphs, _OPERATORS)
    both = np.concatenate([file.vectors(graphs, slot)[1] for slot in (_INPUTS, _OUTPUTS)])
    tensors = _of_first_kind(file, both)
    numbers = file.numbers(graphs, _GRAPH_ID).tolist()
    places = _everywhere(file, graphs, _GRAPH_ID)
    producers = file.fields(tensors, _PRODUCER).positions.tolist()
    return _Ids(
        [root.start + place for place in _everywhere(file, tensors, _ID)],
        [root.start + place for place in (*_everywhere(file, operators, _ID), *producers)],
        {number: root.start + place for number, place in zip(numbers, places, strict=True)},
    )


def _of_first_kind(file: Flatbuffer, tables: Positions) -> Positions:
    held = file.tables(tables, _HELD_SECOND)
    _require((file.numbers(tables, _KIND_FIRST) == 1).all() and held.present.all())
    return held.positions


def _node_ids(payload: bytes, entry: _Entry) -> Iterator[tuple[int, int]]:
    """Yield the ids in a graph that are counted through the life of a process: position in the payload, and id."""
    end = entry.start + entry.nbytes
    mark = _FIRST_NUMBER.to_bytes(4, "little")
    first = payload.find(mark, entry.start, end)
    _require(first >= entry.start + 12 and first % 4 == entry.start % 4)
    # There is one list of nodes.
    _require(payload.find(mark, first + 4, end) < 0)
    count, expected, last = _u32(payload, first - 12), 0, first
    # The number of a node may also occur elsewhere by chance: nodes are accepted in the order of their numbers.
    for start in range(first, end, _AT_ONCE):
        words = np.frombuffer(payload, "<u4", min(_AT_ONCE, end - start) // 4, start)
        numbers = (words ^ np.uint32(_FIRST_NUMBER)) & np.uint32(_NUMBER_BITS)
        for place in np.flatnonzero(numbers < count).tolist():
            if int(numbers[place]) == expected:
                expected, last = expected + 1, start + 4 * place
                yield from _node_id(payload, last, end)
        if expected == count:
            break
    behind = np.frombuffer(payload, "<u4", min(_END_WITHIN, (end - last) // 4), last)
    _require(expected == count and _END_OF_NODES in behind)


def _node_id(payload: bytes, place: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield position and id of the node at `place` if the id is counted."""
    flags = _u32(payload, place) >> 28
    at = place + (12 if flags & _WIDE else 8)
    _require(flags in _FLAGS and at + 8 <= end)
    number, part = _u32(payload, at), _u32(payload, at + 4)
    if part not in _BY_VALUE and number >= _FIRST_NODE:
        _require(number < _NODE_LIMIT)
        yield at, number


def _everywhere(file: Flatbuffer, tables: Positions, slot: Slot) -> list[int]:
    """Return the position of a field in each of `tables`."""
    column = file.fields(tables, slot)
    _require(column.present.all())
    return [int(position) for position in column.positions]


def _from_least(payload: bytes, positions: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    values = [_u32(payload, position) for position in positions]
    least = min(values)
    for position, value in zip(positions, values, strict=True):
        yield position, (value - least).to_bytes(4, "little")


def _u32(data: bytes, position: int) -> int:
    return int.from_bytes(data[position : position + 4], "little")


def _require(is_so: object) -> None:
    if not is_so:
        raise _UnknownLayoutError
