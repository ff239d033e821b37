"""Pages beside the report of a run, in the same frame: served with linked files, or each as one file."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from farm.report.html.templates import SCRIPTS, STYLES, assets, render_page
from farm.report.model.diff import RunDiff
from farm.report.model.status import ago
from farm.report.terminal.diff import about_programs, in_all, parts

PAGE_STYLES = (*STYLES, "pages.css")
PAGE_SCRIPTS = (*SCRIPTS, "pages.js", "grid.js", "charts.js")


class Served(msgspec.Struct, frozen=True):
    """Addresses of the server that a page needs."""

    styles: tuple[str, ...]
    """Addresses of the style sheets."""
    early_script: str
    scripts: tuple[str, ...]
    plot_script: str
    """Address of Plotly, for pages with charts."""
    plot_style: str
    """Id of an element that keeps Plotly from adding styles of maps, which the policy forbids."""
    demo: bool = False
    """True for a store that `farm serve --demo` made."""


def render(template: str, served: Served | None, **values: Any) -> str:
    """Return a page from a template, as one file without a server; all text of `values` is treated as hostile."""
    now_ms = time.time_ns() // 1_000_000
    return render_page(
        template,
        served=served,
        home="/" if served else "",
        now_ms=now_ms,
        ago=lambda time_ms: ago(time_ms, now_ms),
        **assets(PAGE_STYLES),
        **values,
    )


def render_diff(diff: RunDiff, *, virtual: bool) -> str:
    """Return the comparison of two runs as one file; `virtual` is True when a device of either run is virtual."""
    return render("diff.html.j2", None, **diff_values(diff, virtual=virtual))


def diff_values(diff: RunDiff, *, virtual: bool) -> dict[str, Any]:
    """Return the template values of the comparison of two runs."""
    doubtful = virtual and diff.has_times
    totals = {"in_all": in_all(diff), "about_programs": about_programs(diff)}
    return {"diff": diff, "parts": parts(diff), **totals, "doubtful": doubtful, "limit": 0}
