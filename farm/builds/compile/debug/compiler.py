"""Job -> a program that writes the output of every layer, and the same layers on the CPU. Imports torch and executorch.

The usual flow compiles the program, with intermediate outputs on: QNN then keeps every tensor, so that operators that
it fuses otherwise stay apart. `farm run` executes another program, so that the times of this program mean nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from executorch.backends.qualcomm.utils.utils import (
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import ExecutorchBackendConfig
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from farm.base.backends.descriptor import QUANTIZED_PRECISIONS
from farm.base.errors import UsageError
from farm.builds.bundles.bundle import INPUTS, MODEL
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.debug.metrics import BoundMetric, MetricClass, bind_all
from farm.builds.compile.debug.protocol import BUNDLE, ETRECORD
from farm.builds.compile.debug.reference import Computed, LayerNode, layer_nodes, run_float, run_quantized
from farm.builds.compile.flows.calls import Tensors, call, copies, flat_outputs, returned_nodes
from farm.builds.compile.flows.compiler import (
    CompiledProgram,
    in_orders_of,
    write_manifest,
    write_tensors,
    written_method,
)
from farm.builds.compile.flows.control_flow import refuse_control_flow
from farm.builds.compile.flows.delegation import Delegation, read_delegation
from farm.builds.compile.flows.factory import make_inputs, make_method, make_module
from farm.builds.compile.flows.flow import Stopwatch
from farm.builds.compile.flows.node_origins import source_places
from farm.builds.compile.flows.outputs import named_outputs
from farm.builds.compile.flows.qualcomm import calibrate, compiler_specs
from farm.builds.compile.flows.writes import compare_writes, program_outputs, run_reference
from farm.suites.suite import FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

    from farm.builds.compile.debug.protocol import UserMetric
    from farm.builds.program.pte import Method
    from farm.suites.suite import Case, Job, Target

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
        module = make_method(case, make_module(case), case.method)
        samples = [make_inputs(case, number) for number in range(case.samples)]
        with watch.step("reference"):
            reference = run_reference(module, case, samples)
            samples = reference.run.inputs
            inputs, expected = samples[sample], reference.run.outputs[sample]
        if reference.is_changed:
            module = make_method(case, make_module(case), case.method)
        with watch.step("export"):
            exported = torch.export.export(module, samples[0], strict=True)
            refuse_control_flow(exported, case, target.backend)
            graph: Any = exported.module()
        weights: dict[str, torch.Tensor] = {}
        quantized = None
        if target.precision in QUANTIZED_PRECISIONS:
            with watch.step("quantize"):
                graph, weights = _quantize(graph, samples, target)
                quantized = graph
        with watch.step("lower"):
            specs = compiler_specs(target, versions, dump_intermediate_outputs=True)
            edge = to_edge_transform_and_lower_to_qnn(graph, samples[0], specs, generate_etrecord=True)
            lowered = edge.exported_program()
            delegation = _require_delegate(lowered.graph_module)
            writes = compare_writes(reference, exported, lowered)
        with watch.step("serialize"):
            program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment()))
            bundle = folder / BUNDLE
            method = _write_program(program, bundle, case, inputs)
            record = program.get_etrecord()
            record.update_representative_inputs(copies(inputs))
            record.save(folder / ETRECORD)
        compared: ExportedProgram = record.graph_map[REFERENCE_GRAPH]
        with watch.step("layers"):
            unlifted = compared.module()
            fp32 = run_float(unlifted, inputs, weights)
            in_steps = run_quantized(unlifted, inputs) if quantized is not None else None
        notes = [
            *_named_layers(reference.run.names, unlifted.graph),
            *_consistency("FP32", fp32.outputs, expected),
        ]
        if quantized is not None and in_steps is not None:
            notes += _consistency("quantized", in_steps.outputs, flat_outputs(call(quantized, inputs).outputs, case))
    steps, written = [None] * len(expected), writes.found.inputs
    program_facts = CompiledProgram(
        references={},
        outputs=in_orders_of(
            named_outputs(reference, program_outputs(reference.run, written)[sample], written, steps), method
        ),
        writes=writes.kept,
        lost_writes=writes.lost,
        delegates={"QnnBackend": delegation.partitions},
        delegated_ops=delegation.delegated_ops,
        fallback_ops=dict(Counter(delegation.edge_ops) + Counter(delegation.cpu_ops)),
        input_orders=tuple(value.order for value in method.inputs),
    )
    key = hashlib.sha256(f"debug {bundle_key(job, versions)}".encode()).hexdigest()
    write_manifest(job, key, versions, bundle, [inputs], program_facts, watch)
    return DebugProgram(
        edge=compared,
        etrecord=folder / ETRECORD,
        nodes=layer_nodes(unlifted.graph, _partitions(program), source_places(case)),
        fp32=fp32,
        quantized=in_steps,
        metrics=bind_all(classes, compared),
        seconds=watch.seconds,
        notes=(*notes, *(one.note for one in classes)),
    )


def _write_program(program: ExecutorchProgramManager, bundle: Path, case: Case, inputs: Tensors) -> Method:
    """Write the program and its inputs, in its memory orders, and return the method. Raises as `written_method`."""
    bundle.mkdir()
    with (bundle / MODEL).open("wb") as file:
        program.write_to_file(file)
    # The method of a program for debugging is called `forward`, also for a case with another method.
    method = written_method(bundle / MODEL, msgspec.structs.replace(case, method=FORWARD), ())
    write_tensors(bundle / INPUTS, "input", [inputs], tuple(value.order for value in method.inputs))
    return method


def _quantize(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target
) -> tuple[torch.fx.GraphModule, dict[str, torch.Tensor]]:
    """Return the quantized module, and the FP32 values of its quantized constants by their names.

    Conversion drops those values; the module with its observers still has them.
    """
    prepared = calibrate(exported, samples, target)
    originals = _originals(prepared)
    quantized = convert_pt2e(prepared)
    return quantized, _float_weights(quantized, originals)


def _originals(prepared: torch.fx.GraphModule) -> dict[tuple[str, str], torch.Tensor]:
    """Return the constants that the quantizer observes, by the reading node and the place in its arguments."""
    found = {}
    for node in prepared.graph.nodes:
        for place, observer in _reads(node):
            if observer.op != "call_module" or not observer.args:
                continue
            source = observer.args[0]
            if isinstance(source, torch.fx.Node) and source.op == "get_attr":
                found[node.name, place] = _attribute(prepared, str(source.target)).detach().clone()
    return found


def _float_weights(
    converted: torch.fx.GraphModule, originals: Mapping[tuple[str, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the FP32 values of the quantized constants of `converted`, by the constants' names."""
    found = {}
    for node in converted.graph.nodes:
        for place, dequantized in _reads(node):
            original = originals.get((node.name, place))
            if original is None or not dequantized.args:
                continue
            source = dequantized.args[0]
            if isinstance(source, torch.fx.Node) and source.op == "get_attr":
                found[str(source.target)] = original
    return found


def _reads(node: torch.fx.Node) -> list[tuple[str, torch.fx.Node]]:
    """Return the nodes that `node` reads, each with its place in the arguments."""
    found: list[tuple[str, torch.fx.Node]] = []

    def walk(place: str, value: Any) -> None:
        if isinstance(value, torch.fx.Node):
            found.append((place, value))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                walk(f"{place}.{index}", item)

    for index, argument in enumerate(node.args):
        walk(str(index), argument)
    for name, argument in node.kwargs.items():
        walk(name, argument)
    return found


def _attribute(module: torch.nn.Module, name: str) -> torch.Tensor:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    tensor: torch.Tensor = value
    return tensor


def _require_delegate(graph_module: torch.fx.GraphModule) -> Delegation:
    delegation = read_delegation(graph_module)
    if not delegation.partitions:
        raise UsageError("nothing was delegated: there is no layer to compare, as the CPU runs them all")
    return delegation


def _partitions(program: ExecutorchProgramManager) -> dict[int, int]:
    """Return the number of the delegate, in the order of execution, that computes each debug handle."""
    handles = program.debug_handle_map["forward"]
    delegates = sorted(int(instruction) for instruction in program.delegate_map["forward"])
    by_instruction = {int(instruction): found for instruction, found in handles.items()}
    found: dict[int, int] = {}
    for number, instruction in enumerate(delegates):
        inside = by_instruction.get(instruction, ())
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
