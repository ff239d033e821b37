"""RunDiff -> lines for a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from farm.report.model import format as fmt
from farm.report.model.diff import Group
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.report.model.diff import Change, JobDiff, RunDiff

_LEAST_WIDTH = 40


class Part(NamedTuple):
    """Jobs of which the same is to be said."""

    key: str
    title: str
    rows: list[tuple[str, str]]
    """The job's id, and what is to be said of it."""


def parts(diff: RunDiff) -> list[Part]:
    """Return what differs, what needs a look first; a part may have no rows."""
    groups = (Group.NEW_FAILURE, Group.MISSING, Group.STILL_FAILING, Group.FIXED, Group.ADDED)
    titles = ("New failures", "Missing", "Still failing", "Fixed", "Added")
    found = [
        Part(str(group), title, [_outcome(job, group) for job in diff.having(group)])
        for group, title in zip(groups, titles, strict=True)
    ]
    for title, time, worse in (
        ("Slower", True, True),
        ("Faster", True, False),
        ("Worse", False, True),
        ("Better", False, False),
    ):
        rows = [_changed(job, change) for job, change in diff.changed(time=time, worse=worse)]
        found.append(Part(title.lower(), title, rows))
    refused = [(job.job_id, job.not_compared) for job in diff.jobs if job.not_compared]
    return [*found, Part("not_compared", "Numbers not compared", refused)]


def diff_lines(diff: RunDiff, limit: int, width: int = 80) -> list[str]:
    """Return what differs, what needs a look first; at most `limit` lines a group, none wider than `width`."""
    width = max(width, _LEAST_WIDTH)
    lines = [
        f"before: {diff.before}, {fmt.clock(diff.before_ms)}",
        f"after: {diff.after}, {fmt.clock(diff.after_ms)}",
        *(f"  {name}: {was or fmt.NOTHING} -> {now or fmt.NOTHING}" for name, was, now in diff.facts),
    ]
    for part in parts(diff):
        lines += _group(part.title.upper(), part.rows, limit)
    lines += ["", in_all(diff)]
    return [_clean(line, width) for line in lines]


def _clean(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip())
    return " " * indent + one_line(line, width - indent)


def in_all(diff: RunDiff) -> str:
    """Return how many jobs ended as before."""
    same = len(diff.having(Group.SAME))
    jobs = f"{len(diff.jobs)} job{'' if len(diff.jobs) == 1 else 's'}"
    if same == len(diff.jobs) and not any(job.changes or job.not_compared for job in diff.jobs):
        return f"{jobs}, nothing differs"
    return f"{same} of {jobs} ended as before"


def _group(title: str, rows: Sequence[tuple[str, str]], limit: int) -> list[str]:
    if not rows:
        return []
    lines = ["", f"{title}: {len(rows)}"]
    for name, said in rows[:limit]:
        lines += [f"  {name}", f"    {said}"]
    return lines + ([f"  and {len(rows) - limit} more: --limit"] if len(rows) > limit else [])


def _outcome(job: JobDiff, group: Group) -> tuple[str, str]:
    said = f"{job.before} -> {job.after}".replace("_", " ")
    return job.job_id, f"{said}: {job.reason}" if job.reason and group is not Group.FIXED else said


def _changed(job: JobDiff, change: Change) -> tuple[str, str]:
    values = " -> ".join(fmt.quantity(value, change.unit) for value in (change.before, change.after))
    told = ""
    if change.is_time and change.ratio is not None:
        told = f", {100 * (change.ratio - 1):+.1f} %"
    return job.job_id, f"{change.metric}: {values}{told}"
