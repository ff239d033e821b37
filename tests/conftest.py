"""What several tests share: one farm home a session, so that a bundle is compiled once and nothing of a user is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class FarmHome:
    """Cache and state of its own, and the `farm` command in it."""

    cache: Path
    state: Path
    cwd: Path

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "QNN_", "PYTEST_"))}
        return {**kept, "FARM_CACHE_DIR": str(self.cache), "FARM_STATE_DIR": str(self.state), "COLUMNS": "80"}

    def farm(
        self, *arguments: str, timeout_s: float = 120, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` as a user does, without a terminal."""
        return subprocess.run(
            [sys.executable, "-m", "farm.cli.main", *arguments],
            env={**self.env, **(env or {})},
            cwd=cwd or self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def farm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache for the whole session; FARM_TEST_CACHE names one to keep between sessions."""
    kept = os.environ.get("FARM_TEST_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(farm_cache: Path, tmp_path: Path) -> FarmHome:
    """The session's cache, a state folder and a current folder of this test alone."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    return FarmHome(farm_cache, tmp_path / "state", cwd)


@pytest.fixture(autouse=True)
def _own_farm_folders(farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("FARM_") and name not in ("FARM_REQUIRE_CHROMIUM", "FARM_TEST_CACHE"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setenv("FARM_CACHE_DIR", str(farm_cache))
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    yield
