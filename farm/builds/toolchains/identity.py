"""Identity of a toolchain by content, and the origin of its code for people: commit or wheel, and edits since."""

from __future__ import annotations

import ast
import base64
import contextlib
import csv
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from typing import TypeVar

import msgspec
from packaging.utils import canonicalize_name

import farm
from farm.base.errors import FarmError
from farm.base.files import make_folders, weakness, write_atomically
from farm.base.git import git
from farm.base.hashes import digest_of, hash_files, hash_tree, is_read, tree_files
from farm.base.paths import data_folder, files_below
from farm.builds.bundles.key import CONTENT
from farm.builds.bundles.reuse import DevelopedRoot
from farm.builds.runtime.native import BRIDGE
from farm.builds.toolchains.interpreters import SHARED, SITES, InterpreterFacts, added_by, generation_of, is_supported
from farm.builds.toolchains.probe import PACKAGES
from farm.builds.toolchains.toolchain import SourceState

# Choice of the installed packages that take part in compiling, by metadata: requirements of ExecuTorch and of farm.


_T = TypeVar("_T")
_FARM = "snapdragon-farm"
# Extras of farm that take no part in compiling, except QNN's libraries of `simulator`, which have their own hash.
_TOOLS = frozenset({"cluster", "dev", "simulator"})
_MAIN = frozenset(PACKAGES)
# Installers of packages take part in no compile.
_INSTALLERS = frozenset({"pip"})
_INFO = (".dist-info", ".egg-info")
_FOLDER, _MOST_REMEMBERED = "distributions", 200
# Version of the rule, part of the key of remembered decisions: a new version decides anew.
_RULE = "3"


class NamesByPart(msgspec.Struct, frozen=True):
    """Names at the top of the folders that an interpreter imports from."""

    without: frozenset[str]
    """Names that no compile loads: requirements of farm alone; hardly any if farm is not installed."""
    required: frozenset[str]
    """Names that executorch, torch and torchao require, in any folder."""


def parts_of(cache_dir: Path, entries: Sequence[str]) -> NamesByPart:
    """Return the names in `entries` of sys.path that take part; decided once for each set of installed packages."""
    installed = [_info_folders(entry) for entry in entries]
    state = msgspec.json.encode((_RULE, entries, installed))
    return remembered(cache_dir / _FOLDER, state, NamesByPart, lambda: _decide(entries))


def remembered(folder: Path, state: bytes, kind: type[_T], decide: Callable[[], _T]) -> _T:
    """Return the decision for a state of files, taken once: `folder` keeps the latest decisions.

    A file that another user could have written is not used.
    """
    memory = folder / f"{hashlib.sha256(state).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if not weakness(memory):
            return msgspec.json.decode(memory.read_bytes(), type=kind)
    found = decide()
    with contextlib.suppress(OSError):
        make_folders(folder)
        write_atomically(memory, msgspec.json.encode(found), mode=0o600)
        for path in sorted(folder.glob("*.json"), key=os.path.getmtime, reverse=True)[_MOST_REMEMBERED:]:
            path.unlink(missing_ok=True)
    return found


def _info_folders(entry: str) -> dict[str, int]:
    """Return the metadata folders of installed packages; farm's own with its mtime, as an editable one changes."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(entry) as listed:
        for one in listed:
            if one.name.endswith(_INFO):
                is_farm = one.name.startswith("snapdragon_farm")
                found[one.name] = one.stat().st_mtime_ns if is_farm else 0
    return dict(sorted(found.items()))


def _decide(entries: Iterable[str]) -> NamesByPart:
    distributions: dict[str, Distribution] = {}
    for found in importlib.metadata.distributions(path=list(entries)):
        if name := found.metadata["Name"]:
            distributions.setdefault(canonicalize_name(name), found)
    out = {*_INSTALLERS, _FARM}
    if _FARM in distributions:
        tools = _closure(_requirements(distributions[_FARM], _TOOLS), distributions)
        needed = _closure({*_MAIN, *(set(distributions) - tools - out)}, distributions)
        out |= tools - needed
    brought: tuple[set[str], set[str]] = set(), set()
    for name, found in distributions.items():
        brought[name in out].update(_top_names(found))
    required = {name for one in _closure(_MAIN, distributions) for name in _import_names(one, distributions[one])}
    return NamesByPart(_INSTALLERS | (brought[True] - brought[False]), frozenset(required))


def _requirements(found: Distribution, extras: Iterable[str] = ()) -> set[str]:
    """Return the names of the requirements of a distribution, including the requirements of `extras`."""
    names = set[str]()
    for line in found.requires or ():
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and (extra is None or extra[1] in extras):
            names.add(canonicalize_name(name[0]))
    return names


def _closure(names: Iterable[str], distributions: Mapping[str, Distribution]) -> set[str]:
    left, seen = list(names), set[str]()
    while left:
        name = left.pop()
        if name in distributions and name not in seen:
            seen.add(name)
            if name != _FARM:
                left += _requirements(distributions[name])
    return seen


def _top_names(found: Distribution) -> set[str]:
    tops = {file.parts[0] for file in found.files or () if file.parts}
    return {name for name in tops if name not in ("..", "__pycache__", "/")}


def _import_names(name: str, found: Distribution) -> set[str]:
    """Return the import names of a distribution, even if its code is elsewhere."""
    listed = (found.read_text("top_level.txt") or "").split()
    return {name.replace("-", "_"), *listed, *(one.partition(".")[0] for one in _top_names(found))}


# Identity of a toolchain by content: hashes of its files, so that an edit never gets an old bundle from the cache.
#
# All code that a compiler process may import or load counts: executorch, torch and torchao, all other packages that
# are installed beside them (not only those loaded today, as packages import each other if present), the interpreter
# with its standard library, and QNN's libraries. This module imports none of them.


# QNN's libraries have a hash of their own, which bundles for the CPU leave out.
_QNN_WHEEL = frozenset({"onnxruntime_qnn", "onnxruntime_qnn.libs"})
# Folders that are ignored in packages beside the main three: only pytest imports tests.
_TESTS = frozenset({"tests"})
_UNUSED_STANDARD = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"}
)
# farm's own code for another interpreter: keys of bundles have the hash of the files that matter.
_HANDED_OVER = frozenset({"farm", "msgspec"})
# Modules that Python imports at its start, from any folder.
_AT_START = frozenset({"sitecustomize", "usercustomize"})
_FLATC = "data/bin/flatc"


class PackageTree(msgspec.Struct, frozen=True):
    """Folder that provides a main package."""

    folder: Path
    """Folder of the package, links followed."""
    digest: str


class ToolchainIdentity(msgspec.Struct, frozen=True):
    """Hashes that identify a toolchain by content."""

    content: dict[str, str]
    """SHA-256 by name: `executorch_content` and so on."""
    trees: dict[str, tuple[PackageTree, ...]]
    """Folders of each main package."""
    flatc: str
    """Hash of a schema compiler other than ExecuTorch's own; "" for its own, `none` without one."""


def identify(
    cache_dir: Path, python: Path, facts: InterpreterFacts, env: Mapping[str, str], *, qnn: Path | None = None
) -> ToolchainIdentity:
    """Return the identity of the toolchain of `python`.

    `facts` belong to `python`, started with this process's variables and `env`; `qnn` is the folder of the QNN
    libraries that it loads. Raises UsageError for a file that cannot be read.
    """
    content, trees = {}, {}
    edited: list[Path] = []
    flatc = _foreign_flatc(cache_dir, facts, env)
    for name in PACKAGES:
        found = facts.packages.get(name)
        folders = [folder.resolve() for folder in (found.folders if found else ())]
        trees[name] = tuple(PackageTree(folder, _content(cache_dir, folder, edited)) for folder in folders)
        digests = [tree.digest for tree in trees[name]] + ([flatc] if name == "executorch" else [])
        content[f"{name}{CONTENT}"] = hashlib.sha256("\0".join(digests).encode()).hexdigest()
    content[f"packages{CONTENT}"] = _packages(cache_dir, python, facts, edited)
    content[f"python{CONTENT}"] = _python(cache_dir, python, facts)
    if qnn is not None:
        content[f"qnn{CONTENT}"] = _libraries(cache_dir, qnn)
    for path in edited:
        _forget_bytecode(path)
    return ToolchainIdentity(content, trees, flatc)


def _content(
    cache_dir: Path,
    path: Path,
    edited: list[Path],
    without: frozenset[str] = frozenset(),
    unread: frozenset[str] = frozenset(),
) -> str:
    path = path.resolve()
    if not path.is_dir():
        return hash_files(cache_dir, [path])[path] if path.is_file() else ""
    tree = hash_tree(cache_dir, path, without=without, unread=unread)
    edited += [path / name for name in tree.edited]
    return tree.digest


def _packages(cache_dir: Path, python: Path, facts: InterpreterFacts, edited: list[Path]) -> str:
    """Return the hash of the packages besides the main ones, in the order of the search path."""
    digest = hashlib.sha256()
    entries = [entry for entry in facts.path if not _is_standard(entry)]
    sites = [entry for entry in entries if Path(entry).name in SITES]
    parts = parts_of(cache_dir, entries)
    without = frozenset({*PACKAGES, *_QNN_WHEEL, *parts.without, SHARED})
    for site in sites:
        digest.update(_content(cache_dir, Path(site), edited, without, _TESTS).encode())
    # A folder on PYTHONPATH may be a home folder. Only two kinds of packages in it count: packages that hide installed
    # ones, and requirements of ExecuTorch. Imports of a suite are in the keys of the suite's bundles, as far as this
    # interpreter has them. Editable packages count as installed ones, because any package may import them.
    in_front = {name for entry in facts.path if entry in sites or _is_standard(entry) for name in _importable(entry)}
    is_own = python.absolute() == Path(sys.executable).absolute()
    counted = in_front | parts.required | _AT_START
    editable = {entry for site in sites for entry in added_by(site)}
    for entry in entries:
        if entry in sites:
            continue
        wanted = _importable(entry) & counted
        if (not is_own or entry in editable) and not _is_of_farm(Path(entry)):
            wanted |= _regular(entry)
        for name in sorted(wanted - without - _HANDED_OVER):
            for path in _places(Path(entry), name):
                digest.update(f"{name}\0{_content(cache_dir, path, edited, unread=_TESTS)}\0".encode())
    for name, path in sorted(_mapped(sites)):
        if name in without or (name not in counted and _is_of_farm(path.parent)):
            continue
        # The name of a module has no suffix here.
        for place in _places(path.parent, path.name) or [path]:
            digest.update(f"{name}\0{_content(cache_dir, place, edited, unread=_TESTS)}\0".encode())
    return digest.hexdigest()


def _is_of_farm(folder: Path) -> bool:
    """Return whether a folder is farm's own repository: keys of bundles have the hash of the files that matter."""
    return (folder / "farm").resolve() == Path(farm.__file__).resolve().parent


def _regular(entry: str) -> set[str]:
    """Return the modules in a folder, and its regular packages (folders with an `__init__`)."""
    return {
        name
        for name in _importable(entry)
        if not (Path(entry) / name).is_dir() or (Path(entry) / name / "__init__.py").is_file()
    }


def _mapped(sites: Iterable[str]) -> Iterable[tuple[str, Path]]:
    """Yield the packages of setuptools' editable installs, whose code is in other folders."""
    for site in sites:
        for finder in Path(site).glob("__editable___*_finder.py"):
            with contextlib.suppress(OSError, ValueError, SyntaxError):
                for node in ast.parse(finder.read_bytes()).body:
                    match node:
                        case ast.AnnAssign(target=ast.Name("MAPPING"), value=ast.Dict() as mapping):
                            yield from ((name, Path(path)) for name, path in ast.literal_eval(mapping).items())


def _is_standard(entry: str) -> bool:
    return Path(entry).name == "lib-dynload" or (Path(entry) / "os.py").is_file()


def _importable(folder: str) -> set[str]:
    """Return the names that can be imported from a folder."""
    names = set()
    with contextlib.suppress(OSError), os.scandir(folder) as listed:
        for entry in listed:
            stem, dot, ending = entry.name.partition(".")
            is_module = entry.is_dir() if not dot else ending == "py" or ending.endswith("so")
            if is_module and stem.isidentifier():
                names.add(stem)
    return names


def _places(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{name}*") if path.name.partition(".")[0] == name)


def _python(cache_dir: Path, python: Path, facts: InterpreterFacts) -> str:
    """Return the hash of the interpreter: its program, its library and the standard library."""
    version = ".".join(map(str, facts.version))
    digest = hashlib.sha256(f"{version}\0{facts.abi}\0".encode())
    program = python.resolve()
    libraries = sorted((program.parent.parent / "lib").glob(f"libpython{facts.version[0]}.*.so*"))
    for sha256 in hash_files(cache_dir, [program, *libraries]).values():
        digest.update(sha256.encode())
    for entry in facts.path:
        if _is_standard(entry) and Path(entry).name != "lib-dynload":
            digest.update(hash_tree(cache_dir, Path(entry), unread=_UNUSED_STANDARD).digest.encode())
    return digest.hexdigest()


def _libraries(cache_dir: Path, folder: Path) -> str:
    """Return the hash of the libraries in a folder and below, with names; links are followed."""
    paths = {str(path.relative_to(folder)): path for path in sorted(files_below(folder))}
    if (folder / "real" / BRIDGE).is_file():
        # farm's bridge is in front of the library. Its sources count, as its bytes differ between machines.
        del paths[BRIDGE]
        sources = data_folder("native_runner") / "bridge"
        paths |= {f"bridge/{path.name}": path for path in sorted(sources.glob("*.cpp"))}
    hashes = hash_files(cache_dir, paths.values())
    return digest_of((name, hashes[path]) for name, path in paths.items())


def _foreign_flatc(cache_dir: Path, facts: InterpreterFacts, env: Mapping[str, str]) -> str:
    """Return the hash of the schema compiler if it is not the package's own; "" for its own, `none` without one."""
    found = facts.packages.get("executorch")
    brought = [folder / _FLATC for folder in (found.folders if found else ()) if (folder / _FLATC).is_file()]
    variables = {**os.environ, **env}
    named = variables.get("FLATC_EXECUTABLE")
    version = facts.version_of("executorch")
    looks_on_path = is_supported(version) and generation_of(version).needs_flatc
    if brought and not named and not looks_on_path:
        return ""
    program = shutil.which(named or "flatc", path=variables.get("PATH"))
    if program is None:
        return "none"
    path = Path(program).resolve()
    return "" if path in [one.resolve() for one in brought] else hash_files(cache_dir, [path])[path]


def _forget_bytecode(source: Path) -> None:
    """Remove stale bytecode that Python would load for the edited file.

    Python compares size and seconds: after an edit of the same size within the second, or with an mtime that was set
    back, it would run the old code.
    """
    if source.suffix != ".py":
        return
    with contextlib.suppress(OSError):
        status = source.stat()
        for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
            with compiled.open("rb") as file:
                header = file.read(16)
            flags, mtime, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
            if flags == 0 and (mtime, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF):
                compiled.unlink()


# Origin of a toolchain's code, for people: a commit, or a wheel, and the edits since.


_MOST_CHANGED = 20
_GIT_SECONDS = 30.0
# torch is not edited in place: its code is generated and compiled.
_DEVELOPED = ("executorch", "torchao")
_SUBMODULE = "160000"
_EDITED_FOLDER = "edited"
# Suffixes of text for people, whose changes do not change a compile.
_TEXT = (".md", ".rst", ".png", ".svg", ".ipynb")
_NATIVE = Path("backends", "qualcomm")
_NATIVE_SOURCES = frozenset({".cpp", ".cc", ".h", ".hpp", ".fbs"})


def source_state(cache_dir: Path, trees: Mapping[str, tuple[PackageTree, ...]]) -> SourceState:
    """Return the state of the main packages; `trees` are from `identify`.

    ExecuTorch's source tree has the state that git returns; other source trees add the changes that git lists, and
    installed wheels their edited files.
    """
    edited = [
        str(tree.folder.relative_to(tree.folder.parent) / name)
        for name in sorted(trees)
        for tree in trees[name]
        for name in edited_files(cache_dir, tree)
    ]
    checkouts = [
        (name, tree.folder) for name in _DEVELOPED for tree in trees.get(name, ()) if not is_installed(tree.folder)
    ]
    state, dirty, changed, warnings = SourceState(), bool(edited), edited, list[str]()
    asked = set[Path | None]()
    for name, folder in checkouts:
        # A submodule has a state of its own, which git's state of the outer tree does not contain.
        top = _top_of(folder)
        if top is not None and top in asked:
            continue
        found = _checkout_state(folder)
        if name == "executorch" and not asked:
            state, changed = found, [*found.changed, *edited]
        else:
            changed += [f"{name}: {path}" for path in found.changed]
        asked.add(top)
        dirty |= found.dirty
        warnings += found.warnings
    return msgspec.structs.replace(state, dirty=dirty, changed=tuple(changed[:_MOST_CHANGED]), warnings=tuple(warnings))


def developed_roots(
    cache_dir: Path, identity: ToolchainIdentity, trace: bool | None = None
) -> tuple[DevelopedRoot, ...]:
    """Return the folders of ExecuTorch and torchao under development: source trees and edited wheels.

    `trace` overrides the choice: True returns all folders, edited or not, False none.
    """
    if trace is False:
        return ()
    return tuple(
        DevelopedRoot.of(f"{name}{CONTENT}", tree.folder, tree_files(cache_dir, tree.folder), identity.flatc)
        for name in _DEVELOPED
        for tree in identity.trees.get(name, ())
        if trace or not is_installed(tree.folder) or edited_files(cache_dir, tree)
    )


def is_installed(folder: Path) -> bool:
    """Return whether a package was installed from a wheel, whose record lists its original files."""
    return _record_of(folder) is not None


def edited_files(cache_dir: Path, tree: PackageTree) -> tuple[str, ...]:
    """Return some files of an installed package that differ from its wheel or are missing, sorted."""
    record = _record_of(tree.folder)
    if record is None:
        return ()
    status = record.stat()
    state = f"{tree.folder}\0{tree.digest}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
    folder, decide = cache_dir / _EDITED_FOLDER, lambda: _differing(cache_dir, tree, record)
    return remembered(folder, os.fsencode(state), tuple[str, ...], decide)


def _differing(cache_dir: Path, tree: PackageTree, record: Path) -> tuple[str, ...]:
    now, then = tree_files(cache_dir, tree.folder), dict(_recorded(record, tree.folder.name))
    gone = [name for name in then.keys() - now.keys() if is_read(name) and not (tree.folder / name).exists()]
    return tuple(sorted([*gone, *(name for name, sha256 in now.items() if then.get(name) != sha256)])[:_MOST_CHANGED])


def _record_of(folder: Path) -> Path | None:
    """Return the RECORD of the wheel that brought a package; None for an editable one, whose wheel has no files."""
    for record in folder.parent.glob(f"{folder.name}-*.dist-info/RECORD"):
        with contextlib.suppress(OSError), record.open(encoding="utf-8", errors="replace") as lines:
            if any(line.startswith(f"{folder.name}/") for line in lines):
                return record
    return None


def _recorded(record: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a package with the SHA-256 of its wheel; "" for files that the installation made."""
    with record.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.reader(file):
            if len(row) < 2 or not row[0].startswith(f"{package}/"):
                continue
            method, _, encoded = row[1].partition("=")
            digest = base64.urlsafe_b64decode(f"{encoded}==").hex() if method == "sha256" else ""
            yield row[0].removeprefix(f"{package}/"), digest


def _checkout_state(folder: Path) -> SourceState:
    """Return the state of the source tree that has the package in `folder`."""
    top = _top_of(folder)
    warnings = tuple(_older_libraries(folder))
    if top is None:
        return SourceState(warnings=(f"{folder} is no checkout of git: its commit is unknown", *warnings))
    try:
        commit, seconds, subject = git(top, "log", "-1", "--format=%H%n%ct%n%s", timeout_s=_GIT_SECONDS).split("\n", 2)
        branch = git(top, "symbolic-ref", "-q", "--short", "HEAD", timeout_s=_GIT_SECONDS, okay=(0, 1)).strip()
        asked = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal", "--ignore-submodules=dirty")
        status = git(top, *asked, timeout_s=_GIT_SECONDS)
        staged = git(top, "ls-files", "--stage", "-z", timeout_s=_GIT_SECONDS)
        tags = git(top, "ls-files", "-v", "-z", timeout_s=_GIT_SECONDS)
    except FarmError as error:
        hint = f": git config --global --add safe.directory {top}" if "dubious ownership" in str(error) else ""
        # A tree in an unknown state counts as dirty, so that no comparison takes it for a commit.
        return SourceState(dirty=True, warnings=(f"{error}{hint}", *warnings))
    changed = tuple(sorted({*_changed(status), *_unwatched(top, tags)}))
    return SourceState(
        commit=commit,
        branch=branch,
        subject=subject.strip(),
        committed_ms=int(seconds) * 1000,
        dirty=bool(changed),
        changed=changed[:_MOST_CHANGED],
        submodules=dict(_submodules(staged)),
        warnings=warnings,
    )


def _top_of(folder: Path) -> Path | None:
    """Return the checkout that has the package in `folder`."""
    return next((place for place in (folder, *folder.parents[:3]) if (place / ".git").exists()), None)


def _changed(status: str) -> Iterator[str]:
    """Yield the changed files that may affect a program; untracked files only if Python may read them."""
    for entry in filter(None, status.split("\0")):
        kind, path = entry[:2], entry[3:]
        parts = Path(path).parts
        if any(part.startswith(".") for part in parts) or path.endswith(_TEXT):
            continue
        if kind != "??" or path.endswith("/") or is_read(path):
            yield path


def _unwatched(top: Path, tags: str) -> Iterator[str]:
    """Yield existing files that git does not check (skip-worktree, assume-unchanged)."""
    for entry in filter(None, tags.split("\0")):
        tag, _, path = entry.partition(" ")
        if (tag == "S" or tag.islower()) and (top / path).exists():
            yield path


def _submodules(staged: str) -> Iterator[tuple[str, str]]:
    for entry in staged.split("\0"):
        facts, _, path = entry.partition("\t")
        if facts.startswith(_SUBMODULE):
            yield path, facts.split()[1]


def _older_libraries(folder: Path) -> Iterator[str]:
    """Yield a warning for each native library of the QNN backend that is older than its sources."""
    place = folder / _NATIVE
    sources = [path for path in place.rglob("*") if path.suffix in _NATIVE_SOURCES and "tests" not in path.parts]
    newest = max(sources, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return
    for library in sorted(place.rglob("*.so")):
        # A linked library belongs to another tree.
        if not library.is_symlink() and library.stat().st_mtime_ns < newest.stat().st_mtime_ns:
            yield (
                f"{library.relative_to(folder)} is older than {newest.relative_to(folder)}: the library may lack "
                f"changes of the source; {_NATIVE / 'scripts/build.sh'} builds it again"
            )
