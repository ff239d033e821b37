"""Imports of a compiler process: code outside of installed packages is compiled from its source.

Keys contain the source of suites and checkouts. Python runs a file of `__pycache__` instead if it records the size and
the second of the source or is marked as unchecked, and it runs a folder's `x.pyc` without an `x.py`: a user with write
access there could run code that is in no key.
"""

from __future__ import annotations

import os
import sysconfig
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

import farm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import CodeType

_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
_SITES = frozenset({"site-packages", "dist-packages"})


def import_from_source(developed: Iterable[str] = ()) -> None:
    """Read no bytecode, and write none, of files outside the installed packages or in the folders `developed`."""
    paths = sysconfig.get_paths()
    installed = _with_targets([*(paths[name] for name in _INSTALLED), os.path.dirname(farm.__file__)])  # noqa: PTH120
    own = _with_targets(developed)
    path_stats, get_code = SourceFileLoader.path_stats, SourcelessFileLoader.get_code

    def is_installed(path: str) -> bool:
        absolute = os.path.abspath(path)  # noqa: PTH100 - once for each module
        if absolute.startswith(own):
            return False
        return absolute.startswith(installed) or not _SITES.isdisjoint(Path(absolute).parts)

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


def _with_targets(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{path}/" for folder in folders for path in (folder, os.path.realpath(folder)))
