"""Common files of a shared farm without a reference in the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.store.objects.objects import GRACE_S, READER_PATIENCE_S, open_objects

if TYPE_CHECKING:
    from collections.abc import Collection

    from farm.base.config.settings import Config
    from farm.dispatch.request.pruning import Freed
    from farm.store.store import Store


class SharedRemains:
    """The files of a shared farm: artifacts of attempts, bundles, runtimes and code of suites."""

    def __init__(self, config: Config, store: Store) -> None:
        self._named = store.files
        self._objects = open_objects(config, patience_s=READER_PATIENCE_S)

    def measure(self, artifacts: Collection[str], freed: Freed) -> None:
        """Add the bytes that `remove` would free once `artifacts` have no reference. Raises ArtifactsError."""
        unused = {*artifacts, *self._named.unused_archives()}
        found = self._unnamed(unused)
        freed.shared += len(found)
        freed.shared_bytes += sum(found.values())

    def remove(self, freed: Freed) -> None:
        """Remove what nothing names and is a day old. Raises ArtifactsError."""
        self._objects.sweep()
        self._named.forget_builds()
        for name, nbytes in self._unnamed(()).items():
            if self._objects.discard(name):
                freed.shared += 1
                freed.shared_bytes += nbytes

    def _unnamed(self, unused: Collection[str]) -> dict[str, int]:
        """Return the sizes of old files without a reference, except from `unused` ones, by name."""
        old = time.time() - GRACE_S
        # Files are listed before references, so that a file referenced meanwhile is found among the references.
        found = {one.name: one.nbytes for one in self._objects.all() if one.modified_s < old}
        named = self._named.named_files(found) - set(unused)
        return {name: nbytes for name, nbytes in found.items() if name not in named}
