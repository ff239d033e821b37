"""Search for the bundle of a job: by its key, or by a trace that still holds for an edited toolchain.

A bundle of a toolchain under development is reused as long as none of its ingredients has changed:

* all parts of its key except the content of Python files below the developed folders are the same: the case, farm's
  own recipe, other packages, the names of the Python files, data files and binaries (`base_key`);
* the code that runs at import and every function that ran are the same in each loaded file (`bundles/changes.py`).

Sources of stale state, and the reason why each is harmless:

* *Caches, registries, module state*: a traced builder forks a process for each job from a parent that has imported and
  warmed up: the trace contains all code that ran before the job, and the memory contains no state of other jobs.
* *Code that is read, not run*: torch's dynamo inlines bytecode, and notes the inlined code; `inspect.getsource` or any
  other reading of a Python file makes its whole text count.
* *Child processes, foreign threads, a replaced trace function*: there is no trace then (`farm.builds.compile.tracing`).
* *A missing file or name that appears later*: names of files are in the base key, names in a module or class are in
  the skeleton of its file.
* *Line numbers and comments* decide nothing: ExecuTorch writes stack traces into graphs, and none into programs.
* *Answers that a compiler keeps on the disk between processes*: ExecuTorch and torch's export keep none. Inputs of a
  toolchain outside of its folders (variables, a home folder) are no part of any key either.

Not detected: code that reads `__code__` or the size of a file, or depends on the number of a line; Python in threads
that a library starts by itself; a file that is read after a traceback has shown a line of it. ExecuTorch 1.5.1 does
none of it in exir and in the backends that farm compiles for.

The bundle is compiled if a fact is missing, such as a pruned trace or source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from farm.base.ids import is_bundle_key
from farm.base.publish import make_folders
from farm.base.trust import weakness
from farm.builds.bundles.changes import EVERYWHERE, Edit, edit_between
from farm.builds.bundles.key import bundle_key
from farm.builds.bundles.trace import DevelopedRoot, Trace, forget_old_sources, kept_source, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from farm.builds.bundles.cache import BundleCache
    from farm.suites.suite import Job

_TRACED = "traced"
# Latest bundles of a job that are searched: enough for a developer who switches between some states of the source.
_MOST_BUNDLES = 16


class _WithDeveloped(Protocol):
    @property
    def developed(self) -> tuple[DevelopedRoot, ...]: ...


class Tools(Protocol):
    """Versions and compiler of a toolchain: a Toolchain, or a plan that was made with one."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions that a bundle depends on besides its job."""

    @property
    def compiler(self) -> _WithDeveloped:
        """Compiler with the developed folders of the toolchain."""


class FoundBundle(NamedTuple):
    """Key of a job's bundle, and whether the cache has the bundle."""

    key: str
    cached: bool
    """True for a complete bundle in the cache."""


def find_bundle_for(job: Job, tools: Tools, cache: BundleCache) -> FoundBundle:
    """Return the bundle of `job` with the present toolchain: a cached bundle, or the key to compile it under.

    Raises UntrustedError for a bundle that another user could have written.
    """
    return find_bundles_for([job], tools, cache)[job.id]


def find_bundles_for(jobs: Iterable[Job], tools: Tools, cache: BundleCache) -> dict[str, FoundBundle]:
    """Return the bundles of many jobs, by job id; a bundle that jobs share is checked once."""
    finder = _Finder(tools, cache)
    return {job.id: finder.find(job) for job in jobs}


def base_key(job: Job, versions: Mapping[str, str], developed: Iterable[DevelopedRoot]) -> str:
    """Return a hash of all that the bundle of `job` depends on, except Python files in developed folders, as hex."""
    rests: dict[str, str] = {}
    for root in developed:
        rests[root.content] = f"{rests.get(root.content, '')} {root.rest}"
    return bundle_key(job, {**versions, **rests})


def remember_traced(cache_root: Path, base: str, key: str) -> None:
    """Record that the bundle of `key` has a trace and the base key `base`. Raises OSError."""
    folder = _folder(cache_root, base)
    make_folders(folder)
    path = folder / key
    path.touch()
    os.utime(path)


def forget_pruned(cache: BundleCache) -> None:
    """Remove the traces of bundles outside of the cache, and sources without use for a long time."""
    forget_old_sources(cache.root)
    root = cache.root / _TRACED
    for path in root.glob("*/*/*"):
        if not is_bundle_key(path.name) or not cache.folder(path.name).is_dir():
            with contextlib.suppress(OSError):
                path.unlink()
    for folder in root.glob("*/*"):
        with contextlib.suppress(OSError):  # a folder with files stays
            folder.rmdir()


class _Finder:
    """Search for the bundles of many jobs that analyses each changed file once."""

    def __init__(self, tools: Tools, cache: BundleCache) -> None:
        self._tools, self._cache = tools, cache
        self._developed = tools.compiler.developed
        self._found: dict[str, FoundBundle] = {}
        self._serves = functools.cache(self._is_served_by)
        self._edit = functools.cache(functools.partial(edit_from, cache.root))

    def find(self, job: Job) -> FoundBundle:
        key = bundle_key(job, self._tools.versions)
        if key not in self._found:
            self._found[key] = self._look(job, key)
        return self._found[key]

    def _look(self, job: Job, key: str) -> FoundBundle:
        if self._cache.lookup(key) is not None:
            return FoundBundle(key, cached=True)
        if self._developed:
            for other in _remembered(self._cache.root, base_key(job, self._tools.versions, self._developed)):
                if self._serves(other) and self._cache.lookup(other) is not None:
                    return FoundBundle(other, cached=True)
        return FoundBundle(key, cached=False)

    def _is_served_by(self, key: str) -> bool:
        """Return whether the bundle of `key` has a trace that holds for the present files."""
        folder = self._cache.folder(key)
        trace = None if weakness(folder) else read_trace(folder)
        return trace is not None and holds(trace, self._developed, self._edit)


def holds(trace: Trace, developed: tuple[DevelopedRoot, ...], edit: Callable[[str, str, Path], Edit]) -> bool:
    """Return whether no edit since `trace` concerns it; `edit` is `edit_from` for a cache."""
    if len(trace.roots) != len(developed):
        return False
    for files, root in zip(trace.roots, developed, strict=True):
        for name, then in files.items():
            now = root.files.get(name)
            if now is None:
                return False
            if now != then.sha256 and edit(then.sha256, now, Path(root.folder, name)).concerns(then):
                return False
    return True


def edit_from(cache_root: Path, then: str, now: str, path: Path) -> Edit:
    """Return the difference of the file at `path` from its kept source; both are given by their SHA-256."""
    old = kept_source(cache_root, then)
    try:
        new = path.read_bytes()
    except OSError:
        return EVERYWHERE
    # The file may have changed again since the toolchain was read.
    if old is None or hashlib.sha256(new).hexdigest() != now:
        return EVERYWHERE
    return edit_between(old, new)


def _remembered(cache_root: Path, base: str) -> list[str]:
    """Return the keys of the traced bundles with a base key, the latest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(_folder(cache_root, base)) as entries:
        found = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if is_bundle_key(entry.name)]
    return [name for _, name in sorted(found, reverse=True)[:_MOST_BUNDLES]]


def _folder(cache_root: Path, base: str) -> Path:
    return cache_root / _TRACED / base[:2] / base
