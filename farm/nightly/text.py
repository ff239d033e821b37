"""Night -> lines for a terminal or a log; plan -> the matrix of --check. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import msgspec

from farm.nightly.context import counted
from farm.nightly.record import Night, Told, meaning
from farm.report.model import format as fmt
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LEAST_WIDTH = 40
_SHOWN = 10


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A cell before it has begun."""

    name: str
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str
    jobs: int
    virtual: int
    expected_s: float | None
    """By what the store knows, on one device of each SoC, or on the virtual ones; None where it knows nothing."""
    command: str
    problem: str = ""
    """What this machine lacks for it."""


def night_lines(night: Night, width: int = 80) -> list[str]:
    """Return how a night ended; no line is wider than `width`.

    No line begins with what a device said: in a log of GitHub's, that could be a command to its runner.
    """
    width = max(width, _LEAST_WIDTH)
    lines = [
        *textwrap.wrap(f"night {night.name} ({night.id}): {night.word}", width, subsequent_indent="  "),
        f"  exit code {night.code}: {meaning(night.code)}",
        f"  {counted(night.counts)} in {fmt.duration(night.seconds)}",
        "",
    ]
    room = min(max(len(cell.name) for cell in night.cells), width // 2)
    for cell in night.cells:
        virtual = "VIRTUAL, " if cell.virtual else ""
        said = f"  {one_line(cell.name, room):{room}}  {cell.word}: {virtual}{counted(cell.counts)}"
        lines += textwrap.wrap(said, width, subsequent_indent=" " * 6)
        lines += textwrap.wrap(one_line(cell.problem, 400), width, initial_indent="    - ", subsequent_indent="    | ")
    for title, jobs in (
        ("NEW FAILURES", night.new_failures),
        ("REGRESSIONS", night.regressions),
        ("STILL FAILING", night.still_failing),
        ("INFRA", tuple(one for cell in night.cells for one in cell.infra)),
    ):
        lines += _told(title, jobs, width)
    findings = [cell.findings for cell in night.cells]
    if open_ones := sum(one.unknown + one.not_asked for one in findings):
        lines += ["", f"candidates for regressions that are neither confirmed nor refuted: {open_ones}"]
    undelivered = [one for one in night.deliveries if not one.ok]
    if undelivered:
        lines += ["", f"NOT NOTIFIED: {len(undelivered)}"]
        for one in undelivered:
            said = one_line(f"{one.to}: {one.said}")
            lines += textwrap.wrap(said, width, initial_indent="  - ", subsequent_indent="  | ")
    # One to copy, however long.
    return [*lines, "", f"report: {night.report}"]


def _told(title: str, jobs: Sequence[Told], width: int) -> Iterable[str]:
    if not jobs:
        return
    yield ""
    yield f"{title}: {len(jobs)}"
    for one in jobs[:_SHOWN]:
        yield f"  {one_line(one.job_id, width - 2)}"
        yield f"    - {one_line(one.said, width - 6)}"
    if len(jobs) > _SHOWN:
        yield f"  and {len(jobs) - _SHOWN} more: the report has them"


def matrix_lines(name: str, rows: Sequence[Row], budget_s: float | None, width: int = 80) -> list[str]:
    """Return what a night would do, a cell a paragraph."""
    width = max(width, _LEAST_WIDTH)
    jobs = sum(row.jobs for row in rows)
    budget = f"within {fmt.duration(budget_s)}" if budget_s is not None else "without a budget"
    lines = [f"night {name}: runs: {len(rows)}, jobs: {jobs}, {budget}"]
    for row in rows:
        on = f"virtual devices, {row.virtual} of each SoC" if row.virtual else "attached devices"
        expected = "no past to tell how long" if row.expected_s is None else f"about {fmt.duration(row.expected_s)}"
        if row.expected_s is not None and not row.virtual:
            expected += " on one device a SoC"
        lines += ["", one_line(row.name, width)]
        for text in (
            f"{', '.join(row.socs)}; {row.backend}; {', '.join(one_line(suite) for suite in row.suites)}",
            f"{row.jobs} {'job' if row.jobs == 1 else 'jobs'} on {on}; {expected}",
            *([f"CANNOT RUN HERE: {one_line(row.problem)}"] if row.problem else []),
        ):
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return lines
