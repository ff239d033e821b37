"""`farm debug`: compile for debugging, run on simulator and device, compare, record."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import find_backend
from farm.base.errors import UsageError
from farm.base.interrupts import InterruptHandler
from farm.base.text import bounded_log, reason_line
from farm.builds.compile.debug.protocol import (
    BUNDLE,
    ETRECORD,
    CompareRequest,
    CompileRequest,
    DebugReply,
    UserMetric,
    Written,
)
from farm.builds.program.layers import Layer, LayerStep
from farm.devices.execution.raw import DEBUG_FILE, ETDUMP_FILE, RunnerOptions
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.pool.acquire import AcquiredDevice, DeviceAcquirer
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Profile
from farm.policy.situation import Priority
from farm.replay.one_off import finish_run
from farm.results.attempt import Attempt, Cause, Ending, Stage, Verdict, failed, infra
from farm.results.judge import build_failure, with_known_issue, write_problem
from farm.results.layers import Diagnosis, Divergence, diagnose, layer_comparisons
from farm.results.outcome import outcome
from farm.suites.suite import FORWARD, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.compile.debug.process import DebugProcess
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.store import Store

logger = logging.getLogger(__name__)


# A step that begins without time ends with a reason of its own.
_LEAST_SECONDS = 1.0
_SIMULATOR, _DEVICE = "simulator", "device"
_MOST_NAMED = 4


class DebugRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    job: Job
    virtual: bool
    """No device: the simulator is all that runs."""
    sample: int = 0
    timeout_s: float = 600.0
    """Longest that the job may take on one device."""
    metrics: tuple[UserMetric, ...] = ()
    """Comparators of the user that replace farm's own limits for layers."""
    command: str = ""
    priority: Priority = Priority.PERSON
    """For a device that others want as well."""
    until_s: float = math.inf
    """End of the time for all of it, on the clock of `time.monotonic`."""
    wait_until_s: float = math.inf
    """End of the wait for a device with another user."""


class DebugOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    job_id: str
    run_id: str
    exit_code: int
    attempt: Attempt | None
    """Recorded attempt; None after an interruption."""
    layers: tuple[Layer, ...]
    diagnosis: Diagnosis
    devices: dict[str, str]
    """Serial by part: `simulator`, `device`."""
    seconds: dict[str, float]
    """Wall time by step."""
    report: Path
    """The HTML file."""
    files: dict[str, str] = {}
    """SHA-256 of kept files by kind: for ExecuTorch's own tools, and the figures as CSV and as a graph."""


def debug(config: Config, request: DebugRequest) -> DebugOutcome:
    """Debug a job and return the outcome; all started processes are ended.

    Raises UsageError for a job whose layers cannot be distinguished, NoDeviceError for a missing device, InfraError if
    no step could begin.
    """
    from farm.store.store import open_store

    if not 0 <= request.sample < request.job.case.samples:
        raise UsageError(f"there is no sample {request.sample}: the case has {request.job.case.samples}, from 0")
    with InterruptHandler(), open_store(config.store_url) as store:
        return _Debug(config, request, store, _Clock()).execute()


class _Clock:
    """Wall time by step, shown as it passes."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(seconds, 3)
        logger.info("%7.2f s  %s", seconds, name)

    def finish(self) -> dict[str, float]:
        self.add("total", time.perf_counter() - self._started)
        return self.seconds


class _Debug:
    """The part that leaves traces: store, folder, processes."""

    def __init__(self, config: Config, request: DebugRequest, store: Store, clock: _Clock) -> None:
        self._config, self._request, self._store, self._clock = config, request, store, clock
        self._job = request.job
        self._started_ms = time.time_ns() // 1_000_000
        self._layers: tuple[Layer, ...] = ()
        self._files: dict[str, str] = {}
        self._acquired: dict[str, AcquiredDevice] = {}

    def execute(self) -> DebugOutcome:
        from farm.builds.compile.debug.process import require_modules
        from farm.builds.toolchains.prepare import prepare

        with self._clock.step("toolchain"):
            tools = prepare(self._config, virtual=self._request.virtual)
        otherwise = "--virtual, without the device's column"
        with DeviceAcquirer(
            self._config, self._store, self._job.target, name="debug", purpose=self._request.command,
            otherwise=otherwise, until_s=self._request.wait_until_s, priority=self._request.priority,
        ) as acquirer:  # fmt: skip
            require_modules(acquirer.supervisor, tools.compiler, self._request.metrics, Path(self._job.case.folder))
            if not self._request.virtual:
                self._acquired[_DEVICE] = acquirer.acquire(Choice())
            run_id = self._begin(tools)
            folder = self._config.run_folder(run_id)
            folder.mkdir(parents=True)
            attempt, exit_code, report = finish_run(
                self._config, self._store, run_id, lambda: self._record(run_id, tools, folder, acquirer)
            )
            return DebugOutcome(
                job_id=self._job.id,
                run_id=run_id,
                exit_code=exit_code,
                attempt=attempt,
                layers=self._layers,
                diagnosis=self._diagnosis(),
                devices={part: acquired.device.serial for part, acquired in self._acquired.items()},
                seconds=self._clock.finish(),
                report=report,
                files=self._files,
            )

    def _within(self, seconds: float) -> float:
        """Return a time limit in seconds that ends with the time for all of it."""
        return min(seconds, max(_LEAST_SECONDS, self._request.until_s - time.monotonic()))

    def _begin(self, tools: Toolchain) -> str:
        from farm.dispatch.request.recording import run_record

        # A program that keeps all intermediate outputs measures no ordinary job: it belongs to no common series.
        asked = "virtual" if self._request.virtual else "hardware"
        method = self._job.case.method
        of_method = "" if method == FORWARD else f" of {method}"
        facts = tools.fingerprint(asked) | {"debug": f"intermediate outputs{of_method}"}
        run_id = self._store.begin_run(
            run_record(self._config, self._store, tools, command=self._request.command, facts=facts)
        )
        self._store.plan_jobs(run_id, [self._job])
        return run_id

    def _record(self, run_id: str, tools: Toolchain, folder: Path, acquirer: DeviceAcquirer) -> Attempt:
        """Compile, run, compare and record. Raises UsageError for a program without distinguishable layers."""
        from farm.builds.bundles.bundle import load_bundle
        from farm.builds.compile.debug.process import DebugProcess

        log = folder / "debugger.log"
        scratch = acquirer.folder / "program"
        scratch.mkdir()
        process = DebugProcess(acquirer.supervisor, tools.compiler, log, acquirer.folder / "compiler")
        request = self._request
        process.send(CompileRequest(self._job, tools.versions, request.sample, str(scratch), request.metrics))
        # A program for the phone's processor runs on no simulator of this machine.
        if not (find_backend(self._job.target.backend).host_cpus and self._acquired):
            with self._clock.step("virtual device"):
                self._acquired = {_SIMULATOR: acquirer.acquire(None), **self._acquired}
        for acquired in self._acquired.values():
            self._store.record_device(run_id, acquired.device)
        reply = process.receive(self._within(self._config.build_timeout_s))
        self._add_steps("compile", reply)
        if not reply.ok:
            attempt = self._not_compiled(reply, log)
            self._store.record_attempt(run_id, attempt)
            if reply.refused:
                raise UsageError(f"{self._job.id}: {attempt.reason}")
            return attempt
        bundle = load_bundle(scratch / BUNDLE)
        self._store.record_build(
            run_id,
            self._job.id,
            seconds=reply.seconds.get("total", 0.0),
            cached=False,
            bundle_key=bundle.manifest.key,
            fallback_ops=bundle.manifest.fallback_ops,
            program=bundle.manifest.program,
        )
        return self._run(process, run_id, bundle, scratch, reply.notes)

    def _run(
        self, process: DebugProcess, run_id: str, bundle: Bundle, scratch: Path, notes: tuple[str, ...]
    ) -> Attempt:
        """Run the program on each device, compare its files, and record the attempt.

        The attempt of the last device is recorded under its fence: the simulator's if it failed before the device.
        """
        log = ""
        artifacts = AttemptArtifacts(self._config.state_dir / "artifacts", Profile.OFF)
        written: dict[str, Written] = {}
        ending = None
        with ExitStack() as runs:
            for part, acquired in self._acquired.items():
                run = runs.enter_context(
                    DeviceRun(
                        acquired.device,
                        acquired.runtime,
                        run_id,
                        takeover=acquired.fence is not None,
                        fence=acquired.fence,
                        artifacts=artifacts,
                    )
                )
                flags = run.flags(self._job.target, None)
                timeout_s = self._within(self._request.timeout_s)
                options = RunnerOptions(iterations=1, warm_up=0, timeout_s=timeout_s, flags=flags, debug=True)
                with self._clock.step(part):
                    raw = run.run(self._job.id, bundle, scratch / part, options)
                notes = (*notes, *raw.notes)
                found = outcome(raw)
                if isinstance(found, Ending):
                    # The simulator's part can be shown all the same.
                    compared = self._compare(process, written) if written else None
                    notes = (*notes, *(compared.notes if compared else ()))
                    ending = msgspec.structs.replace(found, reason=f"{part}: {found.reason}", notes=notes)
                    log = raw.stderr
                    break
                written[part] = Written(str(raw.folder / ETDUMP_FILE), str(raw.folder / DEBUG_FILE))
            if ending is None:
                ending = self._compare(process, written)
                ending = msgspec.structs.replace(ending, notes=(*notes, *ending.notes))
                if ending.verdict is Verdict.PASSED and (lost := write_problem(bundle)):
                    ending = ending.ended_as(failed(Stage.BUILD, lost, Cause.COMPILE))
            kept, problems = artifacts.keep_files(self._kept_files(scratch, written))
            self._files = {one.kind: one.sha256 for one in kept}
            ending = msgspec.structs.replace(ending, notes=(*ending.notes, *problems))
            attempt = run.excuse_damage(self._attempt(ending, bundle, log, run.device.serial), bundle, raw)
            attempt = with_known_issue(self._job, attempt, virtual=raw.simulated)
            attempt, logs = run.keep_crash_logs(attempt, scratch / "crash-logs")
            run.record(self._store, run_id, attempt, (*kept, *logs))
        if attempt.verdict is Verdict.SKIPPED:
            raise UsageError(f"{self._job.id}: {attempt.reason}")
        return attempt

    def _kept_files(self, scratch: Path, written: Mapping[str, Written]) -> dict[str, Path | bytes]:
        """Return the kept files by kind: those for ExecuTorch's Inspector, and the figures."""
        from farm.report.formats.layers_csv import CSV_KIND, layers_csv
        from farm.report.html.layer_graph import GRAPH_KIND, layer_graph

        files: dict[str, Path | bytes] = {"etrecord": scratch / ETRECORD}
        for part, one in written.items():
            files |= {f"{part}-etdump": Path(one.etdump), f"{part}-outputs": Path(one.outputs)}
        if self._layers:
            diagnosis = self._diagnosis()
            files[CSV_KIND] = layers_csv(self._layers, diagnosis).encode()
            files[GRAPH_KIND] = layer_graph(self._layers, diagnosis)
        return files

    def _compare(self, process: DebugProcess, written: Mapping[str, Written]) -> Ending:
        if _SIMULATOR in written:
            process.send(CompareRequest(written[_SIMULATOR], written.get(_DEVICE)))
        else:
            process.send(CompareRequest(written[_DEVICE], None))
        reply = process.receive(self._within(self._config.build_timeout_s))
        self._add_steps("", reply)
        if reply.refused:
            # A comparator of the user's raised.
            return Ending(Verdict.SKIPPED, Stage.NUMERICS, reply.reason)
        if not reply.ok:
            # The comparison failed in tools that are not under test.
            return infra(Stage.NUMERICS, f"comparing failed: {reply.reason}")
        self._layers = reply.layers
        ending = verdict_of(self._layers, with_device=len(written) > 1)
        return msgspec.structs.replace(ending, notes=(*reply.notes, *ending.notes))

    def _add_steps(self, prefix: str, reply: DebugReply) -> None:
        for name, seconds in reply.seconds.items():
            if name != "total":
                self._clock.add(f"{prefix}: {name}" if prefix else name, seconds)

    def _diagnosis(self) -> Diagnosis:
        return diagnose(self._layers)

    def _attempt(self, ending: Ending, bundle: Bundle, log: str, device: str) -> Attempt:
        return Attempt(
            job_id=self._job.id,
            verdict=ending.verdict,
            stage=ending.stage,
            reason=reason_line(ending.reason),
            cause=ending.cause,
            device=device,
            started_ms=self._started_ms,
            seconds=sum(self._clock.seconds.get(part, 0.0) for part in self._acquired),
            bundle_key=bundle.manifest.key,
            log=bounded_log(log),
            notes=tuple(reason_line(note) for note in (self._compiled_note(), *ending.notes)),
            layers=layer_comparisons(self._layers, self._diagnosis()),
        )

    def _compiled_note(self) -> str:
        method = self._job.case.method
        alone = "" if method == FORWARD else f", the method {method} alone"
        return f"farm debug: compiled to keep every tensor{alone}"

    def _not_compiled(self, reply: DebugReply, log: Path) -> Attempt:
        try:
            text = log.read_bytes()[-64 * 1024 :].decode(errors="replace")
        except OSError:
            text = ""
        if not reply.refused:
            return build_failure(self._job, reply.reason, text, infra=reply.infra, started_ms=self._started_ms)
        return Attempt(
            self._job.id,
            Verdict.SKIPPED,
            Stage.BUILD,
            reply.reason,
            started_ms=self._started_ms,
            log=bounded_log(text),
        )


def verdict_of(layers: Sequence[Layer], *, with_device: bool) -> Ending:
    """Return the verdict of compared layers; `with_device` if a device executed the program beside the simulator. Pure.

    A device that wrote no layer proves nothing. Layers that it alone lacks are noted.
    """
    simulated = [layer for layer in layers if LayerStep.COMPILER in layer.gaps]
    lacking = [layer.name for layer in simulated if LayerStep.DEVICE not in layer.gaps] if with_device else []
    if simulated and (first := diagnose(layers).first):
        ending = failed(Stage.NUMERICS, describe(first), Cause.NUMERICS)
    elif len(lacking) < len(simulated):
        ending = Ending(Verdict.PASSED, Stage.DONE)
    else:
        where = " of the device" if simulated else ""
        problem = f"no layer{where} could be compared: the program wrote no intermediate output"
        ending = failed(Stage.NUMERICS, problem, Cause.NONE)
    if not lacking:
        return ending
    shown = ", ".join(lacking[:_MOST_NAMED]) + (", ..." if len(lacking) > _MOST_NAMED else "")
    return msgspec.structs.replace(ending, notes=(f"not compared, as the device did not write them: {shown}",))


def describe(divergence: Divergence) -> str:
    """Return a divergence in one line."""
    return (
        f"first divergence: {divergence.layer} ({divergence.operator}), "
        f"likely cause: {divergence.step}: {divergence.why}"
    )
