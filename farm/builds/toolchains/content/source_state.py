"""Origin of a toolchain's code, for people: a commit, or a wheel, and the edits since."""

from __future__ import annotations

import base64
import contextlib
import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.base.git import git
from farm.base.hashes import is_read, tree_files
from farm.builds.bundles.key import CONTENT
from farm.builds.bundles.trace import DevelopedRoot
from farm.builds.toolchains.content.distributions import remembered
from farm.builds.toolchains.toolchain import SourceState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from farm.builds.toolchains.content.identity import PackageTree, ToolchainIdentity

_MOST_CHANGED = 20
_GIT_SECONDS = 30.0
# torch is not edited in place: its code is generated and compiled.
_DEVELOPED = ("executorch", "torchao")
_SUBMODULE = "160000"
_FOLDER, _MOST_REMEMBERED = "edited", 200
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
    return remembered(
        cache_dir / _FOLDER,
        os.fsencode(state),
        tuple[str, ...],
        _MOST_REMEMBERED,
        lambda: _differing(cache_dir, tree, record),
    )


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
