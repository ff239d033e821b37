"""Writes to inputs and buffers, of a module and of its program. Imports executorch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from executorch.exir.lowered_backend_module import get_lowered_submodules

from farm.base.errors import ConfigError
from farm.builds.compile.flows.calls import ModuleState, equal, writes_in_place
from farm.builds.compile.flows.state import SampleRun, run_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.export import ExportedProgram

    from farm.builds.compile.flows.calls import Tensors
    from farm.suites.suite import Case


class Writes(NamedTuple):
    """Writes that outlive a call."""

    inputs: tuple[int, ...] = ()
    """Positions of the written inputs, in the order of a signature."""
    buffers: tuple[str, ...] = ()
    """Paths of the written buffers in the module."""

    def named(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Return `input x` and `buffer total`, `inputs` being the names of all inputs."""
        return (*(f"input {inputs[index]}" for index in self.inputs), *(f"buffer {name}" for name in self.buffers))

    def without(self, others: Writes) -> Writes:
        """Return the writes that are not among `others`."""
        return Writes(
            tuple(index for index in self.inputs if index not in others.inputs),
            tuple(name for name in self.buffers if name not in others.buffers),
        )

    def within(self, others: Writes) -> Writes:
        """Return the writes that are among `others`."""
        return self.without(self.without(others))

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
        return self.needed.within(self.found).named(self.input_names)

    @property
    def lost(self) -> tuple[str, ...]:
        """Writes of the module that the program lacks, by name."""
        return self.needed.without(self.found).named(self.input_names)


class Reference(NamedTuple):
    """Results of a module for all samples, and the writes of these calls."""

    run: SampleRun
    writes: Writes
    is_changed: bool
    """True if the calls changed a buffer or an attribute of the module: a new module has to be compiled."""
    input_names: tuple[str, ...]


def program_outputs(run: SampleRun, written: Sequence[int]) -> list[Tensors]:
    """Return the outputs of every sample of `run`, after the inputs `written` with their values after the call."""
    return [
        (*(left[place] for place in written), *outputs) for left, outputs in zip(run.left, run.outputs, strict=True)
    ]


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
    return tuple(names[place] if place < len(names) else str(place) for place in range(count))


def compare_writes(reference: Reference, exported: ExportedProgram, edge: ExportedProgram) -> ComparedWrites:
    """Return the writes of a module, by its calls and its export, beside the writes of its lowered program."""
    needed = _exported_writes(exported).union(reference.writes)
    return ComparedWrites(needed, _program_writes(edge), reference.input_names)


def _exported_writes(exported: ExportedProgram) -> Writes:
    """Return the writes of an exported module.

    torch.export keeps in-place operators, and only functional graphs have writes in their signature. Only graphs with
    such operators are converted.
    """
    if not any(writes_in_place(node) for node in exported.graph.nodes):
        return Writes()
    return _signature_writes(exported.run_decompositions({}))


def _program_writes(edge: ExportedProgram) -> Writes:
    """Return the writes of a lowered program, delegates included: they keep buffers of their own."""
    writes = _signature_writes(edge)
    for _, lowered, _ in get_lowered_submodules(edge.graph_module):
        inside: Any = lowered.original_module
        writes = writes.union(Writes(buffers=_signature_writes(inside).buffers))
    return writes


def _signature_writes(exported: ExportedProgram) -> Writes:
    signature = exported.graph_signature
    places = {str(name): index for index, name in enumerate(signature.user_inputs)}
    inputs = tuple(places[name] for name in signature.user_inputs_to_mutate.values())
    return Writes(inputs, tuple(signature.buffers_to_mutate.values()))
