"""CompareReport -> one HTML file: the effect of a change, and the jobs to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farm.report.html.page import render
from farm.report.model.compare import ComparedJob, CompareGroup, CompareReport, PairedMetric
from farm.report.model.compare_totals import compile_cost, merged, overview, sentence
from farm.report.terminal.compare import TITLES, side_line

# Rows of a table; the JSON file has all.
_SHOWN_ROWS = 400


def render_compare(report: CompareReport) -> str:
    """Return the page of a comparison as one file; all of its text is treated as hostile."""
    groups = [(group, title, report.having(group)) for group, title in TITLES.items()]
    timed = [metric for metric in ("htp_cycles", "latency", "prefill_rate") if _rows(report, metric)]
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
        timed=[(metric, _rows(report, metric)) for metric in timed],
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
    order = {"worse": 0, "better": 1, "unknown": 2, "same": 3}
    found = [
        (job, one)
        for job in report.jobs
        for one in job.metrics
        if one.is_figure and one.a != one.b and not (math.isnan(one.a) and math.isnan(one.b))
    ]
    return sorted(found, key=lambda row: (not row[1].decides, order[row[1].answer], -_size(row[1])))


def _size(one: PairedMetric) -> float:
    return abs(one.change) if not math.isnan(one.change) else 0.0
