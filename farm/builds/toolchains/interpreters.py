"""Interpreters: their packages and search path, and the start of their processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from farm.base.errors import MissingToolError
from farm.base.processes import ask_program
from farm.builds.toolchains import probe

LEAST_PYTHON = (3, 11)
"""Oldest Python of a toolchain, whose processes run farm's own code."""

SITES = ("site-packages", "dist-packages")
"""Names of folders that packages are installed in."""

_PROBE_SECONDS = 60.0


class PackageFacts(msgspec.Struct, frozen=True):
    """Version and folders of a package that an interpreter imports."""

    version: str
    folders: tuple[Path, ...]
    """Folders in the order of the search: a namespace package, such as ExecuTorch, may have several."""


class InterpreterFacts(msgspec.Struct, frozen=True):
    """Facts of an interpreter, and the places of a toolchain's packages."""

    version: tuple[int, int, int]
    abi: str
    """ABI tag in the names of binary modules: `cpython-311-x86_64-linux-gnu`."""
    prefix: Path
    """Folder of the environment."""
    path: tuple[str, ...]
    """Folders that the interpreter searches for modules."""
    packages: dict[str, PackageFacts]
    """Facts of executorch, torch and torchao, as far as the interpreter finds them."""

    def folder(self, package: str) -> Path | None:
        """Return the folder of a package, the first of several; None without the package."""
        found = self.packages.get(package)
        return found.folders[0] if found and found.folders else None

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the found packages."""
        return {name: self.version_of(name) for name in self.packages}

    def version_of(self, package: str) -> str:
        """Return the version of a package; `missing` without the package, `unknown` without a recorded version."""
        found = self.packages.get(package)
        return "missing" if found is None else found.version or "unknown"


def own_facts() -> InterpreterFacts:
    """Return the facts of a process of this interpreter in the environment of `process_environment`."""
    return msgspec.convert(probe.look(_inherited_path()), InterpreterFacts, dec_hook=_path)


def _inherited_path() -> list[str]:
    """Return the entries of sys.path without this process's own ones: the folder of its script, or the user's."""
    given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}  # noqa: PTH100
    named = set(given)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for entry in sys.path:
        if Path(entry).name in SITES:
            named |= {entry, *added_by(entry)}
        elif entry in standard or os.path.dirname(entry) in standard or entry.endswith(".zip"):  # noqa: PTH120
            named.add(entry)
    # This process has put a repeated entry in front: site-packages come behind the standard library.
    return [
        entry
        for place, entry in enumerate(sys.path)
        if entry in named and (entry in given or entry not in sys.path[place + 1 :])
    ]


def added_by(site: str) -> set[str]:
    """Return the folders that the `.pth` files of a folder of packages add to sys.path."""
    lines = set()
    for file in Path(site).glob("*.pth"):
        with contextlib.suppress(OSError):
            lines |= set(file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {os.path.abspath(os.path.join(site, line.strip())) for line in lines if line.strip()}  # noqa: PTH100, PTH118


def inspect(python: Path, env: Mapping[str, str] | None = None) -> InterpreterFacts:
    """Return the facts of `python` in the environment of `process_environment(env)`.

    Raises MissingToolError for an interpreter that cannot be started, or that is too old for farm's code.
    """
    source = Path(probe.__file__).read_text(encoding="utf-8")
    try:
        answer = ask_program([python, "-c", source], _PROBE_SECONDS, process_environment(env or {}))
        # Output of a `sitecustomize` comes before the document.
        document = (answer.output.strip().splitlines() or [""])[-1]
        facts = msgspec.json.decode(document, type=InterpreterFacts, dec_hook=_path)
    except subprocess.TimeoutExpired:
        raise MissingToolError(f"{python} does not answer within {_PROBE_SECONDS:g} s") from None
    except OSError as error:
        raise MissingToolError(f"{python} cannot be started: {error.strerror or error}") from None
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise MissingToolError(f"{python} is no Python that farm can use: {answer.reason}") from None
    if facts.version[:2] < LEAST_PYTHON:
        needed, found = (".".join(map(str, version[:2])) for version in (LEAST_PYTHON, facts.version))
        raise MissingToolError(f"{python} is Python {found}: a toolchain needs Python {needed} or newer")
    return facts


def process_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of a toolchain whose own variables are `env`."""
    # The user's current folder is left out of the search path: an `executorch` in it would be imported.
    return {**os.environ, "PYTHONSAFEPATH": "1", **env}


def _path(kind: type, text: Any) -> Any:
    return kind(text)
