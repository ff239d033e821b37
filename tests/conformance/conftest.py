"""Upstream's tests and tools, unchanged, in processes of their own, with a runner that keeps a list of its starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from attached import rack
from farm_home import FarmHome
from programs import run_program
from simpleadb import Layout, lay_out

from farm.base.socs import find_soc
from farm.builds.runtime.qnn_sdk import host_sdk
from farm.builds.runtime.runtime import Runtime, simulator_runtime
from farm.devices.adb.protocol import adb_target
from farm.devices.adb.server import AdbServer

HERE = Path(__file__).parent
MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"

# Called so, the runner writes an ETDump unasked, which upstream's tests count on.
RUNNER = "qnn_executor_runner"


@dataclass(frozen=True)
class Ran:
    """Result of a run of upstream's unittest."""

    code: int
    log: str
    runner_starts: int

    def check(self, tests: int) -> None:
        """Assert that this number of `tests` ran, that all passed, and that each of them started the runner."""
        failures = [line for line in self.log.splitlines() if line.startswith(("FAIL:", "ERROR:", "AssertionError"))]
        assert self.code == 0, "\n".join([*failures, self.log[-4000:]])
        # `OK (skipped=1)` would be a test that proves nothing.
        assert self.log.rstrip().endswith("\nOK"), self.log[-1000:]
        assert f"\nRan {tests} tests in " in self.log
        assert self.runner_starts >= tests


@pytest.fixture(scope="session")
def simulator(farm_cache: Path) -> Runtime:
    return simulator_runtime(farm_cache)


@pytest.fixture
def outside_env(home: FarmHome) -> dict[str, str]:
    """Environment after `eval "$(farm setup runtime env --soc SM8650)"`, with the modules that upstream imports."""
    kept = {name: value for name, value in home.env.items() if not name.startswith("FARM_")}
    output = home.farm("setup", "runtime", "env", "--soc", "SM8650", timeout_s=600, code=0)
    exported = run_program(["/bin/sh", "-c", f"{output.stdout}\nexec env -0"], env=kept, timeout_s=60).stdout
    env = dict(line.split("=", 1) for line in exported.split("\0") if line)
    return {**env, "PYTHONPATH": str(HERE / "model_stubs")}


@dataclass(frozen=True)
class Attached:
    """A virtual SM8650 behind an adb server of its own."""

    server: AdbServer
    name: str
    """Name of the device for `adb -s`."""
    files: Path
    """Folder of this machine behind the device's /data/local/tmp."""

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which the command `adb` reaches the device."""
        return {"PATH": f"{self.server.adb.parent}:{os.environ['PATH']}", **self.server.environment()}


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    with rack(tmp_path_factory.mktemp("devices"), "SM8650") as one:
        yield Attached(one.server, adb_target(one.device.serial), one.files())


@pytest.fixture
def layout(simulator: Runtime, farm_cache: Path, tmp_path: Path) -> Layout:
    """Content of QNN_SDK_ROOT and of upstream's build folder: libraries for the device, and for the compiler."""
    layout = lay_out(tmp_path / "layout", simulator, find_soc("SM8650").htp_arch)
    compiler = host_sdk(farm_cache).lib_dir
    (layout.sdk / "lib" / compiler.name).symlink_to(compiler)
    return layout


@pytest.fixture
def run_here(outside_env: dict[str, str], tmp_path: Path) -> Callable[..., Ran]:
    """Upstream's x86 mode: the runner is a program of this machine."""
    starts = tmp_path / "starts.log"
    script = _listing_runner(tmp_path / "listing", outside_env["QNN_EXECUTOR_RUNNER"], starts)

    def run(*names: str) -> Ran:
        env = {**outside_env, "QNN_EXECUTOR_RUNNER": str(script)}
        done = _unittest(tmp_path, env, "--enable_x86_64", "--build_folder", ".", *names)
        return Ran(done.returncode, done.stdout, _lines(starts))

    return run


def _listing_runner(folder: Path, command: str | Path, starts: str | Path) -> Path:
    """Return a script that upstream takes for its runner: it adds a line to `starts` and becomes `command`."""
    folder.mkdir()
    script = folder / RUNNER
    script.write_text(f'#!/bin/sh\necho "$*" >>{starts}\nexec {command} "$@"\n')
    script.chmod(0o755)
    return script


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _unittest(folder: Path, env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", MODULE, "--soc_model", "SM8650", *arguments],
        cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=600, check=False,
    )  # fmt: skip
