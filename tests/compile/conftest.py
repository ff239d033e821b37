from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.base.config.settings import load_config
from farm.builds.toolchains.prepare import prepare
from farm.builds.toolchains.toolchain import Toolchain


@pytest.fixture(scope="session")
def tools(farm_cache: Path) -> Toolchain:
    os.environ["FARM_CACHE_DIR"] = str(farm_cache)
    return prepare(load_config())


@pytest.fixture(scope="session")
def lowered(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of lowering.py."""
    return printed_json(Path(__file__).with_name("lowering.py"))
