"""Run as a program: upstream's way from a module to outputs, `build_executorch_binary` and then `SimpleADB`.

Prints what `run_jobs` measured as JSON. Leaves in `--into`: conv.pte (8a8w, for SM8650), reference.npz (inputs `x0` and
`x1`, and the module's own outputs for them, `y0` and `y1`) and the outputs of two jobs of these two samples.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from executorch.backends.qualcomm.export_utils import QnnConfig, build_executorch_binary
from executorch.backends.qualcomm.quantizer.quantizer import QuantDtype
from simpleadb import Job, Layout, run_jobs


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--into", "--sdk", "--build", "--adb"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("more", type=Path, nargs="*")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU()).eval()
    samples = [(torch.randn(1, 3, 16, 16),) for _ in range(2)]
    config = QnnConfig(soc_model="SM8650", build_folder=str(chosen.build), device=chosen.device)
    build_executorch_binary(module, config, str(chosen.into / "conv"), samples, quant_dtype=QuantDtype.use_8a8w)
    with torch.no_grad():
        arrays = {f"x{i}": x.numpy() for i, (x,) in enumerate(samples)}
        arrays |= {f"y{i}": module(x).numpy() for i, (x,) in enumerate(samples)}
    np.savez(chosen.into / "reference.npz", **arrays)

    job = Job(chosen.into / "conv.pte", [[arrays["x0"]], [arrays["x1"]]])
    # The caller has set what adb needs.
    environment = {name: os.environ[name] for name in ("ANDROID_ADB_SERVER_PORT", "HOME")}
    layout = Layout(chosen.sdk, chosen.build, chosen.more)
    measured = run_jobs(
        [job, job], chosen.into, device=chosen.device, soc="SM8650", layout=layout, adb=chosen.adb,
        environment=environment, iterations=3,
    )  # fmt: skip
    print(json.dumps(measured._asdict() | {"jobs": [job._asdict() for job in measured.jobs]}))  # noqa: T201


if __name__ == "__main__":
    main()
