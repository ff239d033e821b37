"""Cases that come from files: a checkpoint, an exported program, a ready .pte, inputs and outputs of a user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from warm_torch import run_script

NETS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.fc(x)
class Sum(torch.nn.Module):
    def forward(self, x, y):
        return x + y
"""

# Module whose weights do not come from its seed, in every form that a case accepts.
FILES = """
import numpy, torch
from nets import Net
torch.manual_seed(7)
net, x = Net().eval(), torch.randn(2, 8)
torch.save(net.state_dict(), "net.pt")
torch.export.save(torch.export.export(net, (x,)), "net.pt2")
numpy.save("x.npy", x.numpy())
torch.save(torch.nn.Linear(3, 3).state_dict(), "other.pt")
"""

SUITE = """
[suite]
name = "mine"
description = "files"

[case.checkpoint]
module = ".nets:Net"
checkpoint = "net.pt"
inputs = [{ files = ["x.npy"] }]
metrics = [{ name = "top1", least = 1.0 }]

[case.program]
program = "net.pt2"
inputs = [{ files = ["x.npy"] }]

[case.other_checkpoint]
module = ".nets:Net"
checkpoint = "other.pt"
inputs = [{ shape = [2, 8] }]

[case.smaller]
module = "..mine.nets:Sum"
inputs = [
    { shape = [2, 5], dynamic = [{ dim = 1, greatest = 8, name = "n" }] },
    { shape = [2, 5], dynamic = [{ dim = 1, greatest = 8, name = "n" }], seed = 3 },
]

[case.ready]
pte = "ready.pte"
inputs = [{ files = ["ready_input.npy"] }]
expected = [["ready_output.npy"]]
tolerance = { ready = { fp32 = { sqnr_db = 100.0 } } }

[case.ready_unjudged]
pte = "ready.pte"
inputs = [{ files = ["ready_input.npy"] }]

[case.ready_misfit]
pte = "ready.pte"
inputs = [{ shape = [1, 2, 3] }]
"""


@pytest.fixture(scope="module")
def ran(farm_cache: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FarmHome, dict[str, Any]]:
    """Run of all forms on the CPU, which compiles fastest."""
    import numpy as np

    folder = tmp_path_factory.mktemp("sources")
    home = FarmHome(farm_cache, folder / "state", folder / "cwd")
    mine = home.cwd / "mine"
    mine.mkdir(parents=True)
    (mine / "suite.toml").write_text(SUITE)
    (mine / "nets.py").write_text(NETS)
    # Beside the module that it imports, and no part of the suite.
    (script := mine / "files.py").write_text(FILES)
    run_script(script, cache=farm_cache, folder=mine)
    script.unlink()
    shutil.copyfile(models / "xnnpack.pte", mine / "ready.pte")
    for name, raw in (("input", "xnnpack_input.raw"), ("output", "xnnpack_fp32.raw")):
        np.save(mine / f"ready_{name}.npy", np.fromfile(models / raw, np.float32).reshape(2, -1))
    done = home.farm(
        "run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "./mine", "--virtual", "1", "--json", timeout_s=600
    )
    return home, json.loads(done.stdout)


@pytest.mark.whole
def test_every_source_is_executed_and_judged(ran: tuple[FarmHome, dict[str, Any]]) -> None:
    _, view = ran
    ended = {job["case"]: job["attempts"][0] for job in view["jobs"]}
    passed = {name for name, attempt in ended.items() if attempt["verdict"] == "passed"}
    assert passed == {"checkpoint", "program", "smaller", "ready", "ready_unjudged"}, view
    outputs = {name: ended[name]["comparisons"][0]["max_abs"] for name in ("checkpoint", "program", "ready")}
    assert max(outputs.values()) < 1e-4
    assert any(row["metric"] == "top1[0]" for row in ended["checkpoint"]["measurements"])
    assert ended["ready_unjudged"]["comparisons"] == []
    assert "it ran; nothing says what its outputs should be" in ended["ready_unjudged"]["notes"]
    assert "other.pt does not fit the module" in ended["other_checkpoint"]["reason"]
    assert "ready.pte takes float32[4, 8]" in ended["ready_misfit"]["reason"]


@pytest.mark.whole
def test_a_program_for_something_else_is_refused_before_anything_runs(
    ran: tuple[FarmHome, dict[str, Any]], models: Path
) -> None:
    home, _ = ran
    runs = set((home.state / "runs").iterdir())
    shutil.copyfile(models / "conv.pte", home.cwd / "mine" / "ready.pte")
    for options, says in (
        (("--soc", "SM8750"), "ready.pte is compiled for SM8650 (htp), not for SM8750 (htp)"),
        (
            ("--soc", "SM8650", "--backend", "xnnpack"),
            "ready.pte is compiled for SM8650 (htp), not for SM8650 (xnnpack)",
        ),
    ):
        done = home.farm("run", *options, "--suite", "./mine", "-k", "ready_unjudged", "--virtual", "1")
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
    (home.cwd / "mine" / "ready.pte").write_text("no program")
    done = home.farm("run", "--soc", "SM8650", "--suite", "./mine", "-k", "ready_unjudged", "--virtual", "1", code=2)
    assert "ready.pte: is not an ExecuTorch program" in done.stderr
    assert set((home.state / "runs").iterdir()) == runs
