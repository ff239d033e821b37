"""Identity of a toolchain by content: hashes of its files, so that an edit never gets an old bundle from the cache.

All code that a compiler process may import or load counts: executorch, torch and torchao, all other packages that are
installed beside them (not only those loaded today, as packages import each other if present), the interpreter with its
standard library, and QNN's libraries. This module imports none of them.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

import farm
from farm.base.hashes import digest_of, hash_files, hash_tree
from farm.base.paths import files_below
from farm.base.resources import data_folder
from farm.builds.bundles.key import CONTENT
from farm.builds.runtime.native.targets import BRIDGE
from farm.builds.toolchains.content.distributions import parts_of
from farm.builds.toolchains.generations import generation_of, is_supported
from farm.builds.toolchains.interpreters import SITES, InterpreterFacts, added_by
from farm.builds.toolchains.probe import PACKAGES

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
    without = frozenset({*PACKAGES, *_QNN_WHEEL, *parts.without})
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
                    if not isinstance(node, ast.AnnAssign) or node.value is None:
                        continue
                    if isinstance(node.target, ast.Name) and node.target.id == "MAPPING":
                        yield from ((name, Path(path)) for name, path in ast.literal_eval(node.value).items())


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
