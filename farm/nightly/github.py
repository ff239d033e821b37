"""Night -> what GitHub shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.nightly.context import counted
from farm.nightly.record import Night, Told, meaning
from farm.report.formats.github import escaped, table, workflow_commands
from farm.report.model import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN = 200


def night_markdown(night: Night) -> str:
    """Return the summary of a night."""
    parts = [
        f"### {escaped(night.name)}: {escaped(night.word)}\n",
        f"Exit code {night.code}: {escaped(meaning(night.code))}.\n",
        f"{escaped(counted(night.counts))} in {escaped(fmt.duration(night.seconds))}.\n",
        table(["run", "verdict", "jobs", "trouble"], (
            (cell.name, cell.word + (" (virtual)" if cell.virtual else ""), counted(cell.counts), cell.problem)
            for cell in night.cells
        )),
    ]  # fmt: skip
    for title, jobs in (
        ("New failures", night.new_failures),
        ("Regressions", night.regressions),
        ("Still failing", night.still_failing),
        ("Infra", night.troubles),
    ):
        if jobs:
            more = f"\nand {len(jobs) - _SHOWN} more\n" if len(jobs) > _SHOWN else ""
            parts.append(f"#### {title}: {len(jobs)}\n\n" + _table(jobs[:_SHOWN]) + more)
    undelivered = [(one.to, one.said) for one in night.deliveries if not one.ok]
    if undelivered:
        parts.append(f"#### Not notified: {len(undelivered)}\n\n" + table(["whom", "why"], undelivered))
    return "\n".join(parts) + "\n"


def night_annotations(night: Night) -> list[str]:
    """Return workflow commands for what is new: failures are errors, regressions warnings."""
    return [
        *workflow_commands("error", ((f"new failure: {one.job_id}", one.said) for one in night.new_failures)),
        *workflow_commands("warning", ((f"regression: {one.job_id}", one.said) for one in night.regressions)),
    ]


def _table(jobs: Iterable[Told]) -> str:
    return table(["what", "why"], ((one.job_id, one.said) for one in jobs))
