"""`farm debug`: compile for debugging, run on simulator and device, compare, record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from farm.base.config.settings import Config
from farm.base.errors import IllegalTargetError, UnknownNameError, UsageError
from farm.base.files import end_of_log
from farm.base.interrupts import InterruptHandler
from farm.base.text import bounded_log, reason_line
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.compile.debug.protocol import (
    BUNDLE,
    ETRECORD,
    CompareRequest,
    CompileRequest,
    DebugProcess,
    DebugReply,
    Written,
)
from farm.builds.program.layers import Layer, LayerStep
from farm.builds.toolchains.toolchain import Toolchain
from farm.devices.execution.raw import DEBUG_FILE, ETDUMP_FILE, RunnerOptions
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.pool.fleet import AcquiredDevice, Choice, DeviceAcquirer
from farm.dispatch.request.choose import named_job
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.records import run_record
from farm.policy.situation import Priority
from farm.replay.one_off import build_record, finish_run
from farm.results.attempt import Attempt, Cause, Ending, Stage, Verdict, failed, infra
from farm.results.judge import build_failure, with_known_issue, write_problem
from farm.results.layers import Diagnosis, Divergence, diagnose, layer_comparisons
from farm.results.outcome import outcome
from farm.store.store import Store, open_store
from farm.suites.suite import FORWARD, Case, Job

logger = logging.getLogger(__name__)


# A step that begins without time ends with a reason of its own.
_LEAST_SECONDS = 1.0
_SIMULATOR, _DEVICE = "simulator", "device"
_MOST_NAMED = 4
_LOG_BYTES = 64 << 10
# Features without an effect on the layers of one method.
_WITHOUT = ("shared_buffer", "use_weight_sharing")


class DebugRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    job: Job
    virtual: bool
    """No device: the simulator is all that runs."""
    sample: int = 0
    timeout_s: float = 600.0
    """Longest that the job may take on one device."""
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
    """SHA-256 of kept files by kind: for ExecuTorch's own tools, and the figures as CSV."""


def debug(config: Config, request: DebugRequest) -> DebugOutcome:
    """Debug a job and return the outcome; all started processes are ended.

    Raises UsageError for a job whose layers cannot be distinguished, NoDeviceError for a missing device, InfraError if
    no step could begin.
    """
    if not 0 <= request.sample < request.job.case.samples:
        raise UsageError(f"there is no sample {request.sample}: the case has {request.job.case.samples}, from 0")
    with InterruptHandler(), open_store(config.store_url) as store:
        return _Debug(config, request, store).execute()


class _Debug:
    """The part that leaves traces: store, folder, processes."""

    def __init__(self, config: Config, request: DebugRequest, store: Store) -> None:
        self._config, self._request, self._store = config, request, store
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._job = request.job
        self._started_ms = time.time_ns() // 1_000_000
        self._layers: tuple[Layer, ...] = ()
        self._files: dict[str, str] = {}
        self._acquired: dict[str, AcquiredDevice] = {}

    def execute(self) -> DebugOutcome:
        from farm.builds.toolchains.selection import prepare

        with self._step("toolchain"):
            tools = prepare(self._config, virtual=self._request.virtual)
        with DeviceAcquirer(
            self._config, self._store, self._job.target, name="debug", purpose=self._request.command,
            otherwise="--virtual, without the device's column", until_s=self._request.wait_until_s,
            priority=self._request.priority,
        ) as acquirer:  # fmt: skip
            if not self._request.virtual:
                self._acquired[_DEVICE] = acquirer.acquire(Choice())
            run_id = self._begin(tools)
            folder = self._config.run_folder(run_id)
            folder.mkdir(parents=True)
            attempt, exit_code, report = finish_run(
                self._config, self._store, run_id, lambda: self._record(run_id, tools, folder, acquirer)
            )
            self._took("total", time.perf_counter() - self._began)
            return DebugOutcome(
                job_id=self._job.id,
                run_id=run_id,
                exit_code=exit_code,
                attempt=attempt,
                layers=self._layers,
                diagnosis=diagnose(self._layers),
                devices={part: acquired.device.serial for part, acquired in self._acquired.items()},
                seconds=self._seconds,
                report=report,
                files=self._files,
            )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._took(name, time.perf_counter() - started)

    def _took(self, name: str, seconds: float) -> None:
        """Record the wall time of a step, and show it."""
        self._seconds[name] = round(seconds, 3)
        logger.info("%7.2f s  %s", seconds, name)

    def _within(self, seconds: float) -> float:
        """Return a time limit in seconds that ends with the time for all of it."""
        return min(seconds, max(_LEAST_SECONDS, self._request.until_s - time.monotonic()))

    def _begin(self, tools: Toolchain) -> str:
        # A program that keeps all intermediate outputs measures no ordinary job: it belongs to no common series.
        asked = "virtual" if self._request.virtual else "hardware"
        of_method = "" if self._job.case.method == FORWARD else f" of {self._job.case.method}"
        facts = tools.fingerprint(asked) | {"debug": f"intermediate outputs{of_method}"}
        run_id = self._store.begin_run(
            run_record(self._config, self._store, tools, command=self._request.command, facts=facts)
        )
        self._store.plan_jobs(run_id, [self._job])
        return run_id

    def _record(self, run_id: str, tools: Toolchain, folder: Path, acquirer: DeviceAcquirer) -> Attempt:
        """Compile, run, compare and record. Raises UsageError for a program without distinguishable layers."""
        log = folder / "debugger.log"
        scratch = acquirer.folder / "program"
        scratch.mkdir()
        process = DebugProcess(acquirer.supervisor, tools.compiler, log, acquirer.folder / "compiler")
        request = self._request
        process.send(CompileRequest(self._job, tools.versions, request.sample, str(scratch)))
        # A program for the phone's processor runs on no simulator of this machine.
        if not (find_backend(self._job.target.backend).host_cpus and self._acquired):
            with self._step("virtual device"):
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
        self._store.record_builds(run_id, [build_record(self._job, bundle, reply.seconds.get("total", 0.0))])
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
                device, runtime, fence = acquired
                run = runs.enter_context(DeviceRun(device, runtime, run_id, fence=fence, artifacts=artifacts))
                flags = run.flags(self._job.target, None)
                timeout_s = self._within(self._request.timeout_s)
                options = RunnerOptions(iterations=1, warm_up=0, timeout_s=timeout_s, flags=flags, debug=True)
                with self._step(part):
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

        files: dict[str, Path | bytes] = {"etrecord": scratch / ETRECORD}
        for part, one in written.items():
            files |= {f"{part}-etdump": Path(one.etdump), f"{part}-outputs": Path(one.outputs)}
        if self._layers:
            files[CSV_KIND] = layers_csv(self._layers, diagnose(self._layers)).encode()
        return files

    def _compare(self, process: DebugProcess, written: Mapping[str, Written]) -> Ending:
        first, *others = written.values()
        process.send(CompareRequest(first, others[0] if others else None))
        reply = process.receive(self._within(self._config.build_timeout_s))
        self._add_steps("", reply)
        if not reply.ok:
            # The comparison failed in tools that are not under test.
            return infra(Stage.NUMERICS, f"comparing failed: {reply.reason}")
        self._layers = reply.layers
        ending = verdict_of(self._layers, with_device=len(written) > 1)
        return msgspec.structs.replace(ending, notes=(*reply.notes, *ending.notes))

    def _add_steps(self, prefix: str, reply: DebugReply) -> None:
        for name, seconds in reply.seconds.items():
            if name != "total":
                self._took(f"{prefix}: {name}" if prefix else name, seconds)

    def _attempt(self, ending: Ending, bundle: Bundle, log: str, device: str) -> Attempt:
        alone = "" if self._job.case.method == FORWARD else f", the method {self._job.case.method} alone"
        compiled = f"farm debug: compiled to keep every tensor{alone}"
        return Attempt(
            job_id=self._job.id,
            verdict=ending.verdict,
            stage=ending.stage,
            reason=reason_line(ending.reason),
            cause=ending.cause,
            device=device,
            started_ms=self._started_ms,
            seconds=sum(self._seconds.get(part, 0.0) for part in self._acquired),
            bundle_key=bundle.manifest.key,
            log=bounded_log(log),
            notes=tuple(reason_line(note) for note in (compiled, *ending.notes)),
            layers=layer_comparisons(self._layers, diagnose(self._layers)),
        )

    def _not_compiled(self, reply: DebugReply, log: Path) -> Attempt:
        text = end_of_log(log, _LOG_BYTES)
        if not reply.refused:
            return build_failure(self._job, reply.reason, text, infra=reply.infra, started_ms=self._started_ms)
        started_ms, log_text = self._started_ms, bounded_log(text)
        return Attempt(self._job.id, Verdict.SKIPPED, Stage.BUILD, reply.reason, started_ms=started_ms, log=log_text)


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


def job_to_debug(config: Config, text: str, *, method: str | None = None, **target: Any) -> Job:
    """Return the job that `text` and `target` name as in `named_job`, with one method: `method`, or the executed one.

    Raises UnknownNameError with the nearest name, IllegalTargetError, UsageError for a text with no job or several.
    """
    return with_layers(named_job(config, text, "farm debug", **target), method)


def with_layers(job: Job, method: str | None = None) -> Job:
    """Return `job` with one method with distinguishable layers. Raises as `job_to_debug`."""
    name, backend = f"{job.case.suite}/{job.case.name}", job.target.backend
    if not find_backend(backend).has_layers:
        able = " and ".join(one.name for one in BACKENDS.values() if one.has_layers)
        raise IllegalTargetError(
            f"farm debug reads what QNN writes of every layer and is for {able}, not for {backend}: "
            f"debug {name} as [{job.target.soc}-{DEFAULT_BACKEND}-PRECISION]"
        )
    if job.target.direct:
        raise IllegalTargetError(f"direct mode writes no layers (ExecuTorch 1.5): debug {name} without {DIRECT_MODE}")
    if job.case.pte:
        raise UsageError(f"{name} is a compiled .pte: its layers cannot be separated")
    if any(spec.dynamic for spec in job.case.inputs):
        raise UsageError(f"{name} has dynamic sizes: layers are compared at fixed sizes only")
    if job.case.generate is not None:
        raise UsageError(f"{name} generates text: farm debug compares the layers of one inference, not of a sequence")
    if features := [feature for feature in job.case.features.named if feature not in _WITHOUT]:
        raise UsageError(
            f"farm debug compiles without features, and {name} has {', '.join(features)}: debug another case"
        )
    return msgspec.structs.replace(job, case=_of_method(job.case, name, method or job.case.method))


def _of_method(case: Case, name: str, method: str) -> Case:
    """Return `case` with this method alone. Raises UnknownNameError for a method that its program lacks.

    If the case names no methods, only the module knows them.
    """
    if case.methods and method not in case.methods:
        raise UnknownNameError("method", method, case.methods, f"of {name}")
    named = case.methods.get(method)
    inputs = named.inputs if named is not None and named.inputs else case.inputs
    features = msgspec.structs.replace(case.features, **dict.fromkeys(_WITHOUT, False))
    return msgspec.structs.replace(case, method=method, methods={}, inputs=inputs, features=features)
