"""Fixture `bundle`: a DeviceProgram for the SoC of the devices from a case of a suite, a module or a ready `.pte`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.errors import FarmError, InfraError, ProgramError, UnknownNameError, UsageError
from farm.base.hashes import sha256_of
from farm.base.socs import READY, check_target, find_soc
from farm.base.text import bounded_log
from farm.builds.bundles.bundle import MODEL, TensorSpec, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.ready import is_dynamic, output_specs, read_ready, ready_manifest
from farm.builds.bundles.reuse import find_bundle_for
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pytest_plugin.runner import DeviceProgram, lay_out
from farm.results.attempt import Cause, Stage
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.options import parse_options
from farm.suites.suite import Case, InputSpec, Job, Target, plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from farm.base.socs import Soc
    from farm.builds.bundles.bundle import Bundle
    from farm.dispatch.pytest_plugin.runner import Arrays
    from farm.dispatch.pytest_plugin.worker import SuiteWorker
    from farm.suites.suite import OptionSet


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
        suite = resolve_suite(suite_name, find_suites(self._plan.suite_folders))
        cases = {case.name: case for case in suite.cases}
        if case_name not in cases:
            raise UnknownNameError("case", case_name, cases, f"in suite {suite.name}")
        alone = msgspec.structs.replace(suite, cases=(cases[case_name],))
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
            outputs=output_specs(method),
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
        texts = (f"{name}={value}" for name, value in (options or {}).items())
        sets = parse_options(texts, self._plan.backend)
        if len(sets) > 1:
            raise UsageError("an option has one value here: a program is compiled once")
        if (DIRECT_MODE, "true") in sets[0]:
            raise UsageError(f"{DIRECT_MODE} is for farm run and farm exec: farm pytest has the ordinary runner")
        return sets[0]

    def _compiled(self, job: Job) -> DeviceProgram:
        key, is_cached = find_bundle_for(job, self._plan, self._cache)
        if not is_cached:
            self._compile(job, key)
        return DeviceProgram(load_bundle(self._cache.folder(key)), job)

    def _compile(self, job: Job, key: str) -> None:
        from farm.builds.compile.pool import BuilderSettings, build_one
        from farm.builds.compile.protocol import BuildRequest

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
