"""Result in the store -> its job with limits, and the exact bundle."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import ArtifactLostError, InfraError, NoHistoryError, UnknownNameError, UsageError
from farm.base.files import make_folders
from farm.base.forms import is_bundle_key
from farm.base.processes import Supervisor
from farm.base.socs import check_target, find_soc
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key, facts_of, relevant_versions
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.compile.protocol import BuildReply
from farm.builds.runtime.runtime import LLAMA_RUNNER
from farm.builds.toolchains.toolchain import Toolchain
from farm.dispatch.device_run.artifacts import kept_outputs
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.records import changed_code, planned_jobs
from farm.results.analysis.history import CONTENTS, changed_facts, side_of
from farm.results.attempt import Attempt
from farm.store.records import JobView, RunView
from farm.store.rows import device_facts
from farm.store.store import Store, open_store
from farm.suites.options import check_options
from farm.suites.suite import Job, MethodInputs, Target

logger = logging.getLogger(__name__)


# More attempts than a job has in its life.
_ALL = 1_000_000
# A fingerprint may come from another store: no time is that long.
_MOST_DIGITS = 6
# Runs kept in memory; a baseline and some more.
_MOST_RUNS = 32


class StoredResult(msgspec.Struct, frozen=True):
    """Result: the last attempt of a job in a run with a bundle and a device."""

    run: RunView
    view: JobView
    attempt: Attempt
    number: int
    """Number of the attempt within the job, from 1."""
    kind: str
    """Kind of its device: `virtual` or `hardware`."""
    outputs: dict[str, str]
    """SHA-256 by file name, of the outputs that were kept."""

    @property
    def place(self) -> tuple[int, str]:
        """Place of its run in the order of time."""
        return self.run.started_ms, self.run.id

    @property
    def description(self) -> str:
        """Description of the result in one line."""
        attempt = f"attempt {self.number} of {len(self.view.attempts)}"
        return f"{self.view.id}: run {self.run.id}, {attempt}, on {self.attempt.device} ({self.kind})"

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the runtime that its device had; empty if they were not recorded."""
        return next((one.runtime or {} for one in self.run.devices if one.serial == self.attempt.device), {})

    @property
    def facts(self) -> dict[str, str]:
        """Facts of its run, and of its device's runtime."""
        return self.run.fingerprint | device_facts(None, self.runtime)

    @property
    def side(self) -> tuple[str, ...]:
        """All that was under test, as `Point.side`."""
        return side_of(self.attempt.bundle_key, self.facts)

    @property
    def is_heap(self) -> bool:
        """True if its run measured the DSP heap alone."""
        return "heap" in self.run.fingerprint

    @property
    def seconds(self) -> int | None:
        """Seconds for which the programs of the run generated text; None for one generation after each prompt."""
        seconds = self.run.fingerprint.get("seconds", "")
        return int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < _MOST_DIGITS else None

    @property
    def profile(self) -> Profile:
        """Profiling of its run; AUTO instead of a timeline, which costs time and is in no figure."""
        name = self.run.fingerprint.get("profile", "")
        return Profile(name) if name in (Profile.OFF, Profile.BASIC, Profile.DETAILED) else Profile.AUTO


def find_stored_result(store: Store, pattern: str, ref: str | None) -> StoredResult:
    """Return the result of `pattern`, a job's id or a pattern with one match, in run `ref`, or the newest one.

    The newest result may be of any branch and of a local run: the user has just seen it.
    Raises UnknownNameError, UsageError where several jobs match or none was executed.
    """
    run, view = find_recorded_job(store, pattern, ref, "run again", debug=False)
    if "debug" in run.fingerprint:
        raise NoHistoryError(f"run {run.id} was of 'farm debug', whose program is not kept: give its command again")
    return _result(store, run, view.id)


def find_recorded_job(
    store: Store, pattern: str, ref: str | None, what_for: str, *, debug: bool = True, own: bool = True
) -> tuple[RunView, JobView]:
    """Return the run `ref`, or the newest that has an attempt of the job that `pattern` means, and the job in it.

    Without `debug`, runs of `farm debug` are skipped, and without `own` `latest` is a run of any user; `what_for`
    describes the command in an error.
    Raises UnknownNameError, UsageError where several jobs match or none was tried.
    """
    newest = store.history.newest_runs(pattern, debug=debug)
    if ref is None:
        names = list(newest)
        run = store.runs.view(newest[names[-1]]) if names else None
    else:
        run = store.runs.view(store.runs.resolve(ref, own=own, unbegun_named=True))
        known = set(store.history.job_names(pattern))
        names = [view.id for view in run.jobs if view.id in known]
        if not names:
            raise NoHistoryError(
                f"run {run.id} has no result of {pattern}: 'farm history {pattern}' shows which runs have"
            )
    if len(names) > 1:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise UsageError(f"{pattern} means {len(names)} jobs, and only one can be {what_for}: name it: {shown}")
    if run is None:
        raise NoHistoryError(f"{pattern} has no result yet: no attempt{'' if debug else ', or of farm debug alone'}")
    return run, next(view for view in run.jobs if view.id == names[0])


def results_before(store: Store, stored: StoredResult) -> Iterator[StoredResult]:
    """Yield the results of the same job on the same kind of device in runs before the run of `stored`, newest first.

    The runs are of the branch that the run belongs to, or is compared with; for a local run also the user's own.
    """
    seen = set()
    branch = stored.run.toolchain.branch if stored.run.toolchain else ""
    user = store.user if stored.run.toolchain and stored.run.toolchain.private else ""
    points = store.history.points(stored.view.id, None, None, _ALL, branch, local_runs_of=user)
    for point in sorted(points, key=lambda point: (point.time_ms, point.run_id), reverse=True):
        if point.run_id in seen or point.device_kind != stored.kind:
            continue
        seen.add(point.run_id)
        run = store.runs.view(point.run_id)
        if (run.started_ms, run.id) >= stored.place:
            continue
        with contextlib.suppress(UsageError):
            yield _result(store, run, stored.view.id)


class Results:
    """Results of many jobs in some runs, each of which is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run = lru_cache(_MOST_RUNS)(store.runs.view)

    def of(self, job_id: str, run_id: str) -> StoredResult:
        """Return the result of a job in a run. Raises UsageError where it was not executed there."""
        return _result(self._store, self._run(run_id), job_id)


def _result(store: Store, run: RunView, job_id: str) -> StoredResult:
    view = next(view for view in run.jobs if view.id == job_id)
    kinds = {device.serial: device.kind for device in run.devices}
    for number, attempt in reversed(list(enumerate(view.attempts, start=1))):
        if attempt.bundle_key and attempt.device in kinds:
            artifacts = [one for one in store.runs.artifacts(run.id, job_id) if one.attempt == number]
            return StoredResult(run, view, attempt, number, kinds[attempt.device], kept_outputs(artifacts))
    last = view.attempts[-1].reason if view.attempts else "it was not begun"
    raise NoHistoryError(f"{job_id} was not executed in run {run.id}, so that nothing can be run again: {last}")


def find_job(config: Config, stored: StoredResult, *, by_program: bool = False) -> Job:
    """Return the job of a result: as this user planned it, or from the suite of its name as it is here today.

    A store never decides about code to execute: the suite of another user's run is found by farm itself. Raises
    UsageError if neither is here, and for a job of the user's own program unless `by_program`.
    """
    if stored.view.suite == LLAMA_RUNNER and not by_program:
        raise UsageError(
            f"{stored.view.id} was run by {LLAMA_RUNNER}, which is named again: "
            f"{shlex.join(['farm', 'jobs', 'rerun', stored.view.id])} --program FILE --tokenizer FILE"
        )
    for job in planned_jobs(config.run_folder(stored.run.id)):
        if job.id == stored.view.id:
            return _without_lost_files(job)
    try:
        return _todays_job(config, stored)
    except UsageError as error:
        raise UsageError(
            f"{stored.view.id}: what run {stored.run.id} planned is not here, or is another user's, and its suite is "
            f"not here either: {error}: name the suite's folder in farm.toml"
        ) from None


def _without_lost_files(job: Job) -> Job:
    """Return `job`; if its files are gone, which its bundle has, as a case without files."""
    if all(Path(job.case.folder, file).exists() for file in job.case.files):
        return job
    case = msgspec.structs.replace(
        job.case, inputs=(), checkpoint="", program="", pte="", expected=(),
        methods=dict.fromkeys(job.case.methods, MethodInputs()),
        features=msgspec.structs.replace(job.case.features, op_packages=()),
        generate=job.case.generate and job.case.generate.without_files,
    )  # fmt: skip
    return msgspec.structs.replace(job, case=case)


def _todays_job(config: Config, stored: StoredResult) -> Job:
    from farm.dispatch.request.choose import find_case, known_suites

    view, known = stored.view, known_suites(config, stored.view.suite)
    # The suite is found by name alone, never by a path from the store.
    if view.suite not in known:
        raise UnknownNameError("suite", view.suite, known, "(farm suites lists them)")
    _, case = find_case(str(known[view.suite]), view.case, known)
    return Job(case, target_of(view))


def target_of(view: JobView) -> Target:
    """Return the target of a job in the store. Raises UsageError for an unknown target."""
    target = Target(view.soc, view.backend, view.precision, tuple(sorted(view.options.items())))
    check_target(find_soc(target.soc), target.backend, target.precision)
    check_options(target)
    return target


def find_bundle(config: Config, stored: StoredResult, job: Job, tools: Toolchain, supervisor: Supervisor) -> Bundle:
    """Return the bundle of a result: from the cache, or built again with an equal key.

    Raises UsageError with the differences, or for an invalid key, InfraError for a failing build.
    """
    if (bundle := _kept_bundle(config, stored)) is not None:
        return bundle
    key = stored.attempt.bundle_key
    if changes := _changes(config, stored, job, tools):
        raise NoHistoryError(
            f"the bundle {key[:12]} of {stored.view.id} is no longer in the cache "
            f"({BundleCache(config.cache_dir).folder(key)}), and building it today gives another one: {changes}; "
            "bring that folder back, or run the job as it is today"
        )
    logger.info("the bundle %s is no longer in the cache: building it again, from the same code and versions", key[:12])
    build_bundle(config, job, key, tools, supervisor)
    if (bundle := _kept_bundle(config, stored)) is None:
        raise InfraError(
            f"the bundle {key[:12]} was built and is gone: check for a user or a job that prunes {config.cache_dir}"
        )
    return bundle


def stored_bundle(config: Config, stored: StoredResult, *, virtual: bool) -> Bundle:
    """Return the exact bundle of a result, compiled again where it is gone. Raises as `find_bundle`."""
    if (bundle := _kept_bundle(config, stored)) is not None:
        return bundle
    from farm.builds.toolchains.selection import prepare

    with Supervisor() as supervisor:
        return find_bundle(config, stored, find_job(config, stored), prepare(config, virtual=virtual), supervisor)


def find_made_bundle(config: Config, key: str) -> Bundle | None:
    """Return the bundle of `key` from the cache, or from the files of a shared farm; None if both lack it.

    Raises UntrustedError for a cache that others may write, StoreError for a farm that does not answer.
    """
    cache = BundleCache(config.cache_dir)
    found = cache.lookup(key)
    if found is not None or not config.is_shared or not is_bundle_key(key):
        return found
    from farm.store.objects.archive import fetch_bundle
    from farm.store.objects.objects import READER_PATIENCE_S, open_objects

    with open_store(config.store_url, readonly=True) as store:
        build = store.cluster.build_of([key]).get(key)
    if build is None or build.state != "built":
        return None
    try:
        return fetch_bundle(open_objects(config, patience_s=READER_PATIENCE_S), cache, key, build.archive)
    except ArtifactLostError:
        return None


def _kept_bundle(config: Config, stored: StoredResult) -> Bundle | None:
    """Return the bundle of a result if it is still there.

    Raises UsageError where it was compiled anew since, to another program than the result is of.
    """
    bundle = find_made_bundle(config, stored.attempt.bundle_key)
    if bundle is None:
        return None
    was, now = stored.view.program, bundle.manifest.program
    if isinstance(was, str) and was and now and was != now:
        raise NoHistoryError(
            f"what run {stored.run.id} executed of {stored.view.id} is gone: its bundle was compiled anew since, to "
            f"another program ({was[:12]} -> {now[:12]}): run the job as it is today"
        )
    return bundle


def _changes(config: Config, stored: StoredResult, job: Job, tools: Toolchain) -> str:
    """Return why the bundle that would be built now is another one; empty when it is the same."""
    if not (job.case.module or job.case.program or job.case.pte):
        return f"it was made by '{stored.run.command}', of files that farm does not keep"
    now = bundle_key(job, tools.versions)
    kept = find_bundle_for(job, tools, BundleCache(config.cache_dir)).key
    if stored.attempt.bundle_key in {now, kept}:
        return ""
    facts, today = stored.run.fingerprint, facts_of(relevant_versions(job.target.backend, tools.versions))
    changes = [
        f"the {CONTENTS[name]} have changed" if name in CONTENTS else f"{name} was {was} and is {is_now}"
        for name, (was, is_now) in changed_facts(facts, today).items()
        if was and is_now
    ]
    changes += [f"the code of {place} has changed" for place in changed_code(config.run_folder(stored.run.id), job)]
    return "; ".join(changes) or f"the case, or the way farm compiles it, has changed (bundle {now[:12]})"


def build_bundle(config: Config, job: Job, key: str, tools: Toolchain, supervisor: Supervisor) -> None:
    """Compile the bundle `key` of a job into the cache. Raises InfraError."""
    reply, log = try_build(config, job, key, tools, supervisor)
    if not reply.ok:
        raise InfraError(f"{job.id} could not be built: {reply.reason}: see {log}")


def try_build(config: Config, job: Job, key: str, tools: Toolchain, supervisor: Supervisor) -> tuple[BuildReply, Path]:
    """Compile the bundle `key` of a job into the cache; return the reply, and the log, which a failure leaves.

    Raises UsageError for a suite that a user has uploaded to the server of this machine.
    """
    if Path(job.case.folder).is_relative_to(config.uploads_folder.resolve()):
        raise UsageError(
            f"{job.id}: its bundle is gone, and its suite was uploaded: build hosts alone execute its code; "
            "submit it again with farm run"
        )
    from farm.builds.compile.pool import BuilderSettings, build_one
    from farm.builds.compile.protocol import BuildRequest

    logs = config.cache_dir / "logs"
    make_folders(logs)
    log = logs / f"{key}.log"
    reply = build_one(
        BuildRequest(job, key, dict(tools.versions), str(log)),
        tools.compiler,
        BuilderSettings.of(config, supervisor, logs),
    )
    if reply.ok:
        log.unlink(missing_ok=True)
    return reply, log
