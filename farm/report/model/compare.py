"""Comparison of two sides job by job, A and B: equal, different and worse jobs, totals and costs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.key import stub_of
from farm.builds.bundles.reuse import has_trace
from farm.builds.bundles.same import data_hash, program_of
from farm.report.model import format as fmt
from farm.results.analysis.confirmation import Answer
from farm.results.analysis.statistics import Scale, change_text, scale_of
from farm.suites.figures import figure_of

# Comparison of two sides job by job, A and B: equal, different and worse jobs. Pure.


class CompareGroup(StrEnum):
    """Result of a job from A to B, in the order in which a reader looks at them."""

    NEWLY_FAILING = "newly_failing"
    WORSE = "worse"
    """Confirmed slower, confirmed worse numerics, or more operators left to the CPU."""
    NOT_COMPARED = "not_compared"
    """The farm, the device or the user prevented the comparison; the code under test is not at fault."""
    NEWLY_PASSING = "newly_passing"
    BETTER = "better"
    FAILING = "failing"
    """Failing on both sides: no news."""
    DIFFERENT = "different"
    """Different programs, without a confirmed change for the worse or the better."""
    SAME = "same"
    """Equal program, inputs and references: the job needs no device."""


class JobState(StrEnum):
    """State of a job on one side."""

    PASSED = "passed"
    KNOWN = "known issue"
    FAILED = "failed"
    INFRA = "infra"
    COMPILED = "compiled"
    """Compiled and not executed."""
    ABSENT = "not compiled"
    """Not reached: the comparison ended before the job was compiled."""


class CompareSide(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one side."""

    label: str
    """`A` or `B`."""
    name: str
    """Name from the command line."""
    facts: dict[str, str]
    """Versions, content hashes and commit: facts that the programs depend on, and names that people know."""
    options: dict[str, str] = {}
    """Options of the target that the other side does not have."""
    warnings: tuple[str, ...] = ()


class CompiledFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a compiled job."""

    key: str
    cached: bool
    """True when the bundle was compiled before this comparison; time and memory are from that compilation."""
    program: str
    """Hash of the program without the times and running numbers that QNN writes."""
    data: str
    """Hash of inputs and references."""
    seconds: dict[str, float]
    """Seconds by step, and `total`."""
    peak_bytes: int
    """Peak resident memory of the builder while it compiled; 0 when it is not known."""
    traced: bool
    """True when the builder also recorded the executed lines of the toolchain, which takes longer."""
    pte_bytes: int
    partitions: int
    delegated_ops: int | None
    fallback_ops: dict[str, int]


class SideResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job on one side."""

    job_id: str
    compiled: CompiledFacts | None = None
    verdict: str = ""
    """Verdict of the device or of a failed compilation: `passed`, `failed`, `infra`; "" when not executed."""
    stage: str = ""
    reason: str = ""
    known_issue: str = ""
    log: str = ""

    @property
    def state(self) -> JobState:
        """Return the state of the job."""
        if self.verdict == "failed":
            return JobState.KNOWN if self.known_issue else JobState.FAILED
        if self.verdict in ("passed", "skipped"):
            return JobState.PASSED
        if self.verdict == "infra":
            return JobState.INFRA
        return JobState.COMPILED if self.compiled else JobState.ABSENT

    @property
    def text(self) -> str:
        """Return outcome and reason in one line."""
        why = f"{self.stage}: {self.reason}" if self.reason else str(self.state)
        return f"{why} (known issue: {self.known_issue})" if self.state is JobState.KNOWN else why


class PairedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """Number of both sides, measured in turns on one device."""

    metric: str
    unit: str
    a: float
    """Median of A, in `unit`."""
    b: float
    change: float
    """Change from A to B on the scale of the metric, by Hodges and Lehmann; NaN without pairs."""
    low: float
    high: float
    """Upper end of the 95 % interval of the change; `low` is the lower end."""
    pairs: int
    p_value: float
    """P-value of the one-sided test in the direction of the answer."""
    worse: Answer
    better: Answer
    decides: bool
    """True when the number can turn the comparison red; times of a simulator's host cannot."""

    @property
    def scale(self) -> Scale:
        """Return the scale on which values are compared."""
        return scale_of(self.metric, self.unit)

    @property
    def is_figure(self) -> bool:
        """Return True for a figure of outputs, False for a time."""
        return figure_of(self.metric) is not None or self.unit in ("dB", "1")

    @property
    def answer(self) -> str:
        """Return the answer in a word: `worse`, `better`, `same` when both are refuted, else `unknown`."""
        if self.worse is Answer.CONFIRMED:
            return "worse"
        if self.better is Answer.CONFIRMED:
            return "better"
        return "same" if self.worse is self.better is Answer.REFUTED else "unknown"

    @property
    def change_text(self) -> str:
        """Return the change in words: `+8.2 % (+7.1 % to +9.4 %)`."""
        if math.isnan(self.change):
            return fmt.NOTHING
        change = change_text(self.scale, round(self.change, 6) + 0.0)
        if self.pairs <= 1:
            return change
        low, high = ("…" if math.isinf(end) else change_text(self.scale, end) for end in (self.low, self.high))
        return f"{change} ({low} to {high})"

    @property
    def values_text(self) -> str:
        """Return both values in words: `291,546 -> 314,423 cycles`."""
        unit = " cycles" if self.unit == "cycles" else ""
        return f"{fmt.quantity(self.a, self.unit).removesuffix(unit)} -> {fmt.quantity(self.b, self.unit)}"


class ComparedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job on both sides."""

    name: str
    """Id of the job, without the options in which the sides differ."""
    a: SideResult
    b: SideResult
    executed: bool = False
    """True when the job was executed on a device."""
    metrics: tuple[PairedMetric, ...] = ()
    device: str = ""
    outputs: tuple[int, int] | None = None
    """Number of output files that are equal byte for byte, and of all; None unless both sides wrote outputs."""
    modes_alone: bool = False
    """True when the sides differ only in direct mode: their outputs have to be equal."""
    left_out: str = ""
    """Reason why the job was not executed although its programs differ; "" if executed or not needed."""

    @property
    def compiled(self) -> tuple[CompiledFacts, CompiledFacts] | None:
        """Return the facts of both programs; None unless both sides compiled the job."""
        a, b = self.a.compiled, self.b.compiled
        return None if a is None or b is None else (a, b)

    @property
    def same(self) -> bool:
        """Return True when both sides have the same program, inputs and references."""
        return self.compiled is not None and not self.differs

    @property
    def differs(self) -> str:
        """Return the differing parts of the bundles: `program`, `inputs or references`, or both."""
        if self.compiled is None:
            return ""
        a, b = self.compiled
        return " and ".join(["program"] * (a.program != b.program) + ["inputs or references"] * (a.data != b.data))

    @property
    def outputs_differ(self) -> str:
        """Return the number of outputs that differ between the sides; "" when all are equal or none are known."""
        if self.outputs is None or self.outputs[0] == self.outputs[1]:
            return ""
        equal, total = self.outputs
        return f"{total - equal} of {fmt.plural(total, 'output')} not equal byte for byte"

    @property
    def fallback(self) -> dict[str, tuple[int, int]]:
        """Return the operators left to the CPU in different numbers, with the counts of A and B."""
        if self.compiled is None:
            return {}
        a, b = self.compiled
        names = sorted(a.fallback_ops.keys() | b.fallback_ops.keys())
        counts = {name: (a.fallback_ops.get(name, 0), b.fallback_ops.get(name, 0)) for name in names}
        return {name: both for name, both in counts.items() if both[0] != both[1]}

    @property
    def leaves_more(self) -> bool:
        """Return True when B leaves more operators to the CPU in total: two that became one other are not more."""
        return sum(now - was for was, now in self.fallback.values()) > 0

    @property
    def worse(self) -> tuple[str, ...]:
        """Return the confirmed changes for the worse of a job that both sides can run, the most telling first."""
        more = {name: (was, now) for name, (was, now) in self.fallback.items() if now > was}
        return (
            *filter(None, [self.outputs_differ if self.modes_alone else ""]),
            *self._moved("worse"),
            *(_on_cpu(more) if self.leaves_more else ()),
        )

    @property
    def better(self) -> tuple[str, ...]:
        """Return the confirmed changes for the better, a line each.

        Fewer operators on the CPU count only if no other operator took their place.
        """
        fallback = self.fallback
        is_more = any(now > was for was, now in fallback.values())
        return (*self._moved("better"), *(() if is_more else _on_cpu(fallback)))

    def _moved(self, answer: str) -> Iterator[str]:
        """Yield the metrics that decide and have this answer, with values and change."""
        for one in self.metrics:
            if one.decides and one.answer == answer:
                yield f"{one.metric} {one.values_text}, {one.change_text}"

    @property
    def group(self) -> CompareGroup:
        """Return the group of the job."""
        a, b, failed, known = self.a.state, self.b.state, JobState.FAILED, JobState.KNOWN
        rules = (
            (CompareGroup.SAME, self.same and not self.executed and not self.left_out),
            (CompareGroup.NOT_COMPARED, not {a, b}.isdisjoint({JobState.INFRA, JobState.ABSENT})),
            (CompareGroup.NEWLY_FAILING, b is failed and a is not failed),
            (CompareGroup.FAILING, (a is failed and b in (failed, known)) or (a is b is known and not self.metrics)),
            (CompareGroup.NOT_COMPARED, a is failed and bool(self.left_out)),
            (CompareGroup.NEWLY_PASSING, a is failed or (a is known and b is JobState.PASSED)),
            (CompareGroup.WORSE, bool(self.worse)),
            (CompareGroup.NOT_COMPARED, bool(self.left_out)),
            (CompareGroup.BETTER, bool(self.better)),
            (CompareGroup.SAME, self.same),
        )
        return next((group for group, holds in rules if holds), CompareGroup.DIFFERENT)

    @property
    def text(self) -> str:
        """Return the reason for the group in one line."""
        a, b = (one.text for one in (self.a, self.b))
        infra = [text for text, one in ((a, self.a), (b, self.b)) if one.state is JobState.INFRA]
        texts = {
            CompareGroup.NEWLY_FAILING: b,
            CompareGroup.FAILING: b if a == b else f"{b}; A: {a}",
            CompareGroup.NEWLY_PASSING: f"failed with A: {a}",
            CompareGroup.WORSE: "; ".join((*self.worse, *([self.left_out] if self.left_out else []))),
            CompareGroup.BETTER: "; ".join(self.better),
            CompareGroup.NOT_COMPARED: "; ".join(infra) or self.left_out or "not compiled",
            CompareGroup.DIFFERENT: "; ".join(_on_cpu(self.fallback)),
        }
        return texts.get(self.group, "")


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two sides."""

    id: str
    command: str
    started_ms: int
    """Start of the comparison; epoch, milliseconds."""
    seconds: float
    kind: str
    """Kind of the devices: `virtual` or `hardware`; "" when only programs are compared."""
    devices: tuple[str, ...]
    """Serials of the devices; virtual devices have an adb server each, so their serials are equal."""
    sides: tuple[CompareSide, CompareSide]
    jobs: tuple[ComparedJob, ...]
    notes: tuple[str, ...] = ()
    """Notes on the measurement for the reader."""
    interrupted: bool = False
    pairs: int = 0
    """Least number of pairs behind a confirmed change."""

    def having(self, group: CompareGroup) -> tuple[ComparedJob, ...]:
        """Return the jobs of one group."""
        return tuple(job for job in self.jobs if job.group is group)

    @property
    def stub(self) -> bool:
        """Return True for a side with a stub in the place of QNN's libraries."""
        return any(stub_of(side.facts) for side in self.sides)

    @property
    def is_worse(self) -> bool:
        """Return True when a job fails newly, is confirmed slower or less exact, or leaves more to the CPU."""
        return any(job.group in (CompareGroup.NEWLY_FAILING, CompareGroup.WORSE) for job in self.jobs)

    @property
    def verdict(self) -> str:
        """Return the result in some words, in agreement with the exit code."""
        if self.is_worse:
            return "B is worse"
        if self.interrupted:
            return "interrupted"
        return "not every job was compared" if self.having(CompareGroup.NOT_COMPARED) else "B is not worse"

    @property
    def same_programs(self) -> int:
        """Return the number of jobs with the same program, inputs and references on both sides."""
        return sum(job.same for job in self.jobs)

    @property
    def with_outputs(self) -> tuple[ComparedJob, ...]:
        """Return the jobs with outputs of both sides, compared byte for byte; jobs that differ come first."""
        return tuple(sorted((job for job in self.jobs if job.outputs), key=lambda job: not job.outputs_differ))

    @property
    def equal_outputs(self) -> int:
        """Return the number of jobs whose outputs are equal byte for byte."""
        return sum(not job.outputs_differ for job in self.with_outputs)

    @property
    def resized(self) -> tuple[ComparedJob, ...]:
        """Return the jobs whose program has another size, the greatest change first."""
        both = [(job, *job.compiled) for job in self.jobs if job.compiled]
        ratios = [(abs(math.log((b.pte_bytes or 1) / (a.pte_bytes or 1))), job) for job, a, b in both]
        return tuple(job for ratio, job in sorted(ratios, key=lambda one: -one[0]) if ratio)

    @property
    def repartitioned(self) -> tuple[ComparedJob, ...]:
        """Return the jobs with another number of delegates, or other operators left to the CPU."""
        both = [(job, *job.compiled) for job in self.jobs if job.compiled]
        return tuple(job for job, a, b in both if job.fallback or a.partitions != b.partitions)

    @property
    def differing_facts(self) -> tuple[tuple[str, str, str], ...]:
        """Return the facts that differ between the sides: name, A, B."""
        a, b = (side.facts for side in self.sides)
        names = dict.fromkeys((*a, *b))
        return tuple((name, a.get(name, ""), b.get(name, "")) for name in names if a.get(name) != b.get(name))


def compiled_facts(bundle: Bundle, *, cached: bool) -> CompiledFacts:
    """Return the facts of a bundle for a comparison. Raises OSError."""
    manifest = bundle.manifest
    return CompiledFacts(
        key=manifest.key,
        cached=cached,
        program=program_of(bundle),
        data=data_hash(manifest),
        seconds=manifest.seconds,
        peak_bytes=manifest.peak_bytes,
        traced=has_trace(bundle.folder),
        pte_bytes=manifest.pte_bytes,
        partitions=manifest.partitions,
        delegated_ops=manifest.delegated_ops,
        fallback_ops=manifest.fallback_ops,
    )


def _on_cpu(operators: dict[str, tuple[int, int]]) -> tuple[str, ...]:
    return tuple(f"{name} {fmt.count(was)} -> {fmt.count(now)} on the CPU" for name, (was, now) in operators.items())


# Totals of a comparison: one sentence, sums over all jobs, and the cost of compiling. Pure.


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
    compiled = [job.compiled for job in jobs if job.compiled]
    both = {(a.key, b.key): (a, b) for a, b in compiled if a.key != b.key}
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
    if both := [job.compiled for job in report.jobs if job.compiled]:
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
        changes = (one.change for job in report.jobs for one in job.metrics if one.metric == metric)
        if moved := [change for change in changes if math.isfinite(change)]:
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
