"""Uploads of a submitted run: bundles of this machine's cache, and new ones with `--build-on here`."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.cluster.files.exchange import failed_build, sent_build
from farm.dispatch.cluster.toolchain_id import toolchain_id
from farm.store.cluster.records import Build, NewBuild

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from farm.base.config.settings import Config
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
