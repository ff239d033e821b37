"""Archives of folders: plain tar with the same bytes for the same content, and bundles of a shared farm in them."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from farm.base.errors import ArtifactLostError, BundleError
from farm.builds.bundles.bundle import MANIFEST, Bundle, load_bundle
from farm.devices.files import local_errors

if TYPE_CHECKING:
    from farm.builds.bundles.cache import BundleCache
    from farm.store.objects.objects import Objects


# Archives of folders: plain tar without compression, with the same bytes for the same content, and checked on
# reading.
#
# Any user with write access to the farm's store could put any archive there. Unpacking creates only regular files
# with relative names inside the folder, without links, devices, sparse files and permissions of the archive. An
# archive without compression is not smaller than its content, so that its size bounds the written data.


MOST_FILES = 200_000
_MOST_NAME_CHARS = 1024
_MOST_PARTS = 64
_MOST_PART_BYTES = 255
"""Longest name of a file system."""
_MOST_HEADER_BYTES = 4096
"""Most bytes of an extended header, which tarfile reads into memory before any check."""
_MOST_EXTENDED = 4
"""Most extended headers of a member, which tarfile reads by recursion, and global ones, which it copies for each."""
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_SIZE_RECORD = re.compile(rb"\d+ size=(\d{1,18})\n")
_CHUNK = 1 << 20
# Errors of a foreign archive, and of a file system for illegal names, such as a name for both a file and a folder.
_NOT_OURS = (tarfile.TarError, ValueError, EOFError, OverflowError, FileExistsError, NotADirectoryError)


def write_archive(files: Mapping[str, Path], target: Path) -> None:
    """Write `files`, by their relative paths in the archive, into `target`. Raises LocalError."""
    with local_errors(target), tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            with local_errors(files[name]), files[name].open("rb") as file:
                member = tarfile.TarInfo(name)
                # Leave out owner and time, so that equal content gives equal bytes.
                member.size = os.fstat(file.fileno()).st_size
                member.mode, member.mtime = 0o644, 0
                archive.addfile(member, file)


def unpack(path: Path, folder: Path, most_files: int = MOST_FILES) -> list[str]:
    """Write the files of an archive into `folder`, which has none of them yet; return the relative paths, sorted.

    `most_files` counts folders as well. Raises ArtifactLostError for an archive that farm did not write, LocalError for
    failed writes on this machine.
    """
    with local_errors(path), path.open("rb") as file:
        try:
            return sorted(_unpack(file, folder, most_files))
        except _NOT_OURS as error:
            # An error of the file system names a folder of this machine.
            problem = error.strerror if isinstance(error, OSError) else error
            raise ArtifactLostError(f"an archive is none that farm wrote, and is not used: {problem}") from None


def _unpack(file: BinaryIO, folder: Path, most_files: int) -> set[str]:
    left, found, folders = os.fstat(file.fileno()).st_size, set[str](), set[str]()
    _require_small_headers(file)
    with tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive:
        for member in archive:
            _require_plain(member)
            left -= member.size
            # Each name may make as many folders as it has parts.
            above = member.name.rpartition("/")[0]
            while above and above not in folders:
                folders.add(above)
                above = above.rpartition("/")[0]
            if left < 0 or len(found) + len(folders) >= most_files or member.name in found:
                raise tarfile.ReadError(f"{member.name!r:.100} is too much, or there twice")
            found.add(member.name)
            target = folder.joinpath(*PurePosixPath(member.name).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            if source is None:
                raise tarfile.ReadError(f"{member.name!r:.100} has no content")
            # "x" never overwrites a file. No link can be followed, as unpacking creates none.
            with source, target.open("xb") as out:
                copied = 0
                while chunk := source.read(_CHUNK):
                    copied += len(chunk)
                    out.write(chunk)
            if copied != member.size:
                raise tarfile.ReadError(f"{member.name!r:.100} is cut off")
    return found


def _require_small_headers(file: BinaryIO) -> None:
    """Raise ReadError for extended headers that would take much memory or time."""
    size: int | None = None
    in_a_row = global_ones = 0
    while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE and block.strip(b"\0"):
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        is_extended = header.type in _EXTENDED
        if is_extended and not 0 <= header.size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(
                f"an extended header has {header.size} bytes, expected at most {_MOST_HEADER_BYTES}"
            )
        in_a_row = in_a_row + 1 if is_extended else 0
        global_ones += header.type == tarfile.XGLTYPE
        if max(in_a_row, global_ones) > _MOST_EXTENDED:
            raise tarfile.ReadError(f"more than {_MOST_EXTENDED} extended headers in a row, or global ones")
        if is_extended:
            records = file.read(-(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
            # Sizes above 8 GiB are in an extended header alone.
            match = _SIZE_RECORD.search(records)
            size = int(match[1]) if match else size
            continue
        length = header.size if size is None else size
        size = None
        blocks = -(-length // tarfile.BLOCKSIZE) if header.type in tarfile.REGULAR_TYPES else 0
        if not 0 <= blocks * tarfile.BLOCKSIZE <= os.fstat(file.fileno()).st_size:
            raise tarfile.ReadError(f"{header.name!r:.100} is too much")
        file.seek(blocks * tarfile.BLOCKSIZE, os.SEEK_CUR)
    file.seek(0)


def _require_plain(member: tarfile.TarInfo) -> None:
    name = member.name
    parts = PurePosixPath(name).parts
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse() or member.size < 0:
        raise tarfile.ReadError(f"{name!r:.100} is no regular file")
    is_short = len(name) <= _MOST_NAME_CHARS and all(len(os.fsencode(part)) <= _MOST_PART_BYTES for part in parts)
    plain = name and is_short and len(parts) <= _MOST_PARTS and "\0" not in name and name == "/".join(parts)
    if not plain or PurePosixPath(name).is_absolute() or ".." in parts:
        raise tarfile.ReadError(f"{name!r:.100} is no path in its folder")


# Bundles of a shared farm: folders in the cache of a machine, single files in the place of the farm's files.


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
