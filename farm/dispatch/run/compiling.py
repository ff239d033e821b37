"""Compiling overlaps running: the builder pool of one run, and where its replies go."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farm.base.errors import BundleError, FarmError
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.device_run.builds import builds_folder, leave_reply
from farm.store.records import BuildRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.bundles.cache import BundleCache
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.progress import ProgressListener
    from farm.dispatch.request.plan import RunPlan
    from farm.dispatch.run.rebuild import Rebuild
    from farm.store.store import Store

logger = logging.getLogger(__name__)

# Seconds between two looks for room to write a reply.
_ROOM_SECONDS = 0.5


@contextmanager
def builders(
    config: Config,
    plan: RunPlan,
    tools: Toolchain,
    supervisor: Supervisor,
    listener: ProgressListener,
    store: Store,
    rebuild: Rebuild | None = None,
) -> Iterator[int]:
    """Compile the missing bundles of the plan during the body; yield the number of missing bundles of jobs.

    Every reply is written for the device processes and recorded for all jobs that share the bundle. Health checks come
    first, as every device waits for its own.
    """
    from farm.builds.bundles.cache import BundleCache
    from farm.builds.compile.pool import BuilderPool, BuilderSettings

    builds = _Builds(plan, listener, store, BundleCache(config.cache_dir), rebuild)
    anew = rebuild.keys if rebuild else frozenset()
    requests: dict[str, BuildRequest] = {}
    for planned in (*plan.health_checks, *plan.jobs):
        if not planned.cached and planned.key not in requests:
            log = builds_folder(plan.folder) / f"{planned.key}.log"
            versions, is_anew = dict(tools.versions), planned.key in anew
            requests[planned.key] = BuildRequest(planned.job, planned.key, versions, str(log), anew=is_anew)
    builds.record_cached(requests.keys())
    pool = BuilderPool(
        requests.values(),
        tools.compiler,
        BuilderSettings.of(config, supervisor, plan.folder / "logs"),
        width=config.builders,
        on_start=builds.started,
        on_done=builds.ended,
    )
    pool.start()
    try:
        yield len(requests.keys() & builds.jobs_of.keys())
    finally:
        builds.over.set()
        pool.stop()


class _Builds:
    """Handler of the replies of builders."""

    def __init__(
        self,
        plan: RunPlan,
        listener: ProgressListener,
        store: Store,
        cache: BundleCache,
        rebuild: Rebuild | None = None,
    ) -> None:
        self._plan, self._listener, self._store, self._cache = plan, listener, store, cache
        self._rebuild = rebuild
        self.over = threading.Event()
        """Set once no process waits for replies."""
        self.jobs_of: dict[str, list[str]] = {}
        """Job ids by bundle key; health checks have none."""
        for planned in plan.jobs:
            self.jobs_of.setdefault(planned.key, []).append(planned.job.id)

    def record_cached(self, lacking: Collection[str]) -> None:
        """Record the bundles that are there."""
        self._record({key: 0.0 for key in self.jobs_of if key not in lacking}, cached=True)

    def started(self, key: str) -> None:
        """Report that a bundle is being compiled."""
        if key in self.jobs_of:
            self._listener.build_started(self.jobs_of[key][0])

    def ended(self, reply: BuildReply) -> None:
        """Record and report how it went, and let the workers know."""
        jobs = self.jobs_of.get(reply.key)
        try:
            if jobs:
                self._record({reply.key: reply.seconds}, cached=False)
            elif not reply.ok:
                logger.warning("devices are used without a health check, as it was not compiled: %s", reply.reason)
        except FarmError as error:
            logger.warning("how %s was compiled could not be recorded: %s", jobs[0] if jobs else reply.key, error)
        finally:
            # The reply is written in every case, as a device process waits for it.
            self._leave(reply)
        if jobs:
            self._listener.build_ended(jobs[0], reply)
            if self._rebuild is not None:
                self._rebuild.ended(reply)

    def _leave(self, reply: BuildReply) -> None:
        """Let the workers know, as soon as there is room on the disk."""
        while True:
            try:
                leave_reply(self._plan.folder, reply)
            except OSError:
                if self.over.wait(_ROOM_SECONDS):
                    return
            else:
                return

    def _record(self, seconds: Mapping[str, float], *, cached: bool) -> None:
        """Record the bundles of the keys of `seconds`, in one transaction."""
        from farm.builds.bundles.bundle import load_bundle

        builds = []
        for key, took_s in seconds.items():
            # Only the manifest is read: files were verified at the lookup, and are verified again before use.
            try:
                manifest = load_bundle(self._cache.folder(key)).manifest
            except BundleError:
                manifest = None
            builds += [
                BuildRecord(
                    job_id,
                    took_s,
                    cached,
                    key,
                    manifest.fallback_ops if manifest else None,
                    manifest.operators if manifest else None,
                    manifest.program if manifest else "",
                )
                for job_id in self.jobs_of[key]
            ]
        if builds:
            self._store.record_builds(self._plan.run_id, builds)
