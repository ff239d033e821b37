"""Calls of a module, sample by sample, with state that goes from an output to the next inference: farm.suites.state.

Imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from farm.base.errors import ConfigError
from farm.builds.compile.flows.calls import Tensors, call, flat_outputs, output_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.suites.suite import Case


class SampleRun(NamedTuple):
    """Inputs and outputs of a module for all samples of a case, in their order."""

    inputs: list[Tensors]
    """Inputs of each sample, including state from the sample before."""
    outputs: list[Tensors]
    left: list[Tensors]
    """Inputs after the call, with the writes of the module."""
    names: tuple[str, ...]
    """Path of each output in the return value: `farm.builds.compile.flows.calls.output_names`."""


def run_samples(module: torch.nn.Module, case: Case, samples: Sequence[Tensors]) -> SampleRun:
    """Return the run of `module` over `samples`, each with the state from the sample before it.

    `samples` keep their values. Raises ConfigError for an output that is no tensor, or does not fit the input.
    """
    ran = SampleRun([], [], [], ())
    for sample in samples:
        inputs = list(sample)
        for one in case.state if ran.outputs else ():
            inputs[one.input] = _handed_on(case, ran.outputs[-1], one.output, inputs[one.input])
        called = call(module, inputs)
        ran.inputs.append(tuple(inputs))
        ran.outputs.append(flat_outputs(called.outputs, case))
        ran.left.append(called.inputs)
        ran = ran._replace(names=output_names(called.outputs))
    return ran


def _handed_on(case: Case, outputs: Tensors, index: int, wanted: torch.Tensor) -> torch.Tensor:
    manifest, key = case.manifest, f"case.{case.name}.state"
    if index >= len(outputs):
        raise ConfigError(manifest, key, f"names output {index}, and there are {len(outputs)}, from 0")
    found = outputs[index]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        given, taken = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (found, wanted))
        raise ConfigError(manifest, key, f"output {index} is {given}, and the input takes {taken}")
    return found
