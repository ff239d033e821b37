"""Environments that farm makes in its cache: a release of ExecuTorch, beside the packages of farm's own environment.

torch alone takes 800 MB on disk, and farm's environment has the packages that suites import anyway: a `.pth` file adds
its folders behind the new one, and pip installs only ExecuTorch and requirements that they do not meet.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
import os
import re
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farm.base.errors import MissingToolError, UsageError
from farm.base.files import published
from farm.base.hashes import name_of
from farm.builds.toolchains.interpreters import (
    PYTHON,
    SHARED,
    SITES,
    generation_of,
    is_supported,
    packages_of,
    pip_install,
)

logger = logging.getLogger(__name__)

_LAYOUT = "2"
_ABOUT = "environment.json"
# Part of pip's error for a missing version; "none" is its list for a package that the index does not have at all.
_VERSIONS = re.compile(r"from versions: ((?!none)[^)]+)\)")
_NO_SPACE = os.strerror(errno.ENOSPC)


class MadeEnvironment(msgspec.Struct, frozen=True):
    """Description of an environment, stored in its folder."""

    executorch: str
    torch: str
    made_ms: int


def environments_folder(cache_dir: Path) -> Path:
    """Return where environments are, each in a folder named by what went into it."""
    return cache_dir / "toolchains" / "envs"


def made_environment(cache_dir: Path, version: str) -> Path:
    """Return the folder of an environment with that release of ExecuTorch, made unless it is there.

    Raises UsageError for a release that is not there or too old, MissingToolError where the package index cannot be
    reached or something of it does not install, InfraError for a full disk.
    """
    generation = generation_of(version)

    def make(partial: Path) -> None:
        logger.info("making an environment with ExecuTorch %s, once", version)
        _make(partial, version, generation.torch)

    folder = environment_folder(cache_dir, version)
    made = published(folder, make, is_whole=lambda made: (made / _ABOUT).is_file())
    # An environment that belongs to root is usable, although its time cannot be set.
    with contextlib.suppress(OSError):
        os.utime(made / _ABOUT)
    return made


def environment_folder(cache_dir: Path, version: str) -> Path:
    """Return where the environment of a release is, or would be: another one for other packages of farm's own."""
    shared = sorted(str(info) for site in _shared() for info in site.glob("*.dist-info"))
    parts = (_LAYOUT, version, sys.version, os.path.realpath(sys.executable), *shared)
    return environments_folder(cache_dir) / name_of(*parts)


def used_ms(folder: Path) -> int:
    """Return when an environment was last used, epoch milliseconds."""
    return (folder / _ABOUT).stat().st_mtime_ns // 1_000_000


def about(folder: Path) -> MadeEnvironment | None:
    """Return the description of the environment in `folder`; None for another folder."""
    try:
        return msgspec.json.decode((folder / _ABOUT).read_bytes(), type=MadeEnvironment)
    except (OSError, msgspec.DecodeError):
        return None


def _shared() -> Iterator[Path]:
    """Yield the folders of packages of farm's own environment."""
    for place in sys.path:
        folder = Path(place)
        if folder.name in SITES and folder.is_dir():
            yield folder


def _make(folder: Path, version: str, torch: str) -> None:
    """Make an environment in the empty `folder`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    site, shared = packages_of(folder / "bin" / "python"), [str(one) for one in _shared()]
    (site / SHARED).write_text("\n".join(shared), encoding="utf-8")
    if problem := pip_install(folder / "bin" / "python", [f"executorch=={version}", torch]):
        # An index without any version of ExecuTorch is probably the wrong index, so the error below names the index.
        if f"executorch=={version}" in problem and (there := _VERSIONS.search(problem)):
            known = ", ".join(one for one in there[1].split(", ") if is_supported(one))
            raise UsageError(f"there is no ExecuTorch {version} for Python {PYTHON}: the index has {known}")
        if _NO_SPACE in problem:
            raise OSError(errno.ENOSPC, _NO_SPACE, str(folder))
        raise MissingToolError(
            f"an environment with ExecuTorch {version} cannot be made: {problem}; is the package index reachable?"
        )
    flatc = site / "executorch" / "data" / "bin" / "flatc"
    if flatc.is_file():
        flatc.chmod(0o755)
    found = next(iter(importlib.metadata.distributions(name="torch", path=[str(site), *shared])))
    made = MadeEnvironment(executorch=version, torch=found.version, made_ms=time.time_ns() // 1_000_000)
    (folder / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
