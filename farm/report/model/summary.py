"""Summary of a run: outcomes, counts, verdict line, key numbers of jobs, and commands that run a job again. Pure."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import PurePath

import msgspec

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, runs_on_cpu
from farm.base.grouping import grouped
from farm.builds.bundles.key import stub_of
from farm.report.model import format as fmt
from farm.results.attempt import Attempt, Cause, Comparison, Measurement, Verdict
from farm.store.records import DeviceView, JobView, RunView, SkipReason
from farm.suites.figures import COMPARED, LOAD_TIMES, figure_of

# Commands that run one job of a run again, or show more of it. Pure.


# Characters outside of an identifier of `-k`: pytest 8.2, _pytest/mark/expression.py.
_NOT_K_IDENTIFIER = re.compile(r"[^\w:+\-.\[\]\\/]+")

_ONE_JOB = (["debug"], ["exec"], ["repro"])


def ways_again(job: JobView, rerun: str, run_id: str) -> list[tuple[str, str]]:
    """Return further commands for a job of a run, each with a title, quoted for a shell; `rerun` comes first."""
    ways = [("Run it again", rerun)]
    attempt, backend = job.decisive, BACKENDS.get(job.backend)
    if attempt is None or not attempt.device:
        return ways
    # The program of a debug session is not kept.
    if attempt.bundle_key and _words(rerun)[1:2] != ["debug"]:
        of_run = [job.id, "--run", run_id]
        ways.append(("Its exact bundle", shlex.join(["farm", "jobs", "rerun", *of_run])))
        ways.append(("Without farm", shlex.join(["farm", "jobs", "bundle", *of_run, "--to", "bundle"])))
    if attempt.cause == Cause.NUMERICS and backend is not None and backend.has_layers:
        # The run's own virtual device has ended, and farm debug looks for an attached one.
        own = ["--virtual", "1"] if "--virtual" in _words(rerun) else []
        ways.append(("Layer by layer", shlex.join(["farm", "debug", job.id, *own])))
    return [*ways, ("Run by run", shlex.join(["farm", "history", job.id]))]


def fetch_command(job: JobView, run_id: str) -> str:
    """Return the command that writes the kept files of a job of a run into a folder, quoted for a shell."""
    return shlex.join(["farm", "show", job.id, "--run", run_id, "--files", "files"])


def rerun_command(job: JobView, *, virtual: bool, run_command: str = "", toolchain: str = "") -> str:
    """Return the command that runs `job` alone, quoted for a shell, with the same `toolchain`.

    Devices named in `run_command` are named again, and a virtual device is started if it started some; for other
    commands than `farm run`, `virtual` decides. A suite keeps its path. A command with a single job is repeated; `farm
    pytest` gets a -k for the test, which may match tests whose names begin alike.
    """
    given = _words(run_command)
    if given[:1] == ["farm"] and given[1:2] in _ONE_JOB:
        return shlex.join(given)
    if given[:2] == ["farm", "pytest"]:
        test = job.case.rpartition("/")[2].split("::")
        return shlex.join([*given, *([] if "--" in given else ["--"]), "-k", _expression(*test)])
    if given[:2] == ["farm", "run"]:
        # `farm run` uses attached virtual devices and starts none without --virtual.
        virtual = virtual and any(word.partition("=")[0] == "--virtual" for word in given)
    argv = ["farm", "run", "--soc", job.soc, "--suite", _suite_argument(job.suite, given)]
    if job.backend != DEFAULT_BACKEND:
        argv += ["--backend", job.backend]
    for option in options_of(job):
        argv += ["--profile", "optrace"] if option == "profile_level=optrace" else ["--option", option]
    if toolchain:
        argv += ["--toolchain", toolchain]
    if virtual:
        argv += ["--virtual", "1"]
    argv += [word for name in ("--device", "--label") for value in _values(given, name) for word in (name, value)]
    if "--heap" in given:
        argv.append("--heap")
    argv += [word for seconds in _values(given, "--seconds")[-1:] for word in ("--seconds", seconds)]
    profile = _values(given, "--profile")[-1:]
    if profile in (["basic"], ["detailed"]):
        argv += ["--profile", *profile]
    return shlex.join([*argv, "-k", _expression(job.id)])


def _expression(*names: str) -> str:
    """Return the `-k` expression for all words of the id of a job, or of file, class and name of a test."""
    words = [word for name in names for word in _NOT_K_IDENTIFIER.split(name)]
    return " and ".join(word for word in words if word and word not in {"and", "or", "not"})


def options_of(job: JobView) -> list[str]:
    """Return the options of the job's target, `name=value`."""
    return [f"{name}={value}" for name, value in job.options.items()]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _values(words: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, in the order of the command."""
    found = []
    for word, following in itertools.pairwise([*words, ""]):
        if word == option:
            found.append(following)
        elif word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
    return found


def _suite_argument(suite: str, words: Sequence[str]) -> str:
    """Return the argument that named a suite in a command: its path if given, else its name."""
    nameless = []
    for value in _values(words, "--suite"):
        path = PurePath(value)
        name = (path.parent if path.suffix == ".toml" else path).name
        if suite == name:
            return value
        # "./", "../" and "suite.toml" do not contain the name of their folder.
        nameless += [value] if name in {"", ".."} else []
    return nameless[0] if len(nameless) == 1 else suite


# Summary of a run: outcomes, counts, the verdict line and the key numbers of each job. Pure.
#
# All renderers take counts and final attempts from here, so that two of them cannot disagree.


class Outcome(StrEnum):
    """Outcome of a job as reports show it, the worst first: the verdict of its final attempt, known issues apart."""

    FAILED = "failed"
    INFRA = "infra"
    OUTDATED = "outdated"
    """In coverage alone: the case has changed since, or a newer run did not execute the job."""
    NOT_RUN = "not_run"
    """Without an attempt: the run still executes, was stopped, or had no device for it."""
    SKIPPED = "skipped"
    """Not executed, with the reason: the run had no time for it, or the device lacks a feature."""
    KNOWN = "known"
    """Failed as a known issue predicts: shown, without turning the run red."""
    PASSED = "passed"


GLYPHS = dict(zip(Outcome, "✗△◷·○◇✓", strict=True))
WORDS = {one: {"known": "known issue", "not_run": "not run"}.get(one.value, one.value) for one in Outcome}


class Tone(StrEnum):
    """Result of a run in one word."""

    PASSED = "passed"
    FAILED = "failed"
    INFRA = "infra"
    """No failure of the code, but some jobs could not be judged."""
    SKIPPED = "skipped"
    """No executed job needs attention, but some jobs were skipped for lack of time."""
    UNFINISHED = "unfinished"
    EMPTY = "empty"
    """No job was executed, and none needs attention: nothing has passed."""


OF_STUB = "those of a stub of QNN"
"""Origin of times over a stub."""


class Spread(msgspec.Struct, frozen=True):
    """Samples of one measurement without NaN, in its unit."""

    n: int
    value: float
    """Deciding value of a figure of outputs, the worst sample or the mean; else the median."""
    least: float
    p50: float
    p90: float
    p99: float
    most: float


class KeyNumbers(msgspec.Struct, frozen=True):
    """Numbers by which jobs are compared, from the final attempt; None without a measurement.

    Numerics are the worst over all outputs; NaN counts as the worst of all.
    """

    sqnr_fp32: float | None = None
    """SQNR against the FP32 module in dB; inf where the outputs are equal."""
    sqnr_quantized: float | None = None
    """SQNR against the quantized module on the CPU in dB."""
    cosine: float | None = None
    """Cosine similarity with the FP32 module."""
    max_abs: float | None = None
    """Greatest difference from the FP32 module, in the unit of the output."""
    mismatch: float | None = None
    """Greatest share of unequal elements against either reference; integer and boolean outputs only."""
    latency_ms: float | None = None
    """Median latency."""
    load_ms: float | None = None
    """Median load time."""
    htp_cycles: float | None = None
    pte_bytes: float | None = None
    partitions: float | None = None
    fallback_ops: float | None = None


class JobSummary(msgspec.Struct, frozen=True):
    """Job, judged over all its attempts."""

    index: int
    """Place in the run, from 0, which identifies the job in a page."""
    job: JobView
    outcome: Outcome
    attempt: Attempt | None
    """Final attempt, from which `outcome` and `numbers` are taken."""
    numbers: KeyNumbers
    kind: str
    """Kind of the device of the final attempt: `virtual`, `hardware`, or "" without a device."""
    kinds: tuple[str, ...]
    """Kind of the device of every attempt, in their order."""
    options: str
    """Backend options in the name of the job, "" when it has none."""
    rerun: str
    """Command that runs this job alone, quoted for a shell."""
    skipped: str = ""
    """Reason for skipping the job for lack of time, with its last result and age; "" for other jobs."""
    stub: str = ""
    """Product name of the stub in place of QNN's libraries; "" for Qualcomm's, and on the CPU."""

    @property
    def reason(self) -> str:
        """Return why the job did not pass; "" when it did."""
        if self.attempt is None:
            return self.skipped or "no attempt was made"
        return self.attempt.reason

    @property
    def device(self) -> str:
        """Return the serial of the device of the final attempt, or ""."""
        return self.attempt.device if self.attempt else ""

    @property
    def seconds(self) -> float:
        """Return the wall time of all attempts on devices, in seconds."""
        return math.fsum(one.seconds for one in self.job.attempts if math.isfinite(one.seconds))

    @property
    def virtual(self) -> bool:
        """Return True when the numbers come from a virtual device."""
        return self.kind == "virtual"

    @property
    def on_cpu(self) -> bool:
        """Return True for a baseline by the processor alone."""
        return runs_on_cpu(self.job.backend)

    @property
    def host_time(self) -> str:
        """Return the origin of times that are not times of a device; "" for times of a device."""
        return self.host_time_on(self.kind)

    def host_time_on(self, kind: str) -> str:
        """Return the origin of times for an attempt on a device of this kind."""
        if self.stub and kind:
            return OF_STUB
        return _host_time(on_cpu=self.on_cpu) if kind == "virtual" else ""

    @property
    def retried(self) -> bool:
        """Return True after more than one attempt; skipped attempts, as on a virtual device, do not count."""
        return any(one.verdict is not Verdict.SKIPPED for one in self.job.attempts[:-1])


class RunSummary(msgspec.Struct, frozen=True):
    """Run, counted once for all renderers."""

    view: RunView
    jobs: tuple[JobSummary, ...]
    counts: dict[Outcome, int]
    """Number of jobs for every outcome; 0 for an outcome that did not occur."""

    @property
    def finished(self) -> bool:
        """Return True for a run that has ended."""
        return self.view.finished_ms is not None

    @property
    def attention(self) -> int:
        """Return the number of jobs that need attention."""
        judged = self.counts[Outcome.FAILED] + self.counts[Outcome.INFRA] + len(self.out_of_time)
        return judged + (self.counts[Outcome.NOT_RUN] if self.finished else 0)

    @property
    def tone(self) -> Tone:
        """Return the result in one word."""
        attention = self.attention
        if self.counts[Outcome.FAILED]:
            return Tone.FAILED
        if not self.finished:
            return Tone.UNFINISHED
        if not (attention or self.counts[Outcome.PASSED] or self.counts[Outcome.KNOWN]):
            return Tone.EMPTY
        if attention == len(self.out_of_time):
            return Tone.SKIPPED if attention else Tone.PASSED
        return Tone.INFRA

    @property
    def verdict_line(self) -> str:
        """Return the result in one line: jobs by outcome, and how many need attention."""
        if not self.jobs:
            return "no job was selected" if self.finished else "unfinished: no job yet"
        counts, attention, out_of_time = self.counts, self.attention, len(self.out_of_time)
        parts = [
            f"{counts[Outcome.PASSED]} passed",
            f"{counts[Outcome.FAILED]} failed",
            fmt.plural(counts[Outcome.KNOWN], "known issue"),
            f"{counts[Outcome.INFRA]} infra",
        ]
        if skipped := counts[Outcome.SKIPPED]:
            loud = "SKIPPED" if out_of_time == skipped else f"skipped, {out_of_time} FOR LACK OF TIME"
            parts.append(f"{skipped} {loud if out_of_time else 'skipped'}")
        if not_run := counts[Outcome.NOT_RUN]:
            parts.append(f"{not_run} not run{'' if self.finished else ' yet'}")
        jobs = fmt.plural(len(self.jobs), "job")
        tail = f"{attention} of {jobs} need{'s' if attention == 1 else ''} attention"
        tail = tail if attention else f"none of {jobs} needs attention"
        return f"{'' if self.finished else 'unfinished: '}{', '.join(parts)} - {tail}"

    def having(self, *outcomes: Outcome) -> tuple[JobSummary, ...]:
        """Return the jobs with these outcomes, in the order of the run."""
        return tuple(job for job in self.jobs if job.outcome in outcomes)

    @property
    def out_of_time(self) -> tuple[JobSummary, ...]:
        """Return the jobs skipped for lack of time, which need attention; other skipped jobs do not."""
        return tuple(job for job in self.jobs if job.skipped)

    @property
    def recovered(self) -> tuple[JobSummary, ...]:
        """Return the jobs that passed or were skipped in the end, but not at the first attempt."""
        return tuple(job for job in self.having(Outcome.PASSED, Outcome.SKIPPED) if job.retried)

    @property
    def virtual_devices(self) -> tuple[DeviceView, ...]:
        """Return the devices that are not hardware."""
        return tuple(device for device in self.view.devices if device.kind == "virtual")

    @property
    def on_cpu(self) -> bool:
        """Return True when all jobs are baselines by the processor alone."""
        return bool(self.jobs) and all(job.on_cpu for job in self.jobs)

    @property
    def host_time(self) -> str:
        """Return the origin of the times of virtual devices, or of a stub; "" for a run with times of devices alone."""
        if self.stub:
            return OF_STUB
        return _host_time(on_cpu=self.on_cpu) if self.virtual_devices else ""

    @property
    def stub(self) -> str:
        """Return the product name of the stub in place of QNN's libraries; "" for Qualcomm's."""
        return next((job.stub for job in self.jobs if job.stub), "")

    @property
    def mixed(self) -> bool:
        """Return True when both virtual devices and hardware took part."""
        return 0 < len(self.virtual_devices) < len(self.view.devices)

    @property
    def seconds(self) -> float | None:
        """Return the wall time of the run in seconds; None while it is unfinished."""
        return None if self.view.finished_ms is None else (self.view.finished_ms - self.view.started_ms) / 1000

    def notes(self) -> dict[str, list[JobSummary]]:
        """Return the notes of the final attempts, each with its jobs."""
        return grouped((note, job) for job in self.jobs if job.attempt for note in dict.fromkeys(job.attempt.notes))


def summarize(view: RunView) -> RunSummary:
    """Judge and count `view`."""
    kinds = {device.serial: device.kind for device in view.devices}
    stub = stub_of(view.fingerprint)
    all_virtual = bool(kinds) and set(kinds.values()) == {"virtual"}
    jobs = []
    for index, job in enumerate(view.jobs):
        attempt = job.decisive
        kind = kinds.get(attempt.device, "") if attempt else ""
        jobs.append(
            JobSummary(
                index=index,
                job=job,
                outcome=_outcome_of_job(job),
                attempt=attempt,
                numbers=key_numbers(job, attempt),
                kind=kind,
                kinds=tuple(kinds.get(one.device, "") for one in job.attempts),
                options="-".join(options_of(job)),
                rerun=rerun_command(
                    job,
                    virtual=kind == "virtual" or (not kind and all_virtual),
                    run_command=view.command,
                    toolchain=view.toolchain.name if view.toolchain else "",
                ),
                skipped=skip_words(job.skipped, view.started_ms) if attempt is None and job.skipped is not None else "",
                stub="" if runs_on_cpu(job.backend) else stub,
            )
        )
    return RunSummary(view, tuple(jobs), count_outcomes(view))


def count_outcomes(view: RunView) -> dict[Outcome, int]:
    """Return the number of jobs for every outcome."""
    counted = Counter(map(_outcome_of_job, view.jobs))
    return {outcome: counted[outcome] for outcome in Outcome}


def _outcome_of_job(job: JobView) -> Outcome:
    attempt = job.decisive
    return Outcome.SKIPPED if attempt is None and job.skipped is not None else outcome_of(attempt)


def skip_words(skipped: SkipReason, now_ms: int) -> str:
    """Return age and reason of a skipped job's last result: `last run 3 days before, passed; ...`.

    `now_ms` is the start of the run that skipped the job, so that the text does not depend on the time of reading.
    """
    if not skipped.last_ms:
        return f"never run before; {skipped.reason}"
    age = fmt.days((now_ms - skipped.last_ms) / 1000)
    return f"last run {age} before, {skipped.last_outcome or 'unknown'}; {skipped.reason}"


def outcome_of(attempt: Attempt | None) -> Outcome:
    """Return the outcome of a job with the final attempt `attempt`."""
    if attempt is None:
        return Outcome.NOT_RUN
    if attempt.verdict is Verdict.FAILED and attempt.known_issue:
        return Outcome.KNOWN
    return Outcome(attempt.verdict.value)


def key_numbers(job: JobView, attempt: Attempt | None) -> KeyNumbers:
    """Return the key numbers of `job`, measured by `attempt`."""
    fallback = float(sum(job.fallback_ops.values())) if job.fallback_ops else None
    if attempt is None:
        return KeyNumbers(fallback_ops=fallback)
    measured = {one.metric: one for one in attempt.measurements}

    def value(metric: str) -> float | None:
        spread = spread_of(measured[metric]) if metric in measured else None
        return None if spread is None else spread.value

    def in_ms(metric: str) -> float | None:
        found = value(metric)
        return None if found is None else found / 1e6

    def worst(reference: str, field: str, pick: Callable[..., float | None]) -> float | None:
        values = (getattr(one, field) for one in attempt.comparisons if reference in {"", one.reference})
        known = [value for value in values if value is not None]
        return math.nan if any(map(math.isnan, known)) else pick(known, default=None)

    return KeyNumbers(
        sqnr_fp32=worst("fp32", "sqnr_db", min),
        sqnr_quantized=worst("quantized", "sqnr_db", min),
        cosine=worst("fp32", "cosine", min),
        max_abs=worst("fp32", "max_abs", max),
        mismatch=worst("", "mismatch", max),
        latency_ms=in_ms("latency"),
        load_ms=next((found for metric in LOAD_TIMES if (found := in_ms(metric)) is not None), None),
        htp_cycles=value("htp_cycles"),
        pte_bytes=value("pte_size"),
        partitions=value("partitions"),
        fallback_ops=fallback if (found := value("fallback_ops")) is None else found,
    )


def spread_of(measurement: Measurement) -> Spread | None:
    """Return the spread of the samples without NaN; None without a sample."""
    samples = sorted(one for one in measurement.samples if not math.isnan(one))
    if not samples:
        return None
    median = statistics.median(samples)
    value = measurement.value if figure_of(measurement.metric) else median
    p90, p99 = (samples[math.ceil(share * len(samples)) - 1] for share in (0.9, 0.99))
    return Spread(len(samples), median if value is None else value, samples[0], median, p90, p99, samples[-1])


def beyond_comparisons(attempt: Attempt) -> list[Measurement]:
    """Return the measurements of `attempt` that its comparisons do not contain.

    SQNR and cosine of each output are in both, and returned if they have several samples.
    """

    def is_compared(one: Measurement) -> bool:
        figure = figure_of(one.metric)
        return bool(attempt.comparisons) and figure is not None and figure.has_column

    return [one for one in attempt.measurements if len(one.samples) > 1 or not is_compared(one)]


def broken_limits(comparison: Comparison) -> frozenset[str]:
    """Return the figures of `comparison` that its violations name, by the names of its fields."""
    return frozenset(one.name for one in COMPARED for text in comparison.violations if text.startswith(f"{one.word} "))


def _host_time(*, on_cpu: bool) -> str:
    return "time of the host's processor" if on_cpu else "host time of a simulator"
