"""Bucket with the files of a shared farm, on S3 or a compatible server: MinIO, Ceph, Garage."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import s3fs

from farm.base.errors import ArtifactsError
from farm.store.objects.places import Stored, path_of, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farm.base.config.shared import ArtifactsAddress

# Longest silence: a connection that was cut silently delays a shard for this time.
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 20.0
# Size of a single request: larger files are sent in parts of this size.
_PART_BYTES = 32 << 20


class Bucket:
    """Bucket on S3 or a compatible server: an object appears whole or not at all."""

    def __init__(self, address: ArtifactsAddress) -> None:
        self._root = address.path
        options = {"endpoint_url": address.endpoint_url or None, "profile": address.profile or None}
        self._files = s3fs.S3FileSystem(
            client_kwargs={"region_name": address.region} if address.region else None,
            # No retries here: `PlaceRetry` alone decides how long to try.
            config_kwargs={
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "retries": {"total_max_attempts": 1},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
            **{name: value for name, value in options.items() if value},
        )
        self._files.retries = 1
        self._is_there = False

    def write(self, name: str, chunks: Iterable[bytes], check: Callable[[], None]) -> None:
        """Write a file whole, or not at all."""
        first = b""
        left = iter(chunks)
        for chunk in left:
            first += chunk
            if len(first) > _PART_BYTES:
                break
        else:
            check()
            self._files.pipe_file(self._path(name), first)
            return
        file = self._files.open(self._path(name), "wb", block_size=_PART_BYTES, autocommit=False)
        try:
            file.write(first)
            for chunk in left:
                file.write(chunk)
            check()
            file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            # Mark the file as closed: fsspec would commit an open file when it is garbage collected.
            file.closed = True
            raise
        file.commit()

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file. Raises FileNotFoundError."""
        with self._files.open(self._path(name), "rb", cache_type="none") as file:
            while chunk := file.read(_PART_BYTES):
                yield chunk

    def find(self, name: str) -> Stored | None:
        """Return a file; None if it is missing."""
        try:
            return stored(name, self._files.info(self._path(name)))
        except FileNotFoundError:
            self._require_bucket()
            return None

    def renew(self, name: str) -> bool:  # noqa: ARG002
        """Return False: only a new upload changes the time of an object."""
        return False

    def all(self) -> Iterator[Stored]:
        """Yield every file."""
        self._require_bucket()
        for path, one in self._files.find(self._root, detail=True).items():
            name = path.rpartition("/")[2]
            if path == self._path(name):
                yield stored(name, one)

    def remove(self, name: str, still_old: Callable[[Stored], bool]) -> bool:
        """Remove a file unless it was written or renewed meanwhile."""
        # S3 cannot remove an object only if it is unchanged: an upload of the same content (a day old and unnamed)
        # between these two requests, within milliseconds, is lost.
        found = self.find(name)
        if found is None or not still_old(found):
            return False
        self._files.rm_file(self._path(name))
        return True

    def sweep(self) -> int:
        """Return 0: a lifecycle rule removes unfinished uploads (docs/reference/configuration.md)."""
        return 0

    def _path(self, name: str) -> str:
        return f"{self._root}/{path_of(name)}"

    def _require_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        self._is_there = self._is_there or self._files.exists(bucket)
        if not self._is_there:
            raise ArtifactsError(
                f"there is no bucket {bucket}, or the keys have no access: make the bucket, or correct the keys"
            )
