"""Where the code of a case is, found without importing any of it."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farm.system.hashes import sha256_of

if TYPE_CHECKING:
    from farm.suites.suite import Case

# Their code is named by their version, which is in every key anyway.
_VERSIONED = ("torch", "executorch", "torchao")


def source_place(case: Case) -> tuple[str, ...]:
    """Return where `source_digest` looks: cases with the same place have the same digest."""
    return (case.folder, case.module.partition(":")[0], *case.files)


def source_digest(case: Case) -> str:
    """Return a hash of the code that makes the module of `case`, and of the files that it names.

    For a module in the suite's folder that is every Python file there, as they may import each other, and the version
    of every package that they import. For an installed package it is the file of the module; torch and executorch are
    told apart by version.
    """
    digest = hashlib.sha256()
    for file in case.files:
        digest.update(sha256_of(Path(case.folder, file)).encode())
    name = case.module.partition(":")[0]
    if name.startswith("."):
        folder = Path(case.folder)
        if name.startswith(".."):
            folder = folder.parent / name[2:].split(".")[0]
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0")
            code = path.read_bytes()
            digest.update(hashlib.sha256(code).digest())
            for package in sorted(_imported(code)):
                digest.update(f"{package} {_version(package)}".encode())
    elif name.partition(".")[0] not in _VERSIONED:
        path_or_none = _installed_file(name)
        if path_or_none is not None:
            digest.update(path_or_none.read_bytes())
    return digest.hexdigest()


def _imported(code: bytes) -> set[str]:
    """Return the packages that a file imports, by their first names; none of what is no Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return set()
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in found} - {*_VERSIONED, *sys.stdlib_module_names}


@functools.cache
def _version(package: str) -> str:
    # Distributions that are called otherwise than their package are told apart by nothing.
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _installed_file(name: str) -> Path | None:
    # find_spec of a dotted name would import its parents.
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
