"""Lines and data of the fit of programs, which `farm exec` shows before it uses a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import IllegalTargetError
from farm.base.text import one_line
from farm.cli.output import echo
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.replay.exec_plan import PlannedProgram


def show_fit(programs: Sequence[PlannedProgram]) -> None:
    """Print the fit of each program."""
    for one in programs:
        echo(one.ready.job.id)
        rows = [[str(fit.level), str(fit.name), one_line(fit.line)] for fit in one.fit]
        echo("\n".join(columns(rows, indent="  ")))
        echo()


def require_fit(programs: Sequence[PlannedProgram]) -> None:
    """Raise IllegalTargetError for a program that no device can run."""
    from farm.replay.properties import Level

    for one in programs:
        for fit in one.fit:
            if fit.level is Level.ERROR:
                raise IllegalTargetError(f"{one.ready.path.name}: {fit.name}: {fit.line}")


def data(program: PlannedProgram) -> list[dict[str, str]]:
    """Return the fit of a program for JSON."""
    return [
        {"name": str(one.name), "level": str(one.level), "text": one.text, "next_step": one.next_step}
        for one in program.fit
    ]
