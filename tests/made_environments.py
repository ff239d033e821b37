"""Interpreters and wheels with next to no content: the form of a toolchain without the gigabyte."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

# Enough for farm to take a folder for ExecuTorch's code; like the real one it has no __init__.py of its own.
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
    """Make what looks like a source tree of ExecuTorch, `built` or not; return it."""
    for name, content in _EXECUTORCH.items():
        if built or not name.endswith(".so"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    (folder / text).write_text(f'__version__ = "{version}"\n' if text.endswith(".py") else f"{version}\n")
    return folder


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: Iterable[str] = ()) -> None:
    """Write a wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_hash(text)},{len(text.encode())}" for path, text in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)


def make_executorch_wheel(folder: Path, version: str, requires: Iterable[str] = (), more: str = "") -> None:
    """Write a wheel of an ExecuTorch that cannot compile; `more` is a file's text, to make it large."""
    files = {f"executorch/{name}": text for name, text in _EXECUTORCH.items()}
    make_wheel(folder, "executorch", version, {**files, "executorch/more.txt": more}, requires)


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def farm_without(folder: Path, *packages: str) -> Path:
    """Make an environment with all that the tests' own has but `packages`; return its interpreter."""
    python = make_environment(folder)
    [site] = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if re.split(r"[-.]", path.name, maxsplit=1)[0] not in packages:
            (site / path.name).symlink_to(path)
    for path in Path(sys.prefix, "bin").iterdir():
        if not (folder / "bin" / path.name).exists():
            (folder / "bin" / path.name).symlink_to(path)
    return python
