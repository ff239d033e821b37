"""Upstream's own tests and its SimpleADB class, unchanged, pass with our runner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from executorch_checkout import installed
from farm_home import FarmHome
from programs import run_program
from simpleadb import Layout

if TYPE_CHECKING:
    from conftest import Attached, Ran


# Upstream's own tests, unchanged, pass with our runner: on this machine, and sharded over virtual devices.


pytestmark = pytest.mark.conformance

UNCHANGED = {
    "TestQNNQuantizedOperator": (
        "max_dim",  # outputs of two types
        "stack",  # several inputs
    ),
    "TestQNNFloatingPointOperator": ("equal",),
    "TestQNNQuantizedUtils": ("multi_contexts", "profile_op", "shared_buffer"),
}

ON_DEVICES = (
    "TestQNNQuantizedOperator::test_qnn_backend_chunk_single",  # several outputs
    "TestQNNQuantizedOperator::test_qnn_backend_embedding",  # integer inputs
    "TestQNNQuantizedUtils::test_qnn_backend_dump_intermediate_outputs_topk",
    "TestQNNQuantizedUtils::test_qnn_backend_runtime_option_profile",
)
NEWER = {
    "htp/op/v68/test.py": ("test_abs[16a]",),
    "htp/feature/v68/test.py": ("test_performance[e2e]", "test_tensor_dump[e2e]"),
}
MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"
STUBS = Path(__file__).parent / "model_stubs"


def test_in_x86_mode(run_here: Callable[..., Ran]) -> None:
    # In one process, as importing all that upstream's modules import takes as long as several tests.
    names = [f"{cls}.test_qnn_backend_{name}" for cls, chosen in UNCHANGED.items() for name in chosen]
    run_here(*names).check(tests=len(names))


def test_on_two_devices(home: FarmHome) -> None:
    run_on_devices(
        home,
        ["--pyargs", *(f"{MODULE}::{name}" for name in ON_DEVICES)],
        {f"test_qnn_delegate.py::{name}" for name in ON_DEVICES},
        devices=2,
    )
    assert not list(home.cwd.iterdir()), "they write where they stand, which is a folder of each worker"


def test_the_newer_framework_on_a_device(home: FarmHome) -> None:
    folder = installed() / "backends/qualcomm/tests/rework"
    names = [f"{file}::{name}" for file, chosen in NEWER.items() for name in chosen]
    errors = run_on_devices(
        home, [str(folder / name) for name in names], {f"rework/{name}" for name in names}, devices=1
    )
    assert "SUMMARY [PASSED]/[TOTAL]" in errors, "upstream's own summary, whose plugin is not installed"
    assert not list(home.cwd.iterdir())


def test_the_suite_of_every_backend_runs_on_the_devices(home: FarmHome) -> None:
    folder = installed() / "backends/test/suite/operators"
    done = home.farm(
        *("pytest", "--soc", "SM8550", "--virtual", "1", "--json", "--", "-p", "no:cacheprovider"),
        *(str(folder / "test_relu.py"), "-k", "f32_multi_dim and (8a8w or 16a4w_block)"),
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout_s=1800,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    flows = ("qnn_16a4w_block", "qnn_8a8w")
    assert [job["case"] for job in jobs] == [
        f"suite/operators/test_relu.py::test_relu_f32_multi_dim[{flow}]" for flow in flows
    ], "flows of other backends are deselected"
    for [attempt] in (job["attempts"] for job in jobs):
        assert (attempt["verdict"], attempt["stage"]) == ("passed", "done")
        assert {one["metric"] for one in attempt["measurements"]} >= {"latency", "model_load_time"}, "a device ran it"
        assert any(note.startswith("output 0: SQNR ") for note in attempt["notes"])


def test_a_plan_of_upstream_has_upstreams_count(home: FarmHome) -> None:
    tool = Path(__file__).parents[2] / "tools/upstream_plans.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--only", "17804"],
        env={**home.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        cwd=home.cwd, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"test_resolve_debug_handle \(.*\) \| debug handles \| (\d+) \| \1 \| passed \| ✓ \|", done.stdout)
    assert not list(home.cwd.iterdir())


def run_on_devices(home: FarmHome, arguments: list[str], expected: set[str], *, devices: int) -> str:
    """Run tests of upstream on virtual devices and return standard error. Raises AssertionError unless all pass."""
    done = home.farm(
        *("pytest", "--soc", "SM8650", "--virtual", str(devices), "--json", "--", "-p", "no:cacheprovider", *arguments),
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, (str(STUBS), os.environ.get("PYTHONPATH")))),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        timeout_s=1800,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    assert {job["id"] for job in jobs} == {f"pytest/{name}[SM8650-htp]" for name in expected}
    attempts = [attempt for job in jobs for attempt in job["attempts"]]
    assert [attempt["verdict"] for attempt in attempts] == ["passed"] * len(expected)
    assert {attempt["device"] for attempt in attempts} == {f"virtual-SM8650-{number}" for number in range(devices)}
    return done.stderr


# Upstream's SimpleADB class, unchanged, with a virtual device behind the `adb` command.


HERE = Path(__file__).parent


def test_it_pushes_executes_and_pulls(
    device: Attached, layout: Layout, outside_env: dict[str, str], tmp_path: Path
) -> None:
    env = {**outside_env, **device.env, "PYTHONPATH": str(HERE.parent)}
    folders = ("--sdk", layout.sdk, "--build", layout.build, "--into", tmp_path)
    words = ("--device", device.name, "--adb", device.server.adb, *layout.more)
    command = [sys.executable, HERE / "conv_by_simpleadb.py", *folders, *words]
    done = run_program(command, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout_s=300)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["libraries"] > 0
    assert all(min(job["push"], job["execute"], job["pull"]) > 0 for job in measured["jobs"])

    shown = json.loads((device.files / "qnn_executorch_test/result.json").read_text())
    assert shown["ok"], "it was our runner: upstream's writes no such file"
    assert [len(inference["iterations_ns"]) for inference in shown["inferences"]] == [3, 3]
    assert shown["outputs"] == [{"shape": [1, 8, 16, 16], "dtype": "float32", "nbytes": 8192}]

    reference = np.load(tmp_path / "reference.npz")
    for job in ("0", "1"):
        outputs = tmp_path / job / "outputs"
        assert sorted(os.listdir(outputs)) == ["output_0_0.raw", "output_1_0.raw"]
        for sample in (0, 1):
            output = np.fromfile(outputs / f"output_{sample}_0.raw", dtype=np.float32).reshape(1, 8, 16, 16)
            expected = reference[f"y{sample}"]
            noise = float(np.mean((output - expected) ** 2))
            assert noise < float(np.mean(expected**2)) / 1000, "8 bits of a convolution are worth 30 dB"
