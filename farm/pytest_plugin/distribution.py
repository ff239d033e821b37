"""Distribution modes of pytest-xdist that lose tests or never end once a worker dies."""

from __future__ import annotations

import importlib.metadata

_BROKEN_MODES = ("loadscope", "loadfile", "loadgroup")
"""Modes of one class of xdist's, `LoadScopeScheduling`."""
_LAST_BROKEN = (3, 8)
"""Newest release with the defect, major and minor: pytest-dev/pytest-xdist issue 1323."""


def distribution_problem(mode: str) -> str:
    """Return why tests cannot be distributed by `mode` with the installed xdist; "" where they can."""
    if mode not in _BROKEN_MODES:
        return ""
    version = importlib.metadata.version("pytest-xdist")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) > _LAST_BROKEN:
        return ""
    return (
        f"--dist {mode} loses tests or never ends when a worker dies (pytest-xdist {version}, its issue 1323): "
        "leave --dist out, or use load, worksteal or each"
    )
