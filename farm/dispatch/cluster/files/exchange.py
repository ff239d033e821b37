"""Files that hosts of a shared farm exchange by the hash of their content: code of suites, bundles, runtimes.

An archive with the code of a user's suite, from which build hosts compute the same bundle keys:

    suites/NAME/...       folder of the suite, as far as `farm.builds.bundles.source` reads it for a case
    suites/SIBLING/...    folder beside it with the module of a case

Packages that a suite imports are not in it: a build host has them as wheels of the same versions, or refuses.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from farm.base.errors import ArtifactLostError, UsageError
from farm.base.logs import end_of_log
from farm.base.paths import relative
from farm.base.publish import published
from farm.base.resources import data_folder
from farm.builds.bundles.source import source_place, suite_files
from farm.dispatch.cluster.terms import RemoteRuntime
from farm.store.cluster.records import Build
from farm.store.objects.archive import unpack, write_archive
from farm.store.objects.bundle_archive import upload_bundle
from farm.store.objects.cached import SUITES
from farm.store.objects.objects import Objects, require_sha256

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.builds.bundles.bundle import Bundle
    from farm.builds.compile.protocol import BuildReply
    from farm.builds.runtime.runtime import Runtime
    from farm.suites.suite import Case, Job

_SUITES, _ARCHIVE = "suites", ".archive"
_MOST_BYTES = 16 << 30
_LOG_BYTES = 16 * 1024
# As many requests under way as an SFTP server takes.
_AT_ONCE = 4


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
    return replace(job, case=replace(job.case, folder=str(folder)))


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


def sent_build(objects: Objects, bundle: Bundle, reply: BuildReply) -> Build:
    """Upload the archive of a bundle to the artifact store, and return its row. Raises ArtifactsError."""
    archive, nbytes = upload_bundle(objects, bundle)
    return Build(bundle.manifest.key, "built", archive, nbytes, reply)


def failed_build(reply: BuildReply, log: Path) -> Build:
    """Return the row of a failed build, with the end of the compiler's log."""
    return Build(reply.key, "failed", reply=reply, log=end_of_log(log, _LOG_BYTES).replace("\0", ""))


def upload_runtime(objects: Objects, runtime: Runtime, *, soc: str, device_kind: str, os: str) -> RemoteRuntime:
    """Upload the files of a runtime, and return it for other hosts; `device_kind` and `os` describe its devices.

    Raises ArtifactsError for an artifact store that stays away, LocalError for an unreadable file, UsageError for a
    file that has changed since the runtime was put together.
    """
    with ThreadPoolExecutor(_AT_ONCE, "upload") as threads:
        hashes = dict(zip(runtime.files, threads.map(objects.put, runtime.files.values()), strict=True))
    for name, sha256 in hashes.items():
        if runtime.hashes.get(name, sha256) != sha256:
            raise UsageError(f"{runtime.files[name]} was changed since this command began: begin anew")
    return RemoteRuntime(soc=soc, device_kind=device_kind, os=os, runtime=replace(runtime, files={}, hashes=hashes))


def fetch_runtime(objects: Objects, remote: RemoteRuntime) -> Runtime:
    """Return a runtime with its files in the cache of this machine, each fetched once and verified.

    Raises ArtifactLostError for a missing file, or for names that farm never puts into a runtime, ArtifactsError for an
    artifact store that stays away, InfraError for a cache that cannot be written.
    """
    hashes = remote.runtime.hashes
    if remote.runtime.runner not in hashes or not all(map(_is_plain, hashes)):
        raise ArtifactLostError("a runtime has names that lead out of its folder, or no runner: it is not used")
    with ThreadPoolExecutor(_AT_ONCE, "fetch") as threads:
        files = dict(zip(hashes, threads.map(objects.get, hashes.values()), strict=True))
    return replace(remote.runtime, files=files)


def _is_plain(name: str) -> bool:
    """Return whether a path on a device stays in the folder of the runtime."""
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))
