"""A job of a run in full, for a terminal. Pure."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farm.report.model import format as fmt
from farm.report.model.commits import standing_text, toolchain_text
from farm.report.model.cross_target import cross_targets, elsewhere_line
from farm.report.model.generation import generation_of
from farm.report.model.rerun import fetch_command, ways_again
from farm.report.model.summary import WORDS, JobSummary, RunSummary, beyond_comparisons, spread_of
from farm.report.terminal.generation import generation_lines
from farm.report.terminal.layout import SIMULATED, STUBBED, columns
from farm.results.attempt import Attempt
from farm.store.records import JobFile
from farm.store.view import RunView


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
    if measured := beyond_comparisons(attempt, samples=True):
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
