"""A copy of farm's sources to which a recipe of the documentation is applied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


def recipe_code(document: str, title: str) -> list[str]:
    """Return the Python blocks of a section of docs/."""
    section = (ROOT / "docs" / document).read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@dataclass(frozen=True)
class FarmCopy:
    """Copy of farm's sources in a temporary folder, with its own `farm` command."""

    folder: Path
    cache: Path

    @classmethod
    def make(cls, folder: Path, cache: Path) -> FarmCopy:
        shutil.copytree(ROOT / "farm", folder / "farm", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("device_profiles", "test_suites", "native_runner", "reports"):
            (folder / name).symlink_to(ROOT / name)
        return cls(folder, cache)

    def insert(self, path: str, before: str, code: str) -> None:
        file = self.folder / path
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1
        file.write_text(text.replace(before, f"{code}{before}"), encoding="utf-8")

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "QNN_", "PYTEST_"))}
        folders = {"FARM_CACHE_DIR": str(self.cache), "FARM_STATE_DIR": str(self.folder / "state")}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**kept, **folders, "PYTHONPATH": str(self.folder), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def farm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "farm.cli.main", *arguments)
