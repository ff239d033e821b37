"""Upstream's SimpleADB class, unchanged, with a virtual device behind the `adb` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from programs import run_program
from simpleadb import Layout

if TYPE_CHECKING:
    from conftest import Attached

pytestmark = pytest.mark.conformance

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
