"""Work that a run submits, and the runtimes of its devices."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import BundleError
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Manifest, load_bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.builds.bundles.cache import BundleCache
    from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms
    from farm.dispatch.request.request import RunRequest
    from farm.store.cluster.records import Build, NewBuild, NewShard
    from farm.store.objects.objects import Objects
    from farm.store.view import SkipReason
    from farm.suites.suite import Job


class RunWork(NamedTuple):
    """Work of the agents for a run, and the jobs that are left out."""

    shards: Sequence[NewShard]
    to_build: Sequence[NewBuild]
    built: Sequence[Build]
    """Bundles that exist already."""
    manifests: Mapping[str, Manifest]
    """Manifests of the bundles in this machine's cache, by key."""
    skipped: Mapping[str, SkipReason]
    """Reasons of jobs that are left out, by job id."""
    jobs: int
    """Number of jobs to run."""
    terms: WorkTerms


def manifests_of(cache: BundleCache, keys: Iterable[str]) -> dict[str, Manifest]:
    """Return the manifests of the bundles that are in the cache of this machine, by key."""
    found = {}
    for key in keys:
        # The user of a bundle verifies its files.
        with contextlib.suppress(BundleError):
            found[key] = load_bundle(cache.folder(key)).manifest
    return found


def upload_runtimes(
    config: Config, request: RunRequest, jobs: Sequence[Job], classes: Sequence[str], objects: Objects
) -> tuple[RemoteRuntime, ...]:
    """Upload the runtime of each class of devices for `jobs`, and return them. Raises MissingToolError."""
    from farm.builds.runtime.runtime import attached_runtime, virtual_runtime
    from farm.dispatch.cluster.files.runtime_files import upload_runtime

    # The options of one request have one mode.
    mode = jobs[0].target.mode
    socs = {job.target.soc for job in jobs}
    uploaded = []
    for name in classes:
        soc, kind, os = name.split("/")
        if soc not in socs:
            continue
        runtime = (
            virtual_runtime(config, find_soc(soc), request.backend, mode=mode)
            if kind == "virtual"
            else attached_runtime(config, find_soc(soc), request.backend, mode, linux=os == "linux")
        )
        uploaded.append(upload_runtime(objects, runtime, soc=soc, device_kind=kind, os=os))
    return tuple(uploaded)
