"""farm's own code for the interpreter of a toolchain, which has not installed it: a folder of links for PYTHONPATH.

In it are `farm` and msgspec, which is all that a builder imports before torch, and never the other packages of farm's
environment, which would come before those of the toolchain.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import farm
from farm.errors import MissingToolError
from farm.system.publish import published
from farm.toolchains.pip import pip_install

if TYPE_CHECKING:
    from farm.toolchains.interpreters import InterpreterFacts

_FOLDER = "toolchains"


def handover(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return the folder that makes farm's code importable for `python`. Raises MissingToolError, UntrustedError."""
    code = Path(farm.__file__).resolve().parent
    packages = {"farm": code, "msgspec": _msgspec_for(cache_dir, python, facts)}
    return _links(cache_dir, "handover", packages)


def checkout_link(cache_dir: Path, package: Path) -> Path:
    """Return the folder that makes `executorch` the code in `package`, and that code alone. Raises UntrustedError.

    ExecuTorch is a namespace package: with nothing but PYTHONPATH=$EXECUTORCH_ROOT/.. what a checkout lacks, its native
    libraries above all, would be imported from an installed wheel, and a program be made by both.
    """

    def fill(folder: Path) -> None:
        (folder / "executorch").mkdir()
        text = f"# The source tree that is compiled with, and nothing of a wheel.\n__path__ = [{str(package)!r}]\n"
        (folder / "executorch" / "__init__.py").write_text(text, encoding="utf-8")

    return published(cache_dir / _FOLDER / "checkouts" / _digest(str(package)), fill)


def _links(cache_dir: Path, kind: str, targets: dict[str, Path]) -> Path:
    def fill(folder: Path) -> None:
        for name, target in targets.items():
            (folder / name).symlink_to(target)

    where = cache_dir / _FOLDER / kind / _digest(*(f"{name}={target}" for name, target in targets.items()))
    # What a link leads to may be gone, and come back.
    return published(where, fill, is_whole=lambda folder: all((folder / name).is_dir() for name in targets))


def _msgspec_for(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return a msgspec that `python` can load: farm's own, or for another ABI one that is installed once."""
    own = Path(msgspec.__file__).resolve().parent
    if facts.abi and any(own.glob(f"_core.{facts.abi}.*")):
        return own
    version = msgspec.__version__

    def install(folder: Path) -> None:
        answer = pip_install(python, [f"msgspec=={version}"], folder)
        if not any((folder / "msgspec").glob("_core.*")):
            raise MissingToolError(
                f"{python}: farm's code needs msgspec {version} there, for {facts.abi}, and pip cannot install it: "
                f"{answer}; 'farm toolchain show' says more"
            )

    name = f"msgspec-{version}-{facts.abi or 'unknown'}"
    return published(cache_dir / _FOLDER / "handover" / name, install) / "msgspec"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
