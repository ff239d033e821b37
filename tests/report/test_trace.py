"""Traces: valid in the Trace Event Format, with a mark for measured and for merely laid out times."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from export_schemas import TRACE
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.report.formats.trace import BY_CLOCK, IN_PROPORTION, chrome_trace, run_trace
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.profile.etdump import Block, ProfileEvent
from farm.store.view import RunView

from .conftest import run_of

FACTS = {"job": "s/c[x]", "run": "20260101-000000-abcdef", "device_kind": "virtual"}


def event(name: str, start: int, end: int, instruction: int = 0, *, inside: bool = False) -> ProfileEvent:
    return ProfileEvent(name, start, end, 0, instruction, inside)


def qnn(name: str, value: int, instruction: int = 0) -> ProfileEvent:
    return event(name, 0, value, instruction, inside=True)


LOAD = Block("Default", (event("Method::init", 1_000, 4_000),))
INFERENCE = Block(
    "Execute",
    (
        qnn("Accelerator (execute) time (cycles)", 400),
        qnn("Input OpId_2 (cycles)", 100),
        qnn("aten_relu_default:OpId_9 (cycles)", 300),
        qnn("QNN (execute) time (us)", 7),
        event("DELEGATE_CALL", 10_000, 18_001),
        event("native_call_sin.out", 20_000, 20_500, 1),
        event("OPERATOR_CALL", 19_500, 21_000, 1),
        event("Method::execute", 9_000, 22_000),
    ),
)


def checked(blocks: Iterable[Block]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the trace of an ETDump as a reader loads it, and its complete events."""
    return well_formed(chrome_trace(list(blocks), FACTS, ["QnnBackend"]), {"runtime", "node"})


def well_formed(made: dict[str, Any], categories: set[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a trace as a reader loads it, and its complete events, after checking it against the format."""
    trace = json.loads(msgspec.json.encode(made))
    TRACE.validate(trace)
    named = {one["tid"] for one in trace["traceEvents"] if one["ph"] == "M"}
    complete = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {one["tid"] for one in complete} <= named
    assert {one["cat"] for one in complete} <= categories
    return trace, complete


def spans(events: Iterable[dict[str, Any]], track: int) -> list[tuple[str, int, int]]:
    return [
        (one["name"], round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000))
        for one in events
        if one["tid"] == track
    ]


def nested(found: list[tuple[str, int, int]]) -> bool:
    """Return whether overlapping spans always contain each other, as a track requires."""
    return all(
        end <= other or other_end <= start or (start - other) * (end - other_end) <= 0
        for (_, start, end), (_, other, other_end) in itertools.combinations(found, 2)
    )


def test_what_the_runtime_timed_is_where_it_was() -> None:
    _, complete = checked([LOAD, INFERENCE])
    runtime = spans(complete, 1)
    assert runtime == [
        ("Method::init", 0, 3_000),
        ("DELEGATE_CALL", 9_000, 17_001),
        ("native_call_sin.out", 19_000, 19_500),
        ("OPERATOR_CALL", 18_500, 20_000),
        ("Method::execute", 8_000, 21_000),
    ]
    assert nested(runtime)


def test_nodes_share_their_call_by_value_and_say_so() -> None:
    trace, complete = checked([LOAD, INFERENCE, INFERENCE])
    assert spans(complete, 2)[:2] == [("Input OpId_2", 9_000, 11_000), ("aten_relu_default:OpId_9", 11_000, 17_001)]
    nodes = [one["args"] for one in complete if one["cat"] == "node"]
    assert nodes[:2] == [{"cycles": cycles, "placed": IN_PROPORTION} for cycles in (100, 300)]
    assert "warm-ups included" in trace["otherData"]["executions"]
    assert IN_PROPORTION in trace["otherData"]["placed"]
    calls = [
        one["args"]["QNN (execute) time (us)"]
        for one in complete
        if one["args"].get("block") == "Execute 1" and one["name"] == "DELEGATE_CALL"
    ]
    assert set(calls) == {7}
    assert tracks_of(trace) == {"runtime": 1, "inside of QnnBackend[0]": 2}
    # Nodes fill their call and stay in it.
    for values in ((0, 0), (0, 3), (1, 2**63)):
        rows = tuple(qnn(f"x:OpId_{n} (cycles)", value) for n, value in enumerate(values))
        found = spans(checked([Block("Execute", (*rows, event("DELEGATE_CALL", 5, 1_005)))])[1], 2)
        assert (found[0][1], found[-1][2]) == (0, 1_000 if sum(values) else 0)
        assert nested(found)
    assert checked([])[1] == []


@pytest.mark.parametrize(
    ("call", "first", "placed"), [((10_000, 18_000), 100, BY_CLOCK), ((11_000, 13_900), 0, IN_PROPORTION)]
)
def test_nodes_with_times_of_their_own_stay_where_their_delegate_says_unless_that_is_outside(
    call: tuple[int, int], first: int, placed: str
) -> None:
    nodes = (event("Convolution #1", 10_100, 12_000, inside=True), event("Add #1", 12_000, 13_000, inside=True))
    _, complete = checked([Block("Execute", (*nodes, event("DELEGATE_CALL", *call)))])
    assert spans(complete, 2) == [
        ("Convolution #1", first, first + 1_900), ("Add #1", first + 1_900, first + 2_900),
    ]  # fmt: skip
    assert {one["args"]["placed"] for one in complete if one["tid"] == 2} == {placed}


def test_of_as_many_units_as_nodes_the_one_of_most_nodes_is_shown() -> None:
    units = map("".join, itertools.product("abcdefghijkl", repeat=4))
    nodes = tuple(qnn(f"a:OpId_{n} ({unit})", 1) for n, unit in enumerate(units))
    last = (qnn("b:OpId_1 (cycles)", 2), qnn("c:OpId_2 (cycles)", 2), event("DELEGATE_CALL", 0, 10))
    _, events = checked([Block("Execute", nodes + last)])
    assert [one["name"] for one in events if one["cat"] == "node"] == ["b:OpId_1", "c:OpId_2"]


def test_a_call_repeated_in_an_inference_has_its_own_nodes() -> None:
    twice = tuple(
        one
        for n in range(2)
        for one in (qnn(f"x:OpId_{n} (cycles)", 5), event("DELEGATE_CALL", 1_000 * n, 1_000 * n + 500))
    )
    _, complete = checked([Block("Execute", twice)])
    assert spans(complete, 2) == [("x:OpId_0", 0, 500), ("x:OpId_1", 1_000, 1_500)]


_NUMBERS = st.integers(0, 2**64 - 1)
_EVENTS = st.builds(
    lambda name, a, b, instruction, inside: event(name, min(a, b), max(a, b), instruction, inside=inside),
    st.sampled_from(["DELEGATE_CALL", "x:OpId_1 (cycles)", "x:OpId_1 (us)", "y (us)", "\0\x1b[31m", ""]),
    _NUMBERS, _NUMBERS, st.integers(-(2**31), 2**31 - 1), st.booleans(),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.lists(_EVENTS, max_size=6), max_size=3))
def test_whatever_a_dump_says_the_trace_is_well_formed(blocks: list[list[ProfileEvent]]) -> None:
    checked(Block("Execute\x1b", tuple(events)) for events in blocks)


VERDICTS = set(Verdict)


def tracks_of(trace: dict[str, Any]) -> dict[str, int]:
    return {one["args"]["name"]: one["tid"] for one in trace["traceEvents"] if one["name"] == "thread_name"}


def test_a_run_has_a_track_for_each_device_and_a_slice_for_each_attempt(example_run: RunView) -> None:
    trace, slices = well_formed(run_trace(example_run), VERDICTS)
    assert len(slices) == sum(len(job.attempts) for job in example_run.jobs)
    tracks = tracks_of(trace)
    assert set(tracks) == {"virtual-SM8650-0 (virtual)", "virtual-SM8750-0 (virtual)", "no device"}
    [failed] = [one for one in slices if one["cat"] == "failed" and "group_norm" in one["name"]]
    assert (failed["tid"], failed["ts"], failed["dur"]) == (
        tracks["virtual-SM8650-0 (virtual)"], 61_000_000.0, 310_000.0,
    )  # fmt: skip
    assert failed["args"]["verdict"] == "failed"
    assert failed["args"]["reason"].startswith("output 0 against fp32: sqnr 11.8 dB < 20 dB")
    retried = [one["args"]["attempt"] for one in slices if "softmax[SM8650-htp-16a8w]" in one["name"]]
    assert sorted(retried) == [1, 2]
    assert (trace["otherData"]["device_kinds"], trace["otherData"]["not_shown"]) == ("virtual", "0")


def test_slices_of_one_device_never_overlap_and_say_how_long_the_attempt_was() -> None:
    def at(ms: int, seconds: float) -> tuple[Attempt, ...]:
        return (Attempt("j", Verdict.PASSED, Stage.DONE, "", "virtual-SM8650-0", 1000 + ms, seconds),)

    view = run_of(at(20, 0.03), at(0, 0.025), at(-5, 0.001), (), at(-1000, 9.0), started_ms=1000)
    trace, slices = well_formed(run_trace(view), VERDICTS)
    (track,) = {one["tid"] for one in slices}
    found = sorted((start, end) for _, start, end in spans(slices, track))
    assert found == [(0, 1_000_000), (5_000_000, 25_000_000), (25_000_000, 55_000_000)]
    assert [one["args"]["seconds"] for one in slices] == [0.001, 0.025, 0.03]
    # The idle device has its row; attempts without a time are counted.
    assert len(tracks_of(trace)) == 2
    assert trace["otherData"]["not_shown"] == "1"


def test_the_trace_of_any_run_is_well_formed(hostile_run: RunView) -> None:
    for view in (run_of(), run_of((), finished_ms=None)):
        well_formed(run_trace(view), VERDICTS)
    trace, slices = well_formed(run_trace(hostile_run), VERDICTS)
    assert len(slices) == 5
    assert not {"\x1b", "\u202e", "\0"} & set(json.dumps(trace, ensure_ascii=False))
