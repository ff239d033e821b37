"""Run on a shared farm, from names to exit code: the steps of a local run, with agents in place of devices.

Files are uploaded first, by their hash. Then the run and all of its work appear in one transaction: a command that is
killed before it leaves a run that never began, and a run whose command is killed afterwards goes on.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.socs import find_soc
from farm.builds.bundles.cache import BundleCache
from farm.dispatch.cluster.client.devices import Wanted, pinned
from farm.dispatch.cluster.client.follow import FollowEnd, Signals, follower_of
from farm.dispatch.cluster.client.submit_options import SubmitOptions, require_possible
from farm.dispatch.cluster.client.work import RunWork, manifests_of, upload_runtimes
from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms
from farm.dispatch.request.budget import Budget
from farm.dispatch.request.request import RunOutcome, RunRequest
from farm.dispatch.run.steps import RunSteps, choose, finished_outcome, left_of, log_numbers, narrowed
from farm.report.model.format import plural
from farm.store.protocol import PROTOCOL
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.progress import ProgressListener
    from farm.store.cluster.records import Build, NewOrder, PlannedJob
    from farm.store.objects.objects import Objects
    from farm.store.store import Store
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)


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
    from farm.store.store import open_store

    request = pinned(request)
    require_possible(request, options)
    budget = Budget(request.budget_s)
    config, jobs = choose(config, request, only)
    with open_store(config.store_url) as store:
        wanted = Wanted(store, [find_soc(name).name for name in request.socs], request.choice)
        given_up = wanted.find(wait=options.wait, wait_s=request.wait_s)
        jobs = tuple(job for job in jobs if job.target.soc not in given_up)
        jobs = narrowed(config, request, store, jobs, lambda: wanted.kind or "hardware")
        run = _SharedRun(config, request, listener, store, interrupts, budget, options, wanted)
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
    from farm.store.store import open_store

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
        run = _SharedRun(config, request, listener, store, interrupts, budget, options, wanted)
        return run.execute(missing, view.id, was_submitted=order is not None)


class _SharedRun(RunSteps):
    """Steps of a run that is submitted to agents."""

    def __init__(
        self,
        config: Config,
        request: RunRequest,
        listener: ProgressListener,
        store: Store,
        interrupts: InterruptHandler | None,
        budget: Budget,
        options: SubmitOptions,
        wanted: Wanted,
    ) -> None:
        super().__init__(config, request, listener, store, budget)
        self._interrupts, self._submit_options, self._wanted = interrupts, options, wanted

    def execute(
        self,
        jobs: tuple[Job, ...],
        run_id: str = "",
        begun: Callable[[str], None] = lambda _: None,
        *,
        was_submitted: bool = False,
    ) -> RunOutcome:
        """Submit `jobs` as a new run, whose id `begun` receives, or with `run_id` as the rest of an unfinished run."""
        from farm.builds.toolchains.prepare import prepare
        from farm.dispatch.request.resume import require_same, require_same_runtimes
        from farm.store.objects.objects import open_objects

        before = self._store.runs.view(run_id) if run_id else None
        then = before.fingerprint if before is not None else {}
        # Jobs that an earlier end of the run skipped are due again.
        was_skipped = [job.id for job in before.jobs if job.skipped is not None] if before is not None else []
        kind = self._wanted.kind or then.get("device_kind", "hardware")
        tools = prepare(self._config, virtual=kind == "virtual")
        fingerprint = self._fingerprint(tools, kind)
        if run_id:
            require_same(then, fingerprint, run_id)
        self._read_history(jobs, tools, kind)
        objects = open_objects(self._config)
        work = self._work(jobs, tools, objects)
        if before is not None:
            runtimes = work.terms.runtimes
            require_same_runtimes(
                before.devices,
                lambda one: [each.versions for each in runtimes if (each.soc, each.device_kind) == (one.soc, one.kind)],
                run_id,
            )
        after = made_before = 0
        if was_submitted:
            so_far = self._store.cluster.progress(run_id, 0)
            after, made_before = so_far.last, so_far.to_build
        elif not run_id:
            run_id = self._begin(jobs, tools, fingerprint)
        order = self._order_of(run_id, work)
        skipped = {**dict.fromkeys(was_skipped), **work.skipped}
        # From here on Ctrl-C may concern a submitted run: note it, for the follower to ask the user.
        with Signals(self._interrupts) as signals:
            if was_submitted:
                self._store.cluster.add(
                    run_id, work.shards, work.to_build, work.built,
                    order=order, jobs=jobs, skipped=skipped, manifests=work.manifests,
                )  # fmt: skip
            else:
                self._store.cluster.submit(
                    order, work.shards, work.to_build, work.built, jobs=jobs, skipped=skipped, manifests=work.manifests
                )
            begun(run_id)
            self._log_skipped(len(work.skipped), len(jobs))
            return self._followed(run_id, (after, made_before), work, tools, objects, signals)

    def _work(self, jobs: Sequence[Job], tools: Toolchain, objects: Objects) -> RunWork:
        """Return the work of the run, with all of its files uploaded."""
        from farm.dispatch.cluster.client.upload import new_builds
        from farm.dispatch.cluster.files.suite_archive import upload_sources
        from farm.policy.divide import divide
        from farm.store.cluster.records import NewShard

        planned = self._order(jobs, tools, self._rebuild)
        health_checks = self._order_health_checks(jobs, tools)
        runtimes = upload_runtimes(self._config, self._request, jobs, self._wanted.classes, objects)
        built = self._built([*health_checks, *planned], objects)
        lacking = [one for one in (*health_checks, *planned) if one.key not in built]
        width = self._width(tools) if lacking else self._config.builders
        planned = [msgspec.structs.replace(one, cached=one.key in built) for one in planned]
        most = self._request.most_devices
        devices = {soc: min(count, most or count) for soc, count in self._wanted.per_soc.items()}
        planned, skipped = self._cut(planned, devices, width)
        keys = {one.key for one in (*health_checks, *planned)}
        lacking = [one for one in lacking if one.key in keys]
        sources = upload_sources(objects, [one.job for one in lacking])
        anew = self._rebuild.keys if self._rebuild is not None else frozenset()
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
            to_build=new_builds(lacking, tools, self._request.backend, sources, anew),
            built=[one for key, one in built.items() if key in keys],
            manifests=manifests_of(BundleCache(self._config.cache_dir), built),
            skipped=skipped,
            jobs=len(planned),
            terms=self._terms(jobs, tools, runtimes, health_checks),
        )

    def _terms(
        self,
        jobs: Sequence[Job],
        tools: Toolchain,
        runtimes: tuple[RemoteRuntime, ...],
        health_checks: Sequence[PlannedJob],
    ) -> WorkTerms:
        from farm.dispatch.cluster.toolchain_id import toolchain_id

        request = self._request
        return WorkTerms(
            protocol=PROTOCOL,
            toolchain=toolchain_id(tools.versions, request.backend),
            backend=request.backend,
            mode=jobs[0].target.mode,
            runtimes=runtimes,
            health_checks=tuple(health_checks),
            budget_s=self._budget.seconds,
            **request.execution,
        )

    def _built(self, planned: Sequence[PlannedJob], objects: Objects) -> dict[str, Build]:
        """Return the bundles that need no compiling, by key; uploads bundles that only this machine has."""
        from farm.dispatch.cluster.client.upload import upload_bundles

        anew = self._rebuild.keys if self._rebuild is not None else frozenset()
        keys = list(dict.fromkeys(one.key for one in planned if one.key not in anew))
        known = {
            key: build
            for key, build in self._store.cluster.build_of(keys).items()
            if build.state == "built" and objects.has(build.archive)
        }
        here = sorted({one.key for one in planned if one.cached} - known.keys())
        if here:
            logger.info("uploading %s", plural(len(here), "compiled program"))
        return {**known, **upload_bundles(objects, BundleCache(self._config.cache_dir), here)}

    def _width(self, tools: Toolchain) -> int:
        """Return how many programs are compiled at once. Raises NoDeviceError if no host would compile them."""
        from farm.dispatch.cluster.toolchain_id import require_offered

        if self._submit_options.build_here:
            return self._config.builders
        agents = self._store.cluster.agents()
        if self._submit_options.wait:
            return max(1, sum(bool(agent.alive and agent.facts.toolchains) for agent in agents))
        return len(require_offered(agents, tools.versions, self._request.backend))

    def _order_of(self, run_id: str, work: RunWork) -> NewOrder:
        from farm.policy.situation import Priority
        from farm.store.cluster.records import NewOrder

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

    def _followed(
        self,
        run_id: str,
        before: tuple[int, int],
        work: RunWork,
        tools: Toolchain,
        objects: Objects,
        signals: Signals,
    ) -> RunOutcome:
        """Follow the run, unless it is detached, and return its outcome.

        `before` holds the last attempt and the number of bundles of the run's earlier part.
        """
        after, made_before = before
        logger.info("run %s is handed in", run_id, extra={"run": run_id})
        if self._submit_options.detach:
            return self._left(run_id, 0)
        first = self._store.cluster.progress(run_id, after)
        names = [device.called for device in self._wanted.devices]
        self._listener.begin(jobs=work.jobs, to_build=max(0, first.to_build - made_before), devices=names)
        follower = follower_of(
            self._store,
            run_id,
            self._listener,
            built=made_before,
            ask=self._submit_options.ask,
        )
        with self._building(run_id, work, tools, objects):
            ending = follower.follow(first, signals)
        return self._ended(run_id, ending)

    @contextmanager
    def _building(self, run_id: str, work: RunWork, tools: Toolchain, objects: Objects) -> Iterator[None]:
        """Compile on this machine while the body runs, with `--build-on here`."""
        if not self._submit_options.build_here or not work.to_build:
            yield
            return
        from farm.base.processes import Supervisor
        from farm.dispatch.cluster.client.upload import build_here

        folder = self._config.run_folder(run_id)
        ended = self._rebuild.ended if self._rebuild is not None else lambda _: ""
        with (
            Supervisor() as supervisor,
            build_here(
                self._config, run_id, folder, work.to_build, tools, objects, self._store, supervisor, ended
            ),
        ):  # fmt: skip
            yield

    def _ended(self, run_id: str, ending: FollowEnd) -> RunOutcome:
        """Return the outcome of a run after following it."""
        view = self._store.runs.view(run_id)
        if ending is FollowEnd.LEFT:
            return self._left(run_id, INTERRUPTED)
        if ending is FollowEnd.CANCELLED or view.exit_code is None:
            return self._outcome(run_id, INTERRUPTED)
        log_numbers(self._store, run_id, confirm=self._request.confirm)
        return self._outcome(run_id, view.exit_code)

    def _left(self, run_id: str, code: int) -> RunOutcome:
        """Return the outcome of a run that goes on."""
        report = self._config.run_folder(run_id) / "report.html"
        return RunOutcome(code, self._store.runs.view(run_id), report, toolchain=self._request.toolchain, left=True)
