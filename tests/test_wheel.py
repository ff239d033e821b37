"""An installed wheel, outside the checkout, has everything that the main job needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from farm_home import FarmHome

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=120, capture_output=True)
    [wheel] = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=120)
    return target


def test_the_data_folders_travel_in_it(installed: Path) -> None:
    [wheel] = installed.parent.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "farm/_data/device_profiles/SM8650.toml",
        "farm/_data/test_suites/quantized_ops/suite.toml",
        "farm/_data/test_suites/quantized_ops/operators.py",
        "farm/_data/native_runner/CMakeLists.txt",
        "farm/_data/native_runner/bridge/qnn_bridge.cpp",
        "farm/_data/reports/base.html.j2",
        "farm/_data/reports/notify/slack.j2",
        "farm/py.typed",
        "farm/store/migrations/env.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "bench/")) or name.endswith((".so", ".pte"))]


@pytest.mark.whole
def test_it_runs_the_main_job(installed: Path, home: FarmHome) -> None:
    env = {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import farm; print(farm.__file__)"],
        env={**home.env, **env}, cwd=home.cwd, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed))
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "2")
    done = home.farm(*run, env=env, timeout_s=300, code=0)
    assert "8 passed" in done.stdout
