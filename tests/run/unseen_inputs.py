"""Writes suites of compiled programs with unseen inputs, and with the outputs of the modules for these.

Run as `python unseen_inputs.py SUITE CACHE FOLDER`, with a JSON list of job and bundle key in FOLDER/asked.json.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.utils import _pytree as pytree

from farm.builds.bundles.bundle import Manifest, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.suites.manifests import load_suite
from farm.suites.suite import Case, InputSpec

SQNR_DB = {"8a8w": 24.0, "fp16": 61.0, "fp32": 100.0}
"""Limits by precision: 2 dB below the least of QNN 2.51, 26.3 dB and 64.4 dB; farm's default in fp32.

Unseen inputs have half the range of the calibration, which costs 8a8w at least 6 dB of the suite's SQNR.
"""
SQNR_DB_OF = {("mean", "8a8w"): 18.0, ("mean", "fp16"): 45.0, ("mean", "fp32"): 90.0}
"""Limits of means near zero, 0.006 to 0.018, of values up to 1: 20.2 dB and 47.7 dB were measured.

In fp32 two units in the last place of every tanh are 97 dB of the least mean, computed and not measured.
"""
MISMATCH_OF = {("greatest", "8a8w"): 0.25}
"""Limit of an argmax of four rows: in one the two greatest values are 0.0015 apart, and a step is 0.0157."""
OTHER_SEEDS = 500_000
SUITE = """[suite]
name = "{name}"
description = "Programs with unseen inputs"
{backends}"""
CASE = """
[case.{name}]
pte = "{name}.pte"
precisions = ["{precision}"]
samples = {samples}
inputs = [{inputs}]
expected = {expected}
tolerance = {{ {precision} = {{ fp32 = {{ sqnr_db = {sqnr_db}, mismatch = {mismatch} }} }} }}
"""


def expected_of(case: Case, samples: list[tuple[torch.Tensor, ...]], manifest: Manifest) -> list[list[np.ndarray]]:
    """Return the outputs of a fresh module, called with copies of `samples`, in the order of the program."""
    module = make_module(case)
    names = list(inspect.signature(module.forward).parameters)
    found = []
    for sample in samples:
        given = [tensor.clone() for tensor in sample]
        outputs = iter([leaf.clone() for leaf in pytree.tree_leaves(module(*given))])
        found.append([
            (given[names.index(spec.name)] if spec.written else next(outputs)).contiguous().numpy().copy()
            for spec in manifest.outputs
        ])  # fmt: skip
    return found


def unseen(spec: InputSpec) -> InputSpec:
    """Return a specification of other inputs, within the range that the quantizer has seen."""
    other = msgspec.structs.replace(spec, seed=spec.seed + OTHER_SEEDS)
    if spec.distribution != "uniform":
        return other
    return msgspec.structs.replace(other, low=spec.low / 2, high=spec.high / 2)


def write_case(case: Case, name: str, precision: str, bundle_folder: Path, folder: Path) -> str:
    manifest = load_bundle(bundle_folder).manifest
    inputs = tuple(unseen(spec) for spec in case.inputs)
    other = msgspec.structs.replace(case, inputs=inputs)
    samples = [make_inputs(other, sample) for sample in range(case.samples)]
    shutil.copyfile(bundle_folder / "model.pte", folder / f"{name}.pte")
    given = [[tensor.contiguous().numpy() for tensor in sample] for sample in samples]
    files = {}
    for kind, rows in (("input", given), ("expected", expected_of(case, samples, manifest))):
        files[kind] = [[f"{name}_{kind}_{n}_{i}.npy" for i in range(len(row))] for n, row in enumerate(rows)]
        for row, paths in zip(rows, files[kind], strict=True):
            for array, path in zip(row, paths, strict=True):
                np.save(folder / path, array)
    columns = (f"{{ files = {json.dumps(list(column))} }}" for column in zip(*files["input"], strict=True))
    return CASE.format(
        name=name, precision=precision, samples=case.samples, inputs=", ".join(columns),
        expected=json.dumps(files["expected"]), mismatch=MISMATCH_OF.get((case.name, precision), 0.0),
        sqnr_db=SQNR_DB_OF.get((case.name, precision), SQNR_DB[precision]),
    )  # fmt: skip


def main(suite: str, cache: str, place: str) -> None:
    cases = {case.name: case for case in load_suite(Path(suite)).cases}
    folder, root = Path(place), BundleCache(Path(cache))
    text = {
        "htp": SUITE.format(name="htp", backends='backends = ["htp"]\n'),
        "xnnpack": SUITE.format(name="xnnpack", backends=""),
    }
    for backend in text:
        (folder / backend).mkdir()
    with torch.no_grad():
        for job in json.loads((folder / "asked.json").read_text()):
            case, precision, backend = job["case"], job["precision"], job["backend"]
            name = f"{case}_{precision}"
            text[backend] += write_case(cases[case], name, precision, root.folder(job["key"]), folder / backend)
    for backend, lines in text.items():
        (folder / backend / "suite.toml").write_text(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
