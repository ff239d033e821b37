"""Reference of a program: its module called sample by sample, with state, writes and names. Imports executorch."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torch.export import ExportedProgram

from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import TensorSpec
from farm.builds.compile.flows.calls import (
    ModuleState,
    Tensors,
    call,
    equal,
    flat_outputs,
    output_names,
    returned_nodes,
    writes_in_place,
)
from farm.builds.program.layout import Order
from farm.suites.suite import Case

_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


class SampleRun(NamedTuple):
    """Inputs and outputs of a module for all samples of a case, in their order."""

    inputs: list[Tensors]
    """Inputs of each sample, including state from the sample before (farm.suites.state)."""
    outputs: list[Tensors]
    left: list[Tensors]
    """Inputs after the call, with the writes of the module."""
    names: tuple[str, ...]
    """Path of each output in the return value: `farm.builds.compile.flows.calls.output_names`."""

    def program_outputs(self, written: Sequence[int]) -> list[Tensors]:
        """Return the outputs of every sample, after the inputs `written` with their values after the call."""
        return [
            (*(left[place] for place in written), *outputs)
            for left, outputs in zip(self.left, self.outputs, strict=True)
        ]


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
    key = f"case.{case.name}.state"
    if index >= len(outputs):
        raise ConfigError(case.manifest, key, f"names output {index}, and there are {len(outputs)}, from 0")
    found = outputs[index]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        given, taken = map(tensor_spec, (found, wanted))
        raise ConfigError(case.manifest, key, f"output {index} is {given}, and the input takes {taken}")
    return found


class Writes(NamedTuple):
    """Writes that outlive a call."""

    inputs: tuple[int, ...] = ()
    """Positions of the written inputs, in the order of a signature."""
    buffers: tuple[str, ...] = ()
    """Paths of the written buffers in the module."""

    def named(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Return `input x` and `buffer total`, `inputs` being the names of all inputs."""
        return (*(f"input {inputs[index]}" for index in self.inputs), *(f"buffer {name}" for name in self.buffers))

    def union(self, others: Writes) -> Writes:
        """Return the writes of both."""
        return Writes(
            tuple(dict.fromkeys((*self.inputs, *others.inputs))), tuple(dict.fromkeys((*self.buffers, *others.buffers)))
        )


class ComparedWrites(NamedTuple):
    """Writes of a module beside the writes of its program."""

    needed: Writes
    found: Writes
    input_names: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Writes of the module that the program has, by name."""
        found = self.found.named(self.input_names)
        return tuple(name for name in self.needed.named(self.input_names) if name in found)

    @property
    def lost(self) -> tuple[str, ...]:
        """Writes of the module that the program lacks, by name."""
        return tuple(name for name in self.needed.named(self.input_names) if name not in self.kept)


class Reference(NamedTuple):
    """Results of a module for all samples, and the writes of these calls."""

    run: SampleRun
    writes: Writes
    is_changed: bool
    """True if the calls changed a buffer or an attribute of the module: a new module has to be compiled."""
    input_names: tuple[str, ...]

    def output_specs(
        self, tensors: Tensors, written: Sequence[int], quantized: torch.fx.GraphModule | None = None
    ) -> list[TensorSpec]:
        """Return the outputs of a program as in a manifest: `tensors`, which begin with the inputs `written`.

        Quantization steps are from the converted graph `quantized`.
        """
        steps = output_steps(quantized) if quantized is not None else [None] * len(self.run.names)
        names = [*((self.input_names[place], None) for place in written), *zip(self.run.names, steps, strict=True)]
        return [
            msgspec.structs.replace(tensor_spec(tensor), step=step, name=name, written=number < len(written))
            for number, (tensor, (name, step)) in enumerate(zip(tensors, names, strict=True))
        ]


def tensor_spec(tensor: torch.Tensor, order: Order = ()) -> TensorSpec:
    """Return a tensor as a manifest describes it."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), order=order)


def output_steps(quantized: torch.fx.GraphModule) -> list[float | None]:
    """Return the quantization step of every output of a converted graph, in the unit of the output.

    None for an output without quantization, or without one scale for the whole tensor.
    """
    steps: list[float | None] = []
    for node in returned_nodes(quantized.graph):
        while isinstance(node, torch.fx.Node) and node.target is operator.getitem:
            node = node.args[0]  # noqa: PLW2901 - the operator with several outputs
        scale = node.args[1] if isinstance(node, torch.fx.Node) and str(node.target) == _DEQUANTIZE else None
        steps.append(scale if isinstance(scale, float) else None)
    return steps


def run_reference(module: torch.nn.Module, case: Case, samples: Sequence[Tensors]) -> Reference:
    """Return results and writes of `module` for `samples`, in order. Raises ConfigError for a written parameter."""
    state = ModuleState(module)
    run = run_samples(module, case, samples)
    if parameters := state.written_parameters():
        problem = f"forward writes to its parameter {parameters[0]}: a program has no such write; make it a buffer"
        raise ConfigError(case.manifest, f"case.{case.name}.module", problem)
    calls = list(zip(run.inputs, run.left, strict=True))
    inputs = tuple(
        place for place in range(len(samples[0])) if any(not equal(given[place], left[place]) for given, left in calls)
    )
    writes = Writes(inputs, state.written_buffers())
    is_changed = bool(writes.buffers) or not state.has_same_attributes()
    return Reference(run, writes, is_changed, _parameter_names(module, len(samples[0])))


def refused_write(error: Exception, reference: Reference, case: Case, backend: str) -> ConfigError:
    """Return the error for a module with writes that the flow of `backend` failed to compile, because of `error`."""
    named = " and its ".join(reference.writes.named(reference.input_names))
    problem = f"forward writes to its {named}, and the {backend} flow cannot compile it: return the new value instead"
    reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(case.manifest, f"case.{case.name}.module", f"{problem} ({reason})")


def _parameter_names(module: torch.nn.Module, count: int) -> tuple[str, ...]:
    """Return the names of the first `count` parameters of `forward`; the number of an input without a name."""
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind not in variadic]
    return (*names[:count], *map(str, range(len(names), count)))


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return an exported module without in-place operators, which torch.export keeps: its signature has the writes."""
    if any(writes_in_place(node) for node in exported.graph.nodes):
        return exported.run_decompositions({})
    return exported


def compare_writes(reference: Reference, exported: ExportedProgram, edge: ExportedProgram) -> ComparedWrites:
    """Return the writes of a module, by its calls and its functional export, beside the writes of its program."""
    found = _signature_writes(edge)
    for _, lowered, _ in get_lowered_submodules(edge.graph_module):
        # Delegates keep buffers of their own.
        inside: Any = lowered.original_module
        found = found.union(Writes(buffers=_signature_writes(inside).buffers))
    return ComparedWrites(_signature_writes(exported).union(reference.writes), found, reference.input_names)


def _signature_writes(exported: ExportedProgram) -> Writes:
    signature = exported.graph_signature
    places = {str(name): index for index, name in enumerate(signature.user_inputs)}
    inputs = tuple(places[name] for name in signature.user_inputs_to_mutate.values())
    return Writes(inputs, tuple(signature.buffers_to_mutate.values()))
