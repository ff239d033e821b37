"""Archive with the code of a user's suite for build hosts, which compute the same bundle keys from it.

    suites/NAME/...       folder of the suite, as far as `farm.builds.bundles.source` reads it for a case
    suites/SIBLING/...    folder beside it with the module of a case

Packages that a suite imports are not in it: a build host has them as wheels of the same versions, or refuses.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import ArtifactLostError, UsageError
from farm.base.paths import relative
from farm.base.publish import published
from farm.base.resources import data_folder
from farm.builds.bundles.source import source_place, suite_files
from farm.store.objects.archive import unpack, write_archive
from farm.store.objects.cached import SUITES
from farm.store.objects.objects import Objects, require_sha256

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.suites.suite import Case, Job

_SUITES, _ARCHIVE = "suites", ".archive"
_MOST_BYTES = 16 << 30


def upload_sources(objects: Objects, jobs: Iterable[Job]) -> dict[str, str]:
    """Upload the code of each job, and return the SHA-256 of its archive, by job id; empty for suites of farm.

    Raises UsageError for a case with files outside of its suites, ArtifactsError for an artifact store that stays away,
    LocalError.
    """
    shipped = data_folder("test_suites").resolve()
    found: dict[tuple[str, ...], str] = {}
    sources = {}
    for job in jobs:
        case, place = job.case, source_place(job.case)
        if place not in found:
            is_ours = not case.folder or Path(case.folder).resolve().parent == shipped
            found[place] = "" if is_ours else _upload(objects, case)
        sources[job.id] = found[place]
    return sources


def unpack_source(objects: Objects, cache_dir: Path, sha256: str, job: Job) -> Job:
    """Return the job with its code from an archive, in the cache of this machine; fetched once.

    Raises ArtifactLostError for an archive that is missing or has another suite, ArtifactsError, InfraError.
    """

    def fill(folder: Path) -> None:
        path = folder / _ARCHIVE
        objects.fetch(sha256, path, _MOST_BYTES)
        unpack(path, folder)
        path.unlink()

    root = published(cache_dir / SUITES / sha256[:2] / require_sha256(sha256), fill)
    # Note the time of use, for pruning; a folder of root refuses that and is readable all the same.
    with contextlib.suppress(OSError):
        os.utime(root)
    folder = root / _SUITES / Path(job.case.folder).name
    if not Path(job.case.folder).name or not folder.is_dir():
        raise ArtifactLostError(f"the archive {sha256[:12]} does not hold the suite of {job.id}")
    return msgspec.structs.replace(job, case=msgspec.structs.replace(job.case, folder=str(folder)))


def suite_members(case: Case) -> dict[str, Path]:
    """Return the files of a case by their names in the archive. Raises UsageError for one outside of its suites."""
    root = Path(case.folder).parent
    files = {}
    for path in suite_files(case):
        name = relative(path, root)
        if not name:
            raise UsageError(
                f"{case.suite}/{case.name}: {path} is in no folder that other hosts get: move it below {case.folder}, "
                "or compile here (--build-on here)"
            )
        files[f"{_SUITES}/{name}"] = path
    # A case from an installed package has a folder without a manifest.
    if case.manifest.is_file():
        files.setdefault(f"{_SUITES}/{Path(case.folder).name}/{case.manifest.name}", case.manifest)
    return files


def _upload(objects: Objects, case: Case) -> str:
    files = suite_members(case)
    with objects.scratch() as folder:
        target = folder / _ARCHIVE
        write_archive(files, target)
        return objects.put(target)
