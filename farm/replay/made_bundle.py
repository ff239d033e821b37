"""Bundle from a host of a shared farm, for commands that run a program again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import ArtifactLostError
from farm.base.ids import is_bundle_key
from farm.builds.bundles.cache import BundleCache

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.builds.bundles.bundle import Bundle


def find_made_bundle(config: Config, key: str) -> Bundle | None:
    """Return the bundle of `key` from the cache, or from the files of a shared farm; None if both lack it.

    Raises UntrustedError for a cache that others may write, StoreError for a farm that does not answer.
    """
    cache = BundleCache(config.cache_dir)
    found = cache.lookup(key)
    if found is not None or not config.is_shared or not is_bundle_key(key):
        return found
    from farm.store.objects.bundle_archive import fetch_bundle
    from farm.store.objects.objects import READER_PATIENCE_S, open_objects
    from farm.store.store import open_store

    with open_store(config.store_url, readonly=True) as store:
        build = store.cluster.build_of([key]).get(key)
    if build is None or build.state != "built":
        return None
    try:
        return fetch_bundle(open_objects(config, patience_s=READER_PATIENCE_S), cache, key, build.archive)
    except ArtifactLostError:
        return None
