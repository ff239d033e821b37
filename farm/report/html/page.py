"""Pages beside the report of a run, in the same frame: served with linked files, or each as one file."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from farm.report.html.templates import SCRIPTS, STYLES, assets, render_page
from farm.report.model.compare import (
    ComparedJob,
    CompareGroup,
    CompareReport,
    PairedMetric,
    compile_cost,
    merged,
    overview,
    sentence,
)
from farm.report.model.diff import RunDiff
from farm.report.model.status import ago
from farm.report.terminal.compare import TITLES, about_programs, in_all, parts, side_line

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


# CompareReport -> one HTML file: the effect of a change, and the jobs to look at.


# Rows of a table; the JSON file has all.
_SHOWN_ROWS = 400


def render_compare(report: CompareReport) -> str:
    """Return the page of a comparison as one file; all of its text is treated as hostile."""
    groups = [(group, title, report.having(group)) for group, title in TITLES.items()]
    timed = [(metric, _rows(report, metric)) for metric in ("htp_cycles", "latency", "prefill_rate")]
    return render(
        "compare.html.j2",
        None,
        report=report,
        sentence=sentence(report),
        side_lines=[side_line(side) for side in report.sides],
        overview=overview(report),
        groups=[(str(group), title, jobs) for group, title, jobs in groups if jobs],
        quiet=[title.lower() for _, title, jobs in groups if not jobs],
        different=report.having(CompareGroup.DIFFERENT),
        timed=[(metric, rows) for metric, rows in timed if rows],
        figures=_figures(report),
        cost=compile_cost(report.jobs),
        merged=merged,
        shown_rows=_SHOWN_ROWS,
    )


def _rows(report: CompareReport, metric: str) -> list[tuple[ComparedJob, PairedMetric]]:
    """Return the jobs that have a metric, the greatest increase first."""
    found = [(job, one) for job in report.jobs for one in job.metrics if one.metric == metric]
    return sorted(found, key=lambda row: -row[1].change if math.isfinite(row[1].change) else math.inf)


def _figures(report: CompareReport) -> Sequence[tuple[ComparedJob, PairedMetric]]:
    """Return the figures of outputs that differ between the sides; figures that decide and are worse come first."""
    order = ("worse", "better", "unknown", "same")

    def place(row: tuple[ComparedJob, PairedMetric]) -> tuple[bool, int, float]:
        one = row[1]
        return not one.decides, order.index(one.answer), 0.0 if math.isnan(one.change) else -abs(one.change)

    figures = ((job, one) for job in report.jobs for one in job.metrics if one.is_figure and one.a != one.b)
    return sorted((row for row in figures if not (math.isnan(row[1].a) and math.isnan(row[1].b))), key=place)
