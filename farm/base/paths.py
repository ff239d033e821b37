"""Paths that users name, also other users, and the data folders of farm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def relative(path: Path, root: Path) -> str:
    """Return the path below `root`, without following links; empty for a path that leads elsewhere."""
    parts: list[str] = []
    for part in path.parts[len(root.parts) :] if path.parts[: len(root.parts)] == root.parts else ():
        if part == "..":
            if not parts:
                return ""
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, in linked folders as well; a link back to a folder above is not entered.

    A folder that cannot be read has no files.
    """
    yield from _files_below(folder, frozenset())


def _files_below(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    place = status.st_dev, status.st_ino
    if place in above:
        return
    for entry in listed:
        path = folder / entry.name
        # pathlib has False for a link that leads to itself, os.scandir an error.
        kind: Path | os.DirEntry[str] = path if entry.is_symlink() else entry
        if kind.is_dir():
            yield from _files_below(path, above | {place})
        elif kind.is_file():
            yield path


def is_path(text: str) -> bool:
    """Return whether a toolchain or an SDK is named by its path: names and versions begin with a letter or a digit."""
    return "/" in text or text.startswith((".", "~"))


def beside(base: Path, text: str) -> Path:
    """Return the absolute path that a user named, relative to `base`. Raises UsageError for an unknown home, `~ada`."""
    try:
        return (base / Path(text).expanduser()).absolute()
    except RuntimeError:
        raise UsageError(f"{text}: there is no such home: write the path without ~") from None


def is_suite_path(name: str) -> bool:
    """Return whether a suite is named by the path of its folder or manifest."""
    return "/" in name or name.endswith(".toml")


def require_inside(manifest: Path, key: str, path: Path, root: Path | None) -> None:
    """Raise ConfigError for a path that leads out of `root`; its file is not looked up. Without a root all may be."""
    if root is not None and not relative(path, root):
        raise ConfigError(manifest, key, f"{str(path).removeprefix(f'{root}/')[:200]!r} is outside of the suite")


# Data folders: beside the package in a checkout, inside it in an installed wheel.


_PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """Return the folder `device_profiles`, `test_suites`, `native_runner` or `reports`."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
