"""Environment variables of farm, and checks of paths in them and in farm.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from farm.base.errors import UsageError

QNN_PATHS = {
    "sdk_root": "QNN_SDK_ROOT",
    "android_qnn": "FARM_ANDROID_QNN",
    "android_runner": "",
    "android_backend_library": "",
    "android_ndk_root": "ANDROID_NDK_ROOT",
    "android_executorch": "FARM_ANDROID_EXECUTORCH",
    "executorch_build": "FARM_EXECUTORCH_BUILD",
    "executorch_linux_build": "FARM_EXECUTORCH_LINUX_BUILD",
    "executorch_direct_build": "FARM_EXECUTORCH_DIRECT_BUILD",
    "hexagon_sdk_root": "HEXAGON_SDK_ROOT",
    "hexagon_tools_root": "HEXAGON_TOOLS_ROOT",
}
"""Paths of the [qnn] table, and the variable that overrides each; empty where there is none."""

VARIABLES = {
    "FARM_CONFIG": "configuration file, in place of the nearest farm.toml",
    "FARM_STORE": "`store` of farm.toml, or the path of an SQLite file",
    "FARM_ARTIFACTS": "`artifacts` of farm.toml",
    "FARM_CACHE_DIR": "`paths.cache` of farm.toml",
    "FARM_STATE_DIR": "`paths.state` of farm.toml",
    "FARM_SERVER": "address of a `farm serve`, which everyday commands ask in place of the store",
    "FARM_TOKEN": "token of your account there",
    "FARM_USER": "user of the command, as `farm serve` starts it; PostgreSQL accepts others from server and owner",
    "FARM_VENV": "environment that `farmw` makes, in place of `.venv`",
    "FARM_EXTRAS": "extras that `farmw` installs as well, such as `cluster`",
    "FARM_LOG": "levels of log lines: `LEVEL` and `farm.MODULE=LEVEL`, separated by commas",
}
"""Variables of farm that are not in `QNN_PATHS`, and their meaning."""

# As near as a slip of the finger, and not as another program's variable could be.
_NEAR = 0.85


def require_known_variables() -> None:
    """Raise UsageError for a variable whose name resembles a variable of farm, instead of ignoring it."""
    known = [*VARIABLES, *(name for name in QNN_PATHS.values() if name.startswith("FARM_"))]
    for name in os.environ:
        if not name.startswith("FARM_") or name.startswith(tuple(known)):
            continue
        import difflib

        if near := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
            raise UsageError(f"{name} is no variable of farm: did you mean {near[0]}? Set that one, and unset {name}")


def require_folder(path: Path, named: str) -> None:
    """Raise UsageError for a folder, configured as `named`, that is a file or lies below one."""
    there = next((place for place in (path, *path.parents) if place.exists()), path)
    if not there.is_dir():
        raise UsageError(f"{named}: {there} is no folder: name another place")


def require_there(paths: Mapping[str, Path | None], file: Path | None, otherwise: str = "") -> None:
    """Raise UsageError for a missing path of the [qnn] table of `file`, or of its variable.

    `paths` are by key; `otherwise` names the origin of other paths.
    """
    for key, path in paths.items():
        if path is None or path.exists():
            continue
        variable = QNN_PATHS[key]
        value = os.environ.get(variable)
        named = f"{variable}={value}" if value else otherwise or f"{file}: qnn.{key}"
        raise UsageError(f"{named}: there is no {path}: correct it, or leave it out")
