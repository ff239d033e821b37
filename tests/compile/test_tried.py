"""Versions of the code that a compiler process imports, which decide about shortcuts. torch is a stub."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

SAY = "import json\nfrom farm.builds.compile.flows.shortcuts.tried import installed\nprint(json.dumps(installed()))"


def versions(folder: Path) -> dict[str, str]:
    (folder / "torch.py").write_text("__version__ = '2.13.0'")
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_an_installed_package_has_its_version(tmp_path: Path) -> None:
    expected = {name: importlib.metadata.version(name) for name in ("executorch", "torchao")}
    assert versions(tmp_path) == {**expected, "torch": "2.13.0"}


def test_a_checkout_has_not_the_version_of_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "executorch" / "exir").mkdir(parents=True)
    assert versions(tmp_path)["executorch"] == ""


def test_a_link_to_the_installed_package_has_its_version(tmp_path: Path) -> None:
    package = importlib.metadata.distribution("executorch").locate_file("executorch")
    (tmp_path / "executorch").symlink_to(str(package))
    assert versions(tmp_path)["executorch"] == importlib.metadata.version("executorch")
