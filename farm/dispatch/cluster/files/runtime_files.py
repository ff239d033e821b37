"""Runtime for the devices of other hosts: its files in the artifact store, by hash."""

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
    """Upload the files of a runtime, and return it for other hosts; `device_kind` and `os` describe its devices.

    Raises ArtifactsError for an artifact store that stays away, LocalError for an unreadable file, UsageError for a
    file that has changed since the runtime was put together.
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

    Raises ArtifactLostError for a missing file, or for names that farm never puts into a runtime, ArtifactsError for an
    artifact store that stays away, InfraError for a cache that cannot be written.
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
