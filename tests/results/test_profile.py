"""Profiles: an ETDump read as untrusted input, rows equal to ExecuTorch's own Inspector, with consistent sums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_program

from farm.base.files import published
from farm.results.attempt import OperatorProfile
from farm.results.profile.etdump import (
    ETDUMP_LIMIT,
    OPERATOR_LIMIT,
    Block,
    ETDumpError,
    node_cycles,
    operator_rows,
    read_etdump,
    read_profile,
)
from farm.results.profile.event_names import is_whole_call
from farm.results.runner_report import RunnerReport, parse_report

from .conftest import LOAD_BLOCK, PATIENT, inference_block, write_etdump

GOOD = write_etdump([LOAD_BLOCK, inference_block(826, 98405), inference_block(10, 0, 5)])


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


# Rows of a profile: equal to ExecuTorch's own Inspector, with consistent sums.


SCRIPT = Path(__file__).with_name("official_profile.py")


@pytest.fixture(scope="session")
def official(farm_cache: Path) -> Path:
    """The folder that official_profile.py fills."""
    if find_spec("executorch") is None or find_spec("onnxruntime_qnn") is None:
        pytest.skip("needs the extras build and simulator")
    from farm.builds.runtime.packages import package_version
    from farm.builds.runtime.qnn_sdk import host_sdk
    from farm.builds.runtime.runtime import simulator_runtime

    runtime = simulator_runtime(farm_cache)
    versions = "".join(package_version(name) for name in ("executorch", "torch", "onnxruntime-qnn"))
    key = hashlib.sha256(SCRIPT.read_bytes() + versions.encode() + runtime.digest.encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        device = folder / "device"
        for name, path in runtime.files.items():
            (device / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, device / name)
        env = {**os.environ, **host_sdk(farm_cache).env}
        run_program([sys.executable, str(SCRIPT), str(device), str(folder)], env=env)
        shutil.rmtree(device)

    return published(farm_cache / "official-profile" / key, fill)


def report_of(folder: Path) -> RunnerReport:
    return parse_report((folder / "result.json").read_bytes())


def timed(raw: Sequence[float]) -> list[float]:
    """Return the times without warm-ups, for two inferences with one warm-up and three iterations each."""
    assert len(raw) == 8
    return [*raw[1:4], *raw[5:8]]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["htp", "xnnpack"])
def test_every_delegated_node_has_the_figures_of_the_inspector(official: Path, name: str) -> None:
    folder = official / name
    profile = read_profile(folder, report_of(folder), ["Some"], operators=True)
    events = [event for event in json.loads((folder / "inspector.json").read_text()) if event["block"] == "Execute"]
    calls = sorted({event["instruction"] for event in events if event["name"] == "DELEGATE_CALL"})
    assert len(calls) == {"htp": 2, "xnnpack": 1}[name]
    expected = {}
    for event in events:
        text, _, unit = event["name"].removesuffix(")").rpartition(" (")
        if event["delegated"] and name == "htp" and unit in ("cycles", "us"):
            text = text if "OpId_" in text else f"whole call: {text}"
            expected[f"Some[{calls.index(event['instruction'])}]", text, unit] = timed(event["raw"])
        elif event["delegated"] and name == "xnnpack":
            expected["Some[0]", event["name"], "ns"] = timed(event["raw"])
        elif name == "htp" and event["name"] == "DELEGATE_CALL":
            expected[f"Some[{calls.index(event['instruction'])}]", event["name"], "ns"] = timed(event["raw"])
        elif event["name"].startswith("native_call_"):
            expected["", event["name"], "ns"] = timed(event["raw"])
    found = {(row.delegate, row.node, row.unit): row for row in profile.operators}
    nodes = {key for key in expected if key[0] and key[1] != "DELEGATE_CALL" and not key[1].startswith("whole call")}
    assert len(nodes) > 6
    for layer in ("convolution", "relu", "add", "linear") if name == "htp" else ("Convolution", "Add", "Fully"):
        assert any(layer in node for _, node, _ in nodes), layer
    assert set(found) - set(expected) == {("", "Method::execute", "ns")} | (
        {("Some[0]", "DELEGATE_CALL", "ns")} if name == "xnnpack" else set()
    )
    for key, raw in expected.items():
        row = found[key]
        assert (row.n, row.p50, row.least, row.greatest) == (6, statistics.median(raw), min(raw), max(raw)), key
    if name == "htp":
        [cycles] = profile.measurements
        raws = [raw for key, raw in expected.items() if key in nodes]
        assert cycles.samples == tuple(map(sum, zip(*raws, strict=True)))


# The following tests use made-up dumps.

CPU = [
    {"name": "native_call_sin.out", "start": 120, "end": 150, "instruction": 0},
    {"name": "OPERATOR_CALL", "start": 110, "end": 160, "instruction": 0},
    {"name": "Method::execute", "start": 100, "end": 200, "instruction": 0},
]


def report(iterations: int, warm_up: int = 0) -> RunnerReport:
    inference = {"line": 0, "warm_up_ns": [1] * warm_up, "iterations_ns": [1] * iterations}
    facts = {"schema": 1, "ok": True, "exit_code": 0, "load_ns": 1, "inferences": [inference]}
    return parse_report(json.dumps(facts).encode())


def rows_of(*blocks: list[dict[str, Any]], delegates: Sequence[str] = ("QnnBackend",)) -> list[OperatorProfile]:
    return list(operator_rows(read_etdump(write_etdump([("Execute", block) for block in blocks])), delegates))


def test_a_kernel_and_what_the_runtime_itself_took() -> None:
    kernel, runtime = rows_of(CPU)
    assert (kernel.node, kernel.delegate, kernel.unit, kernel.p50, kernel.share) == (
        "native_call_sin.out", "", "ns", 30.0, 0.3,
    )  # fmt: skip
    assert (runtime.node, runtime.p50, runtime.share) == ("Method::execute", 70.0, 0.7)


def test_shares_are_of_the_medians_in_one_unit_and_leave_out_what_is_about_a_whole_call() -> None:
    rows = rows_of(*(inference_block(a, 300)[1] for a in (100, 900, 100)))
    shares = {row.node: (row.delegate, row.unit, row.share) for row in rows}
    assert shares["aten_relu_default:OpId_0"][2] == 0.25
    assert shares["aten_relu_default:OpId_1"][2] == 0.75
    assert shares["whole call: Accelerator (execute) time"] == ("QnnBackend[0]", "cycles", 0.0)
    assert shares["whole call: QNN (execute) time"] == ("QnnBackend[0]", "us", 0.0)
    assert [row.node for row in rows if is_whole_call(row)] == [
        "whole call: Accelerator (execute) time", "whole call: QNN (execute) time",
    ]  # fmt: skip
    assert "Num times yield occured" not in str(rows)


def test_a_node_executed_twice_in_an_inference_counts_twice_and_one_that_is_not_there_is_not_zero() -> None:
    event = {"delegate": "x:OpId_1 (cycles)", "end": 5, "instruction": 1}
    (row,) = rows_of([event, event], [event], [], delegates=("QnnBackend", "XnnpackBackend"))
    assert (row.n, row.least, row.p50, row.greatest) == (2, 5.0, 7.5, 10.0)
    assert row.delegate == "delegate[0]", "delegates of several kinds have no names"


def test_a_delegates_clock_may_be_coarser_than_the_runtimes() -> None:
    inside = {"delegate": "Convolution #1", "start": 0, "end": 1000, "instruction": 0}
    call = {"name": "DELEGATE_CALL", "start": 100, "end": 900, "instruction": 0}
    outer, node = rows_of([inside, call], delegates=("XnnpackBackend",))
    assert (outer.node, outer.delegate, outer.p50) == ("DELEGATE_CALL", "XnnpackBackend[0]", 0.0)
    assert (node.node, node.delegate, node.unit, node.share) == ("Convolution #1", "XnnpackBackend[0]", "ns", 1.0)


def test_inferences_with_and_without_cycles_give_none_and_rows_come_when_they_are_asked_for(tmp_path: Path) -> None:
    nothing = read_profile(tmp_path, report(1), operators=True)
    assert (nothing.measurements, nothing.operators, nothing.notes) == ((), (), ())
    dump = tmp_path / "etdump.etdp"
    dump.write_bytes(write_etdump([LOAD_BLOCK, inference_block(3, 4)]))
    without, with_rows = (read_profile(tmp_path, report(1), operators=asked) for asked in (False, True))
    assert without.operators == ()
    assert without.measurements == with_rows.measurements
    assert [row.p50 for row in with_rows.operators if "OpId" in row.node] == [3.0, 4.0]
    dump.write_bytes(write_etdump([inference_block(3, 4), inference_block()]))
    profile = read_profile(tmp_path, report(2))
    assert (profile.measurements, profile.notes) == ((), ("no htp_cycles: 1 of 2 inferences have them",))


def test_hostile_names_are_bounded_and_so_are_rows(tmp_path: Path) -> None:
    evil = "\x1b[31m\u202e" + "x" * 100_000
    events = [
        {"delegate": f"{n}{evil if n < 3 else ''}:OpId_1 (cycles)", "end": 2**64 - 1} for n in range(OPERATOR_LIMIT + 5)
    ]
    (tmp_path / "etdump.etdp").write_bytes(write_etdump([("Execute", events)]))
    profile = read_profile(tmp_path, report(1), [evil], operators=True)
    assert len(profile.operators) == OPERATOR_LIMIT
    assert f"the profile has {OPERATOR_LIMIT + 5} rows: the first {OPERATOR_LIMIT} are kept" in profile.notes
    for row in profile.operators[:5]:
        assert len(row.node) <= 200
        assert len(row.delegate) <= 210
        assert (row.node + row.delegate).isprintable()
