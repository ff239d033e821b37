"""Totals of a comparison: one sentence, sums over all jobs, and the cost of compiling. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import msgspec

from farm.report.model import format as fmt
from farm.report.model.compare import ComparedJob, CompareGroup, CompareReport, CompiledFacts
from farm.results.analysis.scale import Scale, change_text

_LEAST_SHOWN = 0.0005


class CompileCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of compiling, over the jobs that both sides compiled."""

    jobs: int
    fresh: bool
    """True when all of them were compiled in this comparison, side by side."""
    seconds: tuple[float, float]
    """Total seconds of A and B."""
    peak_bytes: tuple[int, int]
    """Greatest peak memory of a builder, A and B; 0 when it is not known."""
    steps: tuple[tuple[str, float, float], ...]
    """Seconds by step, the longest steps first."""
    traced: tuple[int, int]
    """Programs whose builder also recorded the executed lines of the toolchain, which takes longer, A and B."""


def compile_cost(jobs: Iterable[ComparedJob]) -> CompileCost | None:
    """Return the cost of compiling, of bundles compiled in this comparison if there are any, else of all."""
    both = {
        (job.a.compiled.key, job.b.compiled.key): (job.a.compiled, job.b.compiled)
        for job in jobs
        if job.a.compiled and job.b.compiled and job.a.compiled.key != job.b.compiled.key
    }
    new = [pair for pair in both.values() if not any(one.cached for one in pair)]
    pairs = new or list(both.values())
    if not pairs:
        return None
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    names = dict.fromkeys(name for one in (*a, *b) for name in one.seconds if name != "total")
    steps = [(name, _seconds(a, name), _seconds(b, name)) for name in names]
    return CompileCost(
        jobs=len(pairs),
        fresh=bool(new),
        seconds=(_seconds(a, "total"), _seconds(b, "total")),
        peak_bytes=(max(one.peak_bytes for one in a), max(one.peak_bytes for one in b)),
        steps=tuple(sorted(steps, key=lambda step: -max(step[1:]))),
        traced=(sum(one.traced for one in a), sum(one.traced for one in b)),
    )


class OverviewRow(msgspec.Struct, frozen=True):
    """Total or median of one figure over all jobs."""

    what: str
    a: str
    b: str
    change: str
    over: str
    """Jobs that the figure covers."""


def overview(report: CompareReport) -> tuple[OverviewRow, ...]:
    """Return the figures over all jobs; figures without data have no row."""
    rows = []
    if both := [(job.a.compiled, job.b.compiled) for job in report.jobs if job.a.compiled and job.b.compiled]:
        over = f"{fmt.plural(len(both), 'job')} that both compile"
        counted: tuple[tuple[str, Callable[[CompiledFacts], int], Callable[[int], str]], ...] = (
            ("size of programs", lambda one: one.pte_bytes, fmt.size),
            ("partitions", lambda one: one.partitions, fmt.count),
            ("operators left to the CPU", lambda one: sum(one.fallback_ops.values()), fmt.count),
        )
        for what, number, shown in counted:
            a, b = (sum(number(pair[side]) for pair in both) for side in (0, 1))
            rows.append(OverviewRow(what, shown(a), shown(b), _ratio_text(a, b), over))
    if compared := report.with_outputs:
        equal = report.equal_outputs
        change = "equal" if equal == len(compared) else f"{len(compared) - equal} of {len(compared)} differ"
        over = f"{fmt.plural(len(compared), 'job')} run on both sides"
        rows.append(OverviewRow("outputs, byte for byte", "", "", change, over))
    for metric, label in (("htp_cycles", "HTP cycles"), ("latency", "latency"), ("prefill_rate", "prefill rate")):
        if moved := changes_of(report, metric):
            host = ", the simulator's host" if metric != "htp_cycles" and report.kind == "virtual" else ""
            middle, least, most = (
                change_text(Scale.RATIO, one) for one in (statistics.median(moved), min(moved), max(moved))
            )
            over = f"{fmt.plural(len(moved), 'job')} run in turns, {least} to {most}"
            rows.append(OverviewRow(f"{label}{host}", "", "", f"{middle} in the median", over))
    if cost := compile_cost(report.jobs):
        how = "compiled side by side now" if cost.fresh else "from the cache, each compiled at its own time"
        over = f"{fmt.plural(cost.jobs, 'program')} {how}"
        if cost.traced[0] != cost.traced[1]:
            side = "A" if cost.traced[0] > cost.traced[1] else "B"
            over += f"; {side}'s builders also recorded the code that ran, which takes longer"
        was, now = map(fmt.duration, cost.seconds)
        rows.append(OverviewRow("compile time", was, now, _ratio_text(*cost.seconds), over))
        if all(cost.peak_bytes):
            was, now = map(fmt.size, cost.peak_bytes)
            rows.append(OverviewRow("greatest memory of a builder", was, now, _ratio_text(*cost.peak_bytes), over))
    return tuple(rows)


def changes_of(report: CompareReport, metric: str) -> list[float]:
    """Return the finite changes of a metric, on its scale, one for each job that has it."""
    found = [one.change for job in report.jobs for one in job.metrics if one.metric == metric]
    return [change for change in found if math.isfinite(change)]


def _ratio_text(a: float, b: float) -> str:
    if a == b:
        return "same"
    if a <= 0 or b <= 0:
        return ""
    change = math.log(b / a)
    return "less than 0.1 %" if abs(change) < _LEAST_SHOWN else change_text(Scale.RATIO, change)


def sentence(report: CompareReport) -> str:
    """Return the result in one sentence."""
    counts = {group: len(report.having(group)) for group in CompareGroup}
    total = len(report.jobs)
    jobs = fmt.plural(total, "job")
    if counts[CompareGroup.SAME] == total and total:
        changed = "no program" if report.same_programs == total else "nothing"
        return f"B changes {changed} of {'this' if total == 1 else 'these'} {jobs}"
    words = {
        CompareGroup.NEWLY_FAILING: "newly failing",
        CompareGroup.WORSE: "worse",
        CompareGroup.NOT_COMPARED: "not compared",
        CompareGroup.NEWLY_PASSING: "newly passing",
        CompareGroup.BETTER: "better",
        CompareGroup.FAILING: "failing on both",
        CompareGroup.DIFFERENT: "another program and no confirmed change",
        CompareGroup.SAME: "the same program",
    }
    found = [f"{counts[group]} {text}" for group, text in words.items() if counts[group]]
    return f"{jobs}: {', '.join(found)}"


def turns_text(number: int, total: int, same: int, what: str) -> str:
    """Return why `number` of `total` jobs run in turns; `same` of them have equal programs, and `what` differs."""
    running = f"running {'it' if number == 1 else 'them'} in turns"
    if same and same == number:
        programs = "the program of 1 job is" if number == 1 else f"the programs of {number} jobs are"
        return f"{programs} the same, {what} differ: {running}"
    if same:
        return f"{number - same} of {fmt.plural(number, 'program')} differ, and so do {what}: {running}"
    return f"{number} of {fmt.plural(total, 'job')} {'differs' if total == 1 else 'differ'}: {running}"


def merged(names: Mapping[str, int]) -> str:
    """Return operators with their counts: `aten.add.Tensor x2, aten.gelu.default`."""
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in sorted(names.items())) or "none"


def _seconds(compiled: Iterable[CompiledFacts], step: str) -> float:
    return sum(one.seconds.get(step, 0.0) for one in compiled)
