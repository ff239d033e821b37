from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farm.config import load_config
from farm.engine.toolchain import Toolchain, prepare

LOWERING = Path(__file__).with_name("lowering.py")


@pytest.fixture(scope="session")
def tools(farm_cache: Path) -> Toolchain:
    os.environ["FARM_CACHE_DIR"] = str(farm_cache)
    return prepare(load_config(), note=lambda _line: None)


@pytest.fixture(scope="session")
def lowered(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lowering.py prints: it runs where torch may be imported, once for all that want to know."""
    done = subprocess.run(
        [sys.executable, str(LOWERING)], env={**os.environ, **tools.env}, cwd=tmp_path_factory.mktemp("lower"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))
