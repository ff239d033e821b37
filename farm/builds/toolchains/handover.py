"""Links on PYTHONPATH to farm's own code, for a toolchain's interpreter without farm.

The folder of links has `farm`, msgspec (the only package that a builder imports before torch) and coverage, which
traces a builder. Other packages of farm's environment are left out, as they would hide the toolchain's packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import farm
from farm.base.errors import MissingToolError
from farm.base.publish import published
from farm.builds.runtime.packages import package_version
from farm.builds.toolchains.pip import pip_install

if TYPE_CHECKING:
    from farm.builds.toolchains.interpreters import InterpreterFacts

_FOLDER = "toolchains"
# Packages and their binary modules, which are built for a single ABI.
_NEEDED = {"msgspec": "_core"}
_USEFUL = {"coverage": "tracer"}
"""Tracer of executed functions, so that an edit invalidates only bundles that used it; without a tracer, all."""


def handover(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return the folder that makes farm's code importable for `python`. Raises MissingToolError, UntrustedError."""
    packages = {"farm": Path(farm.__file__).resolve().parent, **_own_packages(facts)}
    if not _NEEDED.keys() <= packages.keys():
        installed = _installed(cache_dir, python, facts)
        packages |= {name: installed / name for name in _NEEDED | _USEFUL if (installed / name).is_dir()}

    def link(folder: Path) -> None:
        for name, target in packages.items():
            (folder / name).symlink_to(target)

    where = cache_dir / _FOLDER / "handover" / _digest(*(f"{name}={target}" for name, target in packages.items()))
    # The target of a link may be removed and made again, so each link is checked.
    return published(where, link, is_whole=lambda folder: all((folder / name).is_dir() for name in packages))


def checkout_link(cache_dir: Path, package: Path) -> Path:
    """Return the folder for PYTHONPATH that makes `executorch` the code in `package` alone. Raises UntrustedError.

    ExecuTorch is a namespace package: PYTHONPATH=$EXECUTORCH_ROOT/.. alone would import modules that a checkout lacks,
    such as native libraries, from an installed wheel, and so mix both in a program.
    """

    def fill(folder: Path) -> None:
        (folder / "executorch").mkdir()
        text = f"# Only the source tree of the toolchain, no modules of a wheel.\n__path__ = [{str(package)!r}]\n"
        (folder / "executorch" / "__init__.py").write_text(text, encoding="utf-8")

    return published(cache_dir / _FOLDER / "checkouts" / _digest(str(package)), fill)


def _own_packages(facts: InterpreterFacts) -> dict[str, Path]:
    """Return the packages of farm's environment that an interpreter with this ABI can load."""
    found = {}
    for name, core in (_NEEDED | _USEFUL).items():
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder is not None and facts.abi and any(folder.glob(f"{core}.{facts.abi}.*")):
            found[name] = folder
    return found


def _installed(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return a folder with the packages for another ABI; the first call installs them."""
    wanted = {name: f"{name}=={version}" for name in _NEEDED | _USEFUL if (version := package_version(name))}

    def install(folder: Path) -> None:
        for name, requirement in wanted.items():
            problem = pip_install(python, [requirement], folder)
            if name in _NEEDED and not any((folder / name).glob(f"{_NEEDED[name]}.*")):
                raise MissingToolError(
                    f"farm's code needs {requirement} for {python} ({facts.abi}), and pip cannot install it: "
                    f"{problem or 'it has no binary for it'}; is the package index reachable?"
                )

    key = _digest(facts.abi, *wanted.values())
    return published(cache_dir / _FOLDER / "handover" / f"packages-{key}", install)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
