"""RunDiff -> lines for a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.report import format as fmt
from farm.report.clean import one_line
from farm.report.diff import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.report.diff import Change, JobDiff, RunDiff

_LEAST_WIDTH = 40


def diff_lines(diff: RunDiff, limit: int, width: int = 80) -> list[str]:
    """Return what differs, what needs a look first; at most `limit` lines a group, none wider than `width`."""
    width = max(width, _LEAST_WIDTH)
    lines = [
        f"before: {diff.before}, {fmt.clock(diff.before_ms)}",
        f"after: {diff.after}, {fmt.clock(diff.after_ms)}",
        *(f"  {name}: {was or fmt.NOTHING} -> {now or fmt.NOTHING}" for name, was, now in diff.facts),
    ]
    for title, group in (
        ("NEW FAILURES", Group.NEW_FAILURE),
        ("MISSING", Group.MISSING),
        ("STILL FAILING", Group.STILL_FAILING),
        ("FIXED", Group.FIXED),
        ("ADDED", Group.ADDED),
    ):
        lines += _group(title, [_outcome(job, group) for job in diff.having(group)], limit)
    for title, time, worse in (
        ("SLOWER", True, True),
        ("FASTER", True, False),
        ("WORSE", False, True),
        ("BETTER", False, False),
    ):
        lines += _group(title, [_changed(job, change) for job, change in diff.changed(time=time, worse=worse)], limit)
    refused = [(job.job_id, job.not_compared) for job in diff.jobs if job.not_compared]
    lines += _group("NUMBERS NOT COMPARED", refused, limit)
    lines += ["", _summary(diff)]
    return [_clean(line, width) for line in lines]


def _clean(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip())
    return " " * indent + one_line(line, width - indent)


def _summary(diff: RunDiff) -> str:
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
