"""One bundle on one device, now: what `farm exec` and `farm repro` have in common. It is a run of one job in the store.

Apart from `farm run` in what a single job does not need: no builders, no canary, no other device that is asked.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.errors import FarmError, InfraError
from farm.execution.raw import ETDUMP_FILE
from farm.pool.acquire import acquire_attached, acquire_virtual
from farm.pool.fleet import Choice
from farm.request.ending import INTERRUPTED, Patience, exit_code_of, write_report
from farm.request.profiling import Profile
from farm.results.attempt import Attempt, Cause, Verdict
from farm.results.blame import damaged
from farm.results.judge import judge
from farm.results.profile.etdump import ETDUMP_LIMIT
from farm.results.text import one_line
from farm.store.records import ArtifactRecord
from farm.suites.options import runtime_flags
from farm.suites.suite import Job
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.bundles.bundle import Bundle
    from farm.compile.toolchain import Toolchain
    from farm.config.settings import Config
    from farm.devices.device import Device
    from farm.execution.raw import RawResult
    from farm.execution.session import RunnerOptions
    from farm.pool.acquire import AcquiredDevice
    from farm.store.store import Store
    from farm.system.processes import Supervisor

    FindBundle = Callable[[Toolchain, Supervisor], Bundle]
    Look = Callable[[RawResult, Attempt], Attempt]

OUTPUT = "output:"
"""What the kind of an artifact that is an output begins with; its file name follows."""

# Of one attempt, in all: what the outputs of a segmentation network take a hundred times over.
_KEPT_BYTES = 64 << 20


class OneOffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, where and how."""

    job: Job
    virtual: bool
    """On a virtual device of its own."""
    otherwise: str
    """What to use where no device is attached: an option, for the message."""
    choice: Choice = Choice()
    iterations: int = 3
    warm_up: int = 1
    timeout_s: float = 300.0
    profile: Profile = Profile.AUTO
    command: str = ""
    facts: dict[str, str] = {}
    """What else its numbers depend on."""


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
    """Run one bundle, record it, and return how it ended; everything started is ended again. `say` hears of each step.

    `find_bundle` is called before anything is recorded. `look` sees what came back while it is there, and returns what
    is to be recorded. Raises what `find_bundle` raises, NoDeviceError where no device is attached.
    """
    with Patience():
        return _OneOff(config, store, request, say).execute(find_bundle, look)


class _OneOff:
    """The part that leaves traces: store, folder, processes."""

    def __init__(self, config: Config, store: Store, request: OneOffRequest, say: Callable[[str], None]) -> None:
        self._config, self._store, self._request, self._say = config, store, request, say
        self._job = request.job

    def execute(self, find_bundle: FindBundle, look: Look) -> OneOffOutcome:
        from farm.compile.toolchain import prepare
        from farm.system.processes import Supervisor
        from farm.system.publish import own_folder

        request, config = self._request, self._config
        tools = prepare(config, self._say, virtual=request.virtual)
        name = f"one-off-{secrets.token_hex(6)}"
        with (
            own_folder(config.cache_dir / "virtual", name) as storage,
            Supervisor() as supervisor,
            ExitStack() as leases,
        ):
            bundle = find_bundle(tools, supervisor)
            if request.virtual:
                place = acquire_virtual(config, self._job.target, supervisor, storage)
            else:
                place = acquire_attached(
                    config, self._store, self._job.target, supervisor, leases, self._say,
                    choice=request.choice, purpose=request.command, otherwise=request.otherwise,
                )  # fmt: skip
            return self._recorded(tools, bundle, place, look)

    def _recorded(self, tools: Toolchain, bundle: Bundle, place: AcquiredDevice, look: Look) -> OneOffOutcome:
        run_id = self._begin(tools, bundle, place)
        folder = self._config.run_folder(run_id)
        attempt: Attempt | None = None
        kept: tuple[ArtifactRecord, ...] = ()
        exit_code = InfraError.exit_code
        try:
            self._say(f"running on {place.device.serial} ({place.device.kind})")
            raw, attempt = self._execute(bundle, place, run_id, folder / "raw")
            attempt = look(raw, attempt)
            attempt, kept = self._keep(raw, attempt)
            self._store.record_attempt(run_id, attempt, artifacts=kept, fence=place.fence)
            exit_code = exit_code_of(self._store.runs.view(run_id))
        except KeyboardInterrupt:
            attempt, exit_code = None, INTERRUPTED
        except FarmError as error:
            exit_code = error.exit_code
            raise
        finally:
            shutil.rmtree(folder / "raw", ignore_errors=True)
            self._store.finish_run(run_id, exit_code)
        return OneOffOutcome(
            run_id,
            exit_code,
            attempt,
            place.device.kind,
            kept_outputs(kept),
            write_report(self._store.runs.view(run_id), folder / "report.html", self._store, self._config.state_dir),
        )

    def _begin(self, tools: Toolchain, bundle: Bundle, place: AcquiredDevice) -> str:
        from farm.request.resume import leave_intent
        from farm.store.records import RunRecord

        request, kind = self._request, place.device.kind
        # What compiled the bundle, which may be older than what is installed.
        facts = tools.fingerprint(virtual=request.virtual) | bundle.manifest.versions | request.facts
        if request.profile.flags(kind) != Profile.AUTO.flags(kind):
            facts["profile"] = str(request.profile)
        record = RunRecord(request.command, user_name(), socket.gethostname(), facts)
        run_id = self._store.begin_run(
            record, lambda run_id: leave_intent(self._config.run_folder(run_id), None, [self._job])
        )
        self._store.plan_jobs(run_id, [self._job])
        self._store.record_device(run_id, place.device, place.runtime.versions)
        manifest = bundle.manifest
        self._store.record_build(
            run_id, self._job.id, seconds=0.0, cached=True, bundle_key=manifest.key, fallback_ops=manifest.fallback_ops
        )
        return run_id

    def _execute(self, bundle: Bundle, place: AcquiredDevice, run_id: str, folder: Path) -> tuple[RawResult, Attempt]:
        from farm.devices.connect import open_transport
        from farm.execution.session import DeviceSession

        device, runtime = place.device, place.runtime
        leased = place.fence is not None
        session = DeviceSession(open_transport(device), runtime, run_id, device.serial, takeover=leased)
        try:
            if runtime.needs_root:
                from farm.devices.root import ensure_root

                ensure_root(device)
            workspace = session.stage(bundle)
            raw = session.execute(self._job.id, workspace, folder, self._options(device))
            attempt = judge(self._job, bundle, raw, operators=self._request.profile.kept)
            if attempt.verdict is Verdict.FAILED and attempt.cause in (Cause.NUMERICS, Cause.REFUSED):
                what = session.find_damage(bundle, raw)
                attempt = damaged(attempt, what) if what else attempt
            return raw, attempt
        finally:
            session.close()

    def _options(self, device: Device) -> RunnerOptions:
        from farm.execution.session import RunnerOptions

        request = self._request
        return RunnerOptions(
            iterations=request.iterations,
            warm_up=request.warm_up,
            timeout_s=request.timeout_s,
            flags={**runtime_flags(self._job.target), **request.profile.flags(device.kind)},
            etdump=request.profile.kept,
        )

    def _keep(self, raw: RawResult, attempt: Attempt) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep the outputs, and the profile where one was asked for. What goes wrong here changes no verdict."""
        from farm.store.artifacts import ArtifactStore

        store = ArtifactStore(self._config.state_dir / "artifacts")
        outputs = sorted(raw.folder.glob("output_*.raw"))
        wanted = {path: f"{OUTPUT}{path.name}" for path in outputs}
        notes, kept = list(attempt.notes), []
        if sum(path.stat().st_size for path in outputs) > _KEPT_BYTES:
            wanted = {}
            notes.append(f"its outputs are not kept: they have more than {_KEPT_BYTES >> 20} MiB")
        etdump = raw.folder / ETDUMP_FILE
        if self._request.profile.kept and etdump.is_file() and etdump.stat().st_size <= ETDUMP_LIMIT:
            wanted[etdump] = "etdump"
        for path, kind in wanted.items():
            try:
                kept.append(ArtifactRecord(store.put(path), path.stat().st_size, kind))
            except (FarmError, OSError) as error:
                notes.append(one_line(f"{path.name} is not kept: {error}"))
        return msgspec.structs.replace(attempt, notes=tuple(notes)), tuple(kept)


def kept_outputs(artifacts: tuple[ArtifactRecord, ...] | list[ArtifactRecord]) -> dict[str, str]:
    """Return the SHA-256 of the outputs among `artifacts` by their file names; of a name that comes twice the last."""
    return {one.kind.removeprefix(OUTPUT): one.sha256 for one in artifacts if one.kind.startswith(OUTPUT)}
