"""CompareReport -> one HTML file: the effect of a change, and the jobs to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from farm.report.html.page import render
from farm.report.model.compare import ComparedJob, CompareGroup, CompareReport, PairedMetric
from farm.report.model.compare_totals import compile_cost, merged, overview, sentence
from farm.report.terminal.compare import TITLES, side_line
from farm.results.analysis.scale import Scale, change_text

_SHOWN_ROWS = 400
_LEAST_BARS = 8
_CHART_HEIGHT = 160.0
_MOST_BAR, _LEAST_BAR = 24.0, 2.0
# A chart's scale ends at a factor of two, so that one job that takes ten times as long hides no other change.
_MOST_CHANGE = math.log(2.0)
_LEAST_CHANGE = math.log(1.05)
# Width of all bars together: with more jobs the bars become too thin to point at.
_CHART_WIDTH = 900.0


class ChangeBar(msgspec.Struct, frozen=True):
    """Bar of one job in the chart of changes."""

    x: str
    y: str
    width: str
    height: str
    answer: str
    title: str


class ChangeChart(msgspec.Struct, frozen=True):
    """Changes of a metric, a bar per job, from the greatest gain to the greatest loss."""

    metric: str
    bars: tuple[ChangeBar, ...]
    width: int
    height: int
    middle: int
    low: str
    """Change at the lower edge, in words."""
    high: str
    description: str


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
        charts=[chart for metric in timed if (chart := change_chart(report, metric)) is not None],
        timed=[(metric, _rows(report, metric)) for metric in timed],
        figures=_figures(report),
        cost=compile_cost(report.jobs),
        merged=merged,
        shown_rows=_SHOWN_ROWS,
    )


def change_chart(report: CompareReport, metric: str) -> ChangeChart | None:
    """Return the chart of a metric on a ratio scale; None for fewer than eight jobs, which the table shows better."""
    rows = [(job, one) for job, one in reversed(_rows(report, metric)) if math.isfinite(one.change)]
    if len(rows) < _LEAST_BARS:
        return None
    greatest = max(abs(one.change) for _, one in rows)
    end = min(_MOST_CHANGE, max(_LEAST_CHANGE, greatest))
    width = max(_LEAST_BAR, min(_MOST_BAR, _CHART_WIDTH / len(rows)))
    middle = _CHART_HEIGHT / 2
    bars = []
    for number, (job, one) in enumerate(rows):
        height = max(1.0, middle * min(1.0, abs(one.change) / end))
        bars.append(
            ChangeBar(
                x=f"{number * width:.2f}",
                y=f"{middle - height if one.change > 0 else middle:.2f}",
                width=f"{max(1.0, width - 1.0):.2f}",
                height=f"{height:.2f}",
                answer=one.answer,
                title=f"{job.name}: {one.change_text}, {one.answer}",
            )
        )
    more, less = (sum(one.answer == answer for _, one in rows) for answer in ("worse", "better"))
    return ChangeChart(
        metric=metric,
        bars=tuple(bars),
        width=round(width * len(rows)),
        height=round(_CHART_HEIGHT),
        middle=round(middle),
        low=change_text(Scale.RATIO, -end),
        high=change_text(Scale.RATIO, end),
        description=f"Changes of {metric} of {len(rows)} jobs: {more} confirmed worse, {less} confirmed better",
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
