from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.config.settings import load_config
from farm.system import processes
from farm.toolchains.prepare import prepare
from farm.toolchains.toolchain import Toolchain


@pytest.fixture(scope="session")
def tools(farm_cache: Path) -> Toolchain:
    os.environ["FARM_CACHE_DIR"] = str(farm_cache)
    return prepare(load_config(), note=lambda _line: None)


@pytest.fixture
def cold_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let builders of this test start by themselves: libraries that a fork has not touched are not in its memory."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


@pytest.fixture(scope="session")
def lowered(told_by: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What lowering.py prints."""
    return told_by(Path(__file__).with_name("lowering.py"))
