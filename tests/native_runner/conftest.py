"""A runtime folder as a device has it, models compiled for it, and a workspace to run the runner in."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from farm.publish import published
from farm.runtime.packages import package_version
from farm.runtime.runtime import simulator_runtime
from farm.runtime.simulator import host_sdk

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ran:
    """One run of the runner."""

    code: int
    stdout: str
    stderr: str
    result: dict[str, Any] | None

    @property
    def error(self) -> dict[str, Any]:
        assert self.result is not None
        assert self.result["ok"] is False
        assert self.result["exit_code"] == self.code
        error: dict[str, Any] = self.result["error"]
        return error


@dataclass(frozen=True)
class Workspace:
    """A folder on the device, with the output folder in it."""

    folder: Path
    runtime: Path

    def run(self, *flags: str, env: dict[str, str] | None = None, result: str = "result.json") -> Ran:
        done = subprocess.run(
            [str(self.runtime / "farm_runner"), *flags],
            cwd=self.folder,
            # Nothing of this machine's environment reaches a device.
            env={"LD_LIBRARY_PATH": str(self.runtime), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )
        path = self.folder / result
        return Ran(done.returncode, done.stdout, done.stderr, json.loads(path.read_text()) if path.is_file() else None)

    def list_inputs(self, *lines: str) -> None:
        (self.folder / "input_list.txt").write_text("".join(f"{line}\n" for line in lines))

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "outputs").iterdir())


@pytest.fixture(scope="session")
def runtime_folder(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies, not links: what is not among the files of the runtime cannot be found by accident."""
    runtime = simulator_runtime(farm_cache)
    folder = tmp_path_factory.mktemp("runtime")
    for name, path in runtime.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="session")
def models(farm_cache: Path) -> Path:
    """The folder that compile_models.py fills."""
    script = HERE / "compile_models.py"
    versions = "".join(package_version(name) for name in ("executorch", "torch", "onnxruntime-qnn"))
    key = hashlib.sha256(script.read_bytes() + versions.encode()).hexdigest()[:16]

    def compile_all(folder: Path) -> None:
        env = {**os.environ, **host_sdk(farm_cache).env}
        done = subprocess.run(
            [sys.executable, str(script), str(folder)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return published(farm_cache / "runner-test-models" / key, compile_all)


@pytest.fixture
def bare(runtime_folder: Path, tmp_path: Path) -> Workspace:
    """A workspace with an output folder only."""
    folder = tmp_path / "workspace"
    (folder / "outputs").mkdir(parents=True)
    return Workspace(folder, runtime_folder)


@pytest.fixture
def conv(bare: Workspace, models: Path) -> Workspace:
    """A workspace with conv.pte as model.pte and two inferences."""
    shutil.copy(models / "conv.pte", bare.folder / "model.pte")
    for i in range(2):
        shutil.copy(models / f"conv_input_{i}.raw", bare.folder / f"x{i}.raw")
    bare.list_inputs("x0.raw", "x1.raw")
    return bare
