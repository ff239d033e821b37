"""Interpreters and wheels almost without content, in place of toolchains of a gigabyte."""

from __future__ import annotations

import re
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

# Files by which farm recognizes ExecuTorch's code; there is no __init__.py, as in ExecuTorch.
_EXECUTORCH = {
    "exir/__init__.py": "",
    "backends/qualcomm/__init__.py": "",
    "backends/qualcomm/python/PyQnnManagerAdaptor.cpython-311-x86_64-linux-gnu.so": "",
}


def make_environment(folder: Path, packages: Iterable[str] = (), version: str = "1.5.0") -> Path:
    """Make an environment without pip that has empty packages of these names; return its interpreter."""
    venv.EnvBuilder(symlinks=True).create(folder)
    [site] = folder.glob("lib/python*/site-packages")
    for package in packages:
        if package == "executorch":
            make_source_tree(site / "executorch", version, built=True, text="version.py")
        else:
            (site / package).mkdir()
            (site / package / "__init__.py").touch()
    return folder / "bin" / "python"


def make_source_tree(folder: Path, version: str, *, built: bool, text: str = "version.txt") -> Path:
    """Make a minimal source tree of ExecuTorch, `built` or not; return it."""
    for name, content in _EXECUTORCH.items():
        if built or not name.endswith(".so"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    (folder / text).write_text(f'__version__ = "{version}"\n' if text.endswith(".py") else f"{version}\n")
    return folder


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str | bytes], requires: Iterable[str] = ()
) -> None:
    """Write a wheel that pip installs."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {one}\n" for one in requires)
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)


def make_executorch_wheel(folder: Path, version: str, requires: Iterable[str] = (), more: str = "") -> None:
    """Write a wheel of an ExecuTorch that cannot compile; `more` is a file's text, to make it large."""
    files = {f"executorch/{name}": text for name, text in _EXECUTORCH.items()}
    make_wheel(folder, "executorch", version, {**files, "executorch/more.txt": more}, requires)


def farm_without(folder: Path, *packages: str) -> Path:
    """Make an environment with the packages of the tests' environment except `packages`; return its interpreter."""
    python = make_environment(folder)
    [site] = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if re.split(r"[-.]", path.name, maxsplit=1)[0] not in packages:
            (site / path.name).symlink_to(path)
    for path in Path(sys.prefix, "bin").iterdir():
        if not (folder / "bin" / path.name).exists():
            (folder / "bin" / path.name).symlink_to(path)
    return python
