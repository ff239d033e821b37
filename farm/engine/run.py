"""One `farm run`, from names to exit code."""

from __future__ import annotations

import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.engine.command import INTERRUPTED, Patience, exit_code_of, write_report
from farm.engine.compile import builders
from farm.engine.fleet import Choice
from farm.engine.profile import Profile
from farm.errors import FarmError, IllegalTargetError, InfraError, NothingSelectedError, UsageError
from farm.identity import user_name
from farm.options import parse_options, runtime_flags
from farm.profiles import find_soc
from farm.suite_files import find_suites, resolve_suite
from farm.suites import Job, OptionSet, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.config import Config
    from farm.engine.custody import LeaseTerms
    from farm.engine.fleet import Fleet
    from farm.engine.front import Front
    from farm.engine.plan import PlannedJob, RunPlan
    from farm.engine.toolchain import Toolchain
    from farm.execution.optrace import OptraceTools
    from farm.processes import Supervisor
    from farm.store.store import Store
    from farm.store.view import RunView

_PYTEST_OK, _PYTEST_FAILED, _PYTEST_INTERRUPTED, _PYTEST_USAGE, _PYTEST_EMPTY = 0, 1, 2, 4, 5
# pytest's options that decide what farm decides: how many workers, and which plugins it cannot do without.
_OURS = ("-n", "--numprocesses", "--dist", "--tx", "--maxprocesses", "--farm-plan", "-c", "--rootdir", "no:", "-pno:")


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str = "htp"
    precisions: tuple[str, ...] = ()
    virtual: int = 0
    """Virtual devices a SoC; 0 for attached ones."""
    selection: tuple[str, ...] = ()
    """pytest arguments that choose jobs."""
    pytest_arguments: tuple[str, ...] = ()
    """Other arguments for pytest."""
    iterations: int = 3
    warm_up: int = 1
    timeout_s: float = 300.0
    options: tuple[str, ...] = ()
    """`name=value,value`: every combination is a target of its own."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """Measure the DSP's heap, and nothing else."""
    command: str = ""
    choice: Choice = Choice()
    """Which attached devices may be used."""
    most_devices: int | None = None
    """Attached devices of each SoC at most; None for all that are free."""
    nightly: bool = False
    """Hand a device over, between two jobs, to a person who waits for it."""


class RunOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    exit_code: int
    view: RunView
    report: Path
    """The HTML file."""


def collect(config: Config, request: RunRequest) -> list[str]:
    """Return the ids of the jobs that `request` selects, in the order of the manifests.

    Raises UsageError for what cannot be, NothingSelectedError when nothing is left.
    """
    jobs = _jobs(config, request)
    with tempfile.TemporaryDirectory(prefix="farm-collect-") as folder:
        selected = {job.id for job in _select(config, request, jobs, Path(folder))}
    return [job.id for job in jobs if job.id in selected]


def _jobs(config: Config, request: RunRequest) -> tuple[Job, ...]:
    socs = list(dict.fromkeys(find_soc(name) for name in request.socs))
    known = find_suites(config.suite_folders)
    suites = [resolve_suite(name, known) for name in dict.fromkeys(request.suites)]
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise UsageError(f"two suites have the same name: {', '.join(sorted(names))}")
    _check_measurements(request)
    return plan(suites, socs, request.backend, request.precisions, _option_sets(request))


def _check_measurements(request: RunRequest) -> None:
    if request.heap and request.backend != "htp":
        raise IllegalTargetError(f"--heap is for the htp backend: ExecuTorch has no heap profile of {request.backend}")
    if request.heap and request.profile is not Profile.AUTO:
        raise UsageError("--heap measures nothing else: leave --profile out")
    if request.profile is Profile.OPTRACE and request.backend != "htp":
        raise IllegalTargetError(f"--profile optrace is for the htp backend, not for {request.backend}")


def _check_machine(config: Config, request: RunRequest) -> None:
    """Raise MissingToolError for what compiling or running would lack: listing jobs needs none of it."""
    from farm.runtime.runtime import require_backend

    for name in dict.fromkeys(request.socs):
        require_backend(find_soc(name), request.backend, config.sdk_root)
    _optrace_tools(config, request)


def _check_ready(jobs: Sequence[Job]) -> None:
    """Raise IllegalTargetError for a `.pte` that was compiled for something else, ConfigError for what is none."""
    ready = [job for job in jobs if job.case.pte]
    if ready:
        from farm.build.ready import read_ready

        for job in ready:
            read_ready(job)


def _optrace_tools(config: Config, request: RunRequest) -> OptraceTools | None:
    if request.profile is not Profile.OPTRACE:
        return None
    from farm.execution.optrace import find_optrace_tools

    return find_optrace_tools(config.sdk_root, "x86_64-linux-clang" if request.virtual else "aarch64-android")


def _option_sets(request: RunRequest) -> tuple[OptionSet, ...]:
    sets = parse_options(request.options, request.backend)
    if request.profile is not Profile.OPTRACE:
        return sets
    # Compiled in, so that it is another bundle, and another series, as it costs time.
    return tuple(tuple(sorted((*options, ("profile_level", "optrace")))) for options in sets)


def _select(config: Config, request: RunRequest, jobs: Sequence[Job], folder: Path) -> list[Job]:
    arguments = (*request.selection, *request.pytest_arguments)
    if not arguments:
        return list(jobs)
    for argument in arguments:
        if argument.startswith(_OURS):
            raise UsageError(f"{argument} is not for the user to say: farm starts one worker for every device")
    from farm.engine.plan import PlannedJob
    from farm.engine.session import select

    draft = _plan(config, request, "", folder, [PlannedJob(job, "", cached=True) for job in jobs])
    draft.write()
    status, ids = select(draft, arguments, config.state_dir)
    if status == _PYTEST_USAGE:
        raise UsageError(f"pytest does not understand {' '.join(arguments)}")
    chosen = set(ids)
    selected = [job for job in jobs if job.id in chosen]
    if not selected:
        raise NothingSelectedError(f"none of {len(jobs)} jobs is selected by {' '.join(arguments)}")
    return selected


def _plan(
    config: Config,
    request: RunRequest,
    run_id: str,
    folder: Path,
    jobs: Sequence[PlannedJob],
    fleet: Fleet | None = None,
    canaries: Sequence[PlannedJob] = (),
) -> RunPlan:
    from farm.engine.plan import RunPlan

    return RunPlan(
        run_id=run_id,
        folder=folder,
        cache_root=config.cache_dir,
        jobs=tuple(jobs),
        devices=tuple(fleet.devices) if fleet else (),
        runtimes=fleet.runtimes if fleet else {},
        iterations=request.iterations,
        warm_up=request.warm_up,
        timeout_s=request.timeout_s,
        artifact_root=config.state_dir / "artifacts",
        profile=request.profile,
        heap=request.heap,
        optrace=_optrace_tools(config, request) if run_id else None,
        canaries=tuple(canaries),
        leased=fleet.leased if fleet else False,
        health=config.health,
    )


def run(config: Config, request: RunRequest, front: Front) -> RunOutcome:
    """Run what `request` asks for and return how it ended; everything started is ended again.

    Raises UsageError or NothingSelectedError before anything is changed, InfraError when no job could begin.
    """
    from farm.store.store import open_store

    jobs = _jobs(config, request)
    _check_machine(config, request)
    with tempfile.TemporaryDirectory(prefix="farm-select-") as draft:
        jobs = tuple(_select(config, request, jobs, Path(draft)))
    _check_ready(jobs)
    with Patience() as patience, open_store(config.store_url) as store:
        return _Run(config, request, front, store, patience).execute(jobs)


def resume(config: Config, ref: str, front: Front) -> RunOutcome:
    """Finish what is missing of a run, `latest` or an id: jobs that have no verdict about the code.

    Raises UnknownNameError for a run that is not there, UsageError for one that still runs, or that cannot be continued
    as what its numbers depend on has changed since.
    """
    from farm.engine.resume import in_progress, missing_jobs, read_intent
    from farm.store.store import open_store

    with Patience() as patience, open_store(config.store_url) as store:
        run_id = store.resolve_run(ref)
        folder = config.run_folder(run_id)
        request, jobs = read_intent(folder)
        _check_machine(config, request)
        view = store.run_view(run_id)
        missing = missing_jobs(view, jobs)
        front.note(f"run {run_id}: {len(jobs) - len(missing)} of {len(jobs)} jobs are finished")
        if not missing:
            if view.exit_code is None:
                with in_progress(folder):
                    store.finish_run(run_id, exit_code_of(view))
                view = store.run_view(run_id)
            return RunOutcome(exit_code_of(view), view, write_report(view, folder / "report.html"))
        return _Run(config, request, front, store, patience).execute(missing, run_id)


class _Run:
    """The part of a run that leaves traces: store, run folder, processes."""

    def __init__(self, config: Config, request: RunRequest, front: Front, store: Store, patience: Patience) -> None:
        self._config, self._request, self._front, self._store = config, request, front, store
        self._patience = patience

    def execute(self, jobs: tuple[Job, ...], run_id: str = "") -> RunOutcome:
        """Run `jobs`, in a run of its own or, with `run_id`, in one that was not finished."""
        from farm.engine.resume import in_progress, require_same
        from farm.engine.toolchain import prepare
        from farm.processes import Supervisor
        from farm.publish import own_folder

        tools = prepare(self._config, self._front.note, virtual=self._request.virtual > 0)
        fingerprint = tools.fingerprint(virtual=self._request.virtual > 0) | self._profile_fact()
        if run_id:
            require_same(self._store.run_view(run_id).fingerprint, fingerprint, run_id)
        else:
            run_id = self._begin(jobs, fingerprint)
        # Also of a run that was killed before it had done so.
        self._store.plan_jobs(run_id, jobs)
        folder = self._config.run_folder(run_id)
        exit_code = InfraError.exit_code
        with in_progress(folder) as before:
            try:
                self._release_leases(before)
                with own_folder(self._config.cache_dir / "virtual", run_id) as storage, Supervisor() as supervisor:
                    status = self._on_devices(jobs, run_id, folder, storage, tools, supervisor)
                exit_code = INTERRUPTED if self._patience.was_asked else self._exit_code(run_id, status)
            except KeyboardInterrupt:
                exit_code = INTERRUPTED
            except FarmError as error:
                exit_code = error.exit_code
                raise
            finally:
                self._store.finish_run(run_id, exit_code)
        view = self._store.run_view(run_id)
        return RunOutcome(exit_code, view, write_report(view, folder / "report.html"))

    def _release_leases(self, pid: int) -> None:
        """Give back at once what a process had that is known to be dead; others have to wait until it expires."""
        # One that lives is another with the same number.
        if pid and not Path(f"/proc/{pid}").exists():
            host, user = socket.gethostname(), user_name()
            self._store.leases.release(
                lease for lease in self._store.leases.all() if (lease.host, lease.user, lease.pid) == (host, user, pid)
            )

    def _begin(self, jobs: Sequence[Job], fingerprint: dict[str, str]) -> str:
        from farm.engine.resume import leave_intent
        from farm.store.records import RunRecord

        record = RunRecord(
            command=self._request.command,
            user=user_name(),
            host=socket.gethostname(),
            fingerprint=fingerprint,
            priority="nightly" if self._request.nightly else "person",
        )
        # A run that anybody can see can be resumed.
        return self._store.begin_run(
            record, lambda run_id: leave_intent(self._config.run_folder(run_id), self._request, jobs)
        )

    def _profile_fact(self) -> dict[str, str]:
        """Return what the numbers depend on where more, or less, is looked at than usual."""
        if self._request.heap:
            return {"heap": "measured"}
        profile, kind = self._request.profile, "virtual" if self._request.virtual else "hardware"
        usual = profile.flags(kind) == Profile.AUTO.flags(kind) and profile is not Profile.OPTRACE
        return {} if usual else {"profile": str(profile)}

    def _on_devices(
        self, jobs: Sequence[Job], run_id: str, folder: Path, storage: Path, tools: Toolchain, supervisor: Supervisor
    ) -> int:
        """Return pytest's exit status."""
        from farm.engine.canary import canary_jobs
        from farm.engine.controller import Controller
        from farm.engine.custody import Custody
        from farm.engine.session import execute

        with ThreadPoolExecutor(1) as aside:
            allocation = aside.submit(self._fleet, jobs, storage, supervisor)
            planned = self._order(jobs, tools)
            # A program that stays loaded would be in every number of the heap.
            canaries = [] if self._request.heap else self._order(canary_jobs(tuple(jobs)), tools)
            fleet = allocation.result()
        run_plan = _plan(self._config, self._request, run_id, folder, planned, fleet, canaries)
        run_plan.prepare_folder()
        for device in fleet.devices:
            self._store.record_device(run_id, device)
        custody = Custody(fleet.devices, self._store, self._terms() if fleet.leased else None, self._front.note)
        if fleet.server is not None:
            custody.keep_alive(partial(fleet.server.revive, supervisor))
        try:
            custody.acquire()
            with builders(self._config, run_plan, tools, supervisor, self._front, self._store) as to_build:
                self._front.begin(jobs=len(planned), to_build=to_build, devices=[d.serial for d in fleet.devices])
                custody.begin(folder)
                controller = Controller(run_plan, self._front, self._store, custody)
                with self._patience.asking(custody.finish_running):
                    status = execute(run_plan, self._request.pytest_arguments, self._config, controller)
                if controller.interrupted:
                    raise KeyboardInterrupt
                return status
        finally:
            custody.close()

    def _fleet(self, jobs: Sequence[Job], storage: Path, supervisor: Supervisor) -> Fleet:
        from farm.engine.fleet import attached_fleet, virtual_fleet

        config, request = self._config, self._request
        socs = [find_soc(name) for name in dict.fromkeys(job.target.soc for job in jobs)]
        if request.virtual:
            return virtual_fleet(config, socs, request.virtual, request.backend, supervisor, storage)
        return attached_fleet(config, socs, request.backend, request.choice, supervisor, self._store)

    def _terms(self) -> LeaseTerms:
        from farm.engine.custody import LeaseTerms
        from farm.leases import Priority

        return LeaseTerms(
            ttl_s=self._config.leases.ttl_s,
            priority=Priority.NIGHTLY if self._request.nightly else Priority.PERSON,
            purpose=self._request.command,
            most=self._request.most_devices,
        )

    def _order(self, jobs: Sequence[Job], tools: Toolchain) -> list[PlannedJob]:
        from farm.build.cache import BundleCache
        from farm.build.key import bundle_key
        from farm.engine.plan import PlannedJob
        from farm.engine.scheduler import dispatch_order

        cache = BundleCache(self._config.cache_dir)
        keys = {job.id: bundle_key(job, tools.versions) for job in jobs}
        cached = {key: cache.lookup(key) is not None for key in set(keys.values())}
        by_id = {job.id: job for job in jobs}
        order = dispatch_order(
            list(by_id),
            cached={job_id: cached[key] for job_id, key in keys.items()},
            expected_seconds={
                job_id: past.run_seconds
                for job_id, past in self._store.past(
                    list(by_id), "virtual" if self._request.virtual else "hardware"
                ).items()
            },
            sessions={job.id: tuple(runtime_flags(job.target).items()) for job in jobs},
        )
        return [PlannedJob(by_id[job_id], keys[job_id], cached=cached[keys[job_id]]) for job_id in order]

    def _exit_code(self, run_id: str, status: int) -> int:
        if status not in (_PYTEST_OK, _PYTEST_FAILED, _PYTEST_INTERRUPTED):
            raise InfraError(f"the test session broke down (pytest status {status}); what is said above tells why")
        return exit_code_of(self._store.run_view(run_id))
