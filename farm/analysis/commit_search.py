"""Which commit is looked at next, and what is known then: a bisection where some cannot be tried. Pure."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class CommitAnswer(StrEnum):
    """What a commit is for a job."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"
    """It cannot tell: it does not build, or fails in another way."""


class CommitRange(msgspec.Struct, frozen=True):
    """What is known: indices of commits, oldest first."""

    good: int
    """The newest that is known to be good."""
    bad: int
    """The oldest after it that is known to be bad."""
    open: tuple[int, ...]
    """Those between that nobody has looked at."""
    skipped: tuple[int, ...]
    """Those between that cannot tell."""

    @property
    def is_exact(self) -> bool:
        """Whether `bad` is the first bad one."""
        return not self.open and not self.skipped


def with_same(content: Sequence[str], answers: Mapping[int, CommitAnswer]) -> dict[int, CommitAnswer]:
    """Return `answers` with those of commits that have the same content as one that is answered."""
    known: dict[str, CommitAnswer] = {}
    for index, answer in sorted(answers.items()):
        # What could be tried once tells more than what could not.
        if answer is not CommitAnswer.SKIP or content[index] not in known:
            known[content[index]] = answer
    return {
        index: answers.get(index, known[one]) for index, one in enumerate(content) if index in answers or one in known
    }


def range_of(content: Sequence[str], answers: Mapping[int, CommitAnswer]) -> CommitRange:
    """Return where the first bad commit is; commits of the same `content` have one answer.

    `answers` has a good one and, after it, a bad one. Where there is more than one step it is the last of them.
    """
    known = with_same(content, answers)
    bads = [index for index, answer in known.items() if answer is CommitAnswer.BAD]
    good = max(i for i, answer in known.items() if answer is CommitAnswer.GOOD and i < max(bads))
    bad = min(index for index in bads if index > good)
    between = range(good + 1, bad)
    return CommitRange(
        good,
        bad,
        tuple(index for index in between if index not in known),
        tuple(index for index in between if known.get(index) is CommitAnswer.SKIP),
    )


def next_commit(content: Sequence[str], answers: Mapping[int, CommitAnswer], near: Collection[int] = ()) -> int | None:
    """Return the commit that halves what is open, None where none that could decide is left.

    Of neighbours with the same content it is one in `near`, else the oldest. After one that cannot tell it is the next
    to it; after more of them what lies between them is left for last: what does not build seldom comes alone.
    """
    span = range_of(content, answers)
    groups: list[list[int]] = []
    for index in span.open:
        if groups and content[groups[-1][-1]] == content[index]:
            groups[-1].append(index)
        else:
            groups.append([index])
    if not groups:
        return None
    skips = len({content[index] for index in span.skipped})
    if skips > 1:
        older = [group for group in groups if group[-1] < span.skipped[0]]
        newer = [group for group in groups if group[0] > span.skipped[-1]]
        groups = max((older, newer), key=len) or groups
    chosen = groups[(len(groups) - 1) // 2]
    return next((index for index in chosen if index in near), chosen[0])


def shared_choice(wishes: Iterable[int]) -> int:
    """Return the commit that most jobs want to be looked at, the oldest of several."""
    counts = Counter(wishes)
    return min(counts, key=lambda index: (-counts[index], index))
