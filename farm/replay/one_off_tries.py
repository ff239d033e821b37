"""Attempts of a command's single job: in a new session, and on another device if the first one leaves it open.

The rules of runs apply: `policy/retries.py`, `device_run/reruns.py`.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.devices.execution.raw import RunnerOptions
from farm.devices.health import Event, Health, HealthEvent, HealthMark, next_health
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.device_run.reruns import with_rerun
from farm.policy.retries import as_recorded, classify, is_open, needs_health_check, tried, unfit
from farm.replay.llama_program import judged
from farm.results.attempt import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from farm.base.config.settings import Config, HealthConfig
    from farm.base.processes import Supervisor
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.devices.device import Device
    from farm.devices.execution.raw import RawResult
    from farm.dispatch.pool.acquire import AcquiredDevice
    from farm.policy.retries import Tried
    from farm.replay.one_off_request import OneOffRequest
    from farm.results.attempt import Attempt
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store
    from farm.suites.suite import Job, Target

    HealthCheck = tuple[Job, Bundle]

logger = logging.getLogger(__name__)


def find_health_check(
    config: Config,
    target: Target,
    tools: Toolchain,
    supervisor: Supervisor,
    *,
    may_compile: bool,
) -> HealthCheck | None:
    """Return the health check's program for a target, compiled if the cache lacks it and `may_compile`; else None."""
    from farm.builds.bundles.bundle import load_bundle
    from farm.builds.bundles.cache import BundleCache
    from farm.builds.bundles.reuse import find_bundles_for
    from farm.replay.stored_result import build_bundle

    job, cache = health_check_job(target.soc, target.backend, direct=target.direct), BundleCache(config.cache_dir)
    try:
        found = find_bundles_for([job], tools, cache)[job.id]
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
        look: Callable[[RawResult, Attempt], Attempt],
        another: Callable[[Collection[str]], AcquiredDevice | None],
        health_check: Callable[[], HealthCheck | None],
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
        options = self._heap_options(run) if request.heap else RunnerOptions(
            iterations=request.iterations,
            warm_up=request.warm_up,
            reducible=request.reducible,
            repeats=job.case.deterministic is True,
            timeout_s=request.timeout_s + (request.seconds or 0),
            seconds=request.seconds,
            flags=run.flags(job.target, request.profile),
            etdump=request.profile.kept,
        )  # fmt: skip
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

    def _heap_options(self, run: DeviceRun) -> RunnerOptions:
        request = self._request
        processes = 1 if request.reducible else request.iterations
        return RunnerOptions(processes, 0, request.timeout_s, run.flags(request.job.target, None), heap=True)

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
