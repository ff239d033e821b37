"""Removal of old runs with their files: folders and artifacts on this machine, common files of a shared farm."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.base.forms import is_bundle_key, is_run_id
from farm.dispatch.request.records import in_progress
from farm.store.artifacts import GRACE_S, ArtifactStore
from farm.store.objects import objects

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.store.objects.objects import Objects
    from farm.store.records import RunView
    from farm.store.store import Store

# Age from which a run without an end counts as killed.
_MAY_RUN_S = 86_400
# Age of artifacts for a run named by the user, longer than the time between storing and recording a file.
_NAMED_GRACE_S = 600
BISECTS, COMPARES = "bisects", "compares"
"""Folders of a state directory: what searches among commits, and comparisons, found out."""


class Freed(msgspec.Struct):
    """Sums of removed files, or of files to remove."""

    runs: int = 0
    folders: int = 0
    folder_bytes: int = 0
    artifacts: int = 0
    artifact_bytes: int = 0
    shared: int = 0
    """Files that the hosts of a shared farm have in common."""
    shared_bytes: int = 0


def require_removable(config: Config, store: Store, run: RunView) -> None:
    """Raise UsageError for a run in progress, or a run in an open alert."""
    named = (one.id for one in store.alerts.open() if run.id in (one.run_id, one.last_good, one.first_bad))
    if numbers := ", ".join(f"#{number}" for number in sorted(named)):
        raise UsageError(
            f"run {run.id} is named by alert {numbers}: accept it or call it fixed with 'farm alerts list' first"
        )
    order = store.cluster.order(run.id) if config.is_shared else None
    if order is not None and (order.state == "open" or order.held):
        raise UsageError(f"run {run.id} is going on: 'farm runs cancel {run.id}' ends it, then it can be removed")
    is_young = time.time() - run.started_ms / 1000 < _MAY_RUN_S
    # The lock of a folder here shows whether a process works at the run.
    if run.finished_ms is None and is_young and Remains(config, store).find_folder(run.id) is None:
        raise UsageError(f"run {run.id} may be going on, on {run.host}: wait for it, or remove it there")


def remove_run(config: Config, store: Store, run_id: str) -> Freed:
    """Remove a run of any age with all files of its own. Raises UsageError for a run in progress."""
    remains = Remains(config, store)
    remains.remove(run_id, named=True)
    store.pruning.sweep()
    return remains.freed


class Remains:
    """Files of runs: folders and artifacts under a state directory, and the common files of a shared farm."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store
        self._artifacts = ArtifactStore(config.state_dir / "artifacts")
        self.freed = Freed()
        """Sums of the measured or removed files."""

    def measure(self, folders: Iterable[Path | None], artifacts: Iterable[str] = ()) -> None:
        """Count what `remove_folders` and `discard` would free."""
        for folder in filter(None, folders):
            self._count_folder(_size(folder))
        for sha256 in artifacts:
            self._count_artifact(self._artifacts.size(sha256))

    def remove(self, run_id: str, *, named: bool = False) -> None:
        """Remove a run from the store with its files here, if it is old enough or `named` by the user.

        Raises UsageError for a run in progress, and for a named run that stays.
        """
        folder = self.find_folder(run_id)
        with nullcontext() if folder is None else in_progress(folder):
            artifacts = self._store.pruning.remove(run_id, named=named)
            if artifacts is None and named:
                raise UsageError(
                    f"run {run_id} is named by an alert now, or was removed: 'farm runs list' shows the runs"
                )
            if artifacts is not None:
                self.freed.runs += 1
                self.discard(artifacts, _NAMED_GRACE_S if named else GRACE_S)
                if folder is not None:
                    self._remove_folder(folder)

    def discard(self, artifacts: Iterable[str], grace_s: float = GRACE_S) -> None:
        """Remove artifacts that no attempt names, and that were put longer ago than `grace_s`."""
        for sha256 in artifacts:
            self._count_artifact(self._artifacts.discard(sha256, grace_s))

    def remove_folders(self, folders: Iterable[Path]) -> None:
        """Remove folders that no process works at."""
        for folder in folders:
            with suppress(UsageError), in_progress(folder):
                self._remove_folder(folder)

    def orphans(self) -> tuple[list[Path], list[str]]:
        """Return the folders of runs that the store does not have, and the artifacts that it does not name."""
        runs = self._config.state_dir / "runs"
        old = time.time() - GRACE_S
        names = sorted(one.name for one in runs.iterdir()) if runs.is_dir() else []
        found = [folder for name in names if (folder := self.find_folder(name)) and folder.stat().st_mtime < old]
        known = self._store.pruning.run_ids()
        artifacts = list(self._artifacts.all())
        named = self._store.pruning.named(artifacts)
        return [one for one in found if one.name not in known], [one for one in artifacts if one not in named]

    def evidence(self, keep_ms: int | None) -> list[Path]:
        """Return the folders of comparisons and of searches among commits that are older than `keep_ms`."""
        if keep_ms is None:
            return []
        old = time.time() - keep_ms / 1000
        # A search is named by the SHA-256 of its request.
        kinds = ((COMPARES, is_run_id), (BISECTS, is_bundle_key))
        folders = (
            one for kind, is_own in kinds for one in (self._config.state_dir / kind).glob("*") if is_own(one.name)
        )
        return sorted(one for one in folders if one.is_dir() and not one.is_symlink() and _newest(one) < old)

    def find_folder(self, run_id: str) -> Path | None:
        """Return the folder of a run that is here; None also where its id, or a link, leads somewhere else."""
        if not is_run_id(run_id):
            return None
        folder = self._config.run_folder(run_id)
        is_here = folder.is_dir() and folder.resolve() == folder.parent.resolve() / run_id
        return folder if is_here else None

    def measure_shared(self, artifacts: Collection[str]) -> None:
        """Count what `remove_shared` would free once `artifacts` have no reference. Raises ArtifactsError."""
        for nbytes in self._unnamed(self._open_shared(), {*artifacts, *self._store.files.unused_archives()}).values():
            self._count_shared(nbytes)

    def remove_shared(self) -> None:
        """Remove the common files that nothing names and that are a day old. Raises ArtifactsError."""
        shared = self._open_shared()
        shared.sweep()
        self._store.files.forget_builds()
        for name, nbytes in self._unnamed(shared, set()).items():
            if shared.discard(name):
                self._count_shared(nbytes)

    def _open_shared(self) -> Objects:
        return objects.open_objects(self._config, patience_s=objects.READER_PATIENCE_S)

    def _unnamed(self, shared: Objects, unused: set[str]) -> dict[str, int]:
        """Return the sizes of old common files without a reference, except from `unused` ones, by name."""
        old = time.time() - objects.GRACE_S
        # Files are listed before references, so that a file referenced meanwhile is found among the references.
        found = {one.name: one.nbytes for one in shared.all() if one.modified_s < old}
        named = self._store.files.named_files(found) - unused
        return {name: nbytes for name, nbytes in found.items() if name not in named}

    def _remove_folder(self, folder: Path) -> None:
        size = _size(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            self._count_folder(size)

    def _count_folder(self, nbytes: int) -> None:
        self.freed.folders += 1
        self.freed.folder_bytes += nbytes

    def _count_artifact(self, nbytes: int | None) -> None:
        if nbytes is not None:
            self.freed.artifacts += 1
            self.freed.artifact_bytes += nbytes

    def _count_shared(self, nbytes: int) -> None:
        self.freed.shared += 1
        self.freed.shared_bytes += nbytes


def _newest(folder: Path) -> float:
    """Return the newest modification time of a folder and its direct entries, in seconds."""
    return max([folder.lstat().st_mtime, *(one.lstat().st_mtime for one in folder.iterdir())])


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
