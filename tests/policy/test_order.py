"""Order in which jobs are handed out."""

from __future__ import annotations

import itertools

from farm.policy.divide import dispatch_order


def test_compiled_jobs_go_first_then_the_longest_then_the_order_given() -> None:
    cached = {"a": False, "b": True, "c": True, "d": False}
    for ids in itertools.permutations("abcd"):
        sessions = dict.fromkeys(ids, "")
        order = dispatch_order(ids, cached=cached, expected_seconds={"c": 2.0, "b": 1.0}, sessions=sessions)
        assert order[:2] == ["c", "b"]
        assert order[2:] == [job for job in ids if job in "ad"]


def test_jobs_of_one_session_stand_together_whatever_they_take() -> None:
    sessions = {"a": "burst", "b": "balanced", "c": "burst", "d": "balanced"}
    cached = dict.fromkeys(sessions, True)
    seconds = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0}
    assert dispatch_order(list("abcd"), cached=cached, expected_seconds=seconds, sessions=sessions) == list("cabd")


def test_jobs_that_are_to_be_first_go_before_compiled_ones() -> None:
    cached = {"a": True, "b": True, "c": False}
    order = dispatch_order(
        list("abc"), cached=cached, expected_seconds={}, sessions=dict.fromkeys("abc", ""), first={"c"}
    )
    assert order == ["c", "a", "b"]
