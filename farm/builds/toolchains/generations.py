"""Differences between releases of ExecuTorch in starting their processes, and the releases that farm compiles with.

Differences in calls are in farm/builds/compile/flows, beside the calls.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from farm.builds.toolchains.interpreters import InterpreterFacts

OLDEST = "1.3.1"
"""Before it, ExecuTorch's Qualcomm backend has no LPAI, whose names farm's flow imports."""
NEWEST = "1.5.1"
"""Newest release that farm was run with. Newer releases are tried, as they may work."""

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


class ReleaseRow(NamedTuple):
    """Range of releases that are used in the same way."""

    since: tuple[int, int]
    torch: str
    """Requirement of torch for the wheels of these releases: the metadata of wheels from 1.5 lack it."""
    needs_flatc: bool
    """True for releases that search flatc on PATH, not in their own wheel."""


_GENERATIONS = (
    ReleaseRow((1, 3), "torch>=2.12,<2.14", needs_flatc=True),
    ReleaseRow((1, 4), "torch>=2.13,<2.14", needs_flatc=False),
)


def generation_of(version: str) -> ReleaseRow:
    """Return the row of ExecuTorch `version`; for an unknown version, the row of the newest release.

    Raises UsageError for a version older than OLDEST.
    """
    numbers = _numbers(version)
    if numbers is None:
        return _GENERATIONS[-1]
    if not is_supported(version):
        raise UsageError(
            f"ExecuTorch {version} is too old: farm compiles with {OLDEST} and newer, as LPAI came into its Qualcomm "
            "backend then"
        )
    return next(one for one in reversed(_GENERATIONS) if one.since <= numbers[:2])


def newer_than_known(version: str) -> bool:
    """Return whether farm was never run with such a version, which deserves a note but is not refused."""
    numbers, newest = _numbers(version), _numbers(NEWEST)
    return numbers is not None and newest is not None and numbers[:2] > newest[:2]


def variables_of(facts: InterpreterFacts) -> dict[str, str]:
    """Return the variables, besides paths, for the processes of an interpreter's ExecuTorch. Raises UsageError."""
    generation, package = generation_of(facts.version_of("executorch")), facts.folder("executorch")
    if not generation.needs_flatc or package is None or "FLATC_EXECUTABLE" in os.environ:
        return {}
    flatc = package / "data" / "bin" / "flatc"
    return {"FLATC_EXECUTABLE": str(flatc)} if os.access(flatc, os.X_OK) else {}


def is_supported(version: str) -> bool:
    """Return whether farm can compile with an ExecuTorch of that version."""
    return (_numbers(version) or (0, 0, 0)) >= (_numbers(OLDEST) or ())


def _numbers(version: str) -> tuple[int, int, int] | None:
    found = _NUMBERS.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None
