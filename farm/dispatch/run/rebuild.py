"""`farm run --rebuild`: cached bundles are compiled again, and both versions are compared."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import BundleError
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.key import bundle_key
from farm.builds.bundles.reuse import FoundBundle, Tools, find_bundles_for
from farm.report.model.format import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.builds.bundles.cache import BundleCache
    from farm.builds.compile.protocol import BuildReply
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)


class _OldBundle(NamedTuple):
    job_ids: list[str]
    bundle: Bundle | None
    """Cached bundle; its manifest is read, its files are removed later."""
    program: str
    """Hash of its program, from `program_of`."""


class Rebuild:
    """Bundles cached at the begin of a run, compared with newly compiled ones. Safe for several threads."""

    def __init__(self, cache: BundleCache) -> None:
        self._cache = cache
        self._before: dict[str, _OldBundle] = {}
        self._open: set[str] = set()
        self._same = self._other = 0
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of newly compiled bundles."""
        return frozenset(self._before)

    def find(self, jobs: Iterable[Job], tools: Tools) -> dict[str, FoundBundle]:
        """Return an uncached bundle with today's key for each job, and remember the cached ones."""
        jobs = list(jobs)
        cached = find_bundles_for(jobs, tools, self._cache)
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

        if not found.cached:
            return _OldBundle([], None, "")
        try:
            bundle = load_bundle(self._cache.folder(found.key))
            return _OldBundle([], bundle, program_of(bundle))
        except (BundleError, OSError):
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
