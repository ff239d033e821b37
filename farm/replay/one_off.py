"""Execution of a bundle on a device as a run of one job, by farm's runner or the user's `qnn_llama_runner`."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from farm.base.config.settings import Config, HealthConfig
from farm.base.errors import ConfigError, ExitCode, FarmError, UsageError
from farm.base.hashes import sha256_of
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import facts_of
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.program.pte import read_pte
from farm.builds.runtime.parts import AARCH64, MACHINES, X86_64, read_elf
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime, with_runner
from farm.builds.toolchains.toolchain import Toolchain
from farm.devices.device import Device, Event, Health, HealthEvent, HealthMark, next_health
from farm.devices.execution.llama_runner import LOGITS, OWN_FLAGS, TOKENIZER, Dumped
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.devices.execution.runner_process import too_many
from farm.dispatch.device_run.artifacts import AttemptArtifacts, kept_outputs
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate, require_device
from farm.dispatch.device_run.device_worker import with_rerun
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.fleet import AcquiredDevice, Choice, DeviceAcquirer
from farm.dispatch.request.profiling import Execution, Profile
from farm.dispatch.request.records import exit_code_of, leave_intent, run_record, write_report
from farm.policy.retries import Tried, as_recorded, classify, is_open, needs_health_check, tried, unfit
from farm.replay.stored_result import build_bundle
from farm.results.analysis.history import CONTENTS
from farm.results.attempt import Attempt, Verdict
from farm.results.judge import judge
from farm.store.records import ArtifactRecord, BuildRecord, Purpose, RunToolchain
from farm.store.store import Store
from farm.suites.generate import DECODE
from farm.suites.suite import Job, Target

FindBundle = Callable[[Toolchain, Supervisor], Bundle]
Look = Callable[[RawResult, Attempt], Attempt]


# The user's `qnn_llama_runner` in place of farm's own runner: files to push, supported targets, judgement.
#
# Jobs of this runner belong to their own suite, so that their numbers share no series with jobs of farm's runner.


_FLAG = re.compile(r"([a-z][a-z0-9_]{0,63})=([^\0\n]{0,1024})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_JUDGED = "judged"


class LlamaProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    program: Path
    tokenizer: Path
    """Tokenizer, which is always loaded and defines the end of a text."""
    libraries: tuple[Path, ...] = ()
    """Libraries that the program needs besides farm's libraries."""
    flags: tuple[str, ...] = ()
    """`NAME=VALUE` each."""

    @property
    def facts(self) -> dict[str, str]:
        """Facts that the program's numbers depend on, besides the facts of any run. Raises UsageError."""
        named = (self.program, self.tokenizer, *self.libraries)
        try:
            hashes = [sha256_of(path)[:12] for path in named]
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
        files = " ".join(f"{path.name}:{sha256}" for path, sha256 in zip(named, hashes, strict=True))
        return {"program": " ".join((LLAMA_RUNNER, files, *self.flags))}


def job_of(job: Job) -> Job:
    """Return `job` for the program. Raises UsageError for an unsupported target."""
    if job.target.options or job.target.direct:
        raise UsageError(f"{LLAMA_RUNNER} takes no run-time options of a backend, and knows no direct mode")
    return Job(msgspec.structs.replace(job.case, suite=LLAMA_RUNNER), job.target)


def runtime_with(program: LlamaProgram, runtime: Runtime, cache_dir: Path) -> Runtime:
    """Return `runtime` with the program as its runner.

    Raises ConfigError for a file that is made for something else, UsageError.
    """
    if lost := [path for path in (program.program, program.tokenizer, *program.libraries) if not path.is_file()]:
        raise UsageError(f"{lost[0]} is no file")
    for path in (program.program, *program.libraries):
        _require_machine(path, X86_64 if runtime.kind == "simulator" else AARCH64, runtime)
    for path in (program.tokenizer, *program.libraries):
        if not _FILE_NAME.fullmatch(path.name):
            raise UsageError(f"{path}: a file for a device has letters, digits and ._+- in its name")
    files = {path.name: path for path in program.libraries}
    files |= {LLAMA_RUNNER: program.program, f"{TOKENIZER}/{program.tokenizer.name}": program.tokenizer}
    return with_runner(cache_dir, runtime, LLAMA_RUNNER, files, _flags(program))


def _require_machine(path: Path, machine: int, runtime: Runtime) -> None:
    where = "a virtual device, which is this machine," if runtime.kind == "simulator" else "the device"
    try:
        with path.open("rb") as file:
            if runtime.kind == "simulator" and file.read(2) == b"#!":
                return
        found = read_elf(path)
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    if found.machine != machine:
        raise ConfigError(path, "", f"is made for {found.machine_name}, and {where} needs {MACHINES[machine]}")


def _flags(program: LlamaProgram) -> dict[str, str]:
    flags = {}
    for text in program.flags:
        match = _FLAG.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not NAME=VALUE, as decoder_model_version=qwen3")
        if match[1] in OWN_FLAGS:
            raise UsageError(f"{match[1]} is set by farm: leave it out")
        flags[match[1]] = match[2]
    return flags


def require_bundle(bundle: Bundle) -> None:
    """Raise UsageError for a bundle that the program cannot run, or whose logits it cannot write."""
    generation = bundle.manifest.generation
    problem = ""
    if generation is None:
        problem = "and this is no case of text"
    elif generation.likelihoods is not None:
        problem = "and keeps no probabilities of a given text"
    elif generation.decode != 1:
        problem = "and by decoders that take one token a call"
    elif max(generation.prompt_tokens) >= generation.context:
        problem = f"and takes no prompt as long as the context, {generation.context}"
    elif bundle.manifest.outputs and max(generation.scored) >= generation.context:
        problem = f"and scores no sequence as long as the context, {generation.context}: ask for fewer new tokens"
    else:
        logits = read_pte(bundle.model).method(DECODE, "its program").outputs[0]
        if logits.dtype != "uint16":
            problem = f"and writes logits as uint16: this program gives {logits.dtype}"
    if problem:
        raise UsageError(f"{LLAMA_RUNNER} generates text, {problem}")


def judged(run: DeviceRun, job: Job, bundle: Bundle, raw: RawResult) -> tuple[Attempt, Bundle, RawResult]:
    """Return the attempt of an execution, the judged part of the bundle, and the execution with its logits.

    The program writes logits of `kv_forward` alone, so that one output of a decoder with a prompt method is judged.
    """
    view = _decode_alone(bundle)
    dumped = Dumped()
    file = raw.folder / RESULT_FILE
    if file.is_file() and raw.exit_code == 0 and not raw.error:
        # Written here: see `farm.devices.execution.llama_runner`.
        dumped = msgspec.json.decode(file.read_bytes(), type=Dumped)
    looked = raw
    if dumped.observed:
        try:
            looked = _converted(view, raw)
        except (OSError, ValueError) as error:
            looked = msgspec.structs.replace(raw, error=f"its logits cannot be read: {error}", error_stage="pull")
    looked = msgspec.structs.replace(looked, notes=(*looked.notes, *dumped.notes))
    attempt = judge(job, view, looked, observed=dumped.observed)
    return run.excuse_damage(attempt, bundle, raw), view, looked


def _decode_alone(bundle: Bundle) -> Bundle:
    manifest, generation = bundle.manifest, bundle.manifest.generation
    if generation is None:
        return bundle
    alone = msgspec.structs.replace(generation, prefill=0)
    return Bundle(bundle.folder, msgspec.structs.replace(manifest, outputs=manifest.outputs[:1], generation=alone))


def _converted(bundle: Bundle, raw: RawResult) -> RawResult:
    """Return `raw` with its logits in the unit of the references, in a folder of their own. Raises ValueError."""
    folder, generation = raw.folder / _JUDGED, bundle.manifest.generation
    folder.mkdir()
    shutil.copyfile(raw.folder / RESULT_FILE, folder / RESULT_FILE)
    looked = msgspec.structs.replace(raw, folder=folder)
    if generation is None or not bundle.manifest.outputs:
        return looked
    numbers = {method.name: method.outputs[0].number for method in read_pte(bundle.model).methods if method.outputs}
    scale, zero_point = _unit(numbers)
    [spec] = bundle.manifest.outputs
    for sample, rows in enumerate(generation.scored):
        logits = np.zeros(spec.shape, np.float32)
        found = np.fromfile(raw.output(sample, 0), LOGITS).reshape(rows, generation.vocabulary)
        logits[:rows] = (found.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        looked.output(sample, 0).write_bytes(logits.tobytes())
    return looked


def _unit(numbers: Mapping[str, float | None]) -> tuple[float, float]:
    scale, zero_point = numbers.get("get_logits_scale"), numbers.get("get_logits_zero_point")
    if scale is None or zero_point is None or not 0 < scale < float("inf"):
        raise ValueError("the program does not give their scale (get_logits_scale, get_logits_zero_point)")
    return scale, zero_point


# Execution of a bundle on a device, for `farm exec` and `farm jobs rerun`: a run of one job in the store.
#
# Unlike `farm run` there are no builders, and no health check before the job. A failure that may be the device's is
# treated as in a run (`policy/retries.py`, `device_run/device_worker.py`): in a new session, then on another device.


logger = logging.getLogger(__name__)


class OneOffRequest(Execution, frozen=True, kw_only=True):
    """Job of a command, with its device and its executions.

    With `heap` it runs in one process, or in as many as there are iterations that the command names.
    """

    job: Job
    virtual: bool
    """True for a new virtual device in place of an attached one."""
    choice: Choice = Choice()
    command: str = ""
    facts: dict[str, str] = msgspec.field(default_factory=dict)
    """Further facts that numbers depend on."""
    toolchain: RunToolchain | None = None
    """Toolchain of the run whose program runs again; None for the toolchain of this command."""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    program: LlamaProgram | None = None
    """Program that generates in place of farm's runner."""
    failed_before: bool = False
    """Wrong numbers and refusals are no news, which a second device would confirm."""


class OneOffOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    run_id: str
    exit_code: int
    attempt: Attempt | None
    """Recorded attempt; None after an interruption."""
    kind: str
    """Kind of the devices: `virtual` or `hardware`."""
    outputs: dict[str, str]
    """SHA-256 by file name, of the outputs that are kept."""
    report: Path
    """The HTML file."""


def run_one(
    config: Config,
    store: Store,
    request: OneOffRequest,
    find_bundle: FindBundle,
    look: Look = lambda _, attempt: attempt,
) -> OneOffOutcome:
    """Run one bundle, record it, and return how it ended; everything started is ended again.

    `find_bundle` is called before anything is recorded. `look` gets what came back while it is there, and returns what
    is to be recorded. Raises what `find_bundle` raises, NoDeviceError where no device is attached, NeedsDeviceError.
    """
    from farm.builds.toolchains.selection import prepare

    program, target = request.program, request.job.target

    def with_program(acquired: AcquiredDevice) -> AcquiredDevice:
        if program is None:
            return acquired
        return acquired._replace(runtime=runtime_with(program, acquired.runtime, config.cache_dir))

    def another(used: Collection[str]) -> AcquiredDevice | None:
        other = None if request.virtual else acquirer.acquire_other(request.choice, used)
        if other is not None:
            other = with_program(other)
            store.record_device(run_id, other.device, other.runtime.versions)
        return other

    def health_check() -> tuple[Job, Bundle] | None:
        # A program in the place of farm's runner has no health check: the device is asked for a sign of life. A device
        # of the simulator's own has no health that is worth a compilation.
        if program is not None:
            return None
        return _find_health_check(config, target, tools, acquirer.supervisor, may_compile=not request.virtual)

    acquirer = DeviceAcquirer(config, store, target, name="one-off", purpose=request.command, otherwise="--virtual 1")
    with InterruptHandler():
        # A cache that others can write is refused before anything is made in it.
        tools = prepare(config, virtual=request.virtual)
        with acquirer:
            bundle = find_bundle(tools, acquirer.supervisor)
            acquired = acquirer.acquire(None if request.virtual else request.choice)
            if program is not None:
                require_bundle(bundle)
            acquired = with_program(acquired)
            # Before anything is recorded.
            require_device(bundle, acquired.device)
            _require_executions(bundle, acquired, request)
            run_id = _begin(config, store, request, tools, bundle, acquired)
            raw = config.run_folder(run_id) / "raw"
            tries = OneOffTries(
                store, request, bundle, run_id, raw, artifacts=config.state_dir / "artifacts", health=config.health,
                look=look, another=another, health_check=health_check,
            )  # fmt: skip
            try:
                attempt, exit_code, report = finish_run(config, store, run_id, lambda: tries.run(acquired))
            finally:
                shutil.rmtree(raw, ignore_errors=True)
            return OneOffOutcome(run_id, exit_code, attempt, acquired.device.kind, kept_outputs(tries.kept), report)


def _require_executions(bundle: Bundle, acquired: AcquiredDevice, request: OneOffRequest) -> None:
    """Raise UsageError if the user named more executions than the device's runner can make."""
    runtime, manifest = acquired.runtime, bundle.manifest
    if request.reducible or not runtime.one_shot:
        return
    times = request.iterations + request.warm_up
    if problem := too_many(runtime.runner, manifest.samples, len(manifest.outputs), times):
        raise UsageError(problem)


def finish_run(
    config: Config, store: Store, run_id: str, execute: Callable[[], Attempt]
) -> tuple[Attempt | None, int, Path]:
    """Return the attempt of `execute` (None after an interruption), the run's exit code, and its HTML report.

    Raises a FarmError of `execute` again after the run is finished with the error's exit code.
    """
    attempt: Attempt | None = None
    exit_code: int = ExitCode.INFRA
    try:
        attempt = execute()
        exit_code = exit_code_of(store.runs.view(run_id))
    except KeyboardInterrupt:
        attempt, exit_code = None, INTERRUPTED
    except FarmError as error:
        exit_code = error.exit_code
        raise
    finally:
        store.finish_run(run_id, exit_code)
    view, file = store.runs.view(run_id), config.run_folder(run_id) / "report.html"
    return attempt, exit_code, write_report(view, file, store, config)


def _begin(
    config: Config, store: Store, request: OneOffRequest, tools: Toolchain, bundle: Bundle, acquired: AcquiredDevice
) -> str:
    kind, manifest, job = acquired.device.kind, bundle.manifest, request.job
    # The versions of the bundle's toolchain, which may be older than the installed one.
    here = {name: fact for name, fact in tools.fingerprint(kind).items() if name not in CONTENTS}
    facts = here | facts_of(manifest.versions) | request.facts | (request.program.facts if request.program else {})
    if request.seconds is not None:
        facts["seconds"] = str(request.seconds)
    if request.heap:
        facts["heap"] = "measured"
    elif request.profile.flags(kind) != Profile.AUTO.flags(kind):
        facts["profile"] = str(request.profile)
    record = run_record(
        config, store, tools, command=request.command, facts=facts, purpose=request.purpose, name=request.name,
        again=request.toolchain,
    )  # fmt: skip
    run_id = store.begin_run(
        record, lambda run_id: leave_intent(config.run_folder(run_id), None, [job], config.toolchain.name)
    )
    store.plan_jobs(run_id, [job])
    store.record_device(run_id, acquired.device, acquired.runtime.versions)
    store.record_builds(run_id, [build_record(job, bundle)])
    return run_id


def build_record(job: Job, bundle: Bundle, seconds: float | None = None) -> BuildRecord:
    """Return the record of a job's bundle that took `seconds` to build; None for a cached one."""
    key, left, program = bundle.manifest.key, bundle.manifest.fallback_ops, bundle.manifest.program
    return BuildRecord(job.id, seconds or 0.0, seconds is None, key, left, program=program)


def _find_health_check(
    config: Config, target: Target, tools: Toolchain, supervisor: Supervisor, *, may_compile: bool
) -> tuple[Job, Bundle] | None:
    """Return the health check's program for a target, compiled if the cache lacks it and `may_compile`; else None."""
    job, cache = health_check_job(target.soc, target.backend, direct=target.direct), BundleCache(config.cache_dir)
    try:
        found = find_bundle_for(job, tools, cache)
        if not (found.cached or may_compile):
            return None
        if not found.cached:
            logger.info("compiling the health check of %s", target.soc)
            build_bundle(config, job, found.key, tools, supervisor)
        return job, load_bundle(cache.folder(found.key))
    except FarmError as error:
        logger.warning("no health check of %s (%s): the device is asked for a sign of life alone", target.soc, error)
        return None


@dataclass
class OneOffTries:
    """Runs a bundle on a device, records every attempt, and asks another device where the classification is open."""

    store: Store
    request: OneOffRequest
    bundle: Bundle
    run_id: str
    folder: Path
    """Folder for the files of executions."""
    artifacts: Path
    """Root of files that are kept."""
    health: HealthConfig
    look: Look
    another: Callable[[Collection[str]], AcquiredDevice | None]
    """Return a free device beside those with the given ids."""
    health_check: Callable[[], tuple[Job, Bundle] | None]
    """Return the program that a failure may need."""
    kept: tuple[ArtifactRecord, ...] = ()
    """Files of the last attempt."""
    _devices: list[Device] = field(default_factory=list)
    _history: list[Tried] = field(default_factory=list)
    _executions: int = 0

    def run(self, first: AcquiredDevice) -> Attempt:
        """Return the last attempt, which decides as far as the available devices allow."""
        device: AcquiredDevice | None = first
        while device is not None:
            attempt, device = self._on(device)
        return attempt

    def _on(self, acquired: AcquiredDevice) -> tuple[Attempt, AcquiredDevice | None]:
        """Return the attempt that decides on a device, recorded, and the device that has to try next."""
        request = self.request
        device, runtime, fence = acquired
        logger.info("running on %s (%s)", device.serial, device.kind)
        self._devices.append(device)
        artifacts, gate = AttemptArtifacts(self.artifacts, request.profile, outputs=True), HeatGate(self.health)
        with DeviceRun(device, runtime, self.run_id, fence=fence, gate=gate, artifacts=artifacts) as run:
            attempt, raw = self._execute(run)
            alone = not request.heap
            attempts = with_rerun(attempt, raw, lambda: self._execute(run, alone=True)) if alone else (attempt,)
            last = attempts[-1]
            if needs_health_check(last, failed_before=request.failed_before):
                last = self._checked(run, last)
            last, other = self._settled(last)
            last, logs = run.keep_crash_logs(last, self.folder / "crash-logs")
            for attempt in attempts[:-1]:
                run.record(self.store, self.run_id, attempt)
            run.record(self.store, self.run_id, last, (*self.kept, *logs))
        return last, other

    def _execute(self, run: DeviceRun, *, alone: bool = False) -> tuple[Attempt, RawResult]:
        request, bundle, job = self.request, self.bundle, self.request.job
        if alone:
            logger.info("running again in a process of its own on %s", run.device.serial)
        options = run.options(job, request)
        self._executions += 1
        raw = run.run(job.id, bundle, self.folder / f"job-{self._executions}", options, alone=alone or options.heap)
        executed = raw
        if request.program is None:
            attempt = run.judge(job, bundle, raw, operators=request.profile.kept)
        else:
            attempt, bundle, raw = judged(run, job, bundle, raw)
        attempt = self.look(raw, attempt)
        attempt, self.kept = run.keep(attempt, bundle, raw.folder)
        return attempt, executed

    def _checked(self, run: DeviceRun, attempt: Attempt) -> Attempt:
        """Return an attempt that failed; infra where the health check of its device fails as well."""
        if health_check := self.health_check():
            run.set_health_check(*health_check, self.request.profile)
        run.end_session()
        problem = run.probe(self.folder / "health_check")
        if not problem:
            return attempt
        mark = HealthMark(Event.CHECK_FAILED, run.silence_cause(), problem)
        state, why = next_health(Health.HEALTHY, (), mark)
        self._record_health(run.device, Event.CHECK_FAILED, state, why or problem)
        return unfit(attempt, problem, run.health_check_cause)

    def _settled(self, attempt: Attempt) -> tuple[Attempt, AcquiredDevice | None]:
        """Return an attempt with a verdict that takes in every device so far, and the device that has to try next."""
        earlier, failed_before = tuple(self._history), self.request.failed_before
        self._history.append(tried(attempt))
        other = None
        if classify(self._history, others=1, failed_before=failed_before).repeat:
            other = self.another([device.id for device in self._devices])
        decision = classify(self._history, others=int(other is not None), failed_before=failed_before)
        if attempt.verdict is Verdict.PASSED:
            devices = {device.serial: device for device in self._devices}
            for one in earlier:
                if is_open(one.cause):
                    reason = f"a job that failed on it passed on {attempt.device}: {one.reason}"
                    self._record_health(devices[one.device], Event.OUTVOTED, Health.SUSPECT, reason)
        return as_recorded(attempt, self._history, decision), other

    def _record_health(self, device: Device, event: Event, state: Health, reason: str) -> None:
        """Record an event of a device that others use as well."""
        if self.request.virtual:
            return
        with contextlib.suppress(FarmError):
            self.store.devices.record_health(
                HealthEvent(device.id, str(event), str(state), reason, {"run": self.run_id})
            )
