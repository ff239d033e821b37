"""Night -> index.html, which leads to the pages of its runs and to the nights before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.nightly.context import counted
from farm.nightly.record import Night, meaning
from farm.nightly.state import write_whole
from farm.report.html.page_of_run import render_page

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NIGHTS = 30
_JOBS = 100
_TONES = {0: "passed", 1: "failed", 3: "failed", 4: "infra", 5: "stale"}


def write_pages(night: Night, known: Iterable[Night], reports: Path) -> None:
    """Write the page of a night into its folder below `reports`, and there, with the nights before, for the newest.

    Raises InfraError.
    """
    earlier = [one for one in known if one.started_ms < night.started_ms and one.code is not None]
    write_whole(reports / night.id / "index.html", render_night(night, earlier, "", "../").encode())
    write_whole(reports / "index.html", render_night(night, earlier, f"{night.id}/", "").encode())


def render_night(night: Night, earlier: Iterable[Night], here: str, nights: str) -> str:
    """Return the page; links to its runs begin with `here`, those to other nights with `nights`."""
    return render_page(
        "night.html.j2",
        night=night,
        tone=tone(night.code),
        tones=tone,
        meaning=meaning(night.code),
        counted=counted,
        earlier=list(reversed(list(earlier)))[:_NIGHTS],
        here=here,
        nights=nights,
        most=_JOBS,
    )


def tone(code: int | None) -> str:
    """Return the class of the style sheet for an exit code."""
    return "unfinished" if code is None else _TONES.get(code, "infra")
