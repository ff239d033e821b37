"""Submission of a run to a shared farm, with its uploads, and following it to its outcome."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import FarmError, UsageError
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.socs import find_soc
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.cluster.client.devices import Wanted, pinned
from farm.dispatch.cluster.client.follow import FollowEnd, Follower, InterruptChoice, Signals
from farm.dispatch.cluster.client.submit_options import SubmitOptions, require_possible
from farm.dispatch.cluster.files import failed_build, sent_build, upload_runtime, upload_sources
from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms, require_offered, toolchain_id
from farm.dispatch.request.choose import narrow
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.dispatch.request.selection import Budget
from farm.dispatch.run.steps import RunSteps, choose, finished_outcome, left_of, log_numbers, report_of
from farm.policy.divide import divide
from farm.policy.situation import Priority
from farm.report.model.format import plural
from farm.store.cluster.records import Build, NewBuild, NewOrder, NewShard
from farm.store.objects.objects import open_objects
from farm.store.records import PROTOCOL
from farm.store.store import open_store
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.builds.bundles.bundle import Manifest
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.dispatcher import ProgressListener
    from farm.store.cluster.records import PlannedJob
    from farm.store.objects.objects import Objects
    from farm.store.records import SkipReason
    from farm.store.store import Store
    from farm.suites.suite import Job


# Uploads of a submitted run: bundles of this machine's cache, and new ones with `--build-on here`.


logger = logging.getLogger(__name__)

# Four uploads at once hide the latency of the artifact store; more would only share its bandwidth.
_AT_ONCE = 4


def new_builds(
    planned: Iterable[PlannedJob],
    tools: Toolchain,
    backend: str,
    sources: Mapping[str, str],
    anew: Collection[str] = (),
) -> list[NewBuild]:
    """Return the bundles to make for jobs, each once, in the order of the jobs.

    `sources` are hashes of archives with the code of cases, by job id; `anew` has the keys of existing bundles to make
    again.
    """
    toolchain = toolchain_id(tools.versions, backend)
    found: dict[str, NewBuild] = {}
    for one in planned:
        if not one.cached and one.key not in found:
            source = sources.get(one.job.id, "")
            found[one.key] = NewBuild(
                one.key, toolchain, one.job, dict(tools.versions), source, len(found), anew=one.key in anew
            )
    return list(found.values())


def upload_bundles(objects: Objects, cache: BundleCache, keys: Iterable[str]) -> dict[str, tuple[Build, Manifest]]:
    """Upload the bundles of `keys` that the cache has whole to the artifact store, and return them by key.

    Bundles that are there already are not sent again. Raises ArtifactsError.
    """

    def send(key: str) -> tuple[Build, Manifest] | None:
        bundle = cache.lookup(key)
        if bundle is None:
            return None
        return sent_build(objects, bundle, BuildReply(key, ok=True, seconds=0.0)), bundle.manifest

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as pool:
        return {sent[0].key: sent for sent in pool.map(send, dict.fromkeys(keys)) if sent is not None}


@contextlib.contextmanager
def build_here(
    config: Config,
    run_id: str,
    builds: Sequence[NewBuild],
    tools: Toolchain,
    objects: Objects,
    store: Store,
    on_done: Callable[[BuildReply], object],
) -> Iterator[None]:
    """Make `builds` of a run on this machine while the body runs, and upload each as soon as it is made.

    Bundles that a build host has made meanwhile are left out, and so is the rest of a cancelled run. Builds in progress
    at the end of the body are ended and left to build hosts. `on_done(reply)` is called from other threads.
    """
    from farm.base.processes import Supervisor
    from farm.builds.compile.pool import BuilderPool, BuilderSettings

    folder, cache = config.run_folder(run_id), BundleCache(config.cache_dir)
    folder.mkdir(parents=True, exist_ok=True)

    def is_wanted(key: str) -> bool:
        """Return whether a bundle is not made yet and its run is open; True if the store does not answer."""
        with contextlib.suppress(FarmError):
            order = store.cluster.order(run_id)
            if order is not None and order.state != "open":
                return False
            known = store.cluster.build_of([key]).get(key)
            return known is None or known.state == "waiting"
        return True

    def send(reply: BuildReply) -> None:
        try:
            bundle = cache.lookup(reply.key) if reply.ok else None
            if reply.ok and bundle is None:
                reply = msgspec.structs.replace(reply, ok=False, reason=reply.lost_reason, infra=True)
            if bundle is not None:
                store.cluster.add_built(sent_build(objects, bundle, reply), bundle.manifest)
            else:
                store.cluster.add_built(failed_build(reply, folder / f"{reply.key}.log"))
        except FarmError as error:
            logger.warning("bundle %s was made and could not be sent: %s", reply.key[:12], error)
            return
        on_done(reply)

    requests = [
        BuildRequest(one.job, one.key, one.versions, str(folder / f"{one.key}.log"), anew=one.anew) for one in builds
    ]
    # Other threads than the builders' upload, and end before the supervisor does.
    with Supervisor() as supervisor, ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as threads:

        def take(reply: BuildReply) -> None:
            threads.submit(send, reply)

        pool = BuilderPool(
            requests,
            tools.compiler,
            BuilderSettings.of(config, supervisor, folder),
            width=config.builders,
            on_done=take,
            is_wanted=is_wanted,
        )
        pool.start()
        try:
            yield
        finally:
            pool.stop()


# Run on a shared farm, from names to exit code: the steps of a local run, with agents in place of devices.
#
# Files are uploaded first, by their hash. Then the run and all of its work appear in one transaction: a command that
# is killed before it leaves a run that never began, and a run whose command is killed afterwards goes on.


class RunWork(NamedTuple):
    """Work of the agents for a run, and the jobs that are left out."""

    shards: Sequence[NewShard]
    to_build: Sequence[NewBuild]
    built: Sequence[tuple[Build, Manifest | None]]
    """Bundles that exist already, with the manifests of bundles that only this machine had."""
    skipped: Mapping[str, SkipReason]
    """Reasons of jobs that are left out, by job id."""
    jobs: int
    """Number of jobs to run."""
    terms: WorkTerms


def upload_runtimes(
    config: Config, request: RunRequest, jobs: Sequence[Job], classes: Sequence[str], objects: Objects
) -> tuple[RemoteRuntime, ...]:
    """Upload the runtime of each class of devices for `jobs`, and return them. Raises MissingToolError."""
    from farm.builds.runtime.runtime import runtime_for

    # The options of one request have one mode.
    mode = jobs[0].target.mode
    socs = {job.target.soc for job in jobs}
    uploaded = []
    for name in classes:
        soc, kind, os = name.split("/")
        if soc not in socs:
            continue
        runtime = runtime_for(config, soc, kind, os, request.backend, mode)
        uploaded.append(upload_runtime(objects, runtime, soc=soc, device_kind=kind, os=os))
    return tuple(uploaded)


def submit(
    config: Config,
    request: RunRequest,
    listener: ProgressListener,
    options: SubmitOptions,
    *,
    interrupts: InterruptHandler | None = None,
    begun: Callable[[str], None] = lambda _: None,
    only: Collection[str] | None = None,
) -> RunOutcome:
    """Submit the jobs of `request`, follow them and return the outcome; arguments as in `farm.dispatch.run.run`.

    Raises UsageError, NothingSelectedError, NoDeviceError before any change to the store.
    """
    request = pinned(request)
    require_possible(request, options)
    budget = Budget(request.budget_s)
    config, jobs = choose(config, request, only)
    with open_store(config.store_url) as store:
        wanted = Wanted(store, [find_soc(name).name for name in request.socs], request.choice)
        given_up = wanted.find(wait=options.wait, wait_s=request.wait_s)
        jobs = tuple(job for job in jobs if job.target.soc not in given_up)
        jobs = narrow(config, request, jobs, store, lambda: wanted.kind or "hardware")
        run = _SharedRun(config, request, listener, store, budget, interrupts, options, wanted)
        return run.execute(jobs, begun=begun)


def resume(
    config: Config,
    ref: str,
    listener: ProgressListener,
    options: SubmitOptions,
    budget_s: float | None = None,
    *,
    interrupts: InterruptHandler | None = None,
) -> RunOutcome:
    """Submit the missing jobs of a run. Raises as `submit`, and UsageError for a run that has not ended."""
    with open_store(config.store_url) as store:
        config, request, view, missing = left_of(config, store, ref)
        request = pinned(request)
        require_possible(request, options)
        order = store.cluster.order(view.id)
        if order is not None and order.state != "ended":
            raise UsageError(f"run {view.id} is still running: 'farm runs watch {view.id}' follows it")
        if not missing and view.exit_code is not None:
            return finished_outcome(config, store, request, view)
        budget = Budget(request.budget_s if budget_s is None else budget_s)
        wanted = Wanted(store, [job.target.soc for job in missing], request.choice)
        given_up = wanted.find(wait=options.wait, wait_s=request.wait_s)
        missing = tuple(job for job in missing if job.target.soc not in given_up)
        run = _SharedRun(config, request, listener, store, budget, interrupts, options, wanted)
        return run.execute(missing, view.id, was_submitted=order is not None)


@dataclass
class _SharedRun(RunSteps):
    """Steps of a run that is submitted to agents."""

    _interrupts: InterruptHandler | None
    _submit_options: SubmitOptions
    _wanted: Wanted
    _tools: Toolchain = field(init=False)
    _objects: Objects = field(init=False)

    def execute(
        self,
        jobs: tuple[Job, ...],
        run_id: str = "",
        begun: Callable[[str], None] = lambda _: None,
        *,
        was_submitted: bool = False,
    ) -> RunOutcome:
        """Submit `jobs` as a new run, whose id `begun` receives, or with `run_id` as the rest of an unfinished run."""
        from farm.builds.toolchains.selection import prepare
        from farm.dispatch.request.records import require_same_conditions, require_same_runtimes

        before = self._store.runs.view(run_id) if run_id else None
        then = before.fingerprint if before is not None else {}
        # Jobs that an earlier end of the run skipped are due again.
        was_skipped = [job.id for job in before.jobs if job.skipped is not None] if before is not None else []
        kind = self._wanted.kind or then.get("device_kind", "hardware")
        self._tools = prepare(self._config, virtual=kind == "virtual")
        fingerprint = self._fingerprint(self._tools, kind)
        if before is not None:
            require_same_conditions(before, fingerprint)
        self._read_history(jobs, self._tools, kind)
        self._objects = open_objects(self._config)
        work = self._work(jobs)
        if before is not None:
            runtimes = work.terms.runtimes
            require_same_runtimes(
                before.devices,
                lambda one: [
                    each.runtime.versions for each in runtimes if (each.soc, each.device_kind) == (one.soc, one.kind)
                ],
                run_id,
            )
        after = made_before = 0
        if was_submitted:
            so_far = self._store.cluster.progress(run_id, 0)
            after, made_before = so_far.last, so_far.to_build
        elif not run_id:
            run_id = self._begin(jobs, self._tools, fingerprint)
        order = self._order_of(run_id, work)
        skipped = {**dict.fromkeys(was_skipped), **work.skipped}
        # From here on Ctrl-C may concern a submitted run: note it, for the follower to ask the user.
        with Signals(self._interrupts) as signals:
            self._store.cluster.submit(
                order, work.shards, work.to_build, work.built,
                jobs=jobs, skipped=skipped, again=was_submitted,
            )  # fmt: skip
            begun(run_id)
            return self._followed(run_id, (after, made_before), work, signals)

    def _work(self, jobs: Sequence[Job]) -> RunWork:
        """Return the work of the run, with all of its files uploaded."""
        tools, objects = self._tools, self._objects
        planned = self._order(jobs, self._rebuild.find(jobs, tools))
        health_checks = self._order_health_checks(jobs, tools)
        runtimes = upload_runtimes(self._config, self._request, jobs, self._wanted.classes, objects)
        built = self._built([*health_checks, *planned])
        lacking = [one for one in (*health_checks, *planned) if one.key not in built]
        width = self._width() if lacking else self._config.builders
        planned = [msgspec.structs.replace(one, cached=one.key in built) for one in planned]
        most = self._request.most_devices
        devices = {soc: min(count, most or count) for soc, count in self._wanted.per_soc.items()}
        planned, skipped = self._budget.cut(planned, self._past, devices=devices, builders=width, first=self._first)
        keys = {one.key for one in (*health_checks, *planned)}
        lacking = [one for one in lacking if one.key in keys]
        sources = upload_sources(objects, [one.job for one in lacking])
        parts = divide(
            planned,
            devices=devices,
            cached=built.keys(),
            sessions={one.job.id: tuple(runtime_flags(one.job.target).items()) for one in planned},
            first=self._first,
        )
        needs = {soc: tuple(one.key for one in health_checks if one.job.target.soc == soc) for soc in self._wanted.socs}
        return RunWork(
            # A device begins only with the bundle of its health check.
            shards=[NewShard(*part, needs=needs.get(part.soc, ())) for part in parts],
            to_build=new_builds(lacking, tools, self._request.backend, sources, self._rebuild.keys),
            built=[one for key, one in built.items() if key in keys],
            skipped=skipped,
            jobs=len(planned),
            terms=WorkTerms(
                protocol=PROTOCOL,
                toolchain=toolchain_id(tools.versions, self._request.backend),
                backend=self._request.backend,
                mode=jobs[0].target.mode,
                runtimes=runtimes,
                health_checks=tuple(health_checks),
                budget_s=self._budget.seconds,
                **self._request.execution,
            ),
        )

    def _built(self, planned: Sequence[PlannedJob]) -> dict[str, tuple[Build, Manifest | None]]:
        """Return the bundles that need no compiling, by key; uploads bundles that only this machine has."""
        keys = list(dict.fromkeys(one.key for one in planned if one.key not in self._rebuild.keys))
        known: dict[str, tuple[Build, Manifest | None]] = {
            key: (build, None)
            for key, build in self._store.cluster.build_of(keys).items()
            if build.state == "built" and self._objects.has(build.archive)
        }
        here = sorted({one.key for one in planned if one.cached} - known.keys())
        if here:
            logger.info("uploading %s", plural(len(here), "compiled program"))
        return {**known, **upload_bundles(self._objects, BundleCache(self._config.cache_dir), here)}

    def _width(self) -> int:
        """Return how many programs are compiled at once. Raises NoDeviceError if no host would compile them."""
        if self._submit_options.build_here:
            return self._config.builders
        agents = self._store.cluster.agents()
        if self._submit_options.wait:
            return max(1, sum(bool(agent.alive and agent.facts.toolchains) for agent in agents))
        return len(require_offered(agents, self._tools.versions, self._request.backend))

    def _order_of(self, run_id: str, work: RunWork) -> NewOrder:
        request = self._request
        return NewOrder(
            run_id=run_id,
            user=self._store.user,
            priority=Priority.NIGHTLY if request.purpose == "nightly" else Priority.PERSON,
            purpose=request.command,
            terms=msgspec.json.encode(work.terms),
            protocol=PROTOCOL,
            devices=request.choice.devices,
            labels=request.choice.labels,
            most_devices=request.most_devices,
            most_failures=request.most_failures,
            classes=self._wanted.classes,
            budget_s=self._budget.left_s,
        )

    def _followed(self, run_id: str, before: tuple[int, int], work: RunWork, signals: Signals) -> RunOutcome:
        """Follow the run, unless it is detached, and return its outcome.

        `before` holds the last attempt and the number of bundles of the run's earlier part.
        """
        after, made_before = before
        logger.info("run %s is submitted", run_id, extra={"run": run_id})
        if self._submit_options.detach:
            return self._left(run_id, 0)
        first = self._store.cluster.progress(run_id, after)
        names = [device.called for device in self._wanted.devices]
        self._listener.begin(jobs=work.jobs, to_build=max(0, first.to_build - made_before), devices=names)
        follower = Follower(self._store, run_id, self._listener, built=made_before, ask=self._submit_options.ask)
        with contextlib.ExitStack() as stack:
            if self._submit_options.build_here and work.to_build:
                made, ended = work.to_build, self._rebuild.ended
                here = build_here(self._config, run_id, made, self._tools, self._objects, self._store, ended)
                stack.enter_context(here)
            ending = follower.follow(first, signals)
        if ending is FollowEnd.LEFT:
            return self._left(run_id, INTERRUPTED)
        code = self._store.runs.view(run_id).exit_code
        if ending is FollowEnd.CANCELLED or code is None:
            return self._outcome(run_id, INTERRUPTED)
        log_numbers(self._store, run_id, confirm=self._request.confirm)
        return self._outcome(run_id, code)

    def _left(self, run_id: str, code: int) -> RunOutcome:
        """Return the outcome of a run that goes on."""
        report = self._config.run_folder(run_id) / "report.html"
        return RunOutcome(code, self._store.runs.view(run_id), report, toolchain=self._request.toolchain, left=True)


def attach(
    config: Config, ref: str, listener: ProgressListener, ask: Callable[[], InterruptChoice] | None = None
) -> RunOutcome:
    """Follow a run, `latest`, an id or a name, and return its outcome.

    Ctrl-C cannot cancel the run of another user. Raises UnknownNameError, UsageError for a run that was not submitted.
    """
    with open_store(config.store_url) as store:
        run_id = store.runs.resolve(ref)
        order = store.cluster.order(run_id)
        if order is None:
            raise UsageError(f"run {run_id} was not submitted to the shared farm: 'farm report {run_id}' shows it")
        first = store.cluster.progress(run_id, 0)
        ending = FollowEnd.FINISHED
        if not first.finished:
            view = store.runs.view(run_id)
            jobs = sum(job.skipped is None or bool(job.attempts) for job in view.jobs)
            listener.begin(jobs=jobs, to_build=first.to_build - first.built, devices=sorted(first.running))
            ending = Follower(store, run_id, listener, built=first.built, ask=ask).follow(first)
        view = store.runs.view(run_id)
        path = config.run_folder(run_id) / "report.html"
        if ending is FollowEnd.LEFT:
            return RunOutcome(INTERRUPTED, view, path, left=True)
        log_numbers(store, run_id)
        code = view.exit_code if ending is FollowEnd.FINISHED and view.exit_code is not None else INTERRUPTED
        return RunOutcome(code, view, report_of(config, store, view))
