from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.results.profile.cycles import operator_rows
from farm.results.profile.etdump import ETDUMP_LIMIT, Block, ETDumpError, node_cycles, read_etdump

from .conftest import LOAD_BLOCK, PATIENT, inference_block, write_etdump

GOOD = write_etdump([LOAD_BLOCK, inference_block(826, 98405), inference_block(10, 0, 5)])


def test_blocks_and_events_come_in_order() -> None:
    load, first, second = read_etdump(GOOD)
    assert (load.name, first.name, second.name) == ("Default", "Execute", "Execute")
    assert [(event.name, event.unit, event.value, event.is_delegate, event.is_node) for event in first.events] == [
        ("Num times yield occured (count)", "count", 3, True, False),
        ("Accelerator (execute) time (cycles)", "cycles", 99231, True, False),
        ("aten_relu_default:OpId_0 (cycles)", "cycles", 826, True, True),
        ("aten_relu_default:OpId_1 (cycles)", "cycles", 98405, True, True),
        ("QNN (execute) time (us)", "us", 12444, True, False),
        ("DELEGATE_CALL", "", 800, False, False),
        ("Method::execute", "", 820, False, False),
    ]
    assert [event.instruction for event in first.events] == [0, 0, -1, -1, 0, 0, 0]


def test_cycles_are_the_sum_of_the_node_rows_per_inference(etdump: Callable[..., bytes]) -> None:
    assert [node_cycles(block) for block in read_etdump(GOOD)] == [None, 99231, 15]
    assert [node_cycles(block) for block in read_etdump(etdump())] == [None]
    calls = [
        {"delegate": "Input OpId_2 (cycles)", "end": 5, "instruction": 0},
        {"delegate": "aten_add_tensor:OpId_9 (cycles)", "end": 7, "instruction": 2},
        {"delegate": "aten_add_tensor:OpId_9 (us)", "end": 1000, "instruction": 2},
        {"name": "kernel:OpId_1 (cycles)", "end": 1000},
        {"name": "x", "debug_id": 7, "end": 1},
    ]
    (block,) = read_etdump(write_etdump([("Execute", calls)]))
    assert node_cycles(block) == 12, "of every delegate call"
    assert block.events[-1].is_delegate
    assert read_etdump(GOOD[4:]) == read_etdump(GOOD), "the prefix with the size is optional"


NEEDS_SCHEMA = pytest.mark.skipif(
    find_spec("executorch") is None, reason="needs flatc and the schema of the build extra"
)


@NEEDS_SCHEMA
def test_the_tables_are_those_of_executorchs_schema() -> None:
    tool = Path(__file__).parents[2] / "tools" / "generate_etdump_schema.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@NEEDS_SCHEMA
@pytest.mark.parametrize("flags", [["--size-prefixed"], []])
def test_reads_what_flatc_makes_of_executorchs_own_schema(tmp_path: Path, flags: list[str]) -> None:
    package = Path(find_spec("executorch").submodule_search_locations[0])  # type: ignore[union-attr, index]
    profile = {"chain_index": 3, "instruction_id": 4, "delegate_debug_metadata": [1, 2], "end_time": 2**63}
    events: list[dict[str, object]] = [
        {"allocation_event": {"allocator_id": 1, "allocation_size": 64}},
        {
            "profile_event": {
                **profile,
                "delegate_debug_id_str": "aten_relu_default:OpId_80 (cycles)",
                "end_time": 2**63,
            }
        },
        {"profile_event": {"name": "DELEGATE_CALL", "delegate_debug_id_int": 5, "start_time": 2, "end_time": 5}},
    ]
    dump = {"version": 0, "run_data": [{"name": "Execute", "allocators": [{"name": "a"}], "events": events}]}
    source = tmp_path / "dump.json"
    source.write_text(json.dumps(dump))
    schema = package / "devtools" / "etdump" / "etdump_schema_flatcc.fbs"
    flatc = package / "data" / "bin" / "flatc"
    subprocess.run([flatc, "--binary", *flags, "-o", tmp_path, schema, source], check=True, capture_output=True)
    (block,) = read_etdump((tmp_path / "dump.etdp").read_bytes())
    relu, call = block.events
    assert (relu.name, relu.value, relu.unit, relu.chain, relu.instruction, relu.is_delegate) == (
        "aten_relu_default:OpId_80 (cycles)", 2**63, "cycles", 3, 4, True,
    )  # fmt: skip
    assert (call.name, call.start, call.end, call.chain, call.instruction, call.is_delegate) == (
        "DELEGATE_CALL", 2, 5, 0, -1, True,
    )  # fmt: skip
    assert node_cycles(block) == 2**63


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "identifier is missing"),
        (b"ED00", "identifier is missing"),
        (b"{}" * 100, "identifier is missing"),
        (GOOD[:12], "cut short"),
        (GOOD[:-1], "cut short"),
        (GOOD[4:40], "malformed"),
        (b"\xff\xff\xff\x7fED00", "malformed"),
        (b"\0" * (ETDUMP_LIMIT + 1), "more than"),
        (write_etdump([("Execute", [{"name": "x", "start": 9, "end": 3}])]), "before its start"),
    ],
)
def test_what_is_no_etdump_says_so(data: bytes, problem: str) -> None:
    with pytest.raises(ETDumpError, match=problem):
        read_etdump(data)


def _read(data: bytes) -> list[Block] | None:
    """Return the blocks, or None where they were refused as they should be; anything else escapes."""
    try:
        blocks = read_etdump(data)
    except ETDumpError:
        return None
    for block in blocks:
        node_cycles(block)
    return blocks


@settings(PATIENT, max_examples=100)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_damaged_dump_is_read_or_refused(first: int, value: int, second: int, other: int) -> None:
    data = bytearray(GOOD)
    data[first], data[second] = value, other
    blocks = _read(bytes(data))
    for row in operator_rows(blocks or []):
        assert 0 <= row.least <= row.p50 <= row.greatest <= 2.0**67
        assert 0 <= row.share <= 1


@settings(PATIENT, max_examples=150)
@given(
    st.integers(0, len(GOOD) // 4 - 1),
    st.sampled_from([0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFC, len(GOOD), len(GOOD) - 4, 2**16]),
    st.booleans(),
)
def test_hostile_offsets_and_lengths_are_read_or_refused(word: int, value: int, prefixed: bool) -> None:
    data = bytearray(GOOD)
    data[4 * word : 4 * word + 4] = value.to_bytes(4, "little")
    _read(bytes(data) if prefixed else bytes(data)[4:])


def test_a_dump_cut_anywhere_is_refused() -> None:
    for size in range(0, len(GOOD), 7):
        assert _read(GOOD[:size]) is None
        _read(GOOD[4:size])


def test_a_small_file_cannot_ask_for_much_work() -> None:
    # Two vectors of 20,000 offsets, all of one to the same run and all of the other to the same event: 400 million
    # events in 160 kB. A table is a vtable (its size, the table's, the place of each slot) and what that points at.
    count = 20_000
    event = struct.pack("<3H2xi", 6, 4, 0, 8)
    events = _same_target(count, 8)
    run = struct.pack("<6HiI", 12, 8, 0, 0, 0, 4, 12, 4)
    runs = _same_target(count, 12)
    root = struct.pack("<4HiI", 8, 8, 0, 4, 8, 4)
    data = struct.pack("<I4s", 16, b"ED00") + root + runs + run + events + event
    assert len(data) < 170_000
    with pytest.raises(ETDumpError, match="overlap"):
        read_etdump(data)


def _same_target(count: int, beyond: int) -> bytes:
    """Return a vector whose elements all point `beyond` bytes behind its end."""
    return struct.pack("<I", count) + b"".join(struct.pack("<I", 4 * (count - n) + beyond) for n in range(count))
