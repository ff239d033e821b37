"""Compiling overlaps running: the builder pool of one run, where its replies go, and `farm run --rebuild`."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import BundleError, FarmError
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.bundles.reuse import FoundBundle, Tools, find_bundles_for
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.report.model.format import plural
from farm.store.records import BuildRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.dispatch.progress import ProgressListener
    from farm.dispatch.request.plan import RunPlan
    from farm.store.store import Store
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)

# Seconds between two looks for room to write a reply.
_ROOM_SECONDS = 0.5


class _OldBundle(NamedTuple):
    job_ids: list[str]
    bundle: Bundle | None
    """Cached bundle; its manifest is read, its files are removed later."""
    program: str
    """Hash of its program, from `program_of`."""


class Rebuild:
    """Bundles of jobs; with --rebuild cached ones are compiled again and compared. Safe for several threads."""

    def __init__(self, cache: BundleCache, *, is_wanted: bool) -> None:
        """`is_wanted` is True for --rebuild."""
        self._cache, self._is_wanted = cache, is_wanted
        self._before: dict[str, _OldBundle] = {}
        self._open: set[str] = set()
        self._same = self._other = 0
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of newly compiled bundles."""
        return frozenset(self._before)

    def find(self, jobs: Iterable[Job], tools: Tools) -> dict[str, FoundBundle]:
        """Return the bundle of each job; with --rebuild an uncached one with today's key."""
        jobs = list(jobs)
        cached = find_bundles_for(jobs, tools, self._cache)
        if not self._is_wanted:
            return cached
        found = {}
        for job in jobs:
            key = bundle_key(job, tools.versions)
            found[job.id] = FoundBundle(key, cached=False)
            if key not in self._before:
                self._before[key] = self._remembered(cached[job.id])
            self._before[key].job_ids.append(job.id)
        self._open = set(self._before)
        return found

    def ended(self, reply: BuildReply) -> str:
        """Return the difference of the new program from the cached one, "" for none, and record it."""
        before = self._before.get(reply.key)
        if before is None:
            return ""
        with self._lock:
            text = self._difference(before, reply)
            self._open.discard(reply.key)
            was_last = not self._open
        if text:
            more = f" (and {len(before.job_ids) - 1} more with the same bundle)" if len(before.job_ids) > 1 else ""
            logger.info("%s%s: %s", before.job_ids[0], more, text)
        if was_last:
            logger.info(self._summary())
        return text

    def _remembered(self, found: FoundBundle) -> _OldBundle:
        from farm.builds.bundles.same import program_of

        with suppress(BundleError, OSError):
            if found.cached:
                bundle = load_bundle(self._cache.folder(found.key))
                return _OldBundle([], bundle, program_of(bundle))
        return _OldBundle([], None, "")

    def _difference(self, before: _OldBundle, reply: BuildReply) -> str:
        from farm.builds.bundles.same import differences

        if before.bundle is None:
            return ""
        if not reply.ok:
            return "did not compile again; the cached bundle stays in the cache"
        found = differences(before.bundle.manifest, before.program, load_bundle(self._cache.folder(reply.key)))
        if not found:
            self._same += 1
            return ""
        self._other += 1
        return f"compiled again, it differs from the cached bundle: {'; '.join(found)}"

    def _summary(self) -> str:
        had = sum(before.bundle is not None for before in self._before.values())
        done = f"compiled again: {plural(len(self._before), 'bundle')}, {had} of them cached before"
        return f"{done}: {self._same} the same, {self._other} different" if had else done


@contextmanager
def builders(
    config: Config,
    plan: RunPlan,
    tools: Toolchain,
    supervisor: Supervisor,
    listener: ProgressListener,
    store: Store,
    rebuild: Rebuild,
) -> Iterator[int]:
    """Compile the missing bundles of the plan during the body; yield the number of missing bundles of jobs.

    Every reply is written for the device processes and recorded for all jobs that share the bundle. Health checks come
    first, as every device waits for its own.
    """
    from farm.builds.compile.pool import BuilderPool, BuilderSettings

    builds = _Builds(plan, listener, store, BundleCache(config.cache_dir), rebuild)
    requests: dict[str, BuildRequest] = {}
    for planned in (*plan.health_checks, *plan.jobs):
        if not planned.cached and planned.key not in requests:
            log = plan.build_log(planned.key)
            requests[planned.key] = BuildRequest(
                planned.job, planned.key, dict(tools.versions), str(log), anew=planned.key in rebuild.keys
            )
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
        self, plan: RunPlan, listener: ProgressListener, store: Store, cache: BundleCache, rebuild: Rebuild
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
            self._rebuild.ended(reply)

    def _leave(self, reply: BuildReply) -> None:
        """Let the workers know, as soon as there is room on the disk."""
        while True:
            try:
                self._plan.leave_reply(reply)
            except OSError:
                if self.over.wait(_ROOM_SECONDS):
                    return
            else:
                return

    def _record(self, seconds: Mapping[str, float], *, cached: bool) -> None:
        """Record the bundles of the keys of `seconds`, in one transaction."""
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
