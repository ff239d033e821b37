"""Code that gives other outputs for the same inputs, from the compiler to the verdict, on the real runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

pytestmark = pytest.mark.whole

NETS = """
import torch
class Noise(torch.nn.Module):
    # So little that every execution is within the limits.
    def forward(self, x):
        return x + torch.rand(8) * 1e-3
class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
    def forward(self, x):
        self.total.add_(x)
        return self.total + 0
class Last(torch.nn.Module):
    # Written as a whole before it is read.
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8))
    def forward(self, x):
        self.last.copy_(x)
        return self.last * 2
"""

SUITE = """
[suite]
name = "mine"
description = "what repeats itself, and what does not"
[suite.tolerance.fp32.fp32]
cosine = 0.99

[case.steady]
module = "torch.nn:ReLU"
inputs = [{ shape = [8] }]

[case.noise]
module = ".nets:Noise"
inputs = [{ shape = [8] }]

[case.noise_on_purpose]
module = ".nets:Noise"
inputs = [{ shape = [8] }]
deterministic = false

[case.counter]
module = ".nets:Counter"
inputs = [{ shape = [8] }]

[case.counter_that_must_not]
module = ".nets:Counter"
inputs = [{ shape = [8] }]
deterministic = true

[case.last]
module = ".nets:Last"
inputs = [{ shape = [8] }]
deterministic = true
"""


@pytest.fixture(scope="module")
def attempts(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The attempt of each case, of one run on the CPU, as that compiles fastest."""
    folder = tmp_path_factory.mktemp("iterations")
    home = FarmHome(farm_cache, folder / "state", folder / "cwd")
    mine = home.cwd / "mine"
    mine.mkdir(parents=True)
    (mine / "suite.toml").write_text(SUITE)
    (mine / "nets.py").write_text(NETS)
    done = home.farm(
        *("run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "./mine", "--virtual", "1", "--json"),
        timeout_s=600,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    return {job["case"]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}


def test_what_differs_from_time_to_time_fails_although_each_time_is_within_the_limits(
    attempts: dict[str, Any],
) -> None:
    for case in ("noise", "counter_that_must_not"):
        attempt = attempts[case]
        assert (attempt["verdict"], attempt["stage"], attempt["cause"]) == ("failed", "numerics", "numerics"), attempt
        assert attempt["reason"] == "executions 1, 2, 3 of 4 (the first is warm-up) gave other outputs than the last"
        assert [one["violations"] for one in attempt["comparisons"]] == [[]]


def test_what_may_differ_passes_and_says_so(attempts: dict[str, Any]) -> None:
    assert attempts["noise_on_purpose"]["verdict"] == "passed", attempts["noise_on_purpose"]
    why = "gave other outputs than the last: the case says that it is not deterministic"
    assert any(note.endswith(why) for note in attempts["noise_on_purpose"]["notes"])


def test_a_state_goes_on_from_sample_to_sample_as_in_the_reference(attempts: dict[str, Any]) -> None:
    assert attempts["counter"]["verdict"] == "passed", attempts["counter"]
    assert attempts["counter"]["notes"] == [
        "writes to its buffer total: each sample is executed once, as its state goes on"
    ]


def test_what_repeats_itself_passes_in_silence(attempts: dict[str, Any]) -> None:
    for case, notes in (("steady", []), ("last", ["writes to its buffer last"])):
        assert attempts[case]["verdict"] == "passed", attempts[case]
        assert attempts[case]["notes"] == notes
