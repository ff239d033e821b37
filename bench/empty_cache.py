"""Environment of `farm` for programs that measure it: a cache of links, without bundles; the Python of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
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


def python_of(checkout: Path, env: dict[str, str]) -> str:
    """Return the Python that runs the farm of `checkout`: of its .venv, else this one, with PYTHONPATH in `env`.

    Ends this process for a Python that imports another farm. Processes of an earlier farm search the current folder for
    modules: it has to be an empty one.
    """
    own, python = checkout / ".venv" / "bin" / "python", sys.executable
    if own.exists():
        python = str(own)
    else:
        # Before the packages of this Python, in builders as well.
        env["PYTHONPATH"] = str(checkout)
    asked = [python, "-P", "-c", "import farm; print(farm.__file__)"]
    imported = subprocess.check_output(asked, env=env, text=True).strip()
    if not Path(imported).is_relative_to(checkout):
        sys.exit(f"--against {checkout}: Python imports {imported} instead; use another virtual environment")
    return python
