"""Files that a compiler process loads: imports from source, and a check that files are older than keys. Torch-free.

Keys are computed before the first import. If a user saved a file between the two and restored it later, the bundles of
the saved file would lie under the key of the restored file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

import farm
from farm.base.errors import InfraError
from farm.base.hashes import CLOCK_STEP_NS, remembered_files, sha256_of
from farm.builds.bundles.cache import builder_folders
from farm.builds.bundles.source import suite_files
from farm.builds.toolchains.probe import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import CodeType

    from farm.base.hashes import HashedFile
    from farm.suites.suite import Case

_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
_SITES = ("site-packages", "dist-packages")
# Prefix of QNN's libraries, which are in the keys from any folder.
_QNN = "libQnn"
_REPLACED = " (deleted)"
# Permissions of writable shared memory, such as a semaphore, which is as young as its processes and holds no code.
_SHARED_MEMORY = b"rw-s"


class LoadedFiles:
    """Modules and libraries of a toolchain that was read at `as_of_ns`; 0 turns the check off.

    Create it before other code changes sys.path.
    """

    def __init__(self, as_of_ns: int, cache_root: Path) -> None:
        self._as_of_ns, self._cache_root = as_of_ns, cache_root
        self._path = _with_targets(entry for entry in sys.path if os.path.isabs(entry))  # noqa: PTH117 - text, as below
        # Files of farm, and files that a compiler writes into the builder's folders, are in no key.
        self._own = _with_targets([os.path.dirname(farm.__file__), str(builder_folders(cache_root))])  # noqa: PTH120
        self._seen: set[str] = set()
        self._known: dict[int, list[tuple[str, HashedFile]]] | None = None
        self.problem = ""
        """Reason why bundles of this process do not belong to their keys: the first changed file; empty for none."""

    def look(self, suite: str = "") -> None:
        """Check the files loaded since the last call, except files in the folder of a suite.

        A key covers the files of its suite as of the time when the key was computed.
        """
        if not self._as_of_ns or self.problem:
            return
        found = _files_loaded() - self._seen
        self._seen |= found
        main = _main_folders()
        sites = (*(entry for entry in self._path if Path(entry).name in _SITES), *main)
        roots = (*self._path, *main)
        suites = _with_targets([suite]) if suite else ()
        for path in sorted(found):
            if _is_below(path, suites) and not _is_below(path, sites):
                continue
            if _is_below(path, roots) or Path(path).name.startswith(_QNN):
                self._look_at(path)

    def require_old(self, suite: str) -> None:
        """Check as `look` does, and raise InfraError if a file of this or an earlier call is younger than the keys."""
        self.look(suite)
        if self.problem:
            raise InfraError(self.problem)

    def require_suite_old(self, case: Case, as_of_ns: int) -> None:
        """Raise InfraError if a file in the key of `case` was changed or removed since the key was computed."""
        if not as_of_ns:
            return
        folders = _with_targets([case.folder])
        gone = (Path(path) for path in self._seen if _is_below(path, folders) and not Path(path).exists())
        for path in (*suite_files(case), *gone):
            require_older(path, as_of_ns)

    def _look_at(self, path: str) -> None:
        if _is_below(path, self._own):
            return
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return  # memory by the name of a file, or a library that was removed
        if status.st_ctime_ns < self._as_of_ns - CLOCK_STEP_NS or self._is_as_keyed(path, status):
            return
        self.problem = self.problem or _was_changed(path)

    def _is_as_keyed(self, path: str, status: os.stat_result) -> bool:
        """Return whether only the time has changed: another link to a file, as uv makes them, or its permissions."""
        if self._known is None:
            self._known = {}
            for name, entry in remembered_files(self._cache_root):
                if 0 < entry.ctime_ns < self._as_of_ns:
                    self._known.setdefault(entry.inode, []).append((name, entry))
        names = (path, os.path.realpath(path))
        return any(
            (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and any(one == name or one.endswith(f"/{name}") for one in names)
            and sha256_of(Path(path)) == entry.sha256
            for name, entry in self._known.get(status.st_ino, ())
        )


def import_from_source(developed: Iterable[str] = ()) -> None:
    """Read no bytecode, and write none, of files outside the installed packages or in the folders `developed`.

    Keys contain the source of suites and checkouts. Python runs a file of `__pycache__` instead if it records the size
    and the second of the source or is marked as unchecked, and it runs a folder's `x.pyc` without an `x.py`: a user
    with write access there could run code that is in no key.
    """
    paths = sysconfig.get_paths()
    installed = _with_targets([*(paths[name] for name in _INSTALLED), os.path.dirname(farm.__file__)])  # noqa: PTH120
    own = _with_targets(developed)
    path_stats, get_code = SourceFileLoader.path_stats, SourcelessFileLoader.get_code

    def is_installed(path: str) -> bool:
        absolute = os.path.abspath(path)  # noqa: PTH100 - once for each module
        if _is_below(absolute, own):
            return False
        return _is_below(absolute, installed) or any(part in _SITES for part in Path(absolute).parts)

    def path_stats_of_installed(loader: SourceFileLoader, path: str) -> Mapping[str, object]:
        if is_installed(path):
            return path_stats(loader, path)
        raise OSError(f"{path}: no bytecode is used")

    def code_of_installed(loader: SourcelessFileLoader, name: str) -> CodeType | None:
        if is_installed(path := loader.get_filename(name)):
            return get_code(loader, name)
        raise ImportError(f"{path} is bytecode without its source", name=name, path=path)

    SourceFileLoader.path_stats = path_stats_of_installed  # type: ignore[method-assign, assignment]
    SourcelessFileLoader.get_code = code_of_installed  # type: ignore[method-assign, assignment]


def require_older(path: Path, as_of_ns: int) -> None:
    """Raise InfraError for a file that was changed or removed since `as_of_ns`."""
    try:
        is_older = path.stat().st_ctime_ns < as_of_ns - CLOCK_STEP_NS
    except FileNotFoundError:
        is_older = False
    if not is_older:
        raise InfraError(_was_changed(path))


def _was_changed(path: Path | str) -> str:
    return f"{path} was changed after the start of the run: run it again, to compile with the present file"


def _files_loaded() -> set[str]:
    """Return the absolute paths of loaded modules and libraries."""
    found = set(_mapped_files())
    for module in list(sys.modules.values()):
        # `getattr` would make some modules import others; `__dict__` does not.
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and path.startswith("/"):
            found.add(path)
    return found


def _mapped_files() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        mapping, slash, rest = line.partition(b"/")
        if slash and mapping.split()[1] != _SHARED_MEMORY:
            # For a replaced library, the file in its place shows the time of the change.
            yield "/" + os.fsdecode(rest).removesuffix(_REPLACED)


def _main_folders() -> tuple[str, ...]:
    """Return the folders of the main packages: targets of links, with all packages installed beside them."""
    folders: list[str] = []
    for name in PACKAGES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            real = os.path.realpath(folder)
            above = os.path.dirname(real)  # noqa: PTH120
            folders += [folder, above if Path(above).name in _SITES else real]
    return tuple(dict.fromkeys(folders))


def _with_targets(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder))))


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)
