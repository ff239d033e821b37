"""Trace of a bundle: files of a toolchain under development that took part, by content, and their executed lines.

A trace lies beside the bundle in the cache and holds facts only. The search for a bundle decides the effect of an edit
(`farm.builds.bundles.reuse`), with the old sources, which the cache keeps by their hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from farm.base.atomic import write_atomically
from farm.base.hashes import digest_of
from farm.base.publish import make_folders

TRACE = "trace"
"""File of a bundle; like the log it is not listed in the manifest."""

_SOURCES = "sources"
# Time without use after which sources are removed; their bundles are compiled again on request.
_KEEP_SOURCES_S = 60 * 86_400.0
_TOUCH_S = 86_400.0


class DevelopedRoot(msgspec.Struct, frozen=True):
    """Present state of a toolchain's folder under development."""

    content: str
    """Name of the folder's hash among the versions: `executorch_content`."""
    folder: str
    """Absolute path, equal to the one in the `__file__` of its modules."""
    rest: str
    """Hash of all that counts except the content of Python files: their names, data, binaries."""
    files: dict[str, str]
    """SHA-256 of the Python files, by path in the folder."""

    @staticmethod
    def of(content: str, folder: Path, files: Mapping[str, str], *also: str) -> DevelopedRoot:
        """Return the root with all `files` that count, SHA-256 by path; `also` are further ingredients of `rest`."""
        python = {name: sha256 for name, sha256 in files.items() if name.endswith(".py")}
        counts = [(name, "" if name in python else sha256) for name, sha256 in sorted(files.items())]
        return DevelopedRoot(content, str(folder), digest_of([*counts, *(("", more) for more in also)]), python)


class FileTrace(msgspec.Struct, frozen=True, array_like=True):
    """Content hash and executed lines of a file."""

    sha256: str
    lines: bytes
    """Bits of the executed lines: bit n % 8 of byte n // 8 is line n."""
    whole: bool = False
    """True for a file whose whole text counts: it was read as text, or could not be watched."""

    def ran(self, first: int, last: int) -> bool:
        """Return whether any line from `first` to `last` ran."""
        bits = int.from_bytes(self.lines, "little")
        return bool(bits >> first & ((1 << max(0, last - first + 1)) - 1))


class Trace(msgspec.Struct, frozen=True):
    """Files of the developed roots that took part in a bundle."""

    roots: tuple[dict[str, FileTrace], ...]
    """Loaded files by path, for each root in the order of the toolchain."""


def to_bits(lines: Iterable[int]) -> bytes:
    """Return line numbers as the bits of FileTrace."""
    bits = 0
    for line in lines:
        bits |= 1 << line
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def write_trace(folder: Path, trace: Trace) -> None:
    """Write the trace of the bundle in `folder`. Raises OSError."""
    (folder / TRACE).write_bytes(zlib.compress(msgspec.msgpack.encode(trace), 1))


def has_trace(folder: Path) -> bool:
    """Return whether the bundle in `folder` has a trace."""
    return (folder / TRACE).is_file()


def read_trace(folder: Path) -> Trace | None:
    """Return the trace of a bundle; None for a missing or unreadable one."""
    try:
        return msgspec.msgpack.decode(zlib.decompress((folder / TRACE).read_bytes()), type=Trace)
    except (OSError, zlib.error, msgspec.MsgspecError, ValueError):
        return None


def keep_source(cache_root: Path, sha256: str, source: bytes) -> None:
    """Store the text of a file by its hash. Raises OSError."""
    path = _source_path(cache_root, sha256)
    try:
        if time.time() - path.stat().st_mtime > _TOUCH_S:
            os.utime(path)
    except FileNotFoundError:
        make_folders(path.parent)
        write_atomically(path, zlib.compress(source, 6))


def kept_source(cache_root: Path, sha256: str) -> bytes | None:
    """Return the text of a file by its hash; None if it is missing or damaged."""
    try:
        source = zlib.decompress(_source_path(cache_root, sha256).read_bytes())
    except (OSError, zlib.error):
        return None
    return source if hashlib.sha256(source).hexdigest() == sha256 else None


def forget_old_sources(cache_root: Path) -> None:
    """Remove sources without use for a long time."""
    for path in (cache_root / _SOURCES).glob("*/*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEEP_SOURCES_S:
                path.unlink()


def _source_path(cache_root: Path, sha256: str) -> Path:
    if len(sha256) != 64 or not sha256.isalnum():
        raise OSError(f"{sha256[:80]!r} is no hash of a source")
    return cache_root / _SOURCES / sha256[:2] / sha256
