"""How long `farm debug` takes for a model of fifty layers, from a warm cache.

    python bench/debug.py
    python bench/debug.py --quick   five layers

Two calls of the command as a user makes them: the first builds and fetches what is missing, the second is timed. Their
state folder is their own; the cache is the user's, or $FARM_CACHE_DIR. The last line is JSON: layers that were
compared, and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SUITE = """
[suite]
name = "deep"
description = "A residual network of fifty layers."
precisions = ["8a8w"]

[case.residual]
module = ".model:Residual"
inputs = [{ shape = [1, 3, 32, 32] }]
"""
# A convolution, a ReLU and an addition in each block, after a convolution and a ReLU.
_BLOCKS, _QUICK_BLOCKS = 16, 1
_MODEL = """
import torch


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(BLOCKS))

    def forward(self, x):
        x = torch.relu(self.first(x))
        for convolution in self.convolutions:
            x = x + torch.relu(convolution(x))
        return x
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five layers")
    blocks = _QUICK_BLOCKS if parser.parse_args().quick else _BLOCKS
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        suite = Path(folder, "deep")
        suite.mkdir()
        (suite / "suite.toml").write_text(_SUITE)
        (suite / "model.py").write_text(_MODEL.replace("BLOCKS", str(blocks)))
        for which in ("warming", "timed"):
            started = time.perf_counter()
            layers = _debug(suite, Path(folder, "state"))
            seconds = time.perf_counter() - started
            print(f"{which}: {layers} layers in {seconds:.1f} s", file=sys.stderr)
    print(json.dumps({"layers": layers, "seconds": round(seconds, 1)}))


def _debug(suite: Path, state: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "farm.cli.main",
        "debug",
        f"{suite}/residual[SM8650-htp-8a8w]",
        "--virtual",
        "--json",
    ]
    done = subprocess.run(
        command, env={**os.environ, "FARM_STATE_DIR": str(state)}, stdout=subprocess.PIPE, text=True, check=True
    )
    return sum(layer["compiler"] is not None for layer in json.loads(done.stdout)["layers"])


if __name__ == "__main__":
    main()
