"""SHA-256 of files and folders, remembered: nothing is read twice unless it has changed.

A file is known by size, modification time, change time and inode. No program can set the change time back, so that an
edit with the other three unchanged is seen as well. A file may change twice within one tick of its file system's clock,
so that a file younger than `_YOUNG_S` at its reading is read again the next time (git calls such files racily clean).

A memory is a file in the cache: its damage costs time alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from farm.base.errors import UsageError
from farm.base.files import make_folders, weakness, write_atomically

CLOCK_STEP_NS = 20_000_000
"""A clock that files are stamped with goes in steps."""

_FOLDER = "hashes"
_SINGLE_FILES = "files.json"
_YOUNG_S = 2.0
# Recent states of a folder, such as before and after an edit that was undone.
_MOST_STATES = 8
_MOST_MEMORIES, _TOUCH_S = 200, 86_400.0
_TRIES = 3
# Errors of a damaged memory: the files are read again.
_DAMAGED = (OSError, ValueError, msgspec.MsgspecError)

# No Python code and nothing that Python code reads while it runs: sources of C++, type stubs, text for people.
_UNREAD = (
    *(".h", ".hh", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu", ".S", ".s", ".o", ".a", ".inl", ".cmake"),
    *(".pyi", ".pyx", ".pxd", ".md", ".rst", ".log", ".swp", "~"),
)
_UNREAD_FOLDERS = frozenset({"__pycache__", ".git", "third-party", "node_modules"})
# Metadata of installed packages: name, version and plugins count, the installer does not.
_INFO = (".dist-info", ".egg-info")
_INFO_FILES = frozenset({"METADATA", "PKG-INFO", "entry_points.txt"})
_BUILD_FOLDER, _BUILT_FROM = "CMakeCache.txt", "CMakeLists.txt"
# Version in the names of memories: another selection of files starts new memories.
_RULE = "2"


def digest_of(pairs: Iterable[tuple[object, object]]) -> str:
    """Return the SHA-256 of names with their values, in the given order, as hex."""
    digest = hashlib.sha256()
    for name, value in pairs:
        digest.update(f"{name}\0{value}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def name_of(*parts: str) -> str:
    """Return the name of a folder of the cache that is made of `parts`: 32 digits of their SHA-256."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class HashedFile(msgspec.Struct, frozen=True, array_like=True):
    """Identity and hash of a file at its reading."""

    size: int
    mtime_ns: int
    ctime_ns: int
    """0 where the file had just changed: it is read again."""
    inode: int
    sha256: str


class HashedTree(msgspec.Struct, frozen=True):
    """The content of a folder."""

    digest: str
    """Hash of the names and contents of the files that count."""
    edited: tuple[str, ...] = ()
    """Files that have another content than when they were read last, or have just changed; relative."""


def is_read(name: str) -> bool:
    """Return whether a file counts in a tree by its relative name."""
    *folders, _ = name.split("/")
    return not name.endswith(_UNREAD) and not any(one in _UNREAD_FOLDERS or one == "include" for one in folders)


_Files = dict[str, HashedFile]
_Stats = list[tuple[str, int, int, int, int]]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def let_the_clock_pass(paths: Iterable[Path]) -> None:
    """Wait one tick of the file system's clock, so that files written before differ in time from later writes."""
    now_ns = time.time_ns()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if 0 <= now_ns - path.stat().st_ctime_ns <= CLOCK_STEP_NS:
                time.sleep(2 * CLOCK_STEP_NS / 1e9)
                return


def hash_files(cache_dir: Path, paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of every file, as hex. Raises OSError for an unreadable file."""
    memory = cache_dir / _FOLDER / _SINGLE_FILES
    known = _read_files(memory)
    found, hashes = dict(known), {}
    folders: dict[Path, str] = {}
    for path in paths:
        # Each folder is resolved once: resolving takes ten times as long as reading the state of a file.
        if path.parent not in folders:
            folders[path.parent] = os.path.realpath(path.parent)
        real = Path(folders[path.parent], path.name)
        real = real.resolve() if real.is_symlink() else real
        found[str(real)] = entry = _hashed(real, known.get(str(real)))
        hashes[path] = entry.sha256
    if found != known:
        _write(memory, {}, {path: entry for path, entry in found.items() if Path(path).exists()})
    return hashes


def hash_tree(
    cache_dir: Path, root: Path, *, without: frozenset[str] = frozenset(), unread: frozenset[str] = frozenset()
) -> HashedTree:
    """Return the content of the files below `root` that a Python program may read.

    Links are followed: the content read by that name counts. Names in `without` are left out at the top, folders named
    in `unread` everywhere. Headers, sources of C++, type stubs, bytecode beside its source and foreign folders do not
    count; hidden folders count with shared libraries alone, build folders of CMake also with folders of Python. Raises
    UsageError for unreadable files.
    """
    return _steady(cache_dir, root, without, unread, files_too=False)[0]


def tree_files(cache_dir: Path, root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that counts in `hash_tree`, by its relative path."""
    files = _steady(cache_dir, root, frozenset(), frozenset(), files_too=True)[1]
    return {name: entry.sha256 for name, entry in files.items()}


def remembered_files(cache_dir: Path) -> Iterator[tuple[str, HashedFile]]:
    """Yield remembered single files by absolute path, and files in folders by relative path."""
    for memory in (cache_dir / _FOLDER).glob("*.json"):
        yield from _read_files(memory).items()


def _steady(
    cache_dir: Path, root: Path, without: frozenset[str], unread: frozenset[str], *, files_too: bool
) -> tuple[HashedTree, _Files]:
    unread |= _UNREAD_FOLDERS
    # `without` is no part of the name, so that files stay remembered when another name is left out.
    name = "\0".join((_RULE, os.fspath(root.absolute()), *sorted(unread)))
    memory = cache_dir / _FOLDER / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.json"
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            return _look(memory, root, without, unread, files_too=files_too)
        except FileNotFoundError as error:  # it went while it was being looked at
            problem = error
        except UnicodeEncodeError:
            raise UsageError(f"{root}: has a file whose name is no UTF-8: rename it, or take it out of there") from None
        except OSError as error:
            raise _unreadable(root, error) from None
    raise _unreadable(root, problem) from None


def _unreadable(root: Path, error: OSError | None) -> UsageError:
    where, why = (error.filename or root, error.strerror) if error else (root, "")
    return UsageError(f"{where}: {why}: compilers are identified by their content: make it readable, or remove it")


def _look(
    memory: Path, root: Path, without: frozenset[str], unread: frozenset[str], *, files_too: bool
) -> tuple[HashedTree, _Files]:
    stats: _Stats = []
    _scan(os.fspath(root), "", without | unread, unread, stats, (), binaries_only=False)
    state = hashlib.sha256(msgspec.msgpack.encode(stats)).hexdigest()
    states = _read_states(memory)
    if state in states and not files_too:
        return HashedTree(states[state]), {}
    known = _read_files(memory)
    files = {name: _hashed(root / name, known.get(name), seen) for name, *seen in stats}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name].sha256}\0".encode())
    content = digest.hexdigest()
    edited = tuple(
        name
        for name, entry in files.items()
        if not entry.ctime_ns or (name in known and known[name].sha256 != entry.sha256)
    )
    is_new = state not in states and all(entry.ctime_ns for entry in files.values())
    if is_new:
        states = dict([*states.items(), (state, content)][-_MOST_STATES:])
    if is_new or files != known:
        _write(memory, states, files)
    return HashedTree(content, edited), files


def _scan(
    folder: str,
    prefix: str,
    without: frozenset[str],
    unread: frozenset[str],
    found: _Stats,
    above: tuple[tuple[int, int], ...],
    *,
    binaries_only: bool,
) -> None:
    """Add what counts below `folder` but names in `without`.

    `above` are the folders on the way that a link led to: links may go round.
    """
    with os.scandir(folder) as entries:
        listed = list(entries)
    names = [entry.name for entry in listed]
    # A source folder in which CMake builds counts as a source tree.
    if binaries_only or (prefix and _BUILD_FOLDER in names and _BUILT_FROM not in names):
        # A folder of Python files can be imported.
        binaries_only = "/." in f"/{prefix}" or not any(name.endswith(".py") for name in names)
    for entry in listed:
        name = entry.name
        if entry.is_dir():
            if name in without:
                continue
            inner = above
            if entry.is_symlink():
                status = entry.stat()
                inner = (*above, (status.st_dev, status.st_ino))
                if inner[-1] in above:
                    continue
            if name == "include" and not os.path.exists(f"{entry.path}/__init__.py"):  # noqa: PTH110 - text, as above
                continue
            hidden = binaries_only or name[0] == "."
            if name.endswith(_INFO):
                _scan_info(entry.path, f"{prefix}{name}/", found)
            else:
                _scan(entry.path, f"{prefix}{name}/", unread, unread, found, inner, binaries_only=hidden)
        elif not name.endswith(_UNREAD) and name not in without and (not binaries_only or ".so" in name):
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # a link to nothing, or gone
            if stat.S_ISREG(status.st_mode):
                path = f"{prefix}{name}"
                found.append((path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


def _scan_info(folder: str, prefix: str, found: _Stats) -> None:
    for name in _INFO_FILES:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116 - text, as above
            path = f"{prefix}{name}"
            found.append((path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


def _hashed(path: Path, known: HashedFile | None, seen: Iterable[int] | None = None) -> HashedFile:
    """Return the hash of `path`, remembered if the file is unchanged; `seen` is its size, times and inode."""
    for _ in range(_TRIES):
        before = tuple(seen) if seen is not None else _identity(path)
        if known is not None and before == (known.size, known.mtime_ns, known.ctime_ns, known.inode):
            return known
        read_ns = time.time_ns()
        try:
            sha256 = sha256_of(path)
        except OSError as error:
            # An error during reading carries no path.
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        if _identity(path) == before:
            break
        seen = None  # it was written meanwhile
    size, mtime_ns, ctime_ns, inode = before
    is_old = 0 < ctime_ns < read_ns - _YOUNG_S * 1e9
    return HashedFile(size, mtime_ns, ctime_ns if is_old else 0, inode, sha256)


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_states(memory: Path) -> dict[str, str]:
    """Return the digests of a folder by its state, from the first line, so that the rest is not parsed."""
    with contextlib.suppress(*_DAMAGED):
        if weakness(memory):
            return {}
        with memory.open("rb") as file:
            states = msgspec.json.decode(file.readline(), type=dict[str, str])
        if time.time() - memory.stat().st_mtime > _TOUCH_S:
            os.utime(memory)
        return states
    return {}


def _read_files(memory: Path) -> _Files:
    with contextlib.suppress(*_DAMAGED):
        if not weakness(memory):
            with memory.open("rb") as file:
                file.readline()
                return msgspec.json.decode(file.read(), type=_Files)
    return {}


def _write(memory: Path, states: dict[str, str], files: _Files) -> None:
    with contextlib.suppress(OSError):
        make_folders(memory.parent)
        content = msgspec.json.encode(states) + b"\n" + msgspec.json.encode(files)
        is_new = not memory.exists()
        write_atomically(memory, content, mode=0o600)
        if is_new:
            _forget_the_oldest(memory.parent)


def _forget_the_oldest(folder: Path) -> None:
    memories = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in memories[_MOST_MEMORIES:]:
        path.unlink(missing_ok=True)
