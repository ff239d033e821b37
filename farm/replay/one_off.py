"""Execution of a bundle on a device, for `farm exec` and `farm jobs rerun`: a run of one job in the store.

Unlike `farm run` there are no builders, and no health check before the job. A failure that may be the device's is
treated as in a run: `farm.replay.one_off_tries`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.builds.bundles.key import facts_of
from farm.devices.execution.one_shot import too_many
from farm.dispatch.device_run.artifacts import kept_outputs
from farm.dispatch.device_run.device_run import require_device
from farm.dispatch.pool.acquire import DeviceAcquirer
from farm.dispatch.request.ending import exit_code_of, write_report
from farm.dispatch.request.profiling import Profile
from farm.replay.llama_program import require_bundle, runtime_with
from farm.replay.one_off_tries import OneOffTries, find_health_check
from farm.results.analysis.facts import CONTENTS
from farm.results.attempt import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.devices.execution.raw import RawResult
    from farm.dispatch.pool.acquire import AcquiredDevice
    from farm.replay.llama_program import LlamaProgram
    from farm.replay.one_off_request import OneOffRequest
    from farm.replay.one_off_tries import HealthCheck
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store

    FindBundle = Callable[[Toolchain, Supervisor], Bundle]
    Look = Callable[[RawResult, Attempt], Attempt]


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

    with InterruptHandler():
        tools = prepare(config, virtual=request.virtual)
        acquirer = DeviceAcquirer(
            config, store, request.job.target, name="one-off", purpose=request.command, otherwise="--virtual 1",
        )  # fmt: skip
        with acquirer:
            bundle = find_bundle(tools, acquirer.supervisor)
            acquired = acquirer.acquire(None if request.virtual else request.choice)
            if request.program is not None:
                require_bundle(bundle)
                acquired = _with_program(acquired, request.program, config)
            # Before anything is recorded.
            require_device(bundle, acquired.device)
            _require_executions(bundle, acquired, request)
            run_id = _begin(config, store, request, tools, bundle, acquired)
            folder = config.run_folder(run_id)
            kept: tuple[ArtifactRecord, ...] = ()

            def another(used: Collection[str]) -> AcquiredDevice | None:
                other = None if request.virtual else acquirer.acquire_other(request.choice, used)
                if other is not None:
                    if request.program is not None:
                        other = _with_program(other, request.program, config)
                    store.record_device(run_id, other.device, other.runtime.versions)
                return other

            def health_check() -> HealthCheck | None:
                # A program in the place of farm's runner has no health check: the device is asked for a sign of life.
                if request.program is not None:
                    return None
                # A device of the simulator's own has no health that is worth a compilation.
                may_compile = not request.virtual
                target = request.job.target
                return find_health_check(config, target, tools, acquirer.supervisor, may_compile=may_compile)

            def execute() -> Attempt:
                nonlocal kept
                tries = OneOffTries(
                    store, request, bundle, run_id, folder / "raw", artifacts=config.state_dir / "artifacts",
                    health=config.health, look=look, another=another, health_check=health_check,
                )  # fmt: skip
                attempt = tries.run(acquired)
                kept = tries.kept
                return attempt

            try:
                attempt, exit_code, report = finish_run(config, store, run_id, execute)
            finally:
                shutil.rmtree(folder / "raw", ignore_errors=True)
            return OneOffOutcome(run_id, exit_code, attempt, acquired.device.kind, kept_outputs(kept), report)


def _with_program(acquired: AcquiredDevice, program: LlamaProgram, config: Config) -> AcquiredDevice:
    """Return the device with `program` in the place of farm's runner."""
    return acquired._replace(runtime=runtime_with(program, acquired.runtime, config.cache_dir))


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
    config: Config,
    store: Store,
    request: OneOffRequest,
    tools: Toolchain,
    bundle: Bundle,
    acquired: AcquiredDevice,
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
    store.record_build(
        run_id, job.id, seconds=0.0, cached=True, bundle_key=manifest.key, fallback_ops=manifest.fallback_ops,
        program=manifest.program,
    )  # fmt: skip
    return run_id
