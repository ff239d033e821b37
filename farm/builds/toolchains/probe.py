"""Places and versions of a toolchain's packages in an interpreter, found without importing the packages.

The module is also a script, `PYTHON -c SOURCE`, which prints the result as JSON: it needs only Python, even an old one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
import sysconfig

PACKAGES = ("executorch", "torch", "torchao")
"""Main packages of a toolchain."""

_VERSION = re.compile(r"""^__version__.*?= *["']([^"']{1,80})["']""", re.MULTILINE)


def look(path: list[str] | None = None) -> dict[str, object]:
    """Return version, ABI, prefix and search path of this interpreter, and version and folders of each package.

    `path` is the search path of another process of the interpreter, in place of this process's own.
    """
    path = [entry for entry in sys.path if entry] if path is None else path
    return {
        "version": list(sys.version_info[:3]),
        "abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag or "",
        "prefix": sys.prefix,
        "path": path,
        "packages": {name: found for name in PACKAGES if (found := _package(name, path))},
    }


def _package(name: str, path: list[str]) -> dict[str, object] | None:
    spec = _spec(name, path)
    if spec is None or spec.submodule_search_locations is None:
        return None
    folders = [os.path.abspath(folder) for folder in spec.submodule_search_locations]  # noqa: PTH100
    if name == "executorch" and spec.origin:
        # ExecuTorch is a namespace package: the folders of a checkout are known after an import alone.
        import executorch

        folders = [os.path.abspath(folder) for folder in executorch.__path__]  # noqa: PTH100
    return {"version": _version(name, folders), "folders": folders}


def _spec(name: str, path: list[str]) -> importlib.machinery.ModuleSpec | None:
    # Same as importlib.util.find_spec, but for `path`; an editable install may have added its own finder.
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path if finder is importlib.machinery.PathFinder else None)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            return spec
    return None


def _version(name: str, folders: list[str]) -> str:
    """Return the version of the imported package: metadata of another installation do not describe a checkout."""
    for folder in folders:
        for text in (f"{folder}/version.txt", f"{folder}/../../version.txt"):
            if found := _read(text).partition("\n")[0].strip():
                return found[:80]
        for distribution in importlib.metadata.distributions(name=name):
            if os.path.realpath(str(distribution.locate_file(name))) == os.path.realpath(folder):
                return distribution.version
        if match := _VERSION.search(_read(f"{folder}/version.py")):
            return match[1]
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read(10_000)
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    print(json.dumps(look()))  # noqa: T201
