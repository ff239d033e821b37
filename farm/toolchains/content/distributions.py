"""Which installed packages take no part in compiling: what only farm itself needs, and its development."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
from typing import TYPE_CHECKING

import msgspec

from farm.system.atomic import write_atomically
from farm.system.publish import make_folders
from farm.system.trust import weakness

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.metadata import Distribution
    from pathlib import Path

_FARM = "snapdragon-farm"
# The other extras of farm bring what compiles.
_TOOLS = frozenset({"cluster", "dev"})
_MAIN = frozenset({"executorch", "torch", "torchao"})
# It installs packages, and is part of none.
_INSTALLERS = frozenset({"pip"})
_INFO = (".dist-info", ".egg-info")
_FOLDER, _MOST_REMEMBERED = "distributions", 50
# Goes into what is remembered: a change of the rule decides anew.
_RULE = "1"


def names_without_part(cache_dir: Path, sites: Sequence[str]) -> frozenset[str]:
    """Return the names at the top of `sites`, folders that packages are installed in, that no compile loads.

    That is what farm's own metadata ask for and nothing else does: where farm is not installed, hardly anything.
    """
    installed = [_info_folders(site) for site in sites]
    if not any(name.startswith("snapdragon_farm") for names in installed for name in names):
        return frozenset(name for names in installed for name in names if name.partition("-")[0] in _INSTALLERS) | (
            _INSTALLERS
        )
    state = msgspec.json.encode((_RULE, sites, installed))
    memory = cache_dir / _FOLDER / f"{hashlib.sha256(state).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if not weakness(memory):
            return msgspec.json.decode(memory.read_bytes(), type=frozenset[str])
    found = _decide(sites)
    with contextlib.suppress(OSError):
        make_folders(memory.parent)
        write_atomically(memory, msgspec.json.encode(found), mode=0o600)
        for path in sorted(memory.parent.glob("*.json"), key=os.path.getmtime, reverse=True)[_MOST_REMEMBERED:]:
            path.unlink(missing_ok=True)
    return found


def _info_folders(site: str) -> dict[str, int]:
    """Return the folders that say what is installed; of farm's own, also when it was written, as it may be edited."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(site) as listed:
        for entry in listed:
            if entry.name.endswith(_INFO):
                is_farm = entry.name.startswith("snapdragon_farm")
                found[entry.name] = entry.stat().st_mtime_ns if is_farm else 0
    return dict(sorted(found.items()))


def _decide(sites: Iterable[str]) -> frozenset[str]:
    distributions: dict[str, Distribution] = {}
    for found in importlib.metadata.distributions(path=list(sites)):
        if name := found.metadata["Name"]:
            distributions.setdefault(_canonical(name), found)
    out = {*_INSTALLERS, _FARM}
    if _FARM in distributions:
        tools = _closure(_requirements(distributions[_FARM], _TOOLS), distributions)
        needed = _closure({*_MAIN, *(set(distributions) - tools - out)}, distributions)
        out |= tools - needed
    brought: tuple[set[str], set[str]] = set(), set()
    for name, found in distributions.items():
        brought[name in out].update(_top_names(found))
    return frozenset(brought[True] - brought[False])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(found: Distribution, extras: Iterable[str] = ()) -> set[str]:
    """Return the names of what a distribution requires; of its extras those in `extras`."""
    names = set()
    for line in found.requires or ():
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and (extra is None or extra[1] in extras):
            names.add(_canonical(name[0]))
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
