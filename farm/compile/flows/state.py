"""Modules whose inferences hand an output on to the next as an input: farm.suites.state. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from farm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.suites.suite import Case

Tensors = tuple[torch.Tensor, ...]


class SampleRun(NamedTuple):
    """What a module computed of all samples of a case, in their order."""

    inputs: list[Tensors]
    """With what was handed on in its place."""
    outputs: list[Tensors]


def run_samples(module: torch.nn.Module, case: Case, samples: Sequence[Tensors]) -> SampleRun:
    """Return what `module` makes of `samples`, each with the state that the one before it left.

    Raises ConfigError where an output is not what the input takes.
    """
    ran = SampleRun([], [])
    for sample in samples:
        inputs = list(sample)
        for one in case.state if ran.outputs else ():
            inputs[one.input] = _handed_on(case, ran.outputs[-1], one.output, inputs[one.input])
        ran.inputs.append(tuple(inputs))
        result = module(*inputs)
        ran.outputs.append((result,) if isinstance(result, torch.Tensor) else tuple(result))
    return ran


def _handed_on(case: Case, outputs: Tensors, index: int, wanted: torch.Tensor) -> torch.Tensor:
    manifest, key = Path(case.folder) / "suite.toml", f"case.{case.name}.state"
    if index >= len(outputs):
        raise ConfigError(manifest, key, f"names output {index}, and there are {len(outputs)}, from 0")
    found = outputs[index]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        given, taken = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (found, wanted))
        raise ConfigError(manifest, key, f"output {index} is {given}, and the input takes {taken}")
    # A copy, as a module may return what it was given.
    return found.detach().clone()
