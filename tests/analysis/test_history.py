"""Comparability of runs, and the list of changes between them."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.history import History, Point, split

from .conftest import PATIENT

DAY_MS = 86_400_000
FACTS = {"executorch": "1.5.1", "qnn": "2.47", "native_runner": "aaaa", "device_build": "UP1A.231005"}


def point(night: int, kind: str = "hardware", version: str = "v1", **facts: str) -> Point:
    return Point(f"run-{night}", night * DAY_MS, 1e6, FACTS | facts, kind, version)


def told(history: History) -> list[tuple[str, str, bool]]:
    return [(event.run_id, event.text, event.parts) for event in history.events]


def sizes(history: History) -> list[int]:
    return [len(segment.points) for segment in history.segments]


def test_runs_of_one_fingerprint_are_one_segment() -> None:
    history = split([point(night) for night in range(5)])
    assert sizes(history) == [5]
    assert history.events == ()
    assert len(history.comparable()) == 5


def test_compiler_runner_and_sdk_are_under_test_and_part_nothing() -> None:
    history = split([point(0), point(1, executorch="1.6.0", native_runner="bbbb"), point(2, qnn="2.51")])
    assert sizes(history) == [3]
    assert told(history) == [
        ("run-1", "executorch 1.5.1 -> 1.6.0", False),
        ("run-1", "runner changed", False),
        ("run-2", "executorch 1.6.0 -> 1.5.1", False),
        ("run-2", "runner changed", False),
        ("run-2", "qnn 2.47 -> 2.51", False),
    ]
    assert history.events[0].started_ms == DAY_MS


def test_a_runner_whose_build_differs_every_night_leaves_one_series() -> None:
    assert sizes(split([point(night, native_runner=f"{night:04}") for night in range(9)])) == [9]


def test_a_build_of_a_device_is_an_event_and_no_other_series() -> None:
    history = split([point(0), point(1, device_build="UP1A.240101")])
    assert sizes(history) == [2]
    assert [parts for _, _, parts in told(history)] == [False]


def test_a_changed_case_starts_anew() -> None:
    history = split([point(0), point(1, version="v2")])
    assert told(history) == [("run-1", "case changed", True)]
    assert len(history.comparable()) == 1


def test_virtual_devices_and_hardware_never_mix() -> None:
    mixed = [
        point(0),
        Point("run-1", DAY_MS, 1e6, {**FACTS, "device_kind": "virtual"}, "virtual", "v1"),
        point(2),
    ]
    history = split(mixed)
    assert sizes(history) == [1, 1, 1]
    assert [one.run_id for one in history.comparable()] == ["run-0", "run-2"]
    assert history.events[0].text == "device kind hardware -> virtual"


def test_runs_in_between_that_looked_at_more_do_not_cut_a_history_short() -> None:
    profiled: Mapping[str, str] = {"profile": "optrace"}
    history = split([point(0), point(1, **profiled), point(2), point(3, **profiled), point(4)])
    assert sizes(history) == [1, 1, 1, 1, 1]
    assert [one.run_id for one in history.comparable()] == ["run-0", "run-2", "run-4"]
    assert told(history)[:2] == [("run-1", "profile optrace", True), ("run-2", "without profile optrace", True)]


def test_a_fact_that_nobody_knows_parts() -> None:
    assert sizes(split([point(0), point(1, governor="performance")])) == [1, 1]


def test_two_users_with_different_executorchs_and_one_runner_each_are_compared() -> None:
    mine, theirs = {}, {"executorch": "1.6.0", "native_runner": "bbbb"}
    history = split([point(0, **mine), point(1, **theirs), point(2, **mine), point(3, **theirs)])
    assert sizes(history) == [4]


def test_an_empty_history_has_nothing() -> None:
    assert split([]) == History((), ())
    assert split([]).comparable() == ()


@PATIENT
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "qnn": st.sampled_from("12"),
                "executorch": st.sampled_from("12"),
                "native_runner": st.sampled_from("123"),
                "governor": st.sampled_from("12"),
            }
        ),
        max_size=12,
    )
)
def test_every_run_is_in_one_segment_and_every_cut_has_a_reason(facts: list[dict[str, str]]) -> None:
    points = [point(night, **one) for night, one in enumerate(facts)]
    history = split(points)
    assert [one for segment in history.segments for one in segment.points] == points
    cuts = {segment.points[0].run_id for segment in history.segments[1:]}
    assert {event.run_id for event in history.events if event.parts} == cuts
    assert all(one.facts["governor"] == points[-1].facts["governor"] for one in history.comparable())
