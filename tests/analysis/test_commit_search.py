"""The choice of commits against brute force: with commits that cannot be tried, and some that are the same."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.analysis.commit_search import (
    CommitAnswer,
    CommitRange,
    next_commit,
    range_of,
    shared_choice,
    with_same,
)

GOOD, BAD, SKIP = CommitAnswer.GOOD, CommitAnswer.BAD, CommitAnswer.SKIP


def search(truth: list[CommitAnswer], content: list[str]) -> tuple[CommitRange, list[int]]:
    """Look at commits until none is left that could decide; return the range, and which were looked at."""
    answers = {0: truth[0], len(truth) - 1: truth[-1]}
    looked_at: list[int] = []
    while (index := next_commit(content, answers)) is not None:
        assert index not in with_same(content, answers), "it is known already"
        looked_at.append(index)
        answers[index] = truth[index]
        assert len(looked_at) <= len(truth)
    return range_of(content, answers), looked_at


def brute_force(truth: list[CommitAnswer]) -> tuple[int, int]:
    """Return the last good commit, and the first bad one after it, by looking at all."""
    good = max(index for index, answer in enumerate(truth) if answer is GOOD)
    return good, min(index for index, answer in enumerate(truth) if answer is BAD and index > good)


@st.composite
def histories(draw: st.DrawFn, skips: bool) -> tuple[list[CommitAnswer], list[str]]:
    """Return the truth about commits with one step, and their contents."""
    count = draw(st.integers(2, 60))
    first_bad = draw(st.integers(1, count - 1))
    truth, content = [], []
    for index in range(count):
        same = index not in (0, first_bad) and draw(st.booleans())
        if same:
            truth.append(truth[-1])
            content.append(content[-1])
            continue
        inside = 0 < index < count - 1
        skip = skips and inside and index != first_bad and draw(st.integers(0, 3)) == 0
        truth.append(SKIP if skip else BAD if index >= first_bad else GOOD)
        content.append(f"content {index}")
    if truth[-1] is not BAD:
        truth[-1], content[-1] = BAD, "the end"
    return truth, content


@given(histories(skips=False))
@settings(max_examples=300, deadline=None)
def test_without_skips_the_first_bad_commit_is_found_by_halving_what_differs(
    history: tuple[list[CommitAnswer], list[str]],
) -> None:
    truth, content = history
    found, looked_at = search(truth, content)
    assert found.is_exact
    assert (found.good, found.bad) == brute_force(truth)
    steps = sum(one != other for one, other in itertools.pairwise(content))
    assert len(looked_at) <= math.ceil(math.log2(max(1, steps)))


@given(histories(skips=True))
@settings(max_examples=300, deadline=None)
def test_with_skips_the_range_is_what_looking_at_all_would_give(
    history: tuple[list[CommitAnswer], list[str]],
) -> None:
    truth, content = history
    found, looked_at = search(truth, content)
    assert (found.good, found.bad) == brute_force(truth)
    assert not found.open
    assert list(found.skipped) == [i for i in range(found.good + 1, found.bad) if truth[i] is SKIP]
    assert found.is_exact == (found.bad == found.good + 1)
    assert len({content[index] for index in looked_at}) == len(looked_at), "a content was looked at twice"


def test_a_broken_stretch_in_the_middle_costs_few_looks() -> None:
    truth = [GOOD] * 20 + [BAD] * 10 + [SKIP] * 40 + [BAD] * 30
    found, looked_at = search(truth, [str(index) for index in range(100)])
    assert (found.good, found.bad) == (19, 20)
    assert len(looked_at) <= 10


def test_of_two_steps_the_last_is_found() -> None:
    # The bad content was there before, and was taken back.
    content = ["a", "b", "a", "c", "b"]
    found = range_of(content, {0: GOOD, 4: BAD})
    assert (found.good, found.bad, found.open) == (2, 4, (3,))


def test_commits_that_are_the_same_as_the_ends_cost_nothing() -> None:
    content = ["a", "a", "a", "b", "b"]
    assert next_commit(content, {0: GOOD, 4: BAD}) is None
    assert range_of(content, {0: GOOD, 4: BAD}).bad == 3


def test_of_neighbours_that_are_the_same_the_one_at_hand_is_taken() -> None:
    content = ["a", "b", "b", "b", "c"]
    assert next_commit(content, {0: GOOD, 4: BAD}) == 1
    assert next_commit(content, {0: GOOD, 4: BAD}, near={3}) == 3


def test_jobs_share_the_commit_that_most_of_them_want() -> None:
    assert shared_choice([7, 3, 7, 3, 5]) == 3
    assert shared_choice([9]) == 9
