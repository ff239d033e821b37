"""Selection of a run's jobs, by suites, options and earlier results; the one job that a user names."""

from __future__ import annotations

import logging
import re
import shlex
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from farm.base.errors import (
    FarmError,
    IllegalTargetError,
    NothingSelectedError,
    StoreError,
    UnknownNameError,
    UsageError,
)
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.key import QNN_PRODUCT, stub_of
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.runtime.qnn_sdk import sdk_product
from farm.builds.runtime.runtime import attached_runtime, require_backend
from farm.devices.device import MIXED
from farm.devices.execution.optrace import OptraceTools, find_optrace_tools
from farm.dispatch.pool.fleet import attached_kind
from farm.dispatch.request.profiling import Profile, require_profilable
from farm.dispatch.request.records import is_private_run, planned_jobs
from farm.dispatch.request.request import RunRequest
from farm.dispatch.request.selection import Version, changed, in_shard, total_seconds
from farm.store.records import Purpose, RunView
from farm.store.values import judged_by
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.options import parse_options, require_limits
from farm.suites.suite import Case, Job, OptionSet, Suite, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.builds.runtime.native import Mode
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.store import Store


# Selection of a run's jobs: by suites, by the options -k, --lf and --shard, and by earlier results.


logger = logging.getLogger(__name__)

# Names of a run that change when a new run begins, so that shards would name different runs.
_RELATIVE = re.compile(r"latest(~\d+)?(@.+)?")
# pytest's rule for one word is this one; its import would cost 0.3 s.
_WORD = re.compile(r"\w+")


def jobs_of(config: Config, request: RunRequest) -> tuple[Job, ...]:
    """Return all jobs of the suites that `request` names. Raises UsageError for options that contradict each other."""
    socs = list(dict.fromkeys(find_soc(name) for name in request.socs))
    known = find_suites(config.suite_folders)
    suites = [resolve_suite(name, known) for name in dict.fromkeys(request.suites)]
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise UsageError(f"two suites have the same name: {', '.join(sorted(names))}")
    _check_measurements(request)
    jobs = plan(suites, socs, request.backend, request.precisions, _option_sets(request))
    if jobs and jobs[0].target.direct:
        if request.heap:
            raise UsageError(f"direct mode's runner has no heap profile: leave --heap or {DIRECT_MODE} out")
        require_profilable(request.profile, direct=True)
    return jobs


def _check_measurements(request: RunRequest) -> None:
    backend = find_backend(request.backend)
    if request.heap:
        require_heap(backend.name)
    if request.heap and request.profile is not Profile.AUTO:
        raise UsageError("--heap measures nothing else: leave --profile out")
    if request.heap and request.seconds is not None:
        raise UsageError("--heap runs every job once: leave --seconds out")
    if request.profile is Profile.OPTRACE and "profile_level" not in backend.options:
        able = " and ".join(name for name, one in BACKENDS.items() if "profile_level" in one.options)
        raise IllegalTargetError(f"--profile optrace is for the {able} backend, not for {backend.name}")


def require_heap(backend: str) -> None:
    """Raise IllegalTargetError for a backend for which ExecuTorch cannot measure the DSP's heap."""
    if not find_backend(backend).has_dsp_heap:
        able = " and ".join(name for name, one in BACKENDS.items() if one.has_dsp_heap)
        raise IllegalTargetError(f"--heap is for the {able} backend: ExecuTorch has no heap profile of {backend}")


def _option_sets(request: RunRequest) -> tuple[OptionSet, ...]:
    sets = parse_options(request.options, request.backend)
    if request.profile is not Profile.OPTRACE:
        return sets
    # The level is an option of the target: it changes the bundle, and its times are a series of their own.
    return tuple(tuple(sorted((*options, ("profile_level", "optrace")))) for options in sets)


def select(request: RunRequest, jobs: Sequence[Job], *, judged: bool = True) -> tuple[Job, ...]:
    """Return the jobs that `-k` selects.

    Raises UsageError for an invalid expression, for measurements that a job does not support and, with `judged`, for a
    job without a limit; NothingSelectedError.
    """
    selected = _select(request, jobs)
    if request.seconds is not None:
        _require_generation(selected)
    if request.heap:
        _require_compiled_contexts(selected)
    if judged:
        require_limits(selected)
    return selected


def _require_compiled_contexts(jobs: Sequence[Job]) -> None:
    """Raise UsageError for programs with online prepare: ExecuTorch does not measure the heap of their contexts."""
    if online := [job.case.name for job in jobs if job.case.features.online_prepare]:
        without = " and ".join(f"not {name}" for name in dict.fromkeys(online))
        raise UsageError(
            f"--heap measures contexts that were compiled ahead of time, and {online[0]} makes its own on the device "
            f"(online_prepare): leave it out with -k {shlex.quote(without)}"
        )


def _require_generation(jobs: Sequence[Job]) -> None:
    """Raise UsageError for jobs that generate no text, for which --seconds has no meaning."""
    if others := [job.id for job in jobs if job.case.generate is None]:
        more = f", nor {len(others) - 1} more" if others[1:] else ""
        raise UsageError(
            f"--seconds is for programs that generate text: {others[0]} does not{more}; leave --seconds out, or select "
            "jobs with -k"
        )


def _select(request: RunRequest, jobs: Sequence[Job]) -> tuple[Job, ...]:
    if not request.keyword:
        return tuple(jobs)
    word = request.keyword.lower()
    if _WORD.fullmatch(word) and word not in ("and", "or", "not"):
        selected = tuple(job for job in jobs if word in job.id.lower())
    else:
        from farm.dispatch.request.keyword import matching

        chosen = set(matching([job.id for job in jobs], request.keyword))
        selected = tuple(job for job in jobs if job.id in chosen)
    if not selected:
        raise NothingSelectedError(f"none of {len(jobs)} jobs is selected by -k {request.keyword}")
    return selected


def check_ready(jobs: Sequence[Job], request: RunRequest | None = None) -> None:
    """Raise IllegalTargetError for a `.pte` of another target, ConfigError for a file that is no program.

    Raises UsageError if `request` names more executions than direct mode's runner can make.
    """
    ready = [job for job in jobs if job.case.pte]
    if ready:
        from farm.builds.bundles.ready import read_ready

        for job in ready:
            read_ready(job)
    if request is not None:
        _check_executions(request, jobs)


def _check_executions(request: RunRequest, jobs: Sequence[Job]) -> None:
    if request.reducible or request.heap or not any(job.target.direct for job in jobs):
        return
    from farm.builds.bundles.ready import read_ready
    from farm.devices.execution.runner_process import too_many

    times = request.iterations + request.warm_up
    for job in jobs:
        # The number of outputs is unknown before the compile: assume one here; the job is checked again later.
        outputs = len(read_ready(job).outputs) if job.case.pte else 1
        if problem := too_many("direct mode's runner", job.case.samples, outputs, times):
            raise UsageError(f"{job.id}: {problem}")


def narrow(
    config: Config, request: RunRequest, jobs: tuple[Job, ...], store: Store, kind: Callable[[], str]
) -> tuple[Job, ...]:
    """Return the `jobs` that remain after selection by the store: --changed-since, then --shard, then --lf.

    `kind` returns `virtual` or `hardware`. Failed jobs are selected last, because they change while other shards run,
    and the jobs of a shard must stay the same. Raises UsageError for a run that cannot be compared,
    NothingSelectedError.
    """
    if not request.asks_the_store:
        return jobs
    from farm.builds.toolchains.selection import branch_of, prepare

    tools = cache(partial(prepare, config, virtual=request.virtual > 0))
    branch, kind_now = branch_of(config), kind()
    if request.changed_since is not None:
        jobs = _changed_since(config, request, jobs, store, tools, kind_now)
    if request.shard is not None:
        ids = [job.id for job in jobs]
        seconds = total_seconds(ids, store.selection.expected(ids, kind_now, branch))
        mine = in_shard(store.selection.agree_on_seconds(seconds, kind_now), request.shard)
        if not mine:
            raise NothingSelectedError(f"--shard {request.shard}: the {len(jobs)} jobs are all in other shards")
        jobs = tuple(job for job in jobs if job.id in mine)
    if request.last_failed:
        private = request.purpose is Purpose.LOCAL or is_private_run(tools(), request.purpose)
        failed = store.selection.failed_last([job.id for job in jobs], kind_now, store.user, branch, private=private)
        if failed:
            return tuple(job for job in jobs if job.id in failed)
        if request.shard is not None:
            # Without shards all jobs run here. With shards nothing runs, since another shard may have the failures.
            raise NothingSelectedError(f"--lf: none of the {len(jobs)} jobs of shard {request.shard} failed last time")
        logger.info("nothing failed last time: all %s jobs are run", len(jobs))
    return jobs


def _changed_since(
    config: Config, request: RunRequest, jobs: tuple[Job, ...], store: Store, tools: Callable[[], Toolchain], kind: str
) -> tuple[Job, ...]:
    from farm.builds.bundles.cache import BundleCache

    ref = request.changed_since or ""
    if request.shard is not None and _RELATIVE.fullmatch(ref):
        problem = "may mean another run for each shard: with --shard, name the run by its id"
        raise UsageError(f"--changed-since {ref} {problem}")
    view = store.runs.view(store.runs.resolve(ref))
    then_kind = view.fingerprint.get("device_kind", kind)
    if then_kind != kind:
        raise UsageError(
            f"--changed-since {ref}: run {view.id} was on {_DEVICES.get(then_kind, then_kind)}, this one "
            f"is for {_DEVICES.get(kind, kind)}: verdicts of the two are not comparable, name another run"
        )
    then = {(job.suite, job.soc, job.backend) for job in view.jobs}
    here = {(job.case.suite, job.target.soc, job.target.backend) for job in jobs}
    if not then & here:
        difference = f"run {view.id} was {_describe(then)}, this one is {_describe(here)}"
        raise UsageError(f"--changed-since {ref}: nothing to compare: {difference}")
    found = find_bundles_for(jobs, tools(), BundleCache(config.cache_dir))
    now = {job.id: Version(found[job.id].key, judged_by(job)) for job in jobs}
    chosen = changed(now, store.runs.verdicts(view.id)) | _with_another_runtime(view, jobs, tools, config, kind)
    if not chosen:
        raise NothingSelectedError(f"no job has changed since run {view.id}, of {len(jobs)} jobs")
    return tuple(job for job in jobs if job.id in chosen)


def _with_another_runtime(
    view: RunView, jobs: tuple[Job, ...], tools: Callable[[], Toolchain], config: Config, kind: str
) -> set[str]:
    """Return the jobs with another runner, or other libraries on the device, than in a run; unknown ones are equal."""

    @cache
    def differs(soc: str, backend: str, mode: Mode) -> bool:
        if kind == "virtual":
            runner = view.fingerprint.get("native_runner", "")
            return bool(runner) and runner != tools().fingerprint(kind)["native_runner"]
        had = [one.runtime for one in view.devices if (one.soc, one.kind) == (soc, kind) and one.runtime]
        now = []
        for linux in (False, True) if had else ():
            # A missing runtime is reported when devices are looked for.
            with suppress(FarmError):
                now.append(attached_runtime(config, find_soc(soc), backend, mode, linux=linux).versions)
        # The store adds the SoC that the device reports.
        known = [{name: value for name, value in one.items() if name != "soc_reported"} for one in had]
        return bool(now) and any(one not in now for one in known)

    found = {job.id for job in jobs if differs(job.target.soc, job.target.backend, job.target.mode)}
    if found:
        logger.info("%s of %s jobs have another runner or other libraries than run %s", len(found), len(jobs), view.id)
    return found


_DEVICES = {"virtual": "virtual devices", "hardware": "hardware", MIXED: "devices of both kinds"}


def device_kind_of(config: Config, request: RunRequest, store: Store, default: str = "hardware") -> str:
    """Return the kind of device that `request` would use now; `default` if no device is attached.

    Verdicts and times of different kinds are not compared.
    """

    if request.virtual:
        return "virtual"
    with Supervisor() as supervisor:
        socs = [find_soc(name).name for name in request.socs]
        return attached_kind(config, socs, request.choice, supervisor, store) or default


def _describe(targets: Collection[tuple[str, str, str]]) -> str:
    """Return (suite, SoC, backend) triples as text."""
    if not targets:
        return "of no job"
    suites, socs, backends = (", ".join(sorted(set(names))) for names in zip(*targets, strict=True))
    return f"{suites} for {socs} on {backends}"


def collect(
    config: Config,
    request: RunRequest,
    *,
    judged: bool = True,
    kind_of: Callable[[Config, RunRequest, Store], str] | None = None,
) -> list[str]:
    """Return the ids of the jobs that `request` selects, in the order of the manifests; `judged` as in `select`.

    `kind_of` replaces `device_kind_of` for devices that are not attached here.

    Raises UsageError for contradicting options, NothingSelectedError if no job remains.
    """
    if request.toolchain:
        from farm.builds.toolchains.selection import toolchain_of

        toolchain_of(config, request.toolchain)
    jobs = select(request, jobs_of(config, request), judged=judged)
    if request.asks_the_store:
        from farm.builds.toolchains.selection import use_toolchain
        from farm.store.store import open_store

        config = use_toolchain(config, request.toolchain)
        with open_store(config.store_url) as store:
            jobs = narrow(config, request, jobs, store, lambda: (kind_of or device_kind_of)(config, request, store))
    return [job.id for job in jobs]


def check_machine(config: Config, request: RunRequest) -> None:
    """Raise MissingToolError for missing parts of the compiler or runtime; listing jobs needs no such check.

    Raises IllegalTargetError for measurements that no virtual device supports.
    """

    for name in dict.fromkeys(request.socs):
        require_backend(find_soc(name), request.backend, config.sdk_root)
    if request.heap and request.virtual:
        require_dsp(config)
    optrace_tools(config, request)


def require_dsp(config: Config) -> None:
    """Raise IllegalTargetError for --heap on the simulator, which has no DSP; a stub of QNN (tests) passes."""

    if not stub_of({QNN_PRODUCT: sdk_product(config.sdk_root)}):
        raise IllegalTargetError("--heap measures the heap of a DSP, and the simulator has none: attach a device")


def optrace_tools(config: Config, request: RunRequest) -> OptraceTools | None:
    """Return the SDK's tools for `--profile optrace`; None for other profiles. Raises MissingToolError."""
    if request.profile is not Profile.OPTRACE:
        return None

    return find_optrace_tools(config.sdk_root, "x86_64-linux-clang" if request.virtual else "aarch64-android")


# A job as users name it: its id, or suite/case with options for its target.


def named_job(
    config: Config,
    text: str,
    command: str,
    *,
    soc: str | None = None,
    precision: str | None = None,
    options: Sequence[str] = (),
) -> Job:
    """Return the job that `text` names: `suite/case[SM8650-htp-8a8w]`, or `suite/case` with an SoC and a precision.

    An SoC may be left out where the store has the case on only one, a precision where the case has only one.
    `command` is what an error shows as an example. Raises UnknownNameError with the nearest name, IllegalTargetError,
    UsageError for a text that names no job or several.
    """
    name, bracket, target = text.partition("[")
    suite_name, slash, case_name = name.rpartition("/")
    if not slash or not suite_name or not case_name or (bracket and not target.endswith("]")):
        raise UsageError(f"{text!r} names no job: expected suite/case[SoC-htp-precision], or suite/case with --soc")
    backend = DEFAULT_BACKEND
    if bracket:
        if soc or precision or options:
            raise UsageError(f"{text!r} has a target already: leave --soc, --precision and --option out")
        soc, backend, precision, options = _parse_target(text, target.removesuffix("]"))
    soc = soc or _only_soc(config, name, command)
    suite, case = find_case(suite_name, case_name, known_suites(config, suite_name))
    (chosen, *others) = parse_options(options, backend)
    if others:
        raise UsageError(f"{name} is one job: give every option one value")
    jobs = plan(
        [msgspec.structs.replace(suite, cases=(case,))],
        [find_soc(soc)],
        backend,
        (precision,) if precision else (),
        (chosen,),
    )
    if len(jobs) > 1:
        precisions = ", ".join(job.target.precision for job in jobs)
        raise UsageError(f"{name} runs at several precisions, {precisions}: choose one with --precision")
    return jobs[0]


def _only_soc(config: Config, name: str, command: str) -> str:
    """Return the SoC that the store has jobs of the case `name` for. Raises UsageError where there is not just one."""
    from farm.store.store import open_store

    try:
        with open_store(config.store_url, readonly=True) as store:
            known = store.history.socs([name])
    except StoreError:
        known = []
    if len(known) == 1:
        return known[0]
    there = f", and there are results on {', '.join(known)}" if known else ""
    example = known[0] if known else "SM8650"
    hint = f"name the SoC with --soc, as in '{command} {name} --soc {example}'"
    raise UsageError(f"{name!r} has no target{there}: {hint}")


def find_case(suite_name: str, case_name: str, known: Mapping[str, Path]) -> tuple[Suite, Case]:
    """Return a suite, by its name in `known` or its path, and its case. Raises UnknownNameError with the nearest."""
    suite = resolve_suite(suite_name, known)
    cases = {case.name: case for case in suite.cases}
    if case_name not in cases:
        raise UnknownNameError("case", case_name, cases, f"in suite {suite.name}")
    return suite, cases[case_name]


def known_suites(config: Config, name: str) -> dict[str, Path]:
    """Return the manifests of suites by name; for `name` also the path from which this user ran it last."""
    known = find_suites(config.suite_folders)
    if "/" not in name and name not in known and (manifest := _manifest_run_last(config, name)):
        known[name] = manifest
    return known


def _manifest_run_last(config: Config, name: str) -> Path | None:
    """Return where the suite `name` was in the newest run whose plan this user has here; None where it is not now."""
    from farm.store.store import open_store

    try:
        with open_store(config.store_url, readonly=True) as store:
            runs = sorted(set(store.history.newest_runs(name, debug=True).values()), reverse=True)
    except (StoreError, UnknownNameError):
        return None
    for run_id in runs:
        for job in planned_jobs(config.run_folder(run_id)):
            # A case that is included is in the folder of its own suite, which is beside.
            manifest = Path(job.case.folder).parent / name / "suite.toml"
            if job.case.suite == name and manifest.is_file():
                return manifest
    return None


def _parse_target(text: str, target: str) -> tuple[str, str, str, tuple[str, ...]]:
    parts = target.split("-")
    if len(parts) < 3 or not all(parts):
        raise UsageError(
            f"{text!r} has no target that is understood: expected SoC-htp-precision, as in SM8650-htp-8a8w"
        )
    soc, backend, precision, *options = parts
    return soc, backend, precision, tuple(options)
