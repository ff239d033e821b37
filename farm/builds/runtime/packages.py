"""Search for the pip packages that the runtime is made from, without importing them.

`importlib.metadata` is imported where it is used: device processes search no distribution, and it takes 20 ms to load.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from farm.base.errors import MissingToolError

# Packages that a toolchain may provide instead of farm's own environment.
_OF_TOOLCHAINS = ("executorch", "torch")


def package_folder(package: str, marker: str, extra: str) -> Path:
    """Return the folder of an import package that contains the file `marker`.

    `extra` is the optional dependency group of farm with this package. Raises MissingToolError.
    """
    # find_spec imports nothing for a name without a dot. A namespace package may lie in several folders.
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        if (folder / marker).exists():
            return folder
    problem = f"the one in {folders[0]} has no {marker}" if folders else "it is not installed"
    elsewhere = ", or name an environment that has it with --toolchain" if package in _OF_TOOLCHAINS else ""
    raise MissingToolError(f"the Python package {package} is needed and {problem}: {install_hint(extra)}{elsewhere}")


def package_version(distribution: str) -> str:
    """Return the version of an installed distribution, "" when it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packaged_tool(distribution: str, extra: str) -> Path:
    """Return the executable of a distribution that has the distribution's name. Raises MissingToolError.

    PATH is not searched, as an older executable of the system may come first there.
    """
    import importlib.metadata

    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(os.path.normpath(str(file.locate()))) for file in files if file.name == distribution]
    tools = [path for path in found if path.parent.name == "bin" and os.access(path, os.X_OK)]
    if not tools:
        raise MissingToolError(f"{distribution} is needed and its pip package is not installed: {install_hint(extra)}")
    # The program itself is preferred to a script that starts it by way of Python.
    return next((path for path in tools if "data" in path.parts), tools[0])


def install_hint(extra: str) -> str:
    """Return the command that installs an optional dependency group."""
    return f"pip install 'snapdragon-farm[{extra}]'"
