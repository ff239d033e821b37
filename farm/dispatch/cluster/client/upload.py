"""Uploads of a submitted run: bundles of this machine's cache, and new ones with `--build-on here`."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.cluster.bundles import failed_build, sent_build
from farm.dispatch.cluster.toolchain_id import toolchain_id
from farm.store.cluster.records import Build, NewBuild

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.bundles.bundle import Manifest
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.cluster.records import PlannedJob
    from farm.store.objects.objects import Objects
    from farm.store.store import Store

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


def upload_bundles(objects: Objects, cache: BundleCache, keys: Iterable[str]) -> dict[str, Build]:
    """Upload the bundles of `keys` that the cache has whole to the artifact store, and return them by key.

    Bundles that are there already are not sent again. Raises ArtifactsError.
    """

    def send(key: str) -> Build | None:
        bundle = cache.lookup(key)
        if bundle is None:
            return None
        return sent_build(objects, bundle, BuildReply(key, ok=True, seconds=0.0))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as pool:
        return {build.key: build for build in pool.map(send, dict.fromkeys(keys)) if build is not None}


@contextlib.contextmanager
def build_here(
    config: Config,
    run_id: str,
    folder: Path,
    builds: Sequence[NewBuild],
    tools: Toolchain,
    objects: Objects,
    store: Store,
    supervisor: Supervisor,
    on_done: Callable[[BuildReply], object],
) -> Iterator[None]:
    """Make `builds` of a run on this machine while the body runs, and upload each as soon as it is made.

    Bundles that a build host has made meanwhile are left out, and so is the rest of a cancelled run; `folder` takes the
    logs. Builds in progress at the end of the body are ended and left to build hosts. `on_done(reply)` is called from
    other threads.
    """
    from farm.builds.compile.pool import BuilderPool, BuilderSettings

    sender = _Sender(run_id, objects, store, BundleCache(config.cache_dir), folder, on_done)
    folder.mkdir(parents=True, exist_ok=True)
    requests = [
        BuildRequest(one.job, one.key, one.versions, str(folder / f"{one.key}.log"), anew=one.anew) for one in builds
    ]
    pool = BuilderPool(
        requests,
        tools.compiler,
        BuilderSettings.of(config, supervisor, folder),
        width=config.builders,
        on_done=sender.take,
        is_wanted=sender.is_wanted,
    )
    pool.start()
    try:
        yield
    finally:
        pool.stop()
        sender.join()


class _Sender:
    """Upload of new bundles in other threads than the builders', with their records in the store."""

    def __init__(
        self,
        run_id: str,
        objects: Objects,
        store: Store,
        cache: BundleCache,
        folder: Path,
        on_done: Callable[[BuildReply], object],
    ) -> None:
        self._run_id, self._objects, self._store = run_id, objects, store
        self._cache, self._folder = cache, folder
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload")

    def is_wanted(self, key: str) -> bool:
        """Return whether a bundle is not made yet and its run is open; True if the store does not answer."""
        with contextlib.suppress(FarmError):
            order = self._store.cluster.order(self._run_id)
            if order is not None and order.state != "open":
                return False
            known = self._store.cluster.build_of([key]).get(key)
            return known is None or known.state in ("waiting", "held")
        return True

    def take(self, reply: BuildReply) -> None:
        """Upload the bundle of a reply, in another thread."""
        self._threads.submit(self._send, reply)

    def join(self) -> None:
        """Wait until all bundles are uploaded."""
        self._threads.shutdown(wait=True)

    def _send(self, reply: BuildReply) -> None:
        try:
            build, manifest = self._build_of(reply)
            self._store.cluster.add_built(build, manifest)
            reply = build.reply or reply
        except FarmError as error:
            logger.warning("bundle %s was made and could not be sent: %s", reply.key[:12], error)
            return
        self._on_done(reply)

    def _build_of(self, reply: BuildReply) -> tuple[Build, Manifest | None]:
        bundle = self._cache.lookup(reply.key) if reply.ok else None
        if bundle is not None:
            return sent_build(self._objects, bundle, reply), bundle.manifest
        if reply.ok:
            reason = "the bundle was built and is not there: is somebody pruning the cache?"
            reply = BuildReply(reply.key, ok=False, seconds=reply.seconds, reason=reason, infra=True)
        return failed_build(reply, self._folder / f"{reply.key}.log"), None
