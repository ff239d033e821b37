"""Job -> a program that writes the output of every layer, and the same layers on the CPU. Imports torch and executorch.

The usual flow compiles the program, with intermediate outputs on: QNN then keeps every tensor, so that operators that
it fuses otherwise stay apart. `farm run` executes another program, so that the times of this program mean nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from executorch.backends.qualcomm.utils.utils import (
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from farm.base.backends.descriptor import QUANTIZED_PRECISIONS
from farm.base.errors import UsageError
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.debug.metrics import BoundMetric, MetricClass, bind_all
from farm.builds.compile.debug.protocol import BUNDLE, ETRECORD, UserMetric
from farm.builds.compile.debug.reference import Computed, LayerNode, layer_nodes, run_float, run_quantized
from farm.builds.compile.flows.calls import call, copies, flat_outputs, returned_nodes
from farm.builds.compile.flows.compiler import CompiledProgram, in_orders_of, run_module, write_bundle, write_program
from farm.builds.compile.flows.delegation import read_delegation
from farm.builds.compile.flows.factory import make_inputs
from farm.builds.compile.flows.flow import Stopwatch
from farm.builds.compile.flows.node_origins import source_places
from farm.builds.compile.flows.qualcomm import calibrate, compiler_specs, refuse_control_flow
from farm.builds.compile.flows.reference import compare_writes, functional
from farm.suites.features import Features
from farm.suites.suite import FORWARD, Job, Target

REFERENCE_GRAPH = "edge_after_transform/forward"
"""Name, in an ETRecord, of the graph that ExecuTorch's QNNIntermediateDebugger compares with."""

# Two ways of computing one program in float32 differ by its rounding alone, by 100 dB and more.
_SAME_DB = 60.0


class DebugProgram(NamedTuple):
    """Compiled program with everything that its outputs are compared with."""

    edge: ExportedProgram
    """Graph of REFERENCE_GRAPH. It stays in memory, as a saved graph loses the quantization of its nodes."""
    etrecord: Path
    nodes: list[LayerNode]
    fp32: Computed
    quantized: Computed | None
    """None for a precision without quantization."""
    metrics: list[BoundMetric]
    seconds: dict[str, float]
    notes: tuple[str, ...]


def compile_debug(
    job: Job, versions: Mapping[str, str], sample: int, folder: Path, metrics: Sequence[UserMetric] = ()
) -> DebugProgram:
    """Compile `job` for debugging and write its bundle, with the inputs of one sample, into BUNDLE of `folder`.

    All samples calibrate, as in `farm run`. Raises UsageError for a program without a layer on the backend and for an
    unusable comparator of `metrics`; the compiler's exceptions pass through.
    """
    classes = [MetricClass(metric, job.case) for metric in metrics]
    case, target = job.case, job.target
    watch = Stopwatch()
    with torch.no_grad():
        # The program has this method alone, as ExecuTorch writes only the layers of `forward`.
        samples = [make_inputs(case, number) for number in range(case.samples)]
        _, module, reference = run_module(case, samples, watch)
        samples = reference.run.inputs
        inputs, expected = samples[sample], reference.run.outputs[sample]
        with watch.step("export"):
            exported = torch.export.export(module, samples[0], strict=True)
            refuse_control_flow(exported, case, target.backend)
            graph: Any = exported.module()
        weights: dict[str, torch.Tensor] = {}
        is_quantized = target.precision in QUANTIZED_PRECISIONS
        if is_quantized:
            with watch.step("quantize"):
                graph, weights = _quantize(graph, samples, target)
        with watch.step("lower"):
            specs = compiler_specs(target, versions, Features(dump_intermediate_outputs=True))
            edge = to_edge_transform_and_lower_to_qnn(graph, samples[0], specs, generate_etrecord=True)
            lowered = edge.exported_program()
            delegation = read_delegation(lowered.graph_module)
            if not delegation.partitions:
                raise UsageError("nothing was delegated: there is no layer to compare, as the CPU runs them all")
            writes = compare_writes(reference, functional(exported), lowered)
        with watch.step("serialize"):
            program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment()))
            bundle = folder / BUNDLE
            bundle.mkdir()
            # The method of a program for debugging is called `forward`, also for a case with another method.
            method = write_program(program, bundle, msgspec.structs.replace(case, method=FORWARD), ())
            record = program.get_etrecord()
            record.update_representative_inputs(copies(inputs))
            record.save(folder / ETRECORD)
        compared: ExportedProgram = record.graph_map[REFERENCE_GRAPH]
        with watch.step("layers"):
            unlifted = compared.module()
            fp32 = run_float(unlifted, inputs, weights)
            quantized = run_quantized(unlifted, inputs) if is_quantized else None
        notes = [*_named_layers(reference.run.names, unlifted.graph), *_consistency("FP32", fp32.outputs, expected)]
        if quantized is not None:
            notes += _consistency("quantized", quantized.outputs, flat_outputs(call(graph, inputs).outputs, case))
    written = writes.found.inputs
    outputs = reference.output_specs(reference.run.program_outputs(written)[sample], written)
    program_facts = CompiledProgram(
        references={},
        outputs=in_orders_of(outputs, method),
        writes=writes.kept,
        lost_writes=writes.lost,
        delegates=method.partitions,
        delegated_ops=delegation.delegated_ops,
        fallback_ops=delegation.cpu_ops,
        inputs=[inputs],
        input_orders=tuple(value.order for value in method.inputs),
    )
    key = hashlib.sha256(f"debug {bundle_key(job, versions)}".encode()).hexdigest()
    write_bundle(job, key, versions, bundle, program_facts, watch)
    return DebugProgram(
        edge=compared,
        etrecord=folder / ETRECORD,
        nodes=layer_nodes(unlifted.graph, _partitions(program), source_places(case)),
        fp32=fp32,
        quantized=quantized,
        metrics=bind_all(classes, compared),
        seconds=watch.seconds,
        notes=(*notes, *(one.note for one in classes)),
    )


def _quantize(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target
) -> tuple[torch.fx.GraphModule, dict[str, torch.Tensor]]:
    """Return the quantized module, and the FP32 values of its quantized constants by their names.

    Conversion drops those values; the module with its observers still has them.
    """
    prepared = calibrate(exported, samples, target)
    constants = _constants(prepared.graph)
    originals = {place: attrgetter(name)(prepared).detach().clone() for place, name in constants.items()}
    quantized = convert_pt2e(prepared)
    constants = _constants(quantized.graph)
    return quantized, {name: originals[place] for place, name in constants.items() if place in originals}


def _constants(graph: torch.fx.Graph) -> dict[tuple[str, int], str]:
    """Return the constants behind observers and dequantizations, by the reading node and the place in its arguments."""
    found = {}
    for node in graph.nodes:
        for place, between in enumerate(pytree.tree_leaves((node.args, node.kwargs))):
            source = between.args[0] if isinstance(between, torch.fx.Node) and between.args else None
            if isinstance(source, torch.fx.Node) and source.op == "get_attr":
                found[node.name, place] = str(source.target)
    return found


def _partitions(program: ExecutorchProgramManager) -> dict[int, int]:
    """Return the number of the delegate, in the order of execution, that computes each debug handle."""
    found: dict[int, int] = {}
    for number, at in enumerate(sorted(program.delegate_map["forward"])):
        inside = program.debug_handle_map["forward"].get(at, ())
        found |= dict.fromkeys((inside,) if isinstance(inside, int) else inside, number)
    return found


def _named_layers(names: Sequence[str], graph: torch.fx.Graph) -> list[str]:
    """Return a note with the layer of each output that has a name."""
    layers = map(str, returned_nodes(graph))
    pairs = [f"{name} is {layer}" for name, layer in zip(names, layers, strict=False) if name]
    return [f"outputs: {', '.join(pairs)}"] if pairs else []


def _consistency(name: str, computed: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
    """Return a note if the outputs of the layers differ from the whole module's outputs by more than rounding."""
    for index, (ours, theirs) in enumerate(zip(computed, expected, strict=False)):
        noise = torch.linalg.vector_norm((ours.double() - theirs.double()).flatten())
        signal = torch.linalg.vector_norm(theirs.double().flatten())
        if noise > 0 and 20 * torch.log10(signal / noise) < _SAME_DB:
            ratio = float(20 * torch.log10(signal / noise))
            problem = f"the {name} layers end in another output {index} than the {name} module has ({ratio:.1f} dB)"
            return [f"{problem}: ExecuTorch's passes changed the graph; take them with care"]
    return []
