"""`farm perf compare` from names to a page: sides, jobs, bundles, equal programs, pairs of differing ones, findings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import runs_on_cpu
from farm.base.config.settings import Config
from farm.base.errors import ExitCode, NothingSelectedError, UsageError
from farm.base.files import make_folders, own_folder, write_atomically
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.key import QNN_PRODUCT, stub_of
from farm.builds.runtime.runtime import require_backend, virtual_runtime
from farm.builds.toolchains.toolchain import Toolchain
from farm.devices.device import common_kind
from farm.dispatch.request.choose import check_ready
from farm.numbers.compare.measuring import JobOutcome, JobToRun, MeasuringPool, paired
from farm.numbers.compare.sides import (
    SIDES,
    BuildingSide,
    BuiltJob,
    ComparisonRequest,
    build_sides,
    config_of,
    jobs_of_side,
    own_options,
)
from farm.numbers.regressions.interleaved_ab import Side
from farm.report.model.compare import (
    ComparedJob,
    CompareGroup,
    CompareReport,
    CompareSide,
    CompiledFacts,
    PairedMetric,
    SideResult,
    compiled_facts,
    turns_text,
)
from farm.results.attempt import Attempt
from farm.results.judge import build_failure, build_problem
from farm.store.rows import new_run_id
from farm.store.store import Store
from farm.suites.options import runtime_flags
from farm.suites.suite import Job, Target

logger = logging.getLogger(__name__)

WORSE = 3
"""Exit code: B is worse."""
REPORT_FILE, PAGE_FILE = "compare.json", "compare.html"
# Seconds between two writes of the findings, so that a kill loses few of them.
_KEEP_EVERY_S = 20.0


class CompareOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    report: CompareReport
    folder: Path
    """Folder of REPORT_FILE and PAGE_FILE."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        report = self.report
        if report.interrupted:
            return INTERRUPTED
        if report.is_worse:
            return ExitCode.REGRESSION
        return ExitCode.INFRA if report.having(CompareGroup.NOT_COMPARED) else 0


def compare_sides(config: Config, store: Store, request: ComparisonRequest) -> CompareOutcome:
    """Compile both sides, run differing programs in turns, and return the outcome, which is kept in the state folder.

    `store` gives leases only and gets no records. Ctrl-C reports the findings so far. Raises UsageError,
    NothingSelectedError, MissingToolError before the first build, NoDeviceError if no job could be compared without a
    device.
    """
    from farm.dispatch.request.pruning import COMPARES

    started_ms = time.time_ns() // 1_000_000
    stop = threading.Event()
    with InterruptHandler() as interrupts, ExitStack() as stack:
        sides = _sides(config, request)
        known = _KnownJobs(request, sides, new_run_id(started_ms), started_ms)
        folder = config.state_dir / COMPARES / known.id
        make_folders(folder)
        stack.enter_context(interrupts.finishing(stop.set, "finishing what runs; Ctrl-C again stops at once"))
        with Supervisor() as supervisor, own_folder(config.cache_dir / "compares", known.id) as logs:
            known.built = build_sides(sides, supervisor, logs, stop)
        differing = known.to_run()
        if request.execute and differing and not stop.is_set():
            configs = (sides[0].config, sides[1].config)
            pool = known.pool = MeasuringPool(configs, store, request, stop)
            logger.info(known.what_differs(differing))
            kept_s = time.monotonic()

            def look() -> None:
                nonlocal kept_s
                if time.monotonic() > kept_s + _KEEP_EVERY_S:
                    kept_s = time.monotonic()
                    keep(known.report(interrupted=True), folder)
                    logger.info("ran %s of %s", len(pool.outcomes), len(differing))

            pool.run(differing, look)
        report = known.report(interrupted=stop.is_set())
        keep(report, folder)
    return CompareOutcome(report, folder)


def keep(report: CompareReport, folder: Path) -> None:
    """Write the comparison and its page into its folder."""
    from farm.report.formats.review import compare_json
    from farm.report.html.page import render_compare

    write_atomically(folder / REPORT_FILE, compare_json(report))
    write_atomically(folder / PAGE_FILE, render_compare(report))


def _sides(config: Config, request: ComparisonRequest) -> tuple[BuildingSide, BuildingSide]:
    """Return both sides with their toolchains and jobs. Raises UsageError, NothingSelectedError, MissingToolError."""
    from farm.builds.toolchains.selection import prepare

    options = [own_options(request, side) for side in request.sides]
    jobs = [jobs_of_side(config, request, request.sides[0])]
    jobs.append(jobs_of_side(config, request, request.sides[1]) if any(options) else jobs[0])
    both = [name for name in jobs[0] if name in jobs[1]]
    if not both:
        raise NothingSelectedError("no job is selected on both sides")
    found = []
    for number, side in enumerate(request.sides):
        own = config_of(config, request, side)
        if request.execute:
            for soc in dict.fromkeys(request.socs):
                require_backend(find_soc(soc), request.backend, own.sdk_root)
        chosen = {name: jobs[number][name] for name in both}
        check_ready(tuple(chosen.values()))
        tools = prepare(own, virtual=request.virtual > 0)
        found.append(BuildingSide(label=SIDES[number], config=own, tools=tools, jobs=chosen))
    if request.execute and not runs_on_cpu(request.backend):
        require_no_lone_stub([side.tools for side in found])
    return found[0], found[1]


def require_no_lone_stub(tools: Sequence[Toolchain]) -> None:
    """Raise UsageError where one side has a stub of QNN, and the other Qualcomm's libraries."""
    stubs = [stub_of(one.fingerprint("")) for one in tools]
    if any(stubs) and not all(stubs):
        label, product = next((SIDES[number], stub) for number, stub in enumerate(stubs) if stub)
        raise UsageError(
            f"side {label} has a stub of QNN ({product}), and the other side Qualcomm's libraries, whose numbers are "
            "not compared: give both sides one QNN SDK, or compare programs with --programs-only"
        )


class _KnownJobs:
    """Findings on all jobs so far."""

    def __init__(
        self, request: ComparisonRequest, sides: tuple[BuildingSide, BuildingSide], compare_id: str, started_ms: int
    ) -> None:
        self._request, self._sides, self.id, self._started_ms = request, sides, compare_id, started_ms
        self._began_s = time.monotonic()
        self.names = list(sides[0].jobs)
        self.built: Sequence[Mapping[str, BuiltJob]] = ({}, {})
        self.pool: MeasuringPool | None = None
        self._compiled: dict[str, CompiledFacts] = {}
        self._swaps = _runtimes_differ(sides, request)
        # A run has one mode.
        self._modes_differ = len({job.target.mode for side in sides for job in side.jobs.values()}) > 1
        # Direct mode changes the way to the DSP; the DSP computes the same.
        self._modes_alone = self._modes_differ and all(
            set(own_options(request, side)) <= {DIRECT_MODE}
            and (side.toolchain, side.base, side.qnn)
            == (request.sides[0].toolchain, request.sides[0].base, request.sides[0].qnn)
            for side in request.sides
        )
        self._side_facts = (_side(sides, request, 0), _side(sides, request, 1))
        for side in self._side_facts:
            for warning in side.warnings:
                logger.info("%s: %s", side.label, warning)

    def to_run(self) -> list[JobToRun]:
        """Return the jobs that need a device."""
        found = []
        for name in self.names:
            jobs = [side.jobs[name] for side in self._sides]
            built = [one.get(name, BuiltJob()) for one in self.built]
            a, b = (Side(job, one.bundle) if one.bundle else None for job, one in zip(jobs, built, strict=True))
            same = not self._swaps and not run_differently(jobs[0].target, jobs[1].target) and self._job(name).same
            # A job without bundle and failure was not reached.
            if (a or b) and not same and all(one.bundle or one.failure for one in built):
                found.append(JobToRun(name=name, target=jobs[1].target, a=a, b=b))
        return found

    def what_differs(self, differing: Sequence[JobToRun]) -> str:
        """Return why jobs are run in turns: their programs differ, or what runs them."""
        what = "the runners or QNN libraries" if self._swaps or self._modes_differ else "the options of the runner"
        return turns_text(len(differing), len(self.names), sum(self._job(one.name).same for one in differing), what)

    def report(self, *, interrupted: bool) -> CompareReport:
        """Return the report of the findings."""
        pool = self.pool
        outcomes, left_out = (dict(pool.outcomes), dict(pool.left_out)) if pool else ({}, {})
        metrics = paired(outcomes)
        open_ = {one.name for one in self.to_run()} - outcomes.keys() if self._request.execute else set()
        why = "interrupted" if interrupted else "no device was left"
        devices = list(pool.devices.values()) if pool else []
        asked = "virtual" if self._request.virtual else "hardware"
        return CompareReport(
            id=self.id,
            command=self._request.command,
            started_ms=self._started_ms,
            seconds=time.monotonic() - self._began_s,
            kind=common_kind(device.kind for device in devices) or asked if self._request.execute else "",
            devices=tuple(sorted(device.serial for device in devices)),
            sides=self._side_facts,
            jobs=tuple(
                self._job(
                    name, outcomes.get(name), metrics.get(name, ()), left_out.get(name, why) if name in open_ else ""
                )
                for name in self.names
            ),
            notes=tuple(self._notes()),
            interrupted=interrupted,
            pairs=self._request.pairs,
        )

    def _job(
        self, name: str, outcome: JobOutcome | None = None, metrics: tuple[PairedMetric, ...] = (), left_out: str = ""
    ) -> ComparedJob:
        attempts = (outcome.a, outcome.b) if outcome else (None, None)
        a, b = (
            side_result(side.jobs[name], one, attempt, self._facts(one))
            for side, one, attempt in zip(
                self._sides, (built.get(name, BuiltJob()) for built in self.built), attempts, strict=True
            )
        )
        return ComparedJob(
            name=name,
            a=a,
            b=b,
            executed=outcome is not None and not outcome.problem,
            metrics=metrics,
            device=outcome.device if outcome else "",
            outputs=outcome.outputs if outcome else None,
            modes_alone=self._modes_alone,
            left_out=outcome.problem if outcome else left_out,
        )

    def _facts(self, built: BuiltJob) -> CompiledFacts | None:
        if built.bundle is None:
            return None
        # Once: a program is read for its hash where its manifest has none.
        key = built.bundle.manifest.key
        if key not in self._compiled:
            self._compiled[key] = compiled_facts(built.bundle, cached=built.cached)
        return self._compiled[key]

    def _notes(self) -> list[str]:
        bundles = [one for built in self.built for one in built.values() if one.bundle]
        cached = sum(one.cached for one in bundles)
        notes = []
        if cached:
            others = "" if cached == len(bundles) else ", the others now, both sides at the same time"
            notes.append(f"{cached} of {len(bundles)} bundles were compiled before{others}")
        if self._swaps:
            notes.append("A and B run with different runners or QNN libraries: every job is run, in new processes")
            sdks = [[side.facts.get(name) for name in ("qnn", "qnn_content")] for side in self._side_facts]
            if self._request.virtual and sdks[0] != sdks[1]:
                notes.append("their simulators belong to two SDKs with different speeds: cycles are not compared")
        elif self._request.execute and self._modes_differ:
            notes.append("one side is in direct mode: A and B run with different runners, in new processes")
        elif self._request.execute:
            runner = self._side_facts[1].facts.get("native_runner", "")
            notes.append(f"programs of both sides run with the same runner ({runner}) and the same QNN libraries")
        facts = [_without_names(side.facts) for side in self._side_facts]
        if facts[0] == facts[1] and not any(side.options for side in self._side_facts):
            notes.append("A and B are the same by content: only chance can make a difference")
        return notes


def side_result(job: Job, built: BuiltJob, attempt: Attempt | None, facts: CompiledFacts | None) -> SideResult:
    """Return the result of a job on a side; a program that no execution could save has failed without one."""
    ending = attempt or built.failure
    if ending is None and built.bundle is not None and (problem := build_problem(job, built.bundle)):
        ending = build_failure(job, problem)
    if ending is None:
        return SideResult(job_id=job.id, compiled=facts)
    return SideResult(
        job_id=job.id,
        compiled=facts,
        verdict=str(ending.verdict),
        stage=str(ending.stage),
        reason=ending.reason,
        known_issue=ending.known_issue,
        log=ending.log if ending.verdict != "passed" else "",
    )


def run_differently(a: Target, b: Target) -> bool:
    """Return whether two targets run the same program with other options of the runner, or with another runner."""
    return (a.mode, runtime_flags(a)) != (b.mode, runtime_flags(b))


def _side(sides: Sequence[BuildingSide], request: ComparisonRequest, number: int) -> CompareSide:
    side, asked = sides[number], request.sides[number]
    facts = {key: value for key, value in side.tools.fingerprint("").items() if key != "device_kind"}
    source = side.tools.source
    named = {"branch": source.branch, "subject": source.subject, "changed": ", ".join(source.changed)}
    facts |= {key: value for key, value in named.items() if value}
    if runs_on_cpu(request.backend):
        facts.pop(QNN_PRODUCT, None)
    options = own_options(request, asked)
    return CompareSide(label=side.label, name=asked.name, facts=facts, options=options, warnings=source.warnings)


def _without_names(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if name not in ("toolchain", "commit", "branch", "subject")}


def _runtimes_differ(sides: Sequence[BuildingSide], request: ComparisonRequest) -> bool:
    """Tell whether programs of A and B would run with other files: then even the same ones are another question."""
    if not request.execute:
        return False
    a, b = (side.config for side in sides)
    if request.virtual:
        socs = [find_soc(name) for name in dict.fromkeys(request.socs)]
        digests = ([virtual_runtime(side, soc, request.backend).digest for soc in socs] for side in (a, b))
        return len(set(map(tuple, digests))) > 1
    prefixes = ("sdk_root", "android_", "executorch_", "hexagon_")
    return any(getattr(a, name) != getattr(b, name) for name in a.__struct_fields__ if name.startswith(prefixes))
