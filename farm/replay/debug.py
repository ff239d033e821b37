"""One `farm debug`: compile for debugging, run on the simulator and on a device, compare, record."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.compile.debug.protocol import BUNDLE, CompareRequest, CompileRequest, Written
from farm.errors import FarmError, InfraError, UsageError
from farm.execution.raw import DEBUG_FILE, ETDUMP_FILE
from farm.pool.acquire import acquire_attached, acquire_virtual
from farm.pool.fleet import Choice
from farm.program.layers import Gap, Layer, Step
from farm.request.ending import INTERRUPTED, Patience, exit_code_of, write_report
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.ending import Ending, failed, infra
from farm.results.judge import build_failure
from farm.results.layers import Diagnosis, Divergence, diagnose, layer_comparisons
from farm.results.outcome import outcome
from farm.results.text import bounded_log, one_line
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from farm.compile.debug.process import DebugProcess
    from farm.compile.debug.protocol import Reply
    from farm.compile.toolchain import Toolchain
    from farm.config.settings import Config
    from farm.execution.raw import RawResult
    from farm.pool.acquire import AcquiredDevice
    from farm.store.store import Store
    from farm.suites.suite import Job
    from farm.system.processes import Supervisor

_REFUSED = UsageError.exit_code
_SIMULATOR, _DEVICE = "simulator", "device"


class DebugRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    job: Job
    virtual: bool
    """No device: the simulator is all that runs."""
    sample: int = 0
    timeout_s: float = 600.0
    """Longest that the job may take on one device."""
    command: str = ""


class DebuggedLayer(msgspec.Struct, frozen=True):
    """One layer and everything that is known of it."""

    layer: Layer
    inspector: Gap | None
    """The simulator against the reference of ExecuTorch's own Inspector: quantized weights, activations in floating
    point."""


class DebugOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    job_id: str
    run_id: str
    exit_code: int
    attempt: Attempt | None
    """What was recorded; None where that was interrupted."""
    layers: tuple[DebuggedLayer, ...]
    diagnosis: Diagnosis
    devices: dict[str, str]
    """Serial by part: `simulator`, `device`."""
    seconds: dict[str, float]
    """Wall time by step."""
    report: Path
    """The HTML file."""


def debug(config: Config, request: DebugRequest, say: Callable[[str], None]) -> DebugOutcome:
    """Debug one job and return how it ended; everything started is ended again. `say` hears of every step.

    Raises UsageError for a job whose layers cannot be told apart, NoDeviceError where a device is wanted and none is
    attached, InfraError when nothing could begin.
    """
    from farm.store.store import open_store

    if not 0 <= request.sample < request.job.case.samples:
        raise UsageError(f"there is no sample {request.sample}: the case has {request.job.case.samples}, from 0")
    with Patience(), open_store(config.store_url) as store:
        return _Debug(config, request, store, _Clock(say)).execute(say)


class _Clock:
    """Wall time by step, told as it passes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._started = say, time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(seconds, 3)
        self._say(f"{seconds:7.2f} s  {name}")

    def finish(self) -> dict[str, float]:
        self.add("total", time.perf_counter() - self._started)
        return self.seconds


class _Debug:
    """The part that leaves traces: store, folder, processes."""

    def __init__(self, config: Config, request: DebugRequest, store: Store, clock: _Clock) -> None:
        self._config, self._request, self._store, self._clock = config, request, store, clock
        self._job = request.job
        self._started_ms = time.time_ns() // 1_000_000
        self._layers: tuple[DebuggedLayer, ...] = ()
        self._places: dict[str, AcquiredDevice] = {}

    def execute(self, say: Callable[[str], None]) -> DebugOutcome:
        from farm.compile.toolchain import prepare
        from farm.system.processes import Supervisor
        from farm.system.publish import own_folder

        with self._clock.step("toolchain"):
            tools = prepare(self._config, say)
        name = f"debug-{secrets.token_hex(6)}"
        with (
            own_folder(self._config.cache_dir / "virtual", name) as storage,
            Supervisor() as supervisor,
            ExitStack() as leases,
        ):
            if not self._request.virtual:
                self._places[_DEVICE] = acquire_attached(
                    self._config,
                    self._store,
                    self._job.target,
                    supervisor,
                    leases,
                    say,
                    choice=Choice(),
                    purpose=self._request.command,
                    otherwise="--virtual, without the device's column",
                )
            return self._record(tools, storage, supervisor)

    def _record(self, tools: Toolchain, storage: Path, supervisor: Supervisor) -> DebugOutcome:
        run_id = self._begin(tools)
        folder = self._config.run_folder(run_id)
        folder.mkdir(parents=True)
        attempt: Attempt | None = None
        refused = ""
        exit_code = InfraError.exit_code
        try:
            attempt = self._attempt(run_id, tools, storage, folder, supervisor)
            self._store.record_attempt(run_id, attempt)
            refused = attempt.reason if attempt.verdict is Verdict.SKIPPED else ""
            exit_code = _REFUSED if refused else exit_code_of(self._store.runs.view(run_id))
        except KeyboardInterrupt:
            exit_code = INTERRUPTED
        except FarmError as error:
            exit_code = error.exit_code
            raise
        finally:
            self._store.finish_run(run_id, exit_code)
        if refused:
            raise UsageError(f"{self._job.id}: {refused}")
        report = write_report(
            self._store.runs.view(run_id), folder / "report.html", self._store, self._config.state_dir
        )
        return DebugOutcome(
            job_id=self._job.id,
            run_id=run_id,
            exit_code=exit_code,
            attempt=attempt,
            layers=self._layers,
            diagnosis=self._diagnosis(),
            devices={part: place.device.serial for part, place in self._places.items()},
            seconds=self._clock.finish(),
            report=report,
        )

    def _begin(self, tools: Toolchain) -> str:
        from farm.store.records import RunRecord

        # What keeps all its intermediate outputs is no measurement of the job: it is in no series with others.
        facts = tools.fingerprint(virtual=self._request.virtual) | {"debug": "intermediate outputs"}
        run_id = self._store.begin_run(
            RunRecord(command=self._request.command, user=user_name(), host=socket.gethostname(), fingerprint=facts)
        )
        self._store.plan_jobs(run_id, [self._job])
        return run_id

    def _attempt(self, run_id: str, tools: Toolchain, storage: Path, folder: Path, supervisor: Supervisor) -> Attempt:
        from farm.bundles.bundle import load_bundle
        from farm.compile.debug.process import DebugProcess

        log = folder / "debugger.log"
        scratch = storage / "program"
        scratch.mkdir()
        process = DebugProcess(supervisor, tools.env, log, storage / "compiler")
        process.send(CompileRequest(self._job, tools.versions, self._request.sample, str(scratch)))
        with self._clock.step("virtual device"):
            simulator = acquire_virtual(self._config, self._job.target, supervisor, storage)
            self._places = {_SIMULATOR: simulator, **self._places}
        for place in self._places.values():
            self._store.record_device(run_id, place.device)
        reply = process.receive(self._config.build_timeout_s)
        self._tell("compile", reply)
        if not reply.ok:
            return self._not_compiled(reply, log)
        manifest = load_bundle(scratch / BUNDLE).manifest
        self._store.record_build(
            run_id,
            self._job.id,
            seconds=reply.seconds.get("total", 0.0),
            cached=False,
            bundle_key=manifest.key,
            fallback_ops=manifest.fallback_ops,
        )
        return self._run(process, run_id, scratch, manifest.key, reply.notes)

    def _run(self, process: DebugProcess, run_id: str, scratch: Path, key: str, notes: tuple[str, ...]) -> Attempt:
        written: dict[str, Written] = {}
        for part, place in self._places.items():
            with self._clock.step(part):
                raw = _execute(place, self._job, run_id, scratch, self._request.timeout_s, part)
            notes = (*notes, *raw.notes)
            found = outcome(raw)
            if isinstance(found, Ending):
                # The simulator's part can be told all the same.
                told = self._compare(process, written) if written else Ending(Verdict.PASSED, Stage.DONE)
                ending = msgspec.structs.replace(found, reason=f"{part}: {found.reason}")
                return self._finished(ending, key, (*notes, *told.notes), raw.stderr)
            written[part] = Written(str(raw.folder / ETDUMP_FILE), str(raw.folder / DEBUG_FILE))
        ending = self._compare(process, written)
        return self._finished(ending, key, (*notes, *ending.notes))

    def _compare(self, process: DebugProcess, written: Mapping[str, Written]) -> Ending:
        process.send(CompareRequest(written[_SIMULATOR], written.get(_DEVICE)))
        reply = process.receive(self._config.build_timeout_s)
        self._tell("", reply)
        if not reply.ok:
            # Of files that a device sent, by tools that are not under test.
            return infra(Stage.NUMERICS, f"comparing failed: {reply.reason}")
        self._layers = tuple(
            DebuggedLayer(row.layer(), row.inspector.gap() if row.inspector else None) for row in reply.layers
        )
        return msgspec.structs.replace(self._verdict(), notes=reply.notes)

    def _tell(self, prefix: str, reply: Reply) -> None:
        for name, seconds in reply.seconds.items():
            if name != "total":
                self._clock.add(f"{prefix}: {name}" if prefix else name, seconds)

    def _diagnosis(self) -> Diagnosis:
        return diagnose([row.layer for row in self._layers])

    def _verdict(self) -> Ending:
        if not any(Step.COMPILER in row.layer.gaps for row in self._layers):
            return failed(
                Stage.NUMERICS, "no layer could be compared: the program wrote no intermediate output", Cause.NONE
            )
        first = self._diagnosis().first
        if first is None:
            return Ending(Verdict.PASSED, Stage.DONE)
        return failed(Stage.NUMERICS, describe(first), Cause.NUMERICS)

    def _finished(self, ending: Ending, key: str, notes: tuple[str, ...], log: str = "") -> Attempt:
        issue = self._job.known_issue
        if issue is not None and issue.has_expired(datetime.now(tz=UTC).date()):
            issue = None
        known = ending.verdict is Verdict.FAILED and issue is not None and issue.stage == ending.stage
        diagnosis = self._diagnosis()
        return Attempt(
            job_id=self._job.id,
            verdict=ending.verdict,
            stage=ending.stage,
            reason=one_line(ending.reason),
            device=self._places[_DEVICE if _DEVICE in self._places else _SIMULATOR].device.serial,
            started_ms=self._started_ms,
            seconds=sum(self._clock.seconds.get(part, 0.0) for part in self._places),
            bundle_key=key,
            known_issue=issue.summary if known and issue else "",
            log=bounded_log(log),
            notes=tuple(one_line(note) for note in ("farm debug: compiled to keep every tensor", *notes)),
            layers=layer_comparisons([row.layer for row in self._layers], diagnosis),
        )

    def _not_compiled(self, reply: Reply, log: Path) -> Attempt:
        try:
            text = log.read_bytes()[-64 * 1024 :].decode(errors="replace")
        except OSError:
            text = ""
        if reply.refused:
            return Attempt(
                self._job.id,
                Verdict.SKIPPED,
                Stage.BUILD,
                reply.reason,
                started_ms=self._started_ms,
                log=bounded_log(text),
            )
        return build_failure(self._job, reply.reason, text, infra=reply.infra, started_ms=self._started_ms)


def describe(divergence: Divergence) -> str:
    """Return a divergence in one line."""
    return (
        f"first divergence: {divergence.layer} ({divergence.operator}), "
        f"likely cause: {divergence.step}: {divergence.why}"
    )


def _execute(place: AcquiredDevice, job: Job, run_id: str, scratch: Path, timeout_s: float, part: str) -> RawResult:
    from farm.bundles.bundle import load_bundle
    from farm.devices.connect import open_transport
    from farm.execution.session import DeviceSession, RunnerOptions
    from farm.suites.options import runtime_flags

    device = place.device
    session = DeviceSession(open_transport(device), place.runtime, run_id, device.serial)
    options = RunnerOptions(iterations=1, warm_up=0, timeout_s=timeout_s, flags=runtime_flags(job.target), debug=True)
    try:
        workspace = session.stage(load_bundle(scratch / BUNDLE))
        return session.execute(job.id, workspace, scratch / part, options)
    finally:
        session.close()
