"""One bundle on one device, now: what `farm exec` and `farm repro` have in common. It is a run of one job in the store.

Apart from `farm run` in what a single job does not need: no builders, no canary, no other device that is asked.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.facts import CONTENTS
from farm.bundles.key import facts_of
from farm.device_run.artifacts import AttemptArtifacts, kept_outputs
from farm.device_run.device_run import DeviceRun, HeatGate, require_device
from farm.errors import FarmError, InfraError, UsageError
from farm.execution.one_shot import too_many
from farm.execution.raw import RunnerOptions
from farm.pool.acquire import DeviceAcquirer
from farm.pool.fleet import Choice
from farm.replay.llama_program import LlamaProgram, judged, require_bundle, runtime_with
from farm.request.ending import exit_code_of, write_report
from farm.request.profiling import Profile
from farm.results.attempt import Attempt
from farm.store.view import Purpose, RunToolchain
from farm.suites.suite import Job
from farm.system.interrupts import INTERRUPTED, InterruptHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.bundles.bundle import Bundle
    from farm.config.settings import Config
    from farm.execution.raw import RawResult
    from farm.pool.acquire import AcquiredDevice
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store
    from farm.system.processes import Supervisor
    from farm.toolchains.toolchain import Toolchain

    FindBundle = Callable[[Toolchain, Supervisor], Bundle]
    Look = Callable[[RawResult, Attempt], Attempt]


class OneOffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, where and how."""

    job: Job
    virtual: bool
    """On a virtual device of its own."""
    choice: Choice = Choice()
    iterations: int = 3
    warm_up: int = 1
    reducible: bool = False
    """As of `farm.request.request.RunRequest`."""
    timeout_s: float = 300.0
    seconds: int | None = None
    """How long a program that generates goes on, beside `timeout_s`; None: every prompt once."""
    profile: Profile = Profile.AUTO
    command: str = ""
    facts: dict[str, str] = {}
    """What else its numbers depend on."""
    toolchain: RunToolchain | None = None
    """Of the run whose program is run again; None where it is that of this command."""
    name: str = ""
    """What the run is called."""
    purpose: Purpose = Purpose.TRIAL
    program: LlamaProgram | None = None
    """What generates in place of farm's runner."""


class OneOffOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    run_id: str
    exit_code: int
    attempt: Attempt | None
    """What was recorded; None where that was interrupted."""
    kind: str
    """Of the device: `virtual` or `hardware`."""
    outputs: dict[str, str]
    """SHA-256 by file name, of the outputs that are kept."""
    report: Path
    """The HTML file."""


def run_one(
    config: Config,
    store: Store,
    request: OneOffRequest,
    find_bundle: FindBundle,
    say: Callable[[str], None],
    look: Look = lambda _, attempt: attempt,
) -> OneOffOutcome:
    """Run one bundle, record it, and return how it ended; everything started is ended again. `say` gets each step.

    `find_bundle` is called before anything is recorded. `look` gets what came back while it is there, and returns what
    is to be recorded. Raises what `find_bundle` raises, NoDeviceError where no device is attached, NeedsDeviceError.
    """
    from farm.toolchains.prepare import prepare

    with InterruptHandler():
        tools = prepare(config, say, virtual=request.virtual)
        acquirer = DeviceAcquirer(
            config, store, request.job.target, say,
            name="one-off", purpose=request.command, otherwise="--virtual 1",
        )  # fmt: skip
        with acquirer:
            bundle = find_bundle(tools, acquirer.supervisor)
            acquired = acquirer.acquire(None if request.virtual else request.choice)
            if request.program is not None:
                require_bundle(bundle)
                runtime = runtime_with(request.program, acquired.runtime, config.cache_dir)
                acquired = acquired._replace(runtime=runtime)
            # Before anything is recorded.
            require_device(bundle, acquired.device)
            _require_executions(bundle, acquired, request)
            run_id = _begin(config, store, request, tools, bundle, acquired, say)
            folder = config.run_folder(run_id)
            kept: tuple[ArtifactRecord, ...] = ()

            def execute() -> Attempt:
                nonlocal kept
                say(f"running on {acquired.device.serial} ({acquired.device.kind})")
                attempt, kept = _execute(config, store, request, bundle, acquired, run_id, folder / "raw", look, say)
                return attempt

            try:
                attempt, exit_code, report = finish_run(config, store, run_id, execute)
            finally:
                shutil.rmtree(folder / "raw", ignore_errors=True)
            return OneOffOutcome(run_id, exit_code, attempt, acquired.device.kind, kept_outputs(kept), report)


def _require_executions(bundle: Bundle, acquired: AcquiredDevice, request: OneOffRequest) -> None:
    """Raise UsageError where somebody named more executions than the runner of the device can be asked for."""
    runtime, manifest = acquired.runtime, bundle.manifest
    if request.reducible or not runtime.one_shot:
        return
    times = request.iterations + request.warm_up
    if problem := too_many(runtime.runner, manifest.samples, len(manifest.outputs), times):
        raise UsageError(problem)


def finish_run(
    config: Config, store: Store, run_id: str, execute: Callable[[], Attempt]
) -> tuple[Attempt | None, int, Path]:
    """Return what `execute` recorded, None where it was interrupted, the run's exit code, and its HTML report.

    Raises the FarmError that `execute` raises, with whose exit code the run is finished.
    """
    attempt: Attempt | None = None
    exit_code = InfraError.exit_code
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
    say: Callable[[str], None],
) -> str:
    from farm.request.recording import run_record
    from farm.request.resume import leave_intent

    kind, manifest, job = acquired.device.kind, bundle.manifest, request.job
    # What compiled the bundle, which may be older than what is installed.
    here = {name: fact for name, fact in tools.fingerprint(kind).items() if name not in CONTENTS}
    facts = here | facts_of(manifest.versions) | request.facts | (request.program.facts if request.program else {})
    if request.seconds is not None:
        facts["seconds"] = str(request.seconds)
    if request.profile.flags(kind) != Profile.AUTO.flags(kind):
        facts["profile"] = str(request.profile)
    record = run_record(
        config, store, tools, command=request.command, facts=facts, purpose=request.purpose, name=request.name,
        again=request.toolchain, say=say,
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


def _execute(
    config: Config,
    store: Store,
    request: OneOffRequest,
    bundle: Bundle,
    acquired: AcquiredDevice,
    run_id: str,
    folder: Path,
    look: Look,
    say: Callable[[str], None],
) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
    """Run the bundle and record the attempt; return it with what is kept of it."""
    profile, job = request.profile, request.job
    artifacts = AttemptArtifacts(config.state_dir / "artifacts", profile, outputs=True)
    with DeviceRun(
        acquired.device,
        acquired.runtime,
        run_id,
        takeover=acquired.fence is not None,
        fence=acquired.fence,
        gate=HeatGate(config.health, say=say),
        artifacts=artifacts,
    ) as run:
        options = RunnerOptions(
            iterations=request.iterations,
            warm_up=request.warm_up,
            reducible=request.reducible,
            repeats=job.case.deterministic is True,
            timeout_s=request.timeout_s + (request.seconds or 0),
            seconds=request.seconds,
            flags=run.flags(job.target, profile),
            etdump=profile.kept,
        )
        raw = run.run(job.id, bundle, folder / "job", options)
        if request.program is None:
            attempt = run.judge(job, bundle, raw, operators=profile.kept)
        else:
            attempt, bundle, raw = judged(run, job, bundle, raw)
        attempt = look(raw, attempt)
        attempt, kept = run.keep(attempt, bundle, raw.folder)
        attempt, logs = run.keep_crash_logs(attempt, folder / "crash-logs")
        run.record(store, run_id, attempt, (*kept, *logs))
    return attempt, kept
