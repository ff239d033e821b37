"""Code that gives other outputs for the same inputs, from the compiler to the verdict, on the real runner."""

from __future__ import annotations

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
description = "cases that repeat themselves, and cases that do not"
tolerance.fp32.fp32.cosine = 0.99

[case]
steady = { module = "torch.nn:ReLU", inputs = [{ shape = [8] }] }
noise = { module = ".nets:Noise", inputs = [{ shape = [8] }] }
noise_on_purpose = { module = ".nets:Noise", inputs = [{ shape = [8] }], deterministic = false }
counter = { module = ".nets:Counter", inputs = [{ shape = [8] }] }
counter_that_must_not = { module = ".nets:Counter", inputs = [{ shape = [8] }], deterministic = true }
last = { module = ".nets:Last", inputs = [{ shape = [8] }], deterministic = true }
"""
GOES_ON = "writes to its buffer total: each sample is executed once, as its state goes on"


def test_outputs_that_differ_between_executions_fail_unless_the_case_says_so(home: FarmHome) -> None:
    """On the CPU, as that compiles fastest."""
    mine = home.cwd / "mine"
    mine.mkdir()
    (mine / "suite.toml").write_text(SUITE)
    (mine / "nets.py").write_text(NETS)
    asked = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "./mine", "--virtual", "1")
    done = home.json(*asked, "--iterations", "3", timeout_s=600, code=1)
    attempts = {job["case"]: job["attempts"][-1] for job in done["jobs"]}
    for case in ("noise", "counter_that_must_not"):
        attempt = attempts.pop(case)
        assert (attempt["verdict"], attempt["stage"], attempt["cause"]) == ("failed", "numerics", "numerics"), attempt
        assert attempt["reason"] == "executions 1, 2, 3 of 4 (the first is warm-up) gave other outputs than the last"
        # Each execution is within the limits.
        assert [one["violations"] for one in attempt["comparisons"]] == [[]]
    assert {attempt["verdict"] for attempt in attempts.values()} == {"passed"}, attempts
    why = "gave other outputs than the last: the case is declared as not deterministic"
    assert any(note.endswith(why) for note in attempts.pop("noise_on_purpose")["notes"])
    notes = {case: attempt["notes"] for case, attempt in attempts.items()}
    assert notes == {"steady": [], "last": ["writes to its buffer last"], "counter": [GOES_ON]}
