"""Environments that farm makes in its cache: a release of ExecuTorch, with links to the packages of farm's own.

torch alone takes 800 MB on disk, and farm's environment has the packages that suites import anyway: packages of a
fitting version are linked, and only ExecuTorch and its other requirements are installed.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from farm.base.errors import MissingToolError, UsageError
from farm.base.files import published
from farm.base.hashes import name_of
from farm.builds.toolchains.interpreters import generation_of, is_supported, pip_install

logger = logging.getLogger(__name__)

_LAYOUT = "1"
_ABOUT = "environment.json"
# ExecuTorch itself, farm's own code (interpreters.py links it), and the installer.
_NEVER_LINKED = {"executorch", "snapdragon-farm", "pip"}
# Requirements of ExecuTorch's wheel for other backends, language models and its tests: no process of farm imports them.
_NOT_NEEDED = {
    "coremltools", "scikit-learn", "pytorch-tokenizers", "hydra-core", "omegaconf", "hypothesis", "kgb",
    "expecttest", "parameterized", "py-cpuinfo", "requests",
}  # fmt: skip
# Part of pip's error for a missing version; "none" is its list for a package that the index does not have at all.
_VERSIONS = re.compile(r"from versions: ((?!none)[^)]+)\)")
_NO_SPACE = os.strerror(errno.ENOSPC)
_PYTHON = ".".join(map(str, sys.version_info[:2]))
# Requirements of requirements: more rounds than any set of packages takes.
_MOST_ROUNDS = 12


class MadeEnvironment(msgspec.Struct, frozen=True):
    """Description of an environment, stored in its folder."""

    executorch: str
    torch: str
    made_ms: int
    installed: tuple[str, ...]
    """Requirements that pip installed."""


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
        _Making(partial, version, generation.torch, _shared()).make()

    folder = environment_folder(cache_dir, version)
    made = published(folder, make, is_whole=lambda made: (made / _ABOUT).is_file())
    # An environment that belongs to root is usable, although its time cannot be set.
    with contextlib.suppress(OSError):
        os.utime(made / _ABOUT)
    return made


def environment_folder(cache_dir: Path, version: str) -> Path:
    """Return where the environment of a release is, or would be: another one for other packages of farm's own."""
    shared = sorted(str(one.info) for one in _shared())
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


class _InstalledPackage(NamedTuple):
    """Installed package by the name of its metadata folder: reading the content of 150 folders takes a second."""

    name: str
    """Normalized."""
    version: str
    info: Path

    @classmethod
    def of(cls, info: Path) -> _InstalledPackage:
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        return cls(canonicalize_name(name), version, info)

    @property
    def requirements(self) -> Iterator[Requirement]:
        for text in PathDistribution(self.info).requires or ():
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    yield requirement

    @property
    def files(self) -> Iterator[str]:
        """Files in the folder of packages, without `.pth` files, which change the start of Python."""
        for row in csv.reader((self.info / "RECORD").read_text(encoding="utf-8").splitlines()):
            if row and not row[0].startswith(("..", "/", "__pycache__/")) and not row[0].endswith(".pth"):
                yield row[0]


def _shared() -> Iterator[_InstalledPackage]:
    """Yield the packages of farm's environment that may be linked."""
    seen = set(_NEVER_LINKED)
    for place in sys.path:
        folder = Path(place)
        if folder.name not in ("site-packages", "dist-packages") or not folder.is_dir():
            continue
        for info in sorted(folder.glob("*.dist-info")):
            one = _InstalledPackage.of(info)
            # An editable package is source code under development in another folder.
            if one.name not in seen and (info / "RECORD").is_file() and not (info / "direct_url.json").is_file():
                seen.add(one.name)
                yield one


class _Making:
    """An environment that is being made in an empty folder."""

    def __init__(self, folder: Path, version: str, torch: str, shared: Iterable[_InstalledPackage]) -> None:
        self._folder, self._version, self._torch = folder, version, torch
        self._site = folder / "lib" / f"python{_PYTHON}" / "site-packages"
        self._shared = {one.name: one for one in shared}
        self._installed: list[str] = []

    def make(self) -> None:
        self._make_interpreter()
        self._install([f"executorch=={self._version}"])
        flatc = self._site / "executorch" / "data" / "bin" / "flatc"
        if flatc.is_file():
            flatc.chmod(0o755)
        _link([self._shared[name] for name in self._settle()], self._site)
        torch = {one.name: one.version for one in map(_InstalledPackage.of, self._site.glob("*.dist-info"))}["torch"]
        # Their first lines name the folder in which they were made, which has another name in a moment.
        for script in (self._folder / "bin").iterdir():
            if not script.name.startswith("python"):
                script.unlink()
        made = MadeEnvironment(
            executorch=self._version,
            torch=torch,
            made_ms=time.time_ns() // 1_000_000,
            installed=tuple(self._installed),
        )
        (self._folder / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(made)))

    def _make_interpreter(self) -> None:
        """Make what venv would, without scripts that name the folder."""
        base = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
        (self._folder / "bin").mkdir()
        self._site.mkdir(parents=True)
        for name in ("python", "python3"):
            (self._folder / "bin" / name).symlink_to(base)
        text = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n"
        (self._folder / "pyvenv.cfg").write_text(text, encoding="utf-8")

    def _settle(self) -> list[str]:
        """Install until installed or linkable packages meet every requirement; return the packages to link."""
        for _ in range(_MOST_ROUNDS):
            wanted = list(self._unmet())
            if not wanted:
                return sorted(self._shared.keys() - self._own().keys())
            for requirement in wanted:
                # farm's own version does not fit: it is not linked, and pip installs another one.
                self._shared.pop(canonicalize_name(requirement.name), None)
            self._install([f"{requirement.name}{requirement.specifier}" for requirement in wanted])
        raise MissingToolError(f"ExecuTorch {self._version}: its requirements do not come to an end: {wanted}")

    def _unmet(self) -> Iterator[Requirement]:
        """Yield the requirements without a package of a fitting version."""
        own, found = self._own(), {}
        versions = {name: one.version for name, one in (self._shared | own).items()}
        wants = [Requirement(self._torch)]
        for one in (*own.values(), *([self._shared["torch"]] if "torch" in self._shared else [])):
            wants += one.requirements
        for requirement in wants:
            name = canonicalize_name(requirement.name)
            there = versions.get(name)
            if name in _NOT_NEEDED:
                # Only suites import these packages, so that another version in farm's environment will do.
                continue
            if there is None or not requirement.specifier.contains(there, prereleases=True):
                found[name] = requirement
        yield from found.values()

    def _own(self) -> dict[str, _InstalledPackage]:
        found = [_InstalledPackage.of(info) for info in self._site.glob("*.dist-info") if not info.is_symlink()]
        return {one.name: one for one in found}

    def _install(self, requirements: list[str]) -> None:
        problem = pip_install(self._folder / "bin" / "python", requirements)
        self._installed += requirements
        if not problem:
            return
        # An index without any version of ExecuTorch is probably the wrong index, so the error below names the index.
        if requirements == [f"executorch=={self._version}"] and (there := _VERSIONS.search(problem)):
            known = ", ".join(one for one in there[1].split(", ") if is_supported(one))
            raise UsageError(f"there is no ExecuTorch {self._version} for Python {_PYTHON}: the index has {known}")
        if _NO_SPACE in problem:
            raise OSError(errno.ENOSPC, _NO_SPACE, str(self._folder))
        raise MissingToolError(
            f"an environment with ExecuTorch {self._version} cannot be made, as pip cannot install "
            f"{' '.join(requirements)}: {problem}; is the package index reachable?"
        )


def _link(shared: Iterable[_InstalledPackage], site: Path) -> None:
    """Link the files of distributions into `site`: whole folders, or the content of a folder that exists there."""
    for one in shared:
        source = one.info.parent
        for name in dict.fromkeys([one.info.name, *(path.partition("/")[0] for path in one.files)]):
            _link_one(source, site, (name,))
            if (site / name).is_dir() and not (site / name).is_symlink():
                for path in one.files:
                    if path.startswith(f"{name}/"):
                        _link_one(source, site, tuple(path.split("/")))


def _link_one(source: Path, target: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        source, target = source / part, target / part
        if target.is_symlink() or not source.exists():
            return
        if not target.exists():
            target.symlink_to(source)
            return
