"""Unpacking of a QNN SDK from an untrusted zip file, and the checks before its first use."""

from __future__ import annotations

import errno
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from farm.base.errors import ConfigError, InfraError
from farm.base.text import one_line
from farm.builds.runtime.native.elf import AARCH64, HEXAGON, MACHINES, X86_64, read_elf
from farm.builds.runtime.qnn_sdk import sdk_field
from farm.builds.runtime.simulator import LIBRARY, TARGET

# Limits far above any SDK: the SDKs of 2025 are 2 GB, 6 GB unpacked, in 20,000 files.
_MOST_BYTES = 64 * 2**30
_MOST_FILES = 400_000
_CHUNK = 2**20
# PATH_MAX of Linux, with the closing NUL.
_MOST_LINK = 4096
_ENCRYPTED = 1
_OF_NAMES = {errno.EEXIST, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
_MACHINES = (
    (re.compile(r"x86_64-linux.*"), X86_64),
    (re.compile(r"aarch64-(android|oe-linux.*|ubuntu.*)"), AARCH64),
    (re.compile(r"(hexagon|lpai)-v\d+"), HEXAGON),
)
_NEEDED = (LIBRARY, "libQnnSystem.so")


def unpack_sdk(archive: Path, folder: Path, version: str) -> None:
    """Unpack the SDK of that version, `qairt/VERSION/` in the archive, into `folder`.

    Raises InfraError for an archive that is damaged, has a name or a link leading out of the folder, or is larger than
    any SDK.
    """
    unpack(archive, folder, f"qairt/{version}/", _MOST_BYTES)


def unpack(archive: Path, folder: Path, prefix: str, most_bytes: int) -> None:
    """Unpack the files below `prefix` in a zip file into `folder`, at most `most_bytes`. Raises as `unpack_sdk`."""
    folder.mkdir(exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [one for one in _checked(opened.infolist(), most_bytes) if one.filename.startswith(prefix)]
            if not members:
                raise refused(f"there is no {prefix} in it" if prefix else "it is empty")
            _require_space(folder, sum(one.file_size for one in members))
            names = {PurePosixPath(one.filename[len(prefix) :]): one for one in members if one.filename != prefix}
            links = {name: _target(opened, one) for name, one in names.items() if _is_link(one)}
            _check_links(names, links)
            for name, one in names.items():
                if name not in links:
                    _extract(opened, one, folder / name, name)
            # Links are made last, so that no file is written through a link.
            for name, target in links.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(target)
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError, NotImplementedError, RuntimeError) as error:
        raise refused(f"it is damaged ({error})") from None
    except OSError as error:
        # A file in the place of a folder, or a name or a path that is too long for the file system.
        if error.errno not in _OF_NAMES:
            raise
        raise refused(f"it has a name that cannot be unpacked ({error.strerror})") from None


def check_sdk(folder: Path, version: str) -> None:
    """Raise InfraError unless `folder` has the SDK of `version` for this machine, with each library in its place."""
    actual = sdk_field(folder, "version")
    if actual != version:
        raise refused(f"its sdk.yaml has version {one_line(actual, 80) or 'nothing'}, and {version} was fetched")
    missing = [name for name in _NEEDED if not (folder / "lib" / TARGET / name).is_file()]
    if missing:
        raise refused(f"it has no lib/{TARGET}/{missing[0]}")
    check_machines(folder / "lib")


def check_machines(folder: Path) -> None:
    """Raise InfraError for a library in the folder of another processor, and for a file that is no library."""
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        machine = next((number for name, number in _MACHINES if name.fullmatch(place.name)), None)
        if machine is None:
            continue
        for library in sorted(place.rglob("*.so")):
            try:
                found = read_elf(library)
            except (ConfigError, OSError) as error:
                raise refused(f"{library.relative_to(folder.parent)}: {error}") from None
            if found.machine != machine:
                name = library.relative_to(folder.parent)
                raise refused(f"{name} is made for {found.machine_name}, expected {MACHINES[machine]}")


def _checked(members: list[zipfile.ZipInfo], most_bytes: int) -> Iterator[zipfile.ZipInfo]:
    """Yield the entries of an archive. Raises InfraError if one leads out of it, or is double or encrypted, and for an
    archive larger than any SDK.
    """
    nbytes = sum(one.file_size for one in members)
    if len(members) > _MOST_FILES or nbytes > most_bytes:
        raise refused(f"it is larger than any SDK: {len(members)} files, {nbytes} bytes")
    seen: set[str] = set()
    for one in members:
        name = one.filename
        parts = name.rstrip("/").split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise refused(f"{one_line(name, 200)!r} in it leads out of its folder")
        if name.rstrip("/") in seen:
            raise refused(f"{one_line(name, 200)!r} is in it twice")
        if one.flag_bits & _ENCRYPTED:
            raise refused("it is encrypted")
        seen.add(name.rstrip("/"))
        yield one


def _check_links(names: Iterable[PurePosixPath], links: dict[PurePosixPath, str]) -> None:
    for name, target in links.items():
        place = list(name.parent.parts)
        for part in PurePosixPath(target).parts:
            if PurePosixPath(*place) in links:
                # The text of a link does not show where `..` leads behind another link.
                raise refused(f"the link {one_line(str(name), 200)!r} in it leads through another one")
            if part == "/" or (part == ".." and not place):
                raise refused(f"the link {one_line(str(name), 200)!r} in it leads out of its folder")
            place = place[:-1] if part == ".." else [*place, part]
    for name in names:
        if any(parent in links for parent in name.parents):
            raise refused(f"{one_line(str(name), 200)!r} in it lies behind a link")


def _target(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Return the target of a link. Raises InfraError for a target that no link can have."""
    if not 0 < member.file_size < _MOST_LINK or "\0" in (target := archive.read(member).decode()):
        raise refused(f"the link {one_line(member.filename, 200)!r} in it has no target, or a damaged one")
    return target


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(member.external_attr >> 16)


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, name: PurePosixPath) -> None:
    if member.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # A read to the end verifies the checksum, and returns at most the announced number of bytes.
    with archive.open(member) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
    executable = member.external_attr >> 16 & 0o111 or name.parts[0] == "bin"
    target.chmod(0o755 if executable else 0o644)


def _require_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InfraError(
            f"the QNN SDK needs {nbytes // 2**20} MB in the cache and {free // 2**20} MB are free: make room with "
            "'farm setup cache prune --older 30d --yes', or set FARM_CACHE_DIR to another folder"
        )


def refused(why: str) -> InfraError:
    """Return the error for fetched files that farm will not use."""
    return InfraError(f"the fetched archive is no usable QNN SDK: {why}")
