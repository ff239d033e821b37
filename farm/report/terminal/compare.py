"""Two runs, and two sides of a comparison, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from farm.base.text import one_line
from farm.report.model import format as fmt
from farm.report.model.compare import CompareGroup, CompareReport, CompareSide, overview, sentence
from farm.report.model.diff import DiffGroup, JobDiff, MetricChange, RunDiff
from farm.report.terminal.layout import LEAST_WIDTH, SIMULATED, STUBBED, columns, fitted, titled, wrapped

# RunDiff -> groups of jobs by their change, and lines for a terminal. Pure.


_GROUPS = {
    DiffGroup.NEW_FAILURE: "New failures",
    DiffGroup.MISSING: "Missing",
    DiffGroup.STILL_FAILING: "Still failing",
    DiffGroup.FIXED: "Fixed",
    DiffGroup.ADDED: "Added",
}
_CHANGES = (
    ("Slower", True, True),
    ("Faster", True, False),
    ("Worse", False, True),
    ("Better", False, False),
    ("Changed", False, None),
)


class DiffPart(NamedTuple):
    """Jobs that differ in the same way."""

    key: str
    title: str
    rows: list[tuple[str, str]]
    """Id of the job, and its difference, in words."""


def parts(diff: RunDiff) -> list[DiffPart]:
    """Return the groups of differences, urgent groups first; a group may have no rows."""
    found = [
        DiffPart(str(group), title, [_outcome(job, group) for job in diff.having(group)])
        for group, title in _GROUPS.items()
    ]
    for title, time, worse in _CHANGES:
        rows = [_changed(job, change) for job, change in diff.changed(time=time, worse=worse)]
        found.append(DiffPart(title.lower(), title, rows))
    refused = [(job.job_id, job.not_compared) for job in diff.jobs if job.not_compared]
    return [*found, DiffPart("not_compared", "Numbers not compared", refused)]


def diff_lines(diff: RunDiff, limit: int, width: int = 80) -> list[str]:
    """Return the differences, urgent groups first; at most `limit` lines a group, none wider than `width`."""
    lines = [
        f"before: {diff.before}, {_when(diff, diff.before, diff.before_ms)}",
        f"after: {diff.after}, {_when(diff, diff.after, diff.after_ms)}",
        *(f"  {name}: {was or fmt.NOTHING} -> {now or fmt.NOTHING}" for name, was, now in diff.facts),
        *(wrapped(STUBBED, width) if diff.stub else []),
    ]
    for part in parts(diff):
        lines += titled(part.title.upper(), part.rows, limit)
    lines += ["", *([about] if (about := about_programs(diff)) else []), in_all(diff)]
    # The address is not cut, so that it can be opened.
    link = [f"commits: {diff.commits_url}"] if diff.commits_url else []
    return [*(fitted(line, max(width, LEAST_WIDTH)) for line in lines), *link]


def about_programs(diff: RunDiff) -> str:
    """Return the number of equal programs; empty when it is not known."""
    return str(diff.programs) if diff.programs else ""


def in_all(diff: RunDiff) -> str:
    """Return the number of jobs that ended as before."""
    same, jobs = len(diff.having(DiffGroup.SAME)), fmt.plural(len(diff.jobs), "job")
    if same == len(diff.jobs) and not any(job.changes or job.not_compared for job in diff.jobs):
        return f"{jobs}, nothing differs"
    return f"{same} of {jobs} ended as before"


def _when(diff: RunDiff, run: str, began_ms: int) -> str:
    return fmt.clock(began_ms) + (", NOT FINISHED" if run in (diff.not_finished or ()) else "")


def _outcome(job: JobDiff, group: DiffGroup) -> tuple[str, str]:
    outcomes = f"{job.before} -> {job.after}".replace("_", " ")
    return job.job_id, f"{outcomes}: {job.reason}" if job.reason and group is not DiffGroup.FIXED else outcomes


def _changed(job: JobDiff, change: MetricChange) -> tuple[str, str]:
    values = " -> ".join(fmt.quantity(value, change.unit) for value in (change.before, change.after))
    by = f", {100 * (change.ratio - 1):+.1f} %" if change.is_time and change.ratio is not None else ""
    # The note rules out the compiler as the cause.
    same = ", with the same program" if job.same_program else ""
    return job.job_id, f"{change.metric}: {values}{by}{same}"


# CompareReport -> lines for a terminal. Pure.


TITLES = {
    CompareGroup.NEWLY_FAILING: "Newly failing",
    CompareGroup.WORSE: "Worse",
    CompareGroup.NOT_COMPARED: "Not compared",
    CompareGroup.NEWLY_PASSING: "Newly passing",
    CompareGroup.BETTER: "Better",
    CompareGroup.FAILING: "Failing on both",
}
# Most characters of a reason; the page shows the whole text.
_MOST_TEXT = 240
_VERSIONS = ("executorch", "torch", "torchao", "qnn")


def side_line(side: CompareSide) -> str:
    """Return name and versions of a side in one line."""
    facts = side.facts
    known = [f"{name} {facts[name]}" for name in _VERSIONS if facts.get(name)]
    if commit := facts.get("commit"):
        known.append(f"commit {commit[:12]}{' with changes' if facts.get('dirty') else ''}")
    return f"{side.label}: {side.name}: {', '.join(known)}"


def compare_lines(report: CompareReport, limit: int, width: int = 80) -> list[str]:
    """Return the comparison, urgent groups first; at most `limit` jobs a group, no line wider than `width`."""
    lines = [line for side in report.sides for line in wrapped(side_line(side), width)]
    lines += ["", *wrapped(sentence(report), width)]
    if report.interrupted:
        lines.append("interrupted: missing jobs were not compared")
    for group, title in TITLES.items():
        blocks = [(job.name, *wrapped(one_line(job.text, _MOST_TEXT), width - 4)) for job in report.having(group)]
        jobs = titled(title.upper(), blocks, limit)
        lines += [fitted(line, max(width, LEAST_WIDTH)) for line in jobs]
    lines += ["", *_overview(report), ""]
    lines += [line for note in report.notes for line in wrapped(note, width)]
    if report.stub:
        return lines + wrapped(STUBBED, width)
    return lines + [SIMULATED] * (report.kind == "virtual")


def _overview(report: CompareReport) -> Iterator[str]:
    total = len(report.jobs)
    verb = "is" if total == 1 else "are"
    yield f"{report.same_programs} of {fmt.plural(total, 'program')} {verb} the same"
    rows = overview(report)
    if rows:
        yield from columns([("", "A", "B", "change"), *((row.what, row.a, row.b, row.change) for row in rows)])
