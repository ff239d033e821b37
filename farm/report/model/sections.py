"""Sections of a report about special measurements: text generation, frame rates, heap, profiles, layers. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from farm.base.grouping import grouped
from farm.builds.program.layers import LayerStep
from farm.report.model import format as fmt
from farm.report.model.chart import Chart, ChartPoint, chart
from farm.report.model.summary import JobSummary, RunSummary, Spread, spread_of
from farm.results.attempt import Attempt, Cause, LayerComparison, Measurement, OperatorProfile
from farm.results.profile.event_names import is_whole_call, sums
from farm.suites.options import FrameSetting, frame_setting

if TYPE_CHECKING:
    from farm.store.queries.history import JobPast
    from farm.store.records import JobView, RunView


# Figures of text generation from the measurements of an attempt: rates, times by prompt and position. Pure.


_BRACKETS = re.compile(r"(\w+)\[([^\]]*)\]")
_STRETCH = re.compile(r"(\d{1,9})-(\d{1,9})")
_SECONDS = re.compile(r"\d{1,6}")


class GenerationFigures(msgspec.Struct, frozen=True):
    """Figures of text generation in one attempt; figures without a measurement are None or empty."""

    logits: dict[str, float]
    """Agreement of the logits with the references, for the worst prompt and output, by metric of `_LOGITS`."""
    prefill: Spread | None
    """Tokens of prompts per second."""
    decode: Spread | None
    """Tokens per second after the first token."""
    steps: Spread | None
    """Times of decode steps, in nanoseconds."""
    prompts: dict[int, Spread]
    """Times to the first token in nanoseconds, by tokens of the prompt, in ascending order."""
    positions: dict[tuple[int, int], Spread]
    """Times of a decode step in nanoseconds, by first and last position."""
    sustained: tuple[float, ...]
    """Tokens per second in equally long parts of a sustained run."""
    fall: float | None
    """Share of the rate that was lost by the end."""
    seconds: int | None
    """Planned length of the run."""
    temperatures: tuple[float, ...]
    """Degrees Celsius before, during and after the run."""
    loads: tuple[tuple[str, float], ...]
    """Load time in nanoseconds by method."""
    memory: float | None
    """Greatest resident memory of the runner, in bytes."""
    tasks: tuple[str, ...] = ()
    """Perplexity of a given text and number of correct answers, each beside the values of the references."""

    @property
    def fall_text(self) -> str:
        """Return the change of the rate: `rate -18.0 % after 60 s`; empty without a sustained run."""
        if self.fall is None:
            return ""
        # `fall` is negative when the rate rises, so the sign is inverted.
        return f"rate {-100 * self.fall:+.1f} %" + (f" after {self.seconds} s" if self.seconds else "")

    @property
    def temperature_text(self) -> str:
        """Return the first and the greatest temperature: `31.0 to 38.5 C`; empty without a measurement."""
        if not self.temperatures:
            return ""
        ends = dict.fromkeys(f"{one:.1f}" for one in (self.temperatures[0], max(self.temperatures)))
        return f"{' to '.join(ends)} C"


def generation_of(attempt: Attempt | None, fingerprint: Mapping[str, str]) -> GenerationFigures | None:
    """Return the figures of an attempt of a run with this fingerprint; None when nothing was generated."""
    if attempt is None:
        return None
    whole = {one.metric: one for one in attempt.measurements}
    matches = ((_BRACKETS.fullmatch(one.metric), one) for one in attempt.measurements)
    parts = grouped((match[1], (match[2], one)) for match, one in matches if match)
    if not ({"decode_rate", "prefill_rate"} & whole.keys() or "first_token_time" in parts):
        return None
    seconds = fingerprint.get("seconds", "")
    fall, memory = (_median(whole.get(name)) for name in ("sustained_fall", "peak_memory"))
    spreads = _spreads((name, whole[name]) for name in ("prefill_rate", "decode_rate", "latency") if name in whole)
    prompts = parts.get("first_token_time", ())
    stretches = ((_STRETCH.fullmatch(name), one) for name, one in parts.get("step_time", ()))
    return GenerationFigures(
        logits=_logits(attempt),
        prefill=spreads.get("prefill_rate"),
        decode=spreads.get("decode_rate"),
        # A single token after each prompt takes no decode step.
        steps=spreads.get("latency") if "decode_rate" in whole and _finite(whole.get("latency")) else None,
        prompts=_spreads((int(length), one) for length, one in prompts if length.isascii() and length.isdecimal()),
        positions=_spreads(((int(match[1]), int(match[2])), one) for match, one in stretches if match),
        sustained=_finite(whole.get("sustained_rate")),
        fall=fall,
        seconds=int(seconds) if _SECONDS.fullmatch(seconds) else None,
        temperatures=_finite(whole.get("temperature")),
        loads=tuple(
            (name, spread.p50) for name, one in parts.get("method_load_time", ()) if (spread := spread_of(one))
        ),
        memory=memory,
        tasks=_task_texts(attempt),
    )


REFERENCES = {"_quantized": "the quantized module", "_fp32": "FP32"}
"""References of logits by the suffix of a metric."""


def _task_texts(attempt: Attempt) -> tuple[str, ...]:
    single = (one for one in attempt.measurements if len(one.samples) == 1)
    values = {one.metric: one.samples[0] for one in single if math.isfinite(one.samples[0])}

    def with_references(name: str, place: str, show: Callable[[float], str]) -> str:
        others = [
            f"{module} {show(values[key])}"
            for suffix, module in REFERENCES.items()
            if (key := f"{name}{suffix}[{place}]") in values
        ]
        return show(values[f"{name}[{place}]"]) + (f" ({', '.join(others)})" if others else "")

    texts = []
    # Perplexity of generated text is shown among the logit figures; `greedy_share` marks a given text.
    if "greedy_share[0]" in values and "perplexity[0]" in values:
        texts.append(f"perplexity {with_references('perplexity', '0', lambda value: f'{value:.6g}')}")
    if count := round(values.get("questions", 0)):
        for metric in ("acc", "acc_norm"):
            if f"accuracy[{metric}]" in values:
                right = with_references("accuracy", metric, lambda share: str(round(share * count)))
                texts.append(f"{metric} {right} of {count} right")
    return tuple(texts)


# Metrics of logits, in dB, ratios and shares, and the function that picks from the samples of all prompts and outputs.
# `prefill` compares prompts by prefill with the same prompts by decode, `margin` is the least ratio of the FP32
# probability of a chosen token to the probability of the likeliest one.
_LOGITS: dict[str, Callable[[Sequence[float]], float]] = {
    "sqnr_quantized": min,
    "worst_position_quantized": min,
    "sqnr_fp32": min,
    "worst_position_fp32": min,
    "prefill_quantized": min,
    "perplexity_ratio_quantized": max,
    "same_tokens_quantized": statistics.fmean,
    "same_tokens_fp32": statistics.fmean,
    "margin_fp32": min,
}


def _logits(attempt: Attempt) -> dict[str, float]:
    known = ((one.metric, sample) for one in attempt.measurements for sample in one.samples if not math.isnan(sample))
    samples = grouped((metric.partition("[")[0], sample) for metric, sample in known)
    return {metric: pick(samples[metric]) for metric, pick in _LOGITS.items() if metric in samples}


def generating(summary: RunSummary) -> tuple[tuple[JobSummary, GenerationFigures], ...]:
    """Return the jobs of a run whose final attempt generated text, and the figures."""
    facts = summary.view.fingerprint
    return tuple((job, found) for job in summary.jobs if (found := generation_of(job.attempt, facts)) is not None)


def generation_charts(figures: GenerationFigures) -> tuple[Chart, ...]:
    """Return the curves with two points or more: by prompt, by position, over time."""
    prompts = [ChartPoint(tokens, one.p50, fmt.plural(tokens, "token")) for tokens, one in figures.prompts.items()]
    positions = [
        ChartPoint((first + last) / 2, one.p50, f"positions {first} to {last}")
        for (first, last), one in figures.positions.items()
    ]
    places = [place for stretch in figures.positions for place in stretch]
    # A rate covers a part of the time, a temperature a moment.
    rates, temperatures = (
        [ChartPoint(place, value, f"{place + 1} of {len(values)}") for place, value in enumerate(values)]
        for values in (figures.sustained, figures.temperatures)
    )
    time = ("0 s", f"{figures.seconds} s") if figures.seconds else ("start", "end")
    curves = (
        chart("time to first token, by tokens of the prompt", prompts, "ns", _ends(list(figures.prompts))),
        chart("decode step, by position", positions, "ns", _ends(places)),
        chart("decode rate, over time", rates, "tokens/s", time),
        chart("temperature, over time", temperatures, "C", time, from_zero=False),
    )
    return tuple(one for one in curves if one is not None)


def _ends(places: Sequence[int]) -> tuple[str, str]:
    return (str(min(places)), str(max(places))) if places else ("", "")


_Place = TypeVar("_Place", str, int, tuple[int, int])


def _spreads(parts: Iterable[tuple[_Place, Measurement]]) -> dict[_Place, Spread]:
    return {place: spread for place, one in sorted(parts, key=itemgetter(0)) if (spread := spread_of(one))}


def _median(measured: Measurement | None) -> float | None:
    samples = _finite(measured)
    return statistics.median(samples) if samples else None


def _finite(measured: Measurement | None) -> tuple[float, ...]:
    return tuple(sample for sample in measured.samples if math.isfinite(sample)) if measured else ()


# Feasible and infeasible settings of a run's jobs: frame rate by clock, for each core selection. Pure.


class FrameGrid(msgspec.Struct, frozen=True):
    """Settings of one program: a case on a target, without the swept options."""

    name: str
    """`suite/case[SoC-backend-precision-option=value]`."""
    jobs: dict[tuple[int, int, int], JobSummary]
    """Jobs by frame rate, core selection and clock."""

    @property
    def rates(self) -> list[int]:
        """Return the frame rates, a row each."""
        return sorted({fps for fps, _, _ in self.jobs})

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Return the core selections with their clocks, a column each."""
        return sorted({(cores, ftrt_ratio) for _, cores, ftrt_ratio in self.jobs})

    @property
    def cores(self) -> tuple[tuple[int, int], ...]:
        """Return core selections and the number of columns of each, in the order of the columns."""
        return tuple(Counter(cores for cores, _ in self.columns).items())

    @property
    def infeasible(self) -> tuple[JobSummary, ...]:
        """Return the jobs that QNN refused for their setting."""
        return tuple(job for job in self.jobs.values() if is_infeasible(job))

    @property
    def text(self) -> str:
        """Return the counts: `7 feasible, 2 infeasible`, and the number of jobs without an answer."""
        # A feasible setting was executed, with correct outputs or not.
        good, bad = sum(job.numbers.latency_ms is not None for job in self.jobs.values()), len(self.infeasible)
        open_ = len(self.jobs) - good - bad
        return f"{good} feasible, {bad} infeasible" + (f", {open_} not known" if open_ else "")


def is_infeasible(job: JobSummary) -> bool:
    """Return True for a job that QNN refused for its setting alone."""
    return job.attempt is not None and job.attempt.cause is Cause.INFEASIBLE


def frame_grids(summary: RunSummary) -> tuple[FrameGrid, ...]:
    """Return a grid for each program with several settings in a run, or with a setting that QNN refused."""
    settings = ((job, frame_setting(job.job.backend, job.job.options)) for job in summary.jobs)
    programs = grouped((_program(job.job, setting), (setting, job)) for job, setting in settings if setting is not None)
    return tuple(
        FrameGrid(name, {(one.fps, one.cores, one.ftrt_ratio): job for one, job in jobs})
        for name, jobs in programs.items()
        if len(jobs) > 1 or is_infeasible(jobs[0][1])
    )


def _program(job: JobView, setting: FrameSetting) -> str:
    target = "-".join([job.soc, job.backend, job.precision, *(f"{name}={value}" for name, value in setting.others)])
    return f"{job.suite}/{job.case}[{target}]"


# DSP heap of a run's jobs beside earlier runs: by case, contexts, SDK and device. Pure.


_BEFORE, _AFTER, _KEPT = "dsp_heap_before", "dsp_heap_after", "dsp_heap_difference"


class HeapRow(msgspec.Struct, frozen=True):
    """Heap of one job on one device with one SDK over its runs: a baseline and its repeatability."""

    job_id: str
    contexts: int | None
    sdk: str
    device: str
    runs: int
    before: float
    """Median over the runs, in bytes, as in the next fields."""
    after: float
    kept: float
    least_kept: float
    """Least over all runs, and over all processes of this run."""
    most_kept: float
    now: tuple[float, ...] = ()
    """Bytes kept in this run, a sample per process; empty for a device or an SDK of earlier runs alone."""


def heap_rows(view: RunView, pasts: Iterable[JobPast]) -> tuple[HeapRow, ...]:
    """Return a row for each job, device and SDK of `pasts`, in the order of jobs; the row of this run is the first."""
    now = {
        job.id: attempt.measurements for job in view.jobs for attempt in job.attempts if attempt.measurements
    }  # fmt: skip
    rows = [row for past in pasts for row in _heap_rows(past, view.id, now.get(past.job_id, ()))]
    return tuple(sorted(rows, key=lambda row: (row.job_id, not row.now, row.device, row.sdk)))


def _heap_rows(past: JobPast, run_id: str, measured: Iterable[Measurement]) -> Iterator[HeapRow]:
    values = {one.series.metric: one.values for one in past.series}
    if _KEPT not in values:
        return
    # Runs that measured times have no heap, and an older version of the case is another test.
    groups = grouped(
        ((point.device, point.facts.get("qnn", "")), place)
        for place, point in enumerate(past.runs)
        if math.isfinite(values[_KEPT][place]) and point.case_version == past.runs[-1].case_version
    )
    samples = next((one.samples for one in measured if one.metric == _KEPT), ())
    for (device, sdk), places in groups.items():
        before, after, kept = ([values[name][place] for place in places] for name in (_BEFORE, _AFTER, _KEPT))
        contexts = values["partitions"][places[-1]] if values.get("partitions") else math.nan
        now = samples if past.runs[places[-1]].run_id == run_id else ()
        spread = [*kept, *now]
        yield HeapRow(
            past.job_id, int(contexts) if math.isfinite(contexts) else None, sdk, device, len(places),
            statistics.median(before), statistics.median(after), statistics.median(kept), min(spread), max(spread), now,
        )  # fmt: skip


# Tables of a profile and of layers: time by node and module, and the first diverging layer. Pure.


SHOWN_JOBS = 200
"""Jobs of one kind whose profile or layers a page shows; `farm jobs profile` shows the others."""
ROW_BUDGET = 6_000
"""Rows of all profiles in a page."""
ROW_LIMITS = (5, 25)
"""Least and most rows of one table of a profile."""
MODULE_ROWS = 12
"""Rows up to which a table of modules in a page goes deeper."""
LAYER_LIMIT = 2_000
"""Most layers of one job that a page shows."""

MODEL = "the model itself"
"""Name of nodes outside of any submodule, such as code of the model's `forward`."""

_UNITS = ("cycles", "us", "ns")


class OperatorTable(msgspec.Struct, frozen=True):
    """Nodes of a profile in one unit, the greatest shares first."""

    unit: str
    total: float
    count: int
    rows: tuple[OperatorProfile, ...]
    left_out: int
    left_out_total: float

    @property
    def left_out_share(self) -> float:
        """Return the share of the hidden rows in the total, 0 to 1."""
        return self.left_out_total / self.total if self.total else 0.0


class OriginSum(msgspec.Struct, frozen=True):
    """Total of all nodes of one module, or of one line of code, in one unit."""

    name: str
    """`layers.3.conv` or `models/text.py:42`; MODEL for nodes outside of any module, "" when it is not known."""
    unit: str
    nodes: int
    p50: float
    """Sum of the medians."""
    share: float


class LayerRow(msgspec.Struct, frozen=True):
    """Layer at every step that was compared; None for a step at which it was not."""

    layer: str
    operator: str
    steps: tuple[LayerComparison | None, ...]


class LayerTable(msgspec.Struct, frozen=True):
    """Layers of one job in the order of execution."""

    steps: tuple[LayerStep, ...]
    rows: tuple[LayerRow, ...]
    first: LayerComparison | None
    """First diverging layer and its step; None when no layer diverges."""
    left_out: int


def row_limit(jobs: int) -> int:
    """Return the number of rows of a table when `jobs` have profiles."""
    least, most = ROW_LIMITS
    return max(least, min(most, ROW_BUDGET // max(1, min(jobs, SHOWN_JOBS))))


def operator_tables(operators: Sequence[OperatorProfile], limit: int) -> tuple[OperatorTable, ...]:
    """Return a table for each unit of a profile, units of accelerators first; at most `limit` rows each."""
    tables = []
    for unit, total in by_unit(sums(operators)):
        rows = sorted((r for r in operators if r.unit == unit and not is_whole_call(r)), key=lambda r: -r.p50)
        left = sum(row.p50 for row in rows[limit:])
        tables.append(OperatorTable(unit, total, len(rows), tuple(rows[:limit]), len(rows[limit:]), left))
    return tuple(tables)


def origin_sums(
    operators: Iterable[OperatorProfile], *, by_line: bool = False, depth: int = 0
) -> tuple[OriginSum, ...]:
    """Return the total of each module, or with `by_line` of each line of code, the greatest first, by unit.

    `depth` is the number of names to which modules are shortened, which sums their submodules; 0 keeps the full names.
    A unit without a known origin has no sums.
    """

    def origin(row: OperatorProfile) -> str:
        module = ".".join(row.module.split(".")[: depth or None])
        return row.source if by_line else module or (MODEL if row.source else "")

    of_origin = grouped(((row.unit, origin(row)), row) for row in operators if not is_whole_call(row))
    known = {unit for unit, name in of_origin if name}
    found = [
        OriginSum(name, unit, len(rows), sum(row.p50 for row in rows), sum(row.share for row in rows))
        for (unit, name), rows in of_origin.items()
        if unit in known
    ]
    order = [unit for unit, _ in by_unit(dict.fromkeys(known, 0.0))]
    return tuple(sorted(found, key=lambda one: (order.index(one.unit), -one.p50, one.name)))


def module_sums(operators: Iterable[OperatorProfile]) -> tuple[OriginSum, ...]:
    """Return totals of modules at the greatest depth with a short table; a table that is long at depth 1 is cut."""
    rows = tuple(operators)
    found: tuple[OriginSum, ...] = ()
    for depth in range(1, 1 + max((row.module.count(".") + 1 for row in rows), default=0)):
        deeper = origin_sums(rows, depth=depth)
        if found and len(deeper) > MODULE_ROWS:
            break
        found = deeper
    return found[: ROW_LIMITS[1]]


def by_unit(totals: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return totals by unit, units of accelerators first."""
    order = {unit: number for number, unit in enumerate(_UNITS)}
    return sorted(totals.items(), key=lambda one: (order.get(one[0], len(order)), one[0]))


def layer_table(layers: Sequence[LayerComparison]) -> LayerTable:
    """Return the layers of one job, a row each."""
    steps = tuple(step for step in LayerStep if any(layer.step is step for layer in layers))
    rows = [
        LayerRow(name, found[0].operator, tuple({one.step: one for one in found}.get(step) for step in steps))
        for name, found in grouped((layer.layer, layer) for layer in layers).items()
    ]
    diverging = (one for row in rows for one in row.steps if one is not None and one.diverges)
    return LayerTable(steps, tuple(rows[:LAYER_LIMIT]), next(diverging, None), len(rows[LAYER_LIMIT:]))
