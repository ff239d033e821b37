"""Comparability of runs, changes between them, and reliability of a job."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.history import (
    CONTENTS,
    WINDOW,
    History,
    Point,
    Reliability,
    Try,
    record_of,
    split,
    wilson,
)

from .conftest import PATIENT

# Comparability of runs, and the list of changes between them.


DAY_MS = 86_400_000
FACTS = {"executorch": "1.5.1", "qnn": "2.47", "native_runner": "aaaa", "device_build": "UP1A.231005"}
RECORDED = {"executorch": "1.5.1", "qnn": "2.51", **dict.fromkeys(CONTENTS, "a" * 16)}
EDITED = {**RECORDED, "executorch_content": "b" * 16}


def point(night: int, kind: str = "hardware", version: str = "v1", **facts: str) -> Point:
    return Point(f"run-{night}", night * DAY_MS, FACTS | facts, kind, version)


def told(history: History) -> list[tuple[str, str, bool]]:
    return [(event.run_id, event.text, event.parts) for event in history.events]


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        ([], []),
        ([point(night) for night in range(5)], [5]),
        # The build of the runner differs every night.
        ([point(night, native_runner=f"{night:04}") for night in range(9)], [9]),
        ([point(0), point(1, device_build="UP1A.240101")], [2]),
        # Nothing is known of this fact.
        ([point(0), point(1, governor="performance")], [1, 1]),
        ([point(0), point(1, executorch="1.6.0", native_runner="bbbb"), point(2)], [3]),
        ([point(0), point(1, kind="virtual"), point(2)], [1, 1, 1]),
    ],
)
def test_unknown_facts_and_kinds_of_devices_part_a_history(points: list[Point], sizes: list[int]) -> None:
    history = split(points)
    assert [len(list(run)) for _, run in groupby(history.classes)] == sizes
    assert any(event.parts for event in history.events) == (len(sizes) > 1)


def test_compiler_runner_and_sdk_are_under_test_and_part_nothing() -> None:
    history = split([point(0), point(1, executorch="1.6.0", native_runner="bbbb"), point(2, qnn="2.51")])
    assert told(history) == [
        ("run-1", "executorch 1.5.1 -> 1.6.0", False),
        ("run-1", "runner changed", False),
        ("run-2", "executorch 1.6.0 -> 1.5.1", False),
        ("run-2", "runner changed", False),
        ("run-2", "qnn 2.47 -> 2.51", False),
    ]
    assert history.events[0].started_ms == DAY_MS


def test_a_changed_case_starts_anew() -> None:
    history = split([point(0), point(1, version="v2")])
    assert told(history) == [("run-1", "case changed", True)]
    assert len(history.comparable()) == 1


@pytest.mark.parametrize("other", [point(1, kind="virtual"), point(1, profile="optrace")])
def test_other_devices_and_profiled_runs_in_between_do_not_cut_a_history_short(other: Point) -> None:
    history = split([point(0), other, point(2)])
    assert [one.run_id for one in history.comparable()] == ["run-0", "run-2"]
    assert history.events[0].text in ("device kind hardware -> virtual", "profile optrace")


@pytest.mark.parametrize(
    ("facts", "events"),
    [
        # An older farm did not record the contents.
        ([{"executorch": "1.5.1", "qnn": "2.51"}, RECORDED], []),
        ([RECORDED, EDITED, RECORDED], ["sources of executorch changed"] * 2),
        ([RECORDED, {**EDITED, "executorch": "1.6.0"}], ["executorch 1.5.1 -> 1.6.0"]),
        ([RECORDED, {**RECORDED, "qnn_content": "b" * 16}], ["libraries of QNN changed"]),
    ],
)
def test_contents_under_the_same_version_are_events(facts: list[dict[str, str]], events: list[str]) -> None:
    history = split([Point(f"r{n}", n, one, "virtual", "v") for n, one in enumerate(facts)])
    assert (len(set(history.classes)), [event.text for event in history.events]) == (1, events)


@PATIENT
@given(st.lists(st.fixed_dictionaries({"qnn": st.sampled_from("12"), "governor": st.sampled_from("12")}), max_size=12))
def test_every_cut_has_a_reason(facts: list[dict[str, str]]) -> None:
    points = [point(night, **one) for night, one in enumerate(facts)]
    history = split(points)
    classes = pairwise(zip(history.classes, points, strict=True))
    cuts = {now.run_id for (before, _), (after, now) in classes if before != after}
    assert {event.run_id for event in history.events if event.parts} == cuts
    assert all(one.facts["governor"] == points[-1].facts["governor"] for one in history.comparable())


def tries(verdicts: str, code: str = "k", first: int = 0) -> list[Try]:
    """Return one try per run: `p` for passed, `f` for failed."""
    return [Try(f"run-{first + n:03}", code, verdict == "p") for n, verdict in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    # Values of Brown, Cai and DasGupta's formula, by hand; SciPy's binomtest has the same for 5 of 8.
    [
        (5, 8, 0.3057, 0.8632),
        (18, 20, 0.6990, 0.9721),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(passed: int, count: int, low: float, high: float) -> None:
    assert wilson(passed, count) == pytest.approx((low, high), abs=1e-4)


# 10 failures among 20 tries and one: 5 passes have p = 0.039, and 4 have 0.075.
HALF = "pf" * 10
STEADY, FLAKY, NEW, HEALED = Reliability.STEADY, Reliability.FLAKY, Reliability.NEWLY_FLAKY, Reliability.HEALED


@pytest.mark.parametrize(
    ("tried", "reliability", "since"),
    [
        (tries("p" * 40), STEADY, ""),
        (tries("f" * 40), STEADY, ""),
        # A verdict that changes with the code.
        (tries("p" * 10, "good") + tries("f" * 10, "bad", 10) + tries("p" * 10, "fixed", 20), STEADY, ""),
        # Unknown code counts as equal only within a run.
        (tries(HALF, ""), STEADY, ""),
        ([*tries("ppp", ""), Try("run-003", "", False), Try("run-003", "", True)], NEW, "run-003"),
        # A fixed job is not flaky until it fails again.
        (tries("f" * 39 + "p"), STEADY, ""),
        (tries("f" * 30 + "ppf"), NEW, "run-032"),
        (tries("p" * 35 + "fpfpf"), NEW, "run-035"),
        (tries("pf" * 20), FLAKY, "run-001"),
        (tries(HALF + "pppp"), FLAKY, "run-001"),
        (tries(HALF + "ppppp"), HEALED, "run-024"),
        (tries(HALF + "p" * 19), HEALED, "run-024"),
        # Passes of a fixed program count, and a single failure after them makes the job flaky again.
        (tries(HALF) + tries("ppppp", "fixed", 20), HEALED, "run-024"),
        (tries(HALF + "pppppf"), FLAKY, "run-001"),
        # A rare failure needs more passes.
        (tries("p" * 9 + "f" + "p" * 29), FLAKY, "run-009"),
        (tries("pppf" + "p" * 14), HEALED, "run-017"),
    ],
)
def test_reliability_of_a_job(tried: list[Try], reliability: Reliability, since: str) -> None:
    record = record_of(tried)
    assert (record.reliability, record.since) == (reliability, since)


def test_the_rate_is_of_the_newest_runs_alone() -> None:
    assert record_of(tries("f" * 20 + "p" * 18 + "ff")).passed == 18
    assert (record_of(tries("f" * 40)).passed, record_of(tries("f" * 40)).tries) == (0, WINDOW)
