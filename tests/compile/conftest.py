from __future__ import annotations

import os
from pathlib import Path

import pytest

from farm.base.config.settings import load_config
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Toolchain


@pytest.fixture(scope="session")
def tools(farm_cache: Path) -> Toolchain:
    os.environ["FARM_CACHE_DIR"] = str(farm_cache)
    return prepare(load_config())
