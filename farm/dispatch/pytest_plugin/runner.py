"""Fixtures `bundle` and `runner`: programs for the device of this worker, executed with numpy arrays as outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.errors import (
    DeviceError,
    DeviceGoneError,
    FarmError,
    InfraError,
    NeedsDeviceError,
    ProgramError,
    UsageError,
)
from farm.base.hashes import sha256_of
from farm.base.socs import READY, Soc, check_target, find_soc
from farm.base.text import bounded_log
from farm.builds.bundles.bundle import INPUTS, MODEL, Bundle, Manifest, TensorSpec, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.ready import is_dynamic, read_ready, ready_manifest
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.compile.pool import BuilderSettings, build_one
from farm.builds.compile.protocol import BuildRequest
from farm.builds.program.pte import from_memory, to_memory
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.runner_process import too_many
from farm.dispatch.device_run.device_worker import with_rerun
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pytest_plugin.worker import ExecutedProgram, SuiteWorker, UnfitDeviceError, WrongNumbersError
from farm.dispatch.request.choose import find_case
from farm.dispatch.request.profiling import Profile
from farm.policy.retries import needs_health_check
from farm.results.attempt import Attempt, Cause, Ending, Measurement, OperatorProfile, Stage, Verdict
from farm.results.measurements import bundle_measurements, time_measurements
from farm.results.outcome import outcome
from farm.results.outputs import describe_differing
from farm.results.profile.etdump import read_profile
from farm.suites.manifests import find_suites
from farm.suites.options import parse_options, runtime_flags
from farm.suites.suite import Case, InputSpec, Job, OptionSet, Target, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from farm.results.runner_report import RunnerReport

    Arrays = Sequence[NDArray[Any]]


class DeviceProgram(msgspec.Struct, frozen=True):
    """Program for a device: a bundle with inputs, and with references unless it is a ready `.pte`."""

    bundle: Bundle
    job: Job | None = None
    """Job that it was compiled from; None for a ready `.pte`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of each input."""
        return self.bundle.manifest.inputs

    def reference(self, kind: str = "fp32", *, sample: int = 0, output: int = 0) -> NDArray[Any]:
        """Return the module's output on the CPU for the inputs of the bundle; `kind` is `fp32` or `quantized`."""
        if kind not in self.bundle.manifest.references:
            known = ", ".join(self.bundle.manifest.references) or "none"
            raise UsageError(f"the program has no reference {kind!r}: it has {known}")
        return self.bundle.reference(kind, sample, output)


@dataclass(frozen=True)
class ProgramResult:
    """Result of a completed execution."""

    outputs: tuple[tuple[NDArray[Any], ...], ...]
    """Outputs by sample and index, in the shapes and dtypes of the program."""
    latency_ms: tuple[float, ...]
    """Time of every timed inference; on a virtual device a time of this machine."""
    load_ms: float
    operators: tuple[OperatorProfile, ...]
    """Profile of each node; only with `profile="detailed"`."""
    measurements: tuple[Measurement, ...]
    """Recorded measurements of the test: latency, load time, cycles, sizes."""
    notes: tuple[str, ...]
    _judge: Callable[[], Attempt] | None

    def check(self) -> None:
        """Raise AssertionError unless the outputs are within the limits of the program's case.

        Raises InfraError for damaged files on the device or of the outputs.
        """
        if self._judge is None:
            raise UsageError("check() needs a case of a suite and its own inputs: compare the outputs yourself")
        attempt = self._judge()
        if attempt.verdict is Verdict.INFRA and attempt.device:
            raise UnfitDeviceError(attempt.device, attempt.reason, attempt.cause)
        if attempt.verdict is Verdict.INFRA:
            raise InfraError(attempt.reason)
        if attempt.verdict is not Verdict.PASSED:
            raise (
                WrongNumbersError(attempt.reason) if attempt.cause is Cause.NUMERICS else AssertionError(attempt.reason)
            )


class Runner:
    """Runner of programs on the device of a worker; callable with a program."""

    def __init__(
        self, worker: SuiteWorker, health_check: Callable[[], tuple[Job, Bundle] | None] = lambda: None
    ) -> None:
        """`health_check` returns the health check for failures that may be the device's fault; None without one."""
        self._worker, self._health_check = worker, health_check
        self._count = 0

    def __call__(
        self,
        program: DeviceProgram,
        inputs: Arrays | None = None,
        *,
        samples: Sequence[Arrays] | None = None,
        iterations: int | None = None,
        warm_up: int | None = None,
        timeout_s: float = 300.0,
        options: Mapping[str, str] | None = None,
        profile: str = "auto",
    ) -> ProgramResult:
        """Run `program` and return its result.

        `inputs` are for one inference, `samples` for several; without both, the inputs in the bundle are used.
        `iterations` is 3 and `warm_up` is 1 by default, or less if the device's runner has a lower limit. `options` are
        backend options as for `farm run --option`, by name. Raises ProgramError if the program failed to load or run,
        crashed or hung; DeviceError for a fault of the device; UsageError for impossible arguments. Skips the test on a
        virtual device if the program needs a real one.
        """
        if inputs is not None and samples is not None:
            raise UsageError("give inputs, of one inference, or samples, of several")
        worker, bundle = self._worker, program.bundle
        self._count += 1
        own_inputs = inputs is not None or samples is not None
        if own_inputs:
            if bundle.manifest.dynamic:
                raise UsageError("a program with dynamic shapes runs with its own inputs only")
            folder = worker.scratch / "inputs" / str(self._count)
            given = [inputs] if inputs is not None else list(samples or ())
            bundle = lay_out(folder, bundle.model, given, bundle.manifest)
        manifest, info = bundle.manifest, worker.info
        if not manifest.samples:
            raise UsageError("the program has no inputs: give inputs=[...] to runner(), or to bundle.pte()")
        runner_options = self._options(options, profile, iterations, warm_up, timeout_s)
        self._require_executions(manifest, runner_options)
        if manifest.soc != info.soc:
            raise UsageError(f"the program is for {manifest.soc}, the device {info.serial} is a {info.soc}")
        try:
            raw, again = self._executed(bundle, runner_options)
        except NeedsDeviceError as error:
            pytest.skip(str(error))
        report = outcome(raw)
        if isinstance(report, Ending):
            raise ProgramError(report.reason, stage=report.stage, cause=report.cause)
        cycles = read_profile(raw.folder, report, manifest.delegates, operators=profile == Profile.DETAILED)
        measured = (*time_measurements(report), *cycles.measurements)
        if (job := program.job) is not None:
            measured = (*measured, *bundle_measurements(manifest))
        # The test's own comparison reveals outputs that differ in number from the manifest.
        orders = [*(spec.order for spec in manifest.outputs), *[()] * len(report.outputs)][: len(report.outputs)]
        outputs = tuple(
            tuple(_output(raw, report, sample, index, order) for index, order in enumerate(orders))
            for sample in range(len(report.inferences))
        )
        notes = (*raw.notes, *again, *filter(None, [describe_differing(report)]), *cycles.notes)
        # Later executions remove the files on the device that a wrong number is checked with.
        judged = worker.run.judge(job, bundle, raw) if job is not None and not own_inputs else None
        worker.executed(ExecutedProgram(manifest.key, measured, cycles.operators), notes)
        return ProgramResult(
            outputs,
            latency_ms=tuple(ns / 1e6 for inference in report.inferences for ns in inference.iterations_ns),
            load_ms=math.nan if report.load_ns is None else report.load_ns / 1e6,
            operators=cycles.operators,
            measurements=measured,
            notes=notes,
            _judge=partial(self._checked, judged) if judged is not None else None,
        )

    def _checked(self, attempt: Attempt) -> Attempt:
        """Return the attempt of an execution; infra if the health check fails after wrong numbers."""
        if needs_health_check(attempt, failed_before=False):
            return self._worker.checked(attempt, self._health_check)
        return attempt

    def _executed(self, bundle: Bundle, options: RunnerOptions) -> tuple[RawResult, tuple[str, ...]]:
        """Return a successful execution, with notes; after a refusal or a crash, the second one, in a new session.

        Raises ProgramError, and DeviceError for a fault of the device, whose health check fails as well.
        """
        worker, job_id = self._worker, bundle.manifest.job_id
        raws: list[RawResult] = []

        def execute(*, alone: bool = False) -> tuple[Attempt, RawResult]:
            name = f"{self._count}-alone" if alone else str(self._count)
            raw = worker.run.run(job_id, bundle, worker.scratch / "raw" / name, options, alone=alone)
            raws.append(raw)
            return _attempt(job_id, raw), raw

        attempts = with_rerun(*execute(), lambda: execute(alone=True))
        last, raw = attempts[-1], raws[-1]
        if needs_health_check(last, failed_before=False):
            last = worker.checked(last, self._health_check)
        if last.verdict is Verdict.INFRA:
            reason = last.reason.removeprefix(f"{raw.serial}: ")
            if last.cause is Cause.GONE:
                raise DeviceGoneError(raw.serial, reason)
            raise UnfitDeviceError(raw.serial, reason, last.cause)
        if last.verdict is Verdict.FAILED:
            raise ProgramError(last.reason, stage=last.stage, cause=last.cause, log=bounded_log(raw.stderr))
        return raw, (*last.notes, *(attempts[0].reason for _ in attempts[1:]))

    def _options(
        self,
        options: Mapping[str, str] | None,
        profile: str,
        iterations: int | None,
        warm_up: int | None,
        timeout_s: float,
    ) -> RunnerOptions:
        reducible = iterations is None and warm_up is None
        iterations, warm_up = 3 if iterations is None else iterations, 1 if warm_up is None else warm_up
        known = [one.value for one in Profile if one is not Profile.OPTRACE]
        if profile not in known:
            raise UsageError(f"profile is {profile!r}, expected one of {', '.join(known)}")
        if iterations < 1 or warm_up < 0 or timeout_s <= 0:
            raise UsageError("iterations is at least 1, warm_up at least 0, timeout_s more than 0")
        plan = self._worker.plan
        chosen = _one_set(options, plan.backend)
        target, kept = Target(plan.soc, plan.backend, "", chosen), Profile(profile)
        if len(runtime_flags(target)) < len(chosen):
            raise UsageError("options of the compiler go to bundle.case() or bundle.module(), not to runner()")
        flags = self._worker.run.flags(target, kept)
        return RunnerOptions(iterations, warm_up, timeout_s, flags, etdump=kept.kept, reducible=reducible)

    def _require_executions(self, manifest: Manifest, options: RunnerOptions) -> None:
        """Raise UsageError if a test names more executions than the device's runner can make."""
        runtime = self._worker.run.runtime
        if options.reducible or not runtime.one_shot:
            return
        times, named = options.iterations + options.warm_up, "iterations and warm_up together"
        if problem := too_many(runtime.runner, manifest.samples, len(manifest.outputs), times, named):
            raise UsageError(problem)


def lay_out(folder: Path, model: Path, samples: Sequence[Arrays], manifest: Manifest) -> Bundle:
    """Return a bundle in the new `folder` of the program `model`, described by `manifest`, with `samples` as inputs.

    Raises UsageError for inputs of other shapes or dtypes.
    """
    for number, sample in enumerate(samples):
        given = [(tuple(array.shape), array.dtype.name) for array in sample]
        if given != [(spec.shape, spec.dtype) for spec in manifest.inputs]:
            taken, offered = _shown(manifest.inputs), _shown([TensorSpec(*one) for one in given])
            raise UsageError(f"the inputs of sample {number} are {offered}, the program takes {taken}")
    (folder / INPUTS).mkdir(parents=True)
    (folder / MODEL).symlink_to(model.resolve())
    files = {MODEL: manifest.files[MODEL]}
    for number, sample in enumerate(samples):
        for index, array in enumerate(sample):
            path = folder / INPUTS / f"input_{number}_{index}.raw"
            to_memory(array, manifest.inputs[index].order).tofile(path)
            files[f"{INPUTS}/{path.name}"] = sha256_of(path)
    return Bundle(folder, msgspec.structs.replace(manifest, samples=len(samples), files=files, references=()))


def _attempt(job_id: str, raw: RawResult) -> Attempt:
    """Return the attempt of an execution, before the test judges its outputs."""
    found = outcome(raw)
    if not isinstance(found, Ending):
        return Attempt(job_id, Verdict.PASSED, Stage.DONE, "", device=raw.serial)
    return Attempt(job_id, found.verdict, found.stage, found.reason, device=raw.serial, cause=found.cause)


def _output(raw: RawResult, report: RunnerReport, sample: int, index: int, order: tuple[int, ...]) -> NDArray[Any]:
    tensor = report.outputs[index]
    path = raw.output(sample, index)
    try:
        size = path.stat().st_size
        kind = np.dtype(tensor.dtype)
    except FileNotFoundError:
        raise DeviceError(raw.serial, f"{path.name} is not there although the runner reported success") from None
    except TypeError:
        raise ProgramError(
            f"output {index} has the dtype {tensor.dtype}, which numpy lacks", stage=Stage.PULL
        ) from None
    if (
        kind.kind not in "biufc"
        or size != tensor.nbytes
        or size != kind.itemsize * int(np.prod(tensor.shape, dtype=object))
    ):
        raise DeviceError(raw.serial, f"{path.name} has {size} bytes, the runner wrote {tensor.nbytes} for {tensor}")
    return from_memory(np.fromfile(path, dtype=kind), tensor.shape, order)


def _one_set(options: Mapping[str, str] | None, backend: str) -> OptionSet:
    """Return the options of one target. Raises UsageError for an option with several values."""
    sets = parse_options((f"{name}={value}" for name, value in (options or {}).items()), backend)
    if len(sets) > 1:
        raise UsageError("an option has one value here: a program is compiled once")
    return sets[0]


def _shown(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "none"


class Bundles:
    """Programs for the device, compiled in another process, so that a test needs no torch, and once per content."""

    def __init__(self, worker: SuiteWorker) -> None:
        self._worker, self._plan = worker, worker.plan
        self._cache = BundleCache(worker.plan.cache_root)
        self._count = 0

    def case(self, name: str, *, precision: str = "", options: Mapping[str, str] | None = None) -> DeviceProgram:
        """Return a case of a suite, `quantized_ops/conv2d`, at `precision` or its first precision.

        Raises UnknownNameError, IllegalTargetError; ProgramError if it does not compile.
        """
        suite_name, slash, case_name = name.rpartition("/")
        if not slash or not suite_name:
            raise UsageError(f"{name!r} is no case: expected suite/case, such as quantized_ops/conv2d")
        suite, case = find_case(suite_name, case_name, find_suites(self._plan.suite_folders))
        alone = msgspec.structs.replace(suite, cases=(case,))
        wanted = (precision,) if precision else ()
        jobs = plan([alone], [self._soc], self._plan.backend, wanted, (self._options(options),))
        return self._compiled(jobs[0])

    def module(
        self,
        module: str,
        inputs: Sequence[InputSpec | Sequence[int]],
        *,
        precision: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        samples: int = 1,
        options: Mapping[str, str] | None = None,
    ) -> DeviceProgram:
        """Return a compiled torch module: `package.module:Class`, or `.file:Class` beside the test.

        `inputs` are shapes of normal float32 inputs, or InputSpec; their values, made from seeds, calibrate the
        quantizer and are the inputs of executions. `seed` is the seed of the weights.
        """
        specs = tuple(one if isinstance(one, InputSpec) else InputSpec(tuple(one)) for one in inputs)
        if ":" not in module or not specs:
            raise UsageError("expected 'package.module:Class' or '.file:Class', and at least one input")
        check_target(self._soc, self._plan.backend, precision)
        case = Case(
            "pytest",
            "module",
            module=module,
            inputs=specs,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            seed=seed,
            samples=samples,
            precisions=(precision,),
            folder=str(self._worker.test_folder),
        )
        return self._compiled(Job(case, Target(self._soc.name, self._plan.backend, precision, self._options(options))))

    def pte(
        self, path: str | Path, inputs: Arrays | None = None, *, samples: Sequence[Arrays] | None = None
    ) -> DeviceProgram:
        """Return a ready `.pte`, a path relative to the folder of the test, without compiling or references.

        Inputs are numpy arrays, given here or to `runner`. Raises ConfigError for a file that is no program,
        IllegalTargetError for a program of another SoC or backend.
        """
        model = self._worker.test_folder / path
        job = Job(
            Case("pytest", "ready", module="", inputs=(), pte=model.name, folder=str(model.parent)),
            Target(self._soc.name, self._plan.backend, READY),
        )
        method = read_ready(job)
        if is_dynamic(method):
            raise UsageError(f"{model.name} has dynamic shapes: make it a case of a suite, and use bundle.case()")
        digest = sha256_of(model)
        manifest = ready_manifest(
            method,
            job.target,
            model,
            key=digest,
            job_id=f"pytest/{model.name}",
            samples=0,
            inputs=tuple(TensorSpec(value.shape, value.dtype, order=value.order) for value in method.inputs),
            files={MODEL: digest},
        )
        given = list(samples or ()) if inputs is None else [inputs]
        self._count += 1
        return DeviceProgram(lay_out(self._worker.scratch / "ready" / str(self._count), model, given, manifest))

    def health_check(self) -> tuple[Job, Bundle] | None:
        """Return the health check of the devices, compiled first for attached devices; None without one."""
        job = health_check_job(self._soc.name, self._plan.backend)
        key, is_cached = find_bundle_for(job, self._plan, self._cache)
        if not (is_cached or self._plan.leased):
            return None
        try:
            if not is_cached:
                self._compile(job, key)
            return job, load_bundle(self._cache.folder(key))
        except FarmError:
            return None

    @property
    def _soc(self) -> Soc:
        return find_soc(self._plan.soc)

    def _options(self, options: Mapping[str, str] | None) -> OptionSet:
        chosen = _one_set(options, self._plan.backend)
        if (DIRECT_MODE, "true") in chosen:
            raise UsageError(f"{DIRECT_MODE} is for farm run and farm exec: farm pytest has the ordinary runner")
        return chosen

    def _compiled(self, job: Job) -> DeviceProgram:
        key, is_cached = find_bundle_for(job, self._plan, self._cache)
        if not is_cached:
            self._compile(job, key)
        return DeviceProgram(load_bundle(self._cache.folder(key)), job)

    def _compile(self, job: Job, key: str) -> None:

        log = self._worker.scratch / f"build-{key[:16]}.log"
        plan, worker = self._plan, self._worker
        reply = build_one(
            BuildRequest(job, key, dict(plan.versions), str(log)),
            plan.compiler,
            BuilderSettings(
                plan.build_limits, plan.build_timeout_s, plan.cache_root, worker.supervisor, worker.scratch
            ),
        )
        if reply.ok:
            return
        if reply.infra:
            raise InfraError(f"{job.case.module} was not compiled: {reply.reason}")
        log_text = bounded_log(log.read_text(errors="replace"), 16 * 1024) if log.exists() else ""
        problem = f"{job.case.module} does not compile for {job.target}: {reply.reason}"
        raise ProgramError(problem, stage=Stage.BUILD, cause=Cause.COMPILE, log=log_text)
