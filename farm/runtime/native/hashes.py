"""SHA-256 of large files that rarely change, remembered by path, size and modification time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.bundles.bundle import sha256_of
from farm.system.atomic import write_atomically
from farm.system.publish import make_folders
from farm.system.trust import weakness

if TYPE_CHECKING:
    from collections.abc import Iterable


class _HashedFile(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    sha256: str


def hash_files(cache_dir: Path, paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of every file, as hex. Raises OSError for one that cannot be read."""
    memory = cache_dir / "hashes.json"
    known = _read(memory)
    found = dict(known)
    hashes = {}
    for path in paths:
        real = path.resolve()
        stat = real.stat()
        entry = known.get(str(real))
        if entry is None or (entry.size, entry.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            entry = _HashedFile(stat.st_size, stat.st_mtime_ns, sha256_of(real))
        found[str(real)] = entry
        hashes[path] = entry.sha256
    if found != known:
        _write(memory, {path: entry for path, entry in found.items() if Path(path).exists()})
    return hashes


def _read(memory: Path) -> dict[str, _HashedFile]:
    # Only a memory: whatever is wrong with it, the files can be read again.
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if weakness(memory):
            return {}
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _HashedFile])
    return {}


def _write(memory: Path, entries: dict[str, _HashedFile]) -> None:
    with contextlib.suppress(OSError):
        make_folders(memory.parent)
        write_atomically(memory, msgspec.json.encode(entries), mode=0o600)
