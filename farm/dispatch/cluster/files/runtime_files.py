"""A runtime for the devices of other hosts: its files by hash, in the place where the farm keeps its files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from farm.base.errors import ArtifactLostError, UsageError
from farm.builds.runtime.runtime import Runtime
from farm.dispatch.cluster.terms import RemoteRuntime

if TYPE_CHECKING:
    from farm.store.objects.objects import Objects

# As many requests under way as an SFTP server takes.
_AT_ONCE = 4


def upload_runtime(objects: Objects, runtime: Runtime, *, soc: str, device_kind: str, os: str) -> RemoteRuntime:
    """Return a runtime whose files other hosts find; `device_kind` and `os` are of the devices that it is for.

    Raises ArtifactsError for a place that stays away, LocalError for a file that cannot be read, UsageError for one
    that is not what it was when the runtime was put together.
    """
    with ThreadPoolExecutor(_AT_ONCE, "upload") as threads:
        hashes = dict(zip(runtime.files, threads.map(objects.put, runtime.files.values()), strict=True))
    for name, sha256 in hashes.items():
        if runtime.hashes.get(name, sha256) != sha256:
            raise UsageError(f"{runtime.files[name]} was changed since this command began: begin anew")
    return RemoteRuntime(
        soc=soc,
        device_kind=device_kind,
        os=os,
        files=hashes,
        digest=runtime.digest,
        runner=runtime.runner,
        versions=runtime.versions,
        kind=runtime.kind,
        needs_root=runtime.needs_root,
        one_shot=runtime.one_shot,
        flags=runtime.flags,
    )


def fetch_runtime(objects: Objects, remote: RemoteRuntime) -> Runtime:
    """Return a runtime with its files in the cache of this machine, each fetched once and verified.

    Raises ArtifactLostError for a file that is not there (any more), or a runtime that farm did not put together,
    ArtifactsError for a place that stays away, InfraError for a cache that cannot be written.
    """
    if remote.runner not in remote.files or not all(map(_is_plain, remote.files)):
        raise ArtifactLostError("a runtime has names that lead out of its folder, or no runner: it is not used")
    with ThreadPoolExecutor(_AT_ONCE, "fetch") as threads:
        files = dict(zip(remote.files, threads.map(objects.get, remote.files.values()), strict=True))
    return Runtime(
        files,
        remote.digest,
        remote.runner,
        remote.versions,
        remote.kind,
        remote.needs_root,
        dict(remote.files),
        remote.one_shot,
        remote.flags,
    )


def _is_plain(name: str) -> bool:
    """Return whether a path on a device stays in the folder of the runtime."""
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))
