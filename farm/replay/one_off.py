"""Execution of a bundle on a device, for `farm exec` and `farm jobs rerun`: a run of one job in the store.

Unlike `farm run` there are no builders, and no health check before the job. A failure that may be the device's is
treated as in a run (`policy/retries.py`, `device_run/device_worker.py`): in a new session, then on another device.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import facts_of
from farm.builds.bundles.reuse import find_bundle_for
from farm.devices.execution.one_shot import too_many
from farm.devices.health import Event, Health, HealthEvent, HealthMark, next_health
from farm.dispatch.device_run.artifacts import AttemptArtifacts, kept_outputs
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate, require_device
from farm.dispatch.device_run.device_worker import with_rerun
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.acquire import DeviceAcquirer
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.ending import exit_code_of, write_report
from farm.dispatch.request.profiling import Execution, Profile
from farm.policy.retries import as_recorded, classify, is_open, needs_health_check, tried, unfit
from farm.replay.llama_program import LlamaProgram, judged, require_bundle, runtime_with
from farm.results.analysis.facts import CONTENTS
from farm.results.attempt import Attempt, Verdict
from farm.store.records import BuildRecord
from farm.store.view import Purpose, RunToolchain
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farm.base.config.settings import Config, HealthConfig
    from farm.base.processes import Supervisor
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.devices.device import Device
    from farm.devices.execution.raw import RawResult
    from farm.dispatch.pool.acquire import AcquiredDevice
    from farm.policy.retries import Tried
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store
    from farm.suites.suite import Target

    FindBundle = Callable[[Toolchain, Supervisor], Bundle]
    Look = Callable[[RawResult, Attempt], Attempt]

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
    from farm.builds.toolchains.prepare import prepare

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

    with InterruptHandler():
        tools = prepare(config, virtual=request.virtual)
        acquirer = DeviceAcquirer(
            config, store, target, name="one-off", purpose=request.command, otherwise="--virtual 1"
        )
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
    from farm.dispatch.request.recording import run_record
    from farm.dispatch.request.resume import leave_intent

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
    build = BuildRecord(
        job.id, 0.0, cached=True, bundle_key=manifest.key, fallback_ops=manifest.fallback_ops, program=manifest.program
    )
    store.record_builds(run_id, [build])
    return run_id


def _find_health_check(
    config: Config, target: Target, tools: Toolchain, supervisor: Supervisor, *, may_compile: bool
) -> tuple[Job, Bundle] | None:
    """Return the health check's program for a target, compiled if the cache lacks it and `may_compile`; else None."""
    from farm.replay.stored_result import build_bundle

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


class OneOffTries:
    """Runs a bundle on a device, records every attempt, and asks another device where the classification is open."""

    def __init__(
        self,
        store: Store,
        request: OneOffRequest,
        bundle: Bundle,
        run_id: str,
        folder: Path,
        *,
        artifacts: Path,
        health: HealthConfig,
        look: Look,
        another: Callable[[Collection[str]], AcquiredDevice | None],
        health_check: Callable[[], tuple[Job, Bundle] | None],
    ) -> None:
        """`folder` gets the files of executions, `artifacts` is the root of files that are kept.

        `another` returns a free device beside those with the given ids. A failure may need `health_check`.
        """
        self._store, self._request, self._bundle, self._run_id = store, request, bundle, run_id
        self._folder, self._artifact_root, self._health = folder, artifacts, health
        self._look, self._another, self._health_check = look, another, health_check
        self.kept: tuple[ArtifactRecord, ...] = ()
        """Files of the last attempt."""
        self._devices: list[Device] = []
        self._history: list[Tried] = []
        self._executions = 0

    def run(self, first: AcquiredDevice) -> Attempt:
        """Return the last attempt, which decides as far as the available devices allow."""
        device: AcquiredDevice | None = first
        while device is not None:
            attempt, device = self._on(device)
        return attempt

    def _on(self, acquired: AcquiredDevice) -> tuple[Attempt, AcquiredDevice | None]:
        """Return the attempt that decides on a device, recorded, and the device that has to try next."""
        request, device = self._request, acquired.device
        logger.info("running on %s (%s)", device.serial, device.kind)
        self._devices.append(device)
        with DeviceRun(
            device,
            acquired.runtime,
            self._run_id,
            takeover=acquired.fence is not None,
            fence=acquired.fence,
            gate=HeatGate(self._health),
            artifacts=AttemptArtifacts(self._artifact_root, request.profile, outputs=True),
        ) as run:
            attempt, raw = self._execute(run)
            alone = not request.heap
            attempts = with_rerun(attempt, raw, lambda: self._execute(run, alone=True)) if alone else (attempt,)
            last = attempts[-1]
            if needs_health_check(last, failed_before=request.failed_before):
                last = self._checked(run, last)
            last, other = self._settled(last)
            last, logs = run.keep_crash_logs(last, self._folder / "crash-logs")
            for attempt in attempts[:-1]:
                run.record(self._store, self._run_id, attempt)
            run.record(self._store, self._run_id, last, (*self.kept, *logs))
        return last, other

    def _execute(self, run: DeviceRun, *, alone: bool = False) -> tuple[Attempt, RawResult]:
        request, bundle, job = self._request, self._bundle, self._request.job
        if alone:
            logger.info("running again in a process of its own on %s", run.device.serial)
        options = run.options(job, request)
        self._executions += 1
        raw = run.run(job.id, bundle, self._folder / f"job-{self._executions}", options, alone=alone or options.heap)
        executed = raw
        if request.program is None:
            attempt = run.judge(job, bundle, raw, operators=request.profile.kept)
        else:
            attempt, bundle, raw = judged(run, job, bundle, raw)
        attempt = self._look(raw, attempt)
        attempt, self.kept = run.keep(attempt, bundle, raw.folder)
        return attempt, executed

    def _checked(self, run: DeviceRun, attempt: Attempt) -> Attempt:
        """Return an attempt that failed; infra where the health check of its device fails as well."""
        if health_check := self._health_check():
            run.set_health_check(*health_check, self._request.profile)
        run.end_session()
        problem = run.probe(self._folder / "health_check")
        if not problem:
            return attempt
        mark = HealthMark(Event.CHECK_FAILED, run.silence_cause(), problem)
        state, why = next_health(Health.HEALTHY, (), mark)
        self._record_health(run.device, Event.CHECK_FAILED, state, why or problem)
        return unfit(attempt, problem, run.health_check_cause)

    def _settled(self, attempt: Attempt) -> tuple[Attempt, AcquiredDevice | None]:
        """Return an attempt with a verdict that takes in every device so far, and the device that has to try next."""
        earlier, failed_before = tuple(self._history), self._request.failed_before
        self._history.append(tried(attempt))
        other = None
        if classify(self._history, others=1, failed_before=failed_before).repeat:
            other = self._another([device.id for device in self._devices])
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
        if self._request.virtual:
            return
        with contextlib.suppress(FarmError):
            self._store.devices.record_health(
                HealthEvent(device.id, str(event), str(state), reason, {"run": self._run_id})
            )
