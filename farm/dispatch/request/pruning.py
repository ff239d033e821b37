"""Removal of old runs' folders and artifacts on this machine."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.base.ids import is_bundle_key, is_run_id
from farm.dispatch.request.resume import in_progress
from farm.store.artifacts import GRACE_S, ArtifactStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.store.pruning import Pruning
    from farm.store.store import Store
    from farm.store.view import RunView

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
    if named := store.pruning.alerts_naming(run.id):
        numbers = ", ".join(f"#{number}" for number in named)
        raise UsageError(
            f"run {run.id} is named by alert {numbers}: accept it or call it fixed with 'farm alerts list' first"
        )
    order = store.cluster.order(run.id) if config.is_shared else None
    if order is not None and (order.state == "open" or order.held):
        raise UsageError(f"run {run.id} is going on: 'farm runs cancel {run.id}' ends it, then it can be removed")
    is_young = time.time() - run.started_ms / 1000 < _MAY_RUN_S
    # The lock of a folder here shows whether a process works at the run.
    if run.finished_ms is None and is_young and Remains(config, store.pruning).find_folder(run.id) is None:
        raise UsageError(f"run {run.id} may be going on, on {run.host}: wait for it, or remove it there")


def remove_run(config: Config, store: Store, run_id: str) -> Freed:
    """Remove a run of any age with all files of its own. Raises UsageError for a run in progress."""
    freed = Freed()
    Remains(config, store.pruning).remove_named(run_id, freed)
    store.pruning.sweep()
    return freed


class Remains:
    """The folders of runs and the artifacts under a state directory."""

    def __init__(self, config: Config, pruning: Pruning) -> None:
        self._config, self._pruning = config, pruning
        self._artifacts = ArtifactStore(config.state_dir / "artifacts")

    def measure(self, run_ids: Iterable[str], artifacts: Iterable[str], freed: Freed) -> None:
        """Add what `remove` and `discard` would free."""
        for run_id in run_ids:
            folder = self.find_folder(run_id)
            if folder is not None:
                self.measure_folders([folder], freed)
        for sha256 in artifacts:
            size = self._artifacts.size(sha256)
            if size is not None:
                freed.artifacts += 1
                freed.artifact_bytes += size

    def remove(self, run_id: str, freed: Freed) -> None:
        """Remove a run from the store with its files here, unless it is in progress."""
        folder = self.find_folder(run_id)
        if folder is None:
            self._remove(run_id, freed)
            return
        with suppress(UsageError), in_progress(folder):
            if self._remove(run_id, freed):
                self._remove_folder(folder, freed)

    def remove_named(self, run_id: str, freed: Freed) -> None:
        """Remove a run named by the user, of any age. Raises UsageError for a run in progress."""
        folder = self.find_folder(run_id)
        with nullcontext() if folder is None else in_progress(folder):
            if not self._remove(run_id, freed, named=True):
                raise UsageError(
                    f"run {run_id} is named by an alert since, or gone: 'farm runs list' shows what there is"
                )
            if folder is not None:
                self._remove_folder(folder, freed)

    def discard(self, artifacts: Iterable[str], freed: Freed, grace_s: float = GRACE_S) -> None:
        """Remove artifacts that no attempt names, and that were put longer ago than `grace_s`."""
        for sha256 in artifacts:
            size = self._artifacts.discard(sha256, grace_s)
            if size is not None:
                freed.artifacts += 1
                freed.artifact_bytes += size

    def orphans(self) -> tuple[list[str], list[str]]:
        """Return the folders of runs that the store does not have, by id, and the artifacts that it does not name."""
        runs = self._config.state_dir / "runs"
        old = time.time() - GRACE_S
        names = [one.name for one in runs.iterdir()] if runs.is_dir() else []
        found = [name for name in names if (folder := self.find_folder(name)) and folder.stat().st_mtime < old]
        known = self._pruning.run_ids()
        artifacts = list(self._artifacts.all())
        named = self._pruning.named(artifacts)
        return sorted(set(found) - known), [one for one in artifacts if one not in named]

    def remove_folders(self, run_ids: Iterable[str], freed: Freed) -> None:
        """Remove folders of runs that the store does not have."""
        for run_id in run_ids:
            folder = self.find_folder(run_id)
            if folder is None:
                continue
            with suppress(UsageError), in_progress(folder):
                self._remove_folder(folder, freed)

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

    def measure_folders(self, folders: Iterable[Path], freed: Freed) -> None:
        """Add what `remove_evidence` would free."""
        for folder in folders:
            freed.folders += 1
            freed.folder_bytes += _size(folder)

    def remove_evidence(self, folders: Iterable[Path], freed: Freed) -> None:
        """Remove folders of `evidence` that no process works at."""
        for folder in folders:
            with suppress(UsageError), in_progress(folder):
                self._remove_folder(folder, freed)

    def find_folder(self, run_id: str) -> Path | None:
        """Return the folder of a run that is here; None also where its id, or a link, leads somewhere else."""
        if not is_run_id(run_id):
            return None
        folder = self._config.run_folder(run_id)
        is_here = folder.is_dir() and folder.resolve() == folder.parent.resolve() / run_id
        return folder if is_here else None

    def _remove(self, run_id: str, freed: Freed, *, named: bool = False) -> bool:
        artifacts = self._pruning.remove(run_id, named=named)
        if artifacts is None:
            return False
        freed.runs += 1
        self.discard(artifacts, freed, _NAMED_GRACE_S if named else GRACE_S)
        return True

    @staticmethod
    def _remove_folder(folder: Path, freed: Freed) -> None:
        size = _size(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            freed.folders += 1
            freed.folder_bytes += size


def _newest(folder: Path) -> float:
    """Return the newest modification time of a folder and its direct entries, in seconds."""
    return max([folder.lstat().st_mtime, *(one.lstat().st_mtime for one in folder.iterdir())])


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
