"""Environment of `farm` for programs that measure compilation: a cache of links, without bundles."""

from __future__ import annotations

import os
from pathlib import Path

from farm.base.config.settings import load_config

# Everything that a compiled job leaves in a cache.
_COMPILED = ("bundles", "builders", "traced", "sources")


def empty_environment(folder: Path, *, builders: int = 0) -> dict[str, str]:
    """Return variables of a cache without bundles and a new state, both in `folder`.

    Runners, SDKs and environments are links into farm's cache. `builders` sets the number of builders.
    """
    cache, whole = folder / "cache", load_config().cache_dir
    cache.mkdir()
    if whole.is_dir():
        for path in whole.iterdir():
            if path.name not in _COMPILED:
                (cache / path.name).symlink_to(path.resolve())
    env = {**os.environ, "FARM_CACHE_DIR": str(cache), "FARM_STATE_DIR": str(folder / "state")}
    if builders:
        (folder / "farm.toml").write_text(f"[build]\nbuilders = {builders}\n")
        env["FARM_CONFIG"] = str(folder / "farm.toml")
    return env
