"""Search for the bundle of a job: by its key, or by a trace that still holds for an edited toolchain."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from farm.base.files import make_folders, weakness, write_atomically
from farm.base.forms import is_bundle_key
from farm.base.hashes import digest_of
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.suites.suite import Job

# Trace of a bundle: files of a toolchain under development that took part, by content, and their executed lines.
#
# A trace lies beside the bundle in the cache and holds facts only. The search for a bundle decides the effect of an
# edit (`farm.builds.bundles.reuse`), with the old sources, which the cache keeps by their hash.


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


# Effect of an edit of a Python file on processes that ran some of its functions, by syntax, not by layout. Pure.
#
# A file consists of its *skeleton*, the code that runs at import (statements of the module and of class bodies,
# decorators, signatures, defaults, the names of all functions), and the bodies of its outermost functions, which
# matter only if they ran. Nested functions, classes and lambdas in a body belong to the body.


_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Statements that may run without any event of a line.
_SILENT = (ast.Pass, ast.Global, ast.Nonlocal)


class Body(NamedTuple):
    """Body of an outermost function."""

    first: int
    """First line of the body; `last` is the last one."""
    last: int
    always: bool
    """True for a body whose lines do not show whether it ran: it counts as run."""
    digest: str


class Parts(NamedTuple):
    """Skeleton and bodies of a file."""

    skeleton: str
    """Hash of the skeleton."""
    bodies: tuple[Body, ...]
    """Bodies in the order of the skeleton, which has their names: equal skeletons have the same functions."""


class Edit(NamedTuple):
    """Difference between two contents of a file."""

    everywhere: bool
    """True for a different skeleton or an unknown difference: every process that loaded the file is concerned."""
    bodies: tuple[Body, ...] = ()
    """Bodies of the old content that are different in the new one."""

    def concerns(self, trace: FileTrace) -> bool:
        """Return whether the edit may concern a process that left `trace` of the old content."""
        if self.everywhere or trace.whole:
            return True
        return any(body.always or trace.ran(body.first, body.last) for body in self.bodies)


EVERYWHERE = Edit(everywhere=True)


def edit_between(old: bytes, new: bytes) -> Edit:
    """Return the difference between two contents of a file."""
    try:
        before, after = parts_of(old), parts_of(new)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return EVERYWHERE
    if before.skeleton != after.skeleton or len(before.bodies) != len(after.bodies):
        return EVERYWHERE
    pairs = zip(before.bodies, after.bodies, strict=True)
    return Edit(everywhere=False, bodies=tuple(one for one, other in pairs if one.digest != other.digest))


@functools.lru_cache(64)
def parts_of(source: bytes) -> Parts:
    """Return the skeleton and bodies of a file. Raises SyntaxError, ValueError, RecursionError."""
    tree = ast.parse(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Code that parses may still not compile: a `break` outside of a loop ends the import of the file.
        compile(source, "<edit>", "exec", dont_inherit=True)
    bodies: list[Body] = []
    _take_bodies(tree, bodies)
    return Parts(_digest(ast.dump(tree)), tuple(bodies))


def _take_bodies(node: ast.AST, bodies: list[Body]) -> None:
    """Take the bodies of the outermost functions below `node` out of the tree, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            bodies.append(_body(child))
            # Traits of the function that are visible without running its body: a `yield` makes it a generator, other
            # code may read its docstring, and a class provides `__class__` to methods that use it.
            is_generator = any(map(_yields, child.body))
            names = {node.id for node in ast.walk(child) if isinstance(node, ast.Name)}
            wants_its_class = not names.isdisjoint(("__class__", "super"))
            traits = (is_generator, ast.get_docstring(child, clean=False), wants_its_class)
            child.body = [ast.Expr(ast.Constant(repr(traits)))]
        else:
            _take_bodies(child, bodies)


def _body(function: _Function) -> Body:
    body = function.body
    parts = [function.args, *function.decorator_list, *filter(None, [function.returns])]
    header = [function.lineno, *(getattr(node, "end_lineno", 0) for part in parts for node in ast.walk(part))]
    first, last = body[0].lineno, max(one.end_lineno or one.lineno for one in body)
    always = first <= max(header) or all(_is_silent(one) for one in body)
    return Body(first, last, always, _digest("".join(map(ast.dump, body))))


def _is_silent(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, _SILENT) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _yields(node: ast.AST) -> bool:
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, _Function | ast.Lambda | ast.ClassDef):
        return False
    return any(_yields(child) for child in ast.iter_child_nodes(node))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# Search for the bundle of a job: by its key, or by a trace that still holds for an edited toolchain.
#
# A bundle of a toolchain under development is reused as long as none of its ingredients has changed:
#
# * all parts of its key except the content of Python files below the developed folders are the same: the case, farm's
#   own recipe, other packages, the names of the Python files, data files and binaries (`base_key`);
# * the code that runs at import and every function that ran are the same in each loaded file (`edit_between`).
#
# Sources of stale state, and the reason why each is harmless:
#
# * *Caches, registries, module state*: a traced builder forks a process for each job from a parent that has imported
#   and
#   warmed up: the trace contains all code that ran before the job, and the memory contains no state of other jobs.
# * *Code that is read, not run*: torch's dynamo inlines bytecode, and notes the inlined code; `inspect.getsource` or
#   any
#   other reading of a Python file makes its whole text count.
# * *Child processes, foreign threads, a replaced trace function*: there is no trace then
#   (`farm.builds.compile.loaded`).
# * *A missing file or name that appears later*: names of files are in the base key, names in a module or class are in
#   the skeleton of its file.
# * *Line numbers and comments* decide nothing: ExecuTorch writes stack traces into graphs, and none into programs.
# * *Answers that a compiler keeps on the disk between processes*: ExecuTorch and torch's export keep none. Inputs of
#   a
#   toolchain outside of its folders (variables, a home folder) are no part of any key either.
#
# Not detected: code that reads `__code__` or the size of a file, or depends on the number of a line; Python in
# threads that a library starts by itself; a file that is read after a traceback has shown a line of it. ExecuTorch
# 1.5.1 does none of it in exir and in the backends that farm compiles for.
#
# The bundle is compiled if a fact is missing, such as a pruned trace or source.


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
    """Return the bundles of many jobs, by job id; a bundle that jobs share and a changed file are checked once."""
    developed = tools.compiler.developed
    edit = functools.cache(functools.partial(edit_from, cache.root))

    def look(job: Job, key: str) -> FoundBundle:
        if cache.lookup(key) is not None:
            return FoundBundle(key, cached=True)
        for other in _remembered(cache.root, base_key(job, tools.versions, developed)) if developed else ():
            folder = cache.folder(other)
            trace = None if weakness(folder) else read_trace(folder)
            if trace is not None and holds(trace, developed, edit) and cache.lookup(other) is not None:
                return FoundBundle(other, cached=True)
        return FoundBundle(key, cached=False)

    by_key: dict[str, FoundBundle] = {}
    found = {}
    for job in jobs:
        key = bundle_key(job, tools.versions)
        found[job.id] = by_key[key] = by_key.get(key) or look(job, key)
    return found


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
