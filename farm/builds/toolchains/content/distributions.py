"""Choice of the installed packages that take part in compiling, by metadata: requirements of ExecuTorch and of farm."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from typing import TypeVar

import msgspec
from packaging.utils import canonicalize_name

from farm.base.atomic import write_atomically
from farm.base.publish import make_folders
from farm.base.trust import weakness
from farm.builds.toolchains.probe import PACKAGES

_T = TypeVar("_T")
_FARM = "snapdragon-farm"
# Extras of farm that take no part in compiling, except QNN's libraries of `simulator`, which have their own hash.
_TOOLS = frozenset({"cluster", "dev", "simulator"})
_MAIN = frozenset(PACKAGES)
# Installers of packages take part in no compile.
_INSTALLERS = frozenset({"pip"})
_INFO = (".dist-info", ".egg-info")
_FOLDER, _MOST_REMEMBERED = "distributions", 50
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
    return remembered(cache_dir / _FOLDER, state, NamesByPart, _MOST_REMEMBERED, lambda: _decide(entries))


def remembered(folder: Path, state: bytes, kind: type[_T], most: int, decide: Callable[[], _T]) -> _T:
    """Return the decision for a state of files, taken once: `folder` keeps the `most` latest decisions.

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
        for path in sorted(folder.glob("*.json"), key=os.path.getmtime, reverse=True)[most:]:
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
