"""Bundles of a shared farm: folders in the cache of a machine, single files in the place of the farm's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import ArtifactLostError, BundleError
from farm.builds.bundles.bundle import MANIFEST, Bundle, load_bundle
from farm.store.objects.archive import unpack, write_archive

if TYPE_CHECKING:
    from pathlib import Path

    from farm.builds.bundles.cache import BundleCache
    from farm.store.objects.objects import Objects

LOG = "build.log"
"""File of a bundle for people, which its manifest does not list."""

_ARCHIVE = ".archive"


class BundleArchive(NamedTuple):
    """Archive of a bundle in the place of the farm's files."""

    sha256: str
    nbytes: int


def upload_bundle(objects: Objects, bundle: Bundle) -> BundleArchive:
    """Upload a bundle for other hosts, whole and verified.

    Raises BundleError for a damaged bundle, ArtifactsError for a place that stays away, LocalError.
    """
    bundle.verify()
    names = [MANIFEST, *bundle.manifest.files]
    names += [LOG] if (bundle.folder / LOG).is_file() else []
    with objects.scratch() as folder:
        path = folder / _ARCHIVE
        write_archive({name: bundle.folder / name for name in names}, path)
        return BundleArchive(objects.put(path), path.stat().st_size)


def fetch_bundle(objects: Objects, cache: BundleCache, key: str, archive: str) -> Bundle:
    """Return the bundle of `key` from the cache, fetched if missing; all of its files are verified.

    Several processes fetch a bundle only once. Raises ArtifactLostError for an archive that is missing or has other
    content, ArtifactsError for a place that stays away, InfraError for a cache that cannot be written.
    """

    def fill(folder: Path) -> None:
        path = folder / _ARCHIVE
        objects.fetch(archive, path)
        names = unpack(path, folder)
        path.unlink()
        _require_bundle(folder, key, names)

    return cache.build(key, fill)


def _require_bundle(folder: Path, key: str, names: list[str]) -> None:
    """Raise ArtifactLostError unless the unpacked `folder` is the bundle of `key`, without further files."""
    try:
        bundle = load_bundle(folder)
        bundle.verify()
    except BundleError as error:
        raise ArtifactLostError(f"the archive of bundle {key[:12]} does not hold it: {error}") from None
    if bundle.manifest.key != key:
        raise ArtifactLostError(f"the archive of bundle {key[:12]} holds {bundle.manifest.key[:12]!r}")
    if foreign := sorted({*names} - {MANIFEST, LOG, *bundle.manifest.files}):
        raise ArtifactLostError(f"the archive of bundle {key[:12]} holds {foreign[0]!r:.100}, which is no part of it")
