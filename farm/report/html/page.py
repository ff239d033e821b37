"""Pages beside the report of a run, of the same frame: served with linked files, or each as one file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from farm.report.html.page_of_run import SCRIPTS, STYLES, assets, render_page
from farm.report.model.chart import HEIGHT, WIDTH
from farm.report.model.status import ago
from farm.report.terminal.diff import about_programs, in_all, parts

if TYPE_CHECKING:
    from farm.report.model.diff import RunDiff

PAGE_STYLES = (*STYLES, "pages.css")
PAGE_SCRIPTS = (*SCRIPTS, "pages.js")


class Served(msgspec.Struct, frozen=True):
    """What a page needs to know of its server."""

    styles: tuple[str, ...]
    """Addresses of the style sheets."""
    early_script: str
    scripts: tuple[str, ...]
    session: bool
    """Somebody has logged in, and may log out."""


def render(template: str, served: Served | None, **values: Any) -> str:
    """Return a page from a template, as one file where there is no server; all text of `values` is hostile."""
    now_ms = time.time_ns() // 1_000_000
    return render_page(
        template,
        served=served,
        home="/" if served else "",
        now_ms=now_ms,
        ago=lambda time_ms: ago(time_ms, now_ms),
        chart_size=(WIDTH, HEIGHT),
        **assets(PAGE_STYLES),
        **values,
    )


def render_diff(diff: RunDiff, *, virtual: bool) -> str:
    """Return two runs as a page in one file; `virtual` says that a device of theirs is."""
    return render("diff.html.j2", None, **diff_values(diff, virtual=virtual))


def diff_values(diff: RunDiff, *, virtual: bool) -> dict[str, Any]:
    """Return what the page of two runs is made of."""
    doubtful = virtual and diff.has_times
    said = {"in_all": in_all(diff), "about_programs": about_programs(diff)}
    return {"diff": diff, "parts": parts(diff), **said, "doubtful": doubtful, "limit": 0}
