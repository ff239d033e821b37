"""Comparability of runs, and the list of changes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.history import History, Point, split

from .conftest import PATIENT

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def test_a_new_sdk_parts_the_series_and_is_told() -> None:
    history = split([point(0), point(1), point(2, qnn="2.51"), point(3, qnn="2.51")])
    assert sizes(history) == [2, 2]
    assert told(history) == [("run-2", "qnn 2.47 -> 2.51", True)]
    assert [one.run_id for one in history.comparable()] == ["run-2", "run-3"]
    assert history.events[0].started_ms == 2 * DAY_MS


def test_a_new_executorch_is_what_is_under_test_and_parts_nothing() -> None:
    history = split([point(0), point(1, executorch="1.6.0", native_runner="bbbb")])
    assert sizes(history) == [2]
    assert told(history) == [("run-1", "executorch 1.5.1 -> 1.6.0", False), ("run-1", "runner changed", False)]


def test_a_runner_that_changes_by_itself_parts_the_series() -> None:
    history = split([point(0), point(1, native_runner="bbbb")])
    assert sizes(history) == [1, 1]
    assert told(history) == [("run-1", "runner changed", True)]


def test_an_sdk_that_comes_with_a_new_executorch_still_parts() -> None:
    history = split([point(0), point(1, executorch="1.6.0", native_runner="bbbb", qnn="2.51")])
    assert sizes(history) == [1, 1]
    assert ("run-1", "qnn 2.47 -> 2.51", True) in told(history)
    assert ("run-1", "runner changed", False) in told(history)


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
    assert all(one.facts["qnn"] == points[-1].facts["qnn"] for one in history.comparable())
