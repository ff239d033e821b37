"""Outputs of broken programs: `python mutating.py FOLDER SUITE/CASE...`, a process with torch.

Leaves FOLDER/SUITE/CASE.npz with, for every output of the FP32 module: `output_N`, its value; `stale_N`, its value for
other inputs; `unbiased_N`, its value without the biases of the module, if the module has any.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch

from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.suites.manifests import find_suites, resolve_suite


def main() -> None:
    folder, *names = sys.argv[1:]
    suites = {name.partition("/")[0] for name in names}
    known = find_suites()
    cases = {f"{suite}/{case.name}": case for suite in suites for case in resolve_suite(suite, known).cases}
    for suite in suites:
        (Path(folder) / suite).mkdir(parents=True)
    with torch.no_grad():
        for name in names:
            case = cases[name]
            module, inputs = make_module(case), make_inputs(case, 0)
            found = outputs("output", module, inputs)
            found |= outputs("stale", module, make_inputs(case, case.samples))
            if unbiased := without_biases(module):
                found |= outputs("unbiased", unbiased, inputs)
            np.savez(Path(folder) / f"{name}.npz", **found)


def outputs(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    # A module may keep or change its inputs.
    result = copy.deepcopy(module)(*copy.deepcopy(inputs))
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    return {f"{name}_{index}": tensor.detach().contiguous().numpy() for index, tensor in enumerate(tensors)}


def without_biases(module: torch.nn.Module) -> torch.nn.Module | None:
    other = copy.deepcopy(module)
    biases = [value for name, value in other.named_parameters() if name.rpartition(".")[2] == "bias"]
    for bias in biases:
        bias.zero_()
    return other if biases else None


if __name__ == "__main__":
    main()
