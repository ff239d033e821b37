"""Cases that come from files: a checkpoint, an exported program, a ready .pte, inputs and outputs of a user."""

from __future__ import annotations

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

[case]
program = { program = "net.pt2", inputs = [{ files = ["x.npy"] }] }
other_checkpoint = { module = ".nets:Net", checkpoint = "other.pt", inputs = [{ shape = [2, 8] }] }
ready_unjudged = { pte = "ready.pte", inputs = [{ files = ["ready_input.npy"] }] }
ready_misfit = { pte = "ready.pte", inputs = [{ shape = [1, 2, 3] }] }

[case.checkpoint]
module = ".nets:Net"
checkpoint = "net.pt"
inputs = [{ files = ["x.npy"] }]
metrics = [{ name = "top1", least = 1.0 }]

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
tolerance.ready.fp32.sqnr_db = 100.0
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
    asked = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "./mine", "--virtual", "1")
    return home, home.json(*asked, timeout_s=600, code=1)


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
    assert "it ran; there is no reference for its outputs" in ended["ready_unjudged"]["notes"]
    assert "other.pt does not fit the module" in ended["other_checkpoint"]["reason"]
    assert "ready.pte takes float32[4, 8]" in ended["ready_misfit"]["reason"]


@pytest.mark.whole
def test_a_program_for_something_else_is_refused_before_anything_runs(
    ran: tuple[FarmHome, dict[str, Any]], models: Path
) -> None:
    home, _ = ran
    runs = set((home.state / "runs").iterdir())
    ready = home.cwd / "mine" / "ready.pte"
    shutil.copyfile(models / "conv.pte", ready)
    asked = ("run", "--suite", "./mine", "-k", "ready_unjudged", "--virtual", "1")
    for soc, backend in (("SM8750", "htp"), ("SM8650", "xnnpack")):
        done = home.farm(*asked, "--soc", soc, "--backend", backend, code=2)
        assert f"ready.pte is compiled for SM8650 (htp), not for {soc} ({backend})" in done.stderr
    ready.write_text("no program")
    assert "ready.pte: is not an ExecuTorch program" in home.farm(*asked, "--soc", "SM8650", code=2).stderr
    assert set((home.state / "runs").iterdir()) == runs
