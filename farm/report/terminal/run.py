"""Run and job for a terminal: the lines at the end of `farm run`, a job in full, figures of text generation."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farm.base.text import one_line, visible, without_colours
from farm.report.model import format as fmt
from farm.report.model.cross_target import CrossTarget, cross_targets, elsewhere_line
from farm.report.model.sections import REFERENCES, GenerationFigures, frame_grids, generating, generation_of
from farm.report.model.status import since_text, standing_text, toolchain_text
from farm.report.model.summary import (
    WORDS,
    JobSummary,
    Outcome,
    RunSummary,
    Tone,
    beyond_comparisons,
    fetch_command,
    spread_of,
    summarize,
    ways_again,
)
from farm.report.terminal.layout import LEAST_WIDTH, SIMULATED, STUBBED, columns, styled, wrapped_in
from farm.report.terminal.status import sparkline
from farm.results.attempt import Attempt
from farm.results.heap import no_heap
from farm.store.records import JobFile, Purpose, RunView

# Figures of text generation -> lines for a terminal. Pure.


_MIB = 1 << 20
_NAMED = 6
"""Lengths of prompts in one line."""


def rates(figures: GenerationFigures) -> list[str]:
    """Return the figures in a few words each: rates, first tokens, spread of steps, loss of rate, memory."""
    known = (("decode", figures.decode), ("prefill", figures.prefill))
    parts = [f"{name} {fmt.rate(rate.p50)} tokens/s" for name, rate in known if rate is not None]
    if prompts := figures.prompts:
        times = [f"{fmt.milliseconds(one.p50 / 1e6)} ms after {fmt.count(tokens)}" for tokens, one in prompts.items()]
        times[0] += " tokens" if min(prompts) > 1 else " token"
        parts.append(f"first token {fmt.first_of(times, _NAMED, 'lengths more')}")
    if steps := figures.steps:
        ranks = (("p50", steps.p50), ("p90", steps.p90), ("p99", steps.p99))
        parts.append("step " + ", ".join(f"{name} {fmt.milliseconds(ns / 1e6)}" for name, ns in ranks) + " ms")
    parts += filter(None, (figures.fall_text, figures.temperature_text))
    if figures.memory is not None:
        parts.append(f"{fmt.small(figures.memory / _MIB)} MiB of memory at most")
    return parts


def nearness(figures: GenerationFigures) -> list[str]:
    """Return the agreement of logits and tokens with the references, in a few words each; empty without references."""
    near, parts = figures.logits, []
    for reference, module in REFERENCES.items():
        if (metric := f"sqnr{reference}") in near:
            worst = near.get(f"worst_position{reference}")
            at_worst = "" if worst is None else f", {_db(worst)} at the worst position"
            parts.append(f"{_db(near[metric])} to {module}{at_worst}")
    if "prefill_quantized" in near:
        parts.append(f"prefill {_db(near['prefill_quantized'])} to decode")
    same = ((near.get(f"same_tokens{reference}"), module) for reference, module in REFERENCES.items())
    if shares := [f"{fmt.percent(share)} as {module}" for share, module in same if share is not None]:
        parts.append(f"tokens {', '.join(shares)}")
    if "margin_fp32" in near:
        parts.append(f"least margin {near['margin_fp32']:.3f}")
    return [*parts, *figures.tasks]


def _db(value: float) -> str:
    return "equal" if value == math.inf else f"{fmt.decibel(value)} dB"


def generation_lines(figures: GenerationFigures, label: str) -> Iterator[str]:
    """Yield a title and a line for each curve; `label` is the origin of the times, "" for times of a device."""
    if near := nearness(figures):
        yield "logits and tokens, of the worst prompt"
        yield from (f"  {part}" for part in near)
    yield f"generation{f', simulated: {label}' if label else ''}"
    yield from (f"  {part}" for part in rates(figures))
    prompts, positions = ([one.p50 / 1e6 for one in times.values()] for times in (figures.prompts, figures.positions))
    yield from _curve("first token", prompts, "ms", f"prompts of {', '.join(map(str, figures.prompts))} tokens")
    if places := list(figures.positions):
        yield from _curve("step", positions, "ms", f"positions {places[0][0]} to {places[-1][1]}")
    over = f"over {figures.seconds} s" if figures.seconds else "over time"
    yield from _curve("decode rate", figures.sustained, "tokens/s", over)
    yield from _curve("temperature", figures.temperatures, "C", over)
    for method, took in figures.loads:
        yield f"  {method} loaded in {fmt.quantity(took, 'ns')}"


def _curve(name: str, values: Sequence[float], unit: str, where: str) -> Iterator[str]:
    if len(set(values)) > 1:
        least, most = (fmt.milliseconds(value) for value in (min(values), max(values)))
        yield f"  {name} {sparkline(values)} {least} to {most} {unit}, {where}"


# RunView -> a few lines for the end of `farm run` in a terminal.


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
    lines = wrapped_in(_STYLES[summary.tone], summary.verdict_line, width)
    lines += _virtual(summary, width)
    standing = standing_text(view.toolchain)
    # A status or a job shows the standing beside the purpose of the run; here the purpose is part of it.
    standing = f"a local run: {standing}" if view.purpose == Purpose.LOCAL and standing else standing
    origin = "; ".join(filter(None, (toolchain_text(view.toolchain), standing, since_text(view.toolchain))))
    lines += wrapped_in("", origin, width)
    more = _known(summary, width)
    if summary.recovered:
        jobs = fmt.plural(len(summary.recovered), "job")
        more += wrapped_in("yellow", f"retried: {jobs} passed only after another attempt", width)
    details = [line for text in _details(summary) for line in wrapped_in("", text, width)]
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
    if summary.stub:
        return wrapped_in("magenta", STUBBED, width)
    if not (virtual := len(summary.virtual_devices)):
        return []
    text = f"{virtual} of {len(summary.view.devices)} devices" if summary.mixed else "all devices"
    text = f"VIRTUAL: {text} simulated; latency is {summary.host_time}, not comparable with hardware"
    return wrapped_in("magenta", text, width)


def _details(summary: RunSummary) -> Iterator[str]:
    """Yield lines beside the verdicts: DSP heap, refused frame rates, rates of generated text."""
    attempts = [job.attempt for job in summary.jobs if job.attempt is not None]
    rows = [row for attempt in attempts for row in attempt.measurements if row.metric == "dsp_heap_difference"]
    if kept := [sample for row in rows for sample in row.samples]:
        ends = dict.fromkeys(f"{value:,.0f}" for value in (min(kept), max(kept)))
        yield f"DSP heap: {' to '.join(ends)} bytes kept, of {len(rows)} jobs"
    for reason, jobs in Counter(filter(None, map(no_heap, attempts))).most_common():
        yield f"{reason}; {jobs} of {len(summary.jobs)} jobs skipped"
    for grid in frame_grids(summary):
        # Skipped jobs have no other line.
        if grid.infeasible:
            yield f"frame rates: {grid.text}: {grid.name}"
    for job, figures in generating(summary):
        title = f"generated, simulated: {job.job.id}" if job.virtual else f"generated: {job.job.id}"
        # `farm show` has the other figures.
        parts = filter(None, (*rates(figures)[:2], figures.fall_text, *figures.tasks))
        yield f"{title}: {'; '.join(parts)}"


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


# A job of a run in full, for a terminal. Pure.


def job_lines(summary: RunSummary, item: JobSummary, files: Sequence[JobFile], places: Mapping[str, Path]) -> list[str]:
    """Return every attempt of a job with its reason, figures and log, the kept files, and the commands to run it again.

    No text is cut. `places` has the paths of files on this machine, by hash.
    """
    view, job = summary.view, item.job
    ended = "unfinished" if view.exit_code is None else f"exit code {view.exit_code}"
    lines = [f"{job.id}: {WORDS[item.outcome]}", f"  run {view.id}, {fmt.clock(view.started_ms)}, {ended}"]
    lines += [f"  by {view.user} on {view.host}: {view.command}"]
    lines += [f"  {text}" for text in (toolchain_text(view.toolchain), standing_text(view.toolchain)) if text]
    lines += [f"  {_build(item)}"]
    lines += [f"  left to the CPU: {name} x{count}" for name, count in job.fallback_ops.items() if not item.on_cpu]
    cross = cross_targets(summary).get(item.index)
    if cross and (elsewhere := elsewhere_line(cross, time.time_ns() // 1_000_000)):
        lines.append(f"  elsewhere: {elsewhere}")
    if not job.attempts:
        lines += ["", item.reason]
    for number in range(len(job.attempts)):
        lines += ["", *_attempt(view, item, number)]
    if item.virtual or item.stub:
        lines += ["", STUBBED if item.stub else SIMULATED]
    if files:
        where = [str(places.get(one.sha256, "not on this machine")) for one in files]
        kept = [
            (f"attempt {one.attempt}", one.kind, f"{one.size:,} bytes", place)
            for one, place in zip(files, where, strict=True)
        ]
        lines += ["", "kept:", *columns(kept, right=(2,), indent="  "), f"  {fetch_command(job, view.id)}"]
    lines.append("")
    for title, command in ways_again(job, item.rerun, view.id):
        lines += [f"{title.lower()}:", f"  {command}"]
    return lines


def _build(item: JobSummary) -> str:
    job, bundle = item.job, item.attempt.bundle_key[:12] if item.attempt else ""
    build = "from the cache" if job.cached else f"in {fmt.duration(job.build_seconds)}"
    parts = [f"module {job.case_module}" if job.case_module else "", f"bundle {bundle}, {build}" if bundle else ""]
    return ", ".join(filter(None, parts)) or "not compiled"


def _attempt(view: RunView, item: JobSummary, number: int) -> Iterator[str]:
    attempts, kind = item.job.attempts, item.kinds[number]
    attempt = attempts[number]
    cause = f", cause {attempt.cause}" if attempt.cause else ""
    decides = ", decides" if len(attempts) > 1 and attempt is item.attempt else ""
    yield f"attempt {number + 1} of {len(attempts)}: {attempt.verdict} at {attempt.stage}{cause}{decides}"
    where = f"on {kind} device {attempt.device}, {fmt.duration(attempt.seconds)}" if attempt.device else "no device"
    yield f"  {where}, {fmt.clock(attempt.started_ms)}" if attempt.started_ms else f"  {where}"
    if attempt.reason:
        yield f"  {attempt.reason}"
    if attempt.known_issue:
        yield f"  known issue: {attempt.known_issue}"
    yield from (f"  note: {note}" for note in attempt.notes)
    if attempt.comparisons:
        yield ""
        yield from _comparisons(attempt)
    if measured := beyond_comparisons(attempt):
        rows: list[tuple[str, ...]] = [("metric", "value", "least", "p90", "most", "n")]
        for one in measured:
            spread = spread_of(one)
            figures = (spread.value, spread.least, spread.p90, spread.most) if spread else ()
            shown = [fmt.quantity(value, one.unit) for value in (figures[:1] if len(one.samples) == 1 else figures)]
            # All figures of a row have the unit of the first.
            shown = [*shown[:1], *(text.partition(" ")[0] for text in shown[1:]), *[""] * (4 - len(shown))]
            rows.append((one.metric, *shown, str(len(one.samples))))
        yield ""
        yield from columns(rows, right=range(1, 6), indent="  ")
    if generated := generation_of(attempt, view.fingerprint):
        yield ""
        yield from (f"  {line}" for line in generation_lines(generated, item.host_time_on(kind)))
    if attempt.operators:
        command = shlex.join(["farm", "jobs", "profile", attempt.job_id, "--run", view.id])
        yield f"  profile: {fmt.plural(len(attempt.operators), 'row')}, see {command}"
    if attempt.layers:
        yield f"  layers: {fmt.plural(len(attempt.layers), 'row')}, see --json"
    if attempt.log:
        yield f"  log, {fmt.plural(len(attempt.log), 'character')}:"
        # The log is printed unchanged, so that it can be searched.
        yield from (f"    {line}".rstrip() for line in attempt.log.rstrip("\n").split("\n"))


def _comparisons(attempt: Attempt) -> list[str]:
    exact = any(one.mismatch is not None for one in attempt.comparisons)
    rows: list[tuple[str, ...]] = [
        ("output", "against", "SQNR dB", "cosine", "max abs", "steps", *(["mismatch"] if exact else []))
    ]
    for one in attempt.comparisons:
        figures = (fmt.decibel(one.sqnr_db), fmt.cosine(one.cosine), fmt.small(one.max_abs), fmt.small(one.steps))
        rows.append((one.title, one.reference, *figures, *([fmt.percent(one.mismatch)] if exact else [])))
    broken = [
        f"  {one.label} against {one.reference} violates: {limit}"
        for one in attempt.comparisons
        for limit in one.violations
    ]
    return [*columns(rows, right=range(2, len(rows[0])), indent="  "), *broken]
