"""Runners and QNN libraries of earlier days, where the cache still has them: to compare with those of today."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from farm.errors import MissingToolError
from farm.runtime.native.targets import RUNNER
from farm.runtime.simulator import find_layouts
from farm.system.trust import weakness_inside

if TYPE_CHECKING:
    from pathlib import Path

    from farm.runtime.simulator import HostSdk

# Of `farm.runtime.native.build`, or its beginning.
_BUILD_KEY = re.compile(r"[0-9a-f]{1,32}")


def older_runner(cache_dir: Path, key: str) -> Path | None:
    """Return the runner for this machine whose build's key begins with `key`, as the fact `native_runner` has it."""
    if not _BUILD_KEY.fullmatch(key):
        return None
    found = sorted(path for path in (cache_dir / "native").glob(f"{key}*/{RUNNER}") if path.is_file())
    return found[0] if len(found) == 1 and not weakness_inside(found[0].parent) else None


def older_sdk(cache_dir: Path, version: str) -> HostSdk | None:
    """Return QNN libraries for this machine of a build id, as the fact `qnn` has it; None where they are gone.

    What is laid out in the cache are links: the libraries that they lead to are asked what they are.
    """
    for sdk, ask in find_layouts(cache_dir):
        if sdk.qnn_version == version:
            try:
                if ask() == version:
                    return sdk
            except (MissingToolError, OSError):
                continue
    return None
