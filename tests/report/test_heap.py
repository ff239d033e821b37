"""The DSP's heap in the report: what jobs keep, beside earlier runs by device and SDK."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import unescape

import msgspec

from farm.report.html.context import ReportContext
from farm.report.html.page_of_run import render_html
from farm.report.model.heap import HeapRow, heap_rows
from farm.report.terminal.run import render_summary
from farm.results.analysis.history import Point
from farm.results.analysis.scale import Series
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.queries.points import JobPast, SeriesPast
from farm.store.view import RunView

JOB = "features/contexts[SM8650-htp-8a8w]"
REASON = "no DSP heap: ExecuTorch wrote no profile of it"


def measured(*kept: float) -> Attempt:
    rows = (Measurement("dsp_heap_difference", "bytes", Direction.LOWER, kept),)
    return Attempt(JOB, Verdict.PASSED, Stage.DONE, "", "phone-1", measurements=rows)


def past(now: str, *runs: tuple[str, str, str, float, float]) -> JobPast:
    """Return runs as (device, SDK, version of the case, before, after), the last of them `now`; NaN without a heap."""
    points = tuple(
        Point(
            now if place == len(runs) - 1 else f"r{place}", place, math.nan, {"qnn": sdk}, "hardware", case, "", device
        )
        for place, (device, sdk, case, _, _) in enumerate(runs)
    )
    values = {
        "dsp_heap_before": [before for *_, before, _ in runs],
        "dsp_heap_after": [after for *_, after in runs],
        "dsp_heap_difference": [after - before for *_, before, after in runs],
        "partitions": [4.0 for _ in runs],
    }
    series = tuple(
        SeriesPast(number, Series(str(number), name, "bytes", Direction.NONE, exact=False), tuple(column))
        for number, (name, column) in enumerate(values.items())
    )
    return JobPast(JOB, runs[-1][0], points, series)


def test_each_device_and_sdk_has_its_own_baseline_and_noise(run_of: Callable[..., RunView]) -> None:
    view = run_of((measured(4096.0, 8192.0),))
    view = msgspec.structs.replace(view, jobs=(msgspec.structs.replace(view.jobs[0], id=JOB),))
    found = heap_rows(view, [past(
        view.id,
        ("phone-1", "2.51", "old", 1.0, 1e9),
        ("phone-2", "2.51", "new", 900.0, 900.0),
        ("phone-1", "2.47", "new", 1000.0, 9000.0),
        ("phone-1", "2.51", "new", math.nan, math.nan),
        ("phone-1", "2.51", "new", 1000.0, 1000.0),
        ("phone-1", "2.51", "new", 1000.0, 7144.0),
    )])  # fmt: skip
    assert found == (
        HeapRow(JOB, 4, "2.51", "phone-1", 2, 1000.0, 4072.0, 3072.0, 0.0, 8192.0, (4096.0, 8192.0)),
        HeapRow(JOB, 4, "2.47", "phone-1", 1, 1000.0, 9000.0, 8000.0, 8000.0, 8000.0),
        HeapRow(JOB, 4, "2.51", "phone-2", 1, 900.0, 900.0, 0.0, 0.0, 0.0),
    )
    page = unescape(render_html(view, ReportContext(heap=found)))
    section = page[page.index('<section id="heap"') :].partition("</section>")[0]
    assert section.count("<tr>") == 1 + 3
    assert "4,096, 8,192" in section
    assert "0 to 8,192" in section, "samples of this run tell of the noise as well"
    assert "2.47" in section


def test_jobs_without_a_heap_have_their_reason_in_one_line(run_of: Callable[..., RunView]) -> None:
    skipped = Attempt(JOB, Verdict.SKIPPED, Stage.EXECUTE, REASON, "phone-1", cause=Cause.REQUEST)
    view = run_of((skipped,), (skipped,))
    page = unescape(render_html(view))
    section = page[page.index('<section id="heap"') :].partition("</section>")[0]
    assert section.count(f"{REASON}; 2 of 2 jobs skipped.") == 1
    assert " ".join(render_summary(view).split()).count(f"{REASON}; 2 of 2 jobs skipped") == 1


def test_runs_that_measure_times_have_no_section_for_it(example_run: RunView) -> None:
    assert 'id="heap"' not in render_html(example_run)
