"""Cases whose tensors are channels last in the memory of the program, from the module to the verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from farm_home import FarmHome

from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.replay.bundle_folder import write_bundle_folder
from farm.suites.suite import Target

LAYERS = """
import torch
from torch import nn

LAST = torch.channels_last


def conv():
    return nn.Conv2d(3, 8, 3).to(memory_format=LAST)


class Two(nn.Module):
    def forward(self, x, y):
        last = (x + y).to(memory_format=LAST)
        return last.relu() + 1.0, last.mean((2, 3)), y.relu()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        # QNN has no divisor of its own: the pool is the CPU's.
        self.conv, self.pool = conv(), nn.AvgPool2d(2, divisor_override=3)

    def forward(self, x):
        return self.pool(self.conv(x.to(memory_format=LAST)))


class Handed(nn.Module):
    def forward(self, x):
        return x.to(memory_format=LAST).relu() + 1.0
"""
MANIFEST = """
[suite]
name = "layouts"
description = "Memory layouts"
precisions = ["8a8w"]
tolerance.8a8w.fp32.sqnr_db = 25.0

[case]
conv = { module = ".layers:conv", inputs = [{ shape = [1, 3, 8, 10] }], samples = 2 }
two = { module = ".layers:Two", inputs = [{ shape = [1, 3, 8, 10] }, { shape = [1, 3, 8, 10] }] }
mixed = { module = ".layers:Mixed", inputs = [{ shape = [1, 3, 8, 10] }] }

[case.handed]
module = ".layers:Handed"
inputs = [{ shape = [1, 3, 8, 10] }]
samples = 2
state = [{ output = 0, input = 0 }]
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite") / "layouts"
    folder.mkdir()
    (folder / "suite.toml").write_text(MANIFEST)
    (folder / "layers.py").write_text(LAYERS)
    return folder


def run(home: FarmHome, suite: Path, *arguments: str) -> dict[str, tuple[str, str]]:
    """Return verdict and reason by case of a run, which may fail."""
    asked = ("run", "--soc", "SM8650", "--suite", str(suite), "--virtual", "1", *arguments)
    attempts = {job["case"]: job["attempts"][-1] for job in home.json(*asked, code=None)["jobs"]}
    return {case: (attempt["verdict"], attempt["reason"]) for case, attempt in attempts.items()}


@pytest.mark.whole
def test_a_channels_last_convolution_passes_on_htp_and_again_as_its_repro(home: FarmHome, suite: Path) -> None:
    assert run(home, suite, "-k", "conv") == {"conv": ("passed", "")}
    home.farm("jobs", "rerun", "layouts/conv", "--virtual", "1", code=0)


def test_on_the_cpu_each_output_is_read_in_its_own_order(home: FarmHome, suite: Path) -> None:
    found = run(home, suite, "--backend", "xnnpack", "-k", "not mixed")
    assert found["two"] == ("passed", "")
    for case, says in (
        ("conv", "XNNPACK takes weights of convolutions in C order, and weight is channels last"),
        ("handed", "0:0: output 0 lies in the order [0, 2, 3, 1] in memory, input 0 in C order"),
    ):
        assert (found[case][0], says in found[case][1]) == ("failed", True), found[case]
    assert home.farm("jobs", "rerun", "layouts/two", "--virtual", "1").returncode == 0


@pytest.mark.whole
def test_a_tensor_that_needs_two_orders_fails_run_and_debug(home: FarmHome, suite: Path) -> None:
    """Without it the layer on the CPU had -2.8 dB, and `farm debug` named it as the first divergence."""
    problem = "takes in the order [0, 2, 3, 1]: keep the module and its inputs in C order"
    debugged = home.farm("debug", f"{suite}/mixed", "--soc", "SM8650", "--virtual", code=2)
    assert problem in debugged.stderr
    verdict, reason = run(home, suite, "-k", "mixed")["mixed"]
    assert (verdict, problem in reason) == ("failed", True)


def test_a_channels_last_bundle_folder_runs_by_its_instructions(home: FarmHome, models: Path, tmp_path: Path) -> None:
    given = np.load(models / "last_input.npy")
    asked = ("exec", str(models / "last_xnnpack.pte"), "--soc", "SM8650", "--virtual", "1")
    attempt = home.json(*asked, "--inputs", str(models / "last_input.npy"))["attempt"]
    bundle = load_bundle(BundleCache(home.cache).folder(attempt["bundle_key"]))
    folder = tmp_path / "bundle"
    write_bundle_folder(bundle, "exec/last", Target("SM8650", "xnnpack", "ready"), ["from a test"], folder)
    assert (folder / "inputs" / "input_0_0.raw").read_bytes() == given.transpose(0, 2, 3, 1).tobytes()
    text = (folder / "README.md").read_text()
    assert "| input 0 | float32[1, 3, 8, 10] | 0, 2, 3, 1 | |" in text
    assert "--input-list array_list.txt" in text
    home.farm(
        "exec", "model.pte", "--soc", "SM8650", "--virtual", "1", "--input-list", "array_list.txt",
        "--expect", str(models / "last_xnnpack.npy"), "--output", str(tmp_path / "out"), cwd=folder, code=0,
    )  # fmt: skip
    np.testing.assert_allclose(np.load(tmp_path / "out" / "output_0_0.npy"), np.load(models / "last_xnnpack.npy"))
