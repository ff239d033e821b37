from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_scripts import SCRIPTS, TorchScripts

from farm.config.settings import load_config
from farm.toolchains.prepare import prepare
from farm.toolchains.toolchain import Toolchain


@pytest.fixture(scope="session")
def tools(farm_cache: Path) -> Toolchain:
    os.environ["FARM_CACHE_DIR"] = str(farm_cache)
    return prepare(load_config(), note=lambda _line: None)


@pytest.fixture(scope="session")
def told_by(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Any]]:
    """What a script prints last, as JSON: it runs where torch may be imported."""

    def run(script: Path) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(script)], env={**os.environ, **tools.compiler.env},
            cwd=tmp_path_factory.mktemp(script.stem),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run


@pytest.fixture(scope="session")
def lowered(torch_scripts: TorchScripts) -> dict[str, Any]:
    """What lowering.py prints, once for all that want to know."""
    return torch_scripts.printed(SCRIPTS["lowered"])
