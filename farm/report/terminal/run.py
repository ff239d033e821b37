"""RunView -> a few lines for the end of `farm run` in a terminal."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING

from farm.base.text import one_line, visible, without_colours
from farm.report.model import format as fmt
from farm.report.model.commits import since_text, standing_text, toolchain_text
from farm.report.model.cross_target import CrossTarget, cross_targets, elsewhere_line
from farm.report.model.frame_grid import frame_grids
from farm.report.model.generation import generating
from farm.report.model.summary import JobSummary, Outcome, RunSummary, Tone, summarize
from farm.report.terminal.generation import rates
from farm.report.terminal.layout import LEAST_WIDTH, STUBBED, styled, wrapped
from farm.results.heap import no_heap
from farm.store.view import Purpose, RunView

if TYPE_CHECKING:
    from collections.abc import Mapping


SHOWN = 10
"""Jobs of one kind that are listed by name; the report has them all."""
_MOST_LINES = 9
"""Lines of a run that needs no attention; the path of the report is the tenth."""
_STYLES = {
    Tone.PASSED: "bold green",
    Tone.FAILED: "bold red",
    Tone.INFRA: "bold yellow",
    Tone.SKIPPED: "bold red",
    Tone.UNFINISHED: "bold yellow",
    Tone.EMPTY: "bold",
}


def render_summary(view: RunView, width: int = 80, *, color: bool = False) -> str:
    """Return the end of a run as text, no line wider than `width` unless a command to copy is on it.

    Verdict, details, then jobs that need attention with a one-line reason each. `color` adds the control sequences of a
    terminal; markup in names and reasons is never interpreted.
    """
    lines = "\n".join(_summary_lines(view, width))
    return lines if color else without_colours(lines)


def _summary_lines(view: RunView, width: int) -> list[str]:
    summary = summarize(view)
    width, found = max(width, LEAST_WIDTH), cross_targets(summary)
    lines = _wrapped(summary.verdict_line, width, _STYLES[summary.tone])
    lines += _virtual(summary, width)
    standing = standing_text(view.toolchain)
    # A status or a job shows the standing beside the purpose of the run; here the purpose is part of it.
    standing = f"a local run: {standing}" if view.purpose == Purpose.LOCAL and standing else standing
    origin = "; ".join(filter(None, (toolchain_text(view.toolchain), standing, since_text(view.toolchain))))
    lines += _wrapped(origin, width, "") if origin else []
    more = _known(summary, width)
    if summary.recovered:
        jobs = fmt.plural(len(summary.recovered), "job")
        more += _wrapped(f"retried: {jobs} passed only after another attempt", width, "yellow")
    details = [*_heap(summary, width), *_frames(summary, width), *_generated(summary, width)]
    room = max(_MOST_LINES - len(lines) - len(more), 1)
    lines += more
    if len(details) > room:
        details[room - 1 :] = [f"and {len(details) - room + 1} lines more in the report"]
    lines += details
    kinds = (
        ("FAILED", summary.having(Outcome.FAILED), "red"),
        ("SKIPPED", summary.out_of_time, "red"),
        ("INFRA", summary.having(Outcome.INFRA), "yellow"),
    )
    for title, named, style in kinds:
        lines += _named(title, named, style, width, found)
    failed = summary.having(Outcome.FAILED, Outcome.INFRA)
    if failed:
        lines.append(styled(f"again: {visible(failed[0].rerun)}", "dim"))
        lines.append(styled(f"in full: farm show {visible(shlex.quote(failed[0].job.id))}", "dim"))
    return lines


def _virtual(summary: RunSummary, width: int) -> list[str]:
    virtual = len(summary.virtual_devices)
    if summary.stub:
        return _wrapped(STUBBED, width, "magenta")
    if not virtual:
        return []
    text = f"{virtual} of {len(summary.view.devices)} devices" if summary.mixed else "all devices"
    text = f"VIRTUAL: {text} simulated; latency is {summary.host_time}, not comparable with hardware"
    return _wrapped(text, width, "magenta")


def _heap(summary: RunSummary, width: int) -> list[str]:
    """Return the result of a run for the DSP's heap, which measures nothing else."""
    attempts = [job.attempt for job in summary.jobs if job.attempt is not None]
    rows = [row for attempt in attempts for row in attempt.measurements if row.metric == "dsp_heap_difference"]
    lines = []
    if kept := [sample for row in rows for sample in row.samples]:
        lines += _wrapped(f"DSP heap: {_range(kept, 1)} bytes kept, of {len(rows)} jobs", width, "")
    for reason, jobs in Counter(filter(None, map(no_heap, attempts))).most_common():
        lines += _wrapped(f"{reason}; {jobs} of {len(summary.jobs)} jobs skipped", width, "")
    return lines


def _frames(summary: RunSummary, width: int) -> list[str]:
    """Return a line for each program with settings that QNN refused: skipped jobs have no other line."""
    lines = []
    for grid in frame_grids(summary):
        if grid.infeasible:
            lines += _wrapped(f"frame rates: {grid.text}: {grid.name}", width, "")
    return lines


def _generated(summary: RunSummary, width: int) -> list[str]:
    """Return rates and tasks of text generation, job by job; `farm show` has the other figures."""
    lines = []
    for job, figures in generating(summary):
        title = f"generated, simulated: {job.job.id}" if job.virtual else f"generated: {job.job.id}"
        parts = filter(None, (*rates(figures)[:2], figures.fall_text, *figures.tasks))
        lines += _wrapped(f"{title}: {'; '.join(parts)}", width, "")
    return lines


def _range(values: list[float], unit: int) -> str:
    least, greatest = (f"{value / unit:,.0f}" for value in (min(values), max(values)))
    return least if least == greatest else f"{least} to {greatest}"


def _named(
    title: str, jobs: tuple[JobSummary, ...], style: str, width: int, found: Mapping[int, CrossTarget]
) -> list[str]:
    now_ms = time.time_ns() // 1_000_000
    lines: list[str] = []
    for job in jobs[:SHOWN]:
        lines.append(f"{styled(title, f'bold {style}')} {one_line(job.job.id, width - len(title) - 1)}")
        stage = f"{job.attempt.stage.value}: " if job.attempt else ""
        lines.append("  " + one_line(f"{stage}{job.reason}", width - 2))
        if job.index in found and (elsewhere := elsewhere_line(found[job.index], now_ms)):
            lines.append(styled("  " + one_line(f"elsewhere: {elsewhere}", width - 2), "dim"))
    if len(jobs) > SHOWN:
        lines.append(styled(f"  and {len(jobs) - SHOWN} more {title}", style))
    return lines


def _known(summary: RunSummary, width: int) -> list[str]:
    """Return the known issues in one line: jobs, then reasons as far as the width allows."""
    jobs = summary.having(Outcome.KNOWN)
    reasons = dict.fromkeys(job.attempt.known_issue for job in jobs if job.attempt)
    return [styled(one_line(f"known issues, {len(jobs)}x: {'; '.join(reasons)}", width), "cyan")] if jobs else []


def _wrapped(text: str, width: int, style: str) -> list[str]:
    return [styled(line, style) for line in wrapped(text, width, whole_words=False)]
