"""Runtimes that devices had, kept in the cache: an old program is measured again with its own runner and QNN."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from farm.base.files import published, weakness_inside
from farm.base.hashes import hash_files
from farm.builds.runtime.runtime import EXECUTORCH_LIBRARIES, Runtime, remade

_FOLDER, _RECORD, _FILES = "runtimes", "runtime.json", "files"
# So many runtimes stay; equal files of them are links to one file.
_MOST = 24


class _Kept(msgspec.Struct, frozen=True):
    """Runtime with the paths of its files below its folder."""

    names: dict[str, str]
    """Name in the folder by path on the device."""
    runtime: Runtime
    """As it was, without files."""


def keep(cache_dir: Path, runtime: Runtime) -> Runtime:
    """Keep the files of a runtime under its digest, remove the oldest of too many, and return `runtime`.

    A kept runtime with a damaged file is kept anew.
    """
    folders = cache_dir / _FOLDER

    def is_whole(folder: Path) -> bool:
        return any(_files(cache_dir, folder, kept) for one, kept in _all(cache_dir) if one == folder)

    def fill(folder: Path) -> None:
        known = {
            kept.runtime.hashes[name]: path
            for other, kept in _all(cache_dir)
            for name, path in _files(cache_dir, other, kept).items()
        }
        (folder / _FILES).mkdir()
        names = {name: str(number) for number, name in enumerate(sorted(runtime.files))}
        for name, path in runtime.files.items():
            _place(path, known.get(runtime.hashes[name]), folder / _FILES / names[name])
        (folder / _RECORD).write_bytes(msgspec.json.encode(_Kept(names, msgspec.structs.replace(runtime, files={}))))

    os.utime(published(folders / runtime.digest, fill, is_whole))
    for old in _by_age(cache_dir)[_MOST:]:
        shutil.rmtree(old, ignore_errors=True)
    return runtime


def find_kept(cache_dir: Path, versions: Mapping[str, str]) -> Runtime | None:
    """Return the newest kept runtime with these recorded versions whose files are as they were; None for none."""
    if not versions:
        return None
    found = [one for one in _all(cache_dir) if one[1].runtime.versions == dict(versions)]
    for folder, kept in found:
        if files := _files(cache_dir, folder, kept):
            return msgspec.structs.replace(kept.runtime, files=files)
    return None


def with_runner_of(cache_dir: Path, runtime: Runtime, other: Runtime) -> Runtime | None:
    """Return `runtime` with the runner and the ExecuTorch libraries of `other`; None where both are of two kinds."""
    if (runtime.kind, runtime.one_shot, runtime.runner) != (other.kind, other.one_shot, other.runner):
        return None
    parts = {*EXECUTORCH_LIBRARIES, runtime.runner}
    files = {name: path for name, path in runtime.files.items() if name not in parts}
    files |= {name: path for name, path in other.files.items() if name in parts}
    versions = {name: of.versions.get(name, "") for name, of in (("qnn", runtime), ("executorch", other))}
    return remade(cache_dir, runtime, files, {**versions, "runner": other.versions["runner"]})


def _all(cache_dir: Path) -> Iterator[tuple[Path, _Kept]]:
    """Yield the kept runtimes, newest first; damaged runtimes, and those writable by other users, are left out."""
    for folder in _by_age(cache_dir):
        if not weakness_inside(folder):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                yield folder, msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Kept)


def _files(cache_dir: Path, folder: Path, kept: _Kept) -> dict[str, Path]:
    """Return the files of a kept runtime by path on the device; none where one is lost or damaged."""
    files = {name: folder / _FILES / place for name, place in kept.names.items()}
    try:
        hashes = hash_files(cache_dir, files.values())
    except OSError:
        return {}
    return files if {name: hashes[path] for name, path in files.items()} == kept.runtime.hashes else {}


def _by_age(cache_dir: Path) -> list[Path]:
    """Return the folders of kept runtimes, newest first."""
    found = [path for path in (cache_dir / _FOLDER).glob("*") if (path / _RECORD).is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _place(source: Path, known: Path | None, target: Path) -> None:
    """Make `target` a link to the `known` file of equal content, else a copy of `source`."""
    if known is not None:
        with contextlib.suppress(OSError):
            os.link(known, target)
            return
    shutil.copyfile(source, target)
    target.chmod(0o755)
