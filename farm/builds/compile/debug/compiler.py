"""Job -> a program that writes the output of every layer, and the same layers on the CPU.

The usual flow compiles the program, with intermediate outputs on: QNN then keeps every tensor, so that operators that
it fuses otherwise stay apart. `farm run` executes another program, so that the times of this program mean nothing.
Imports torch and executorch.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from executorch.backends.qualcomm.builders.node_visitor import dq_ops, q_ops
from executorch.backends.qualcomm.utils import constants as keys
from executorch.backends.qualcomm.utils import utils
from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from farm.base.backends.descriptor import QUANTIZED_PRECISIONS
from farm.base.errors import UsageError
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.debug.protocol import BUNDLE, ETRECORD
from farm.builds.compile.flows.compiler import CompiledProgram, in_orders_of, run_module, write_bundle, write_program
from farm.builds.compile.flows.edge_nodes import origin_of, read_delegation, source_places
from farm.builds.compile.flows.factory import make_inputs
from farm.builds.compile.flows.flow import Stopwatch
from farm.builds.compile.flows.qualcomm import calibrate, compiler_specs, refuse_control_flow
from farm.builds.compile.flows.reference import (
    call,
    copies,
    find_writes,
    flat_outputs,
    functional,
    returned_nodes,
    state_kept,
    write_facts,
)
from farm.builds.program.layers import INPUT, Layer, LayerTensor
from farm.suites.suite import FORWARD, Features, Job, Target


def sqnr_db(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the SQNR of two different float64 tensors in dB; -inf for a `before` of zeros.

    ExecuTorch's comparators square in float32, where 1e20 overflows: an SQNR of inf, and a cosine of 0.
    """
    signal, noise = float((before**2).sum()), float(((before - after) ** 2).sum())
    if not signal:
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise)) if noise else math.inf


# Computation of every layer of an edge program on the CPU, in FP32 and quantized.
#
# ExecuTorch 1.5 folds quantize and dequantize away before it keeps the graph that its Inspector compares with: that
# graph computes with quantized weights and activations in floating point, which is neither FP32 nor quantized. The
# nodes keep the folded parameters (AnnotateQuantAttrs), so that both can be computed from it:
#
# * FP32: the weights that the quantizer saw replace the quantized weights;
# * quantized: the output of a node is quantized and dequantized by the node's parameters, and once more for a reader
#   with other parameters (QCOM_REQUANTIZE). QNN gets the same.


# `aten.conv2d.default`, as torch prints an operator.
_OPERATOR = re.compile(r"[a-z]\w*\.\w+(\.\w+)?")


class Computed(NamedTuple):
    """Values of one run over the graph."""

    layers: dict[str, torch.Tensor]
    """Values by node, inputs of the program included. Each of several outputs of an operator is under the node that
    picks it."""
    outputs: tuple[torch.Tensor, ...]


class LayerNode(NamedTuple):
    """Layer of the graph: an output of a computing node, or an input of the program."""

    layer: Layer
    """Layer without gaps. Its name is `node`, followed by `:1` if several outputs of it are used."""
    node: str
    value: str
    """Node of the value: `node`, or the node that picks this output of it."""
    axis_order: tuple[int, ...] | None
    """Order of the axes in QNN's layout; None for torch's layout."""


def layer_nodes(graph: torch.fx.Graph, partitions: Mapping[int, int], places: Sequence[Path] = ()) -> list[LayerNode]:
    """Return the layers of an unlifted edge graph in the order of execution, its inputs first.

    `partitions` are the numbers of the delegates, by the debug handles of their operators. Sources below a folder of
    `places` are relative to it.
    """
    sources: dict[torch.fx.Node, list[str]] = {}
    found = []
    for node in graph.nodes:
        bypassed = node.op == "call_function" and node.meta.get(keys.QCOM_BYPASS_NODE)  # what only unpacks a weight
        if node.op not in ("placeholder", "call_function") or node.target is operator.getitem or bypassed:
            continue
        read = dict.fromkeys(name for each in node.all_input_nodes for name in sources.get(each, ()))
        if _only_quantizes(node):
            sources[node] = list(read)
            continue
        picks = _picks(node)
        for index, pick in picks.items() or [(None, node)]:
            name = f"{node.name}:{index}" if len(picks) > 1 else node.name
            sources[pick] = [name]
            handle = node.meta.get("debug_handle")
            tensor = _tensor(pick, handle, index, partitions.get(handle) if handle is not None else None)
            layer = Layer(name, INPUT, tuple(read), {}, tensor=tensor)
            if node.op == "call_function":
                target = "quantize" if node.target in q_ops else getattr(node.target, "__name__", str(node.target))
                origin, exported = origin_of(node, places), _exported_operators(node)
                layer = msgspec.structs.replace(
                    layer, operator=target, module=origin.module, source=origin.source, exported=exported
                )
            found.append(LayerNode(layer, node.name, pick.name, pick.meta.get(keys.QCOM_AXIS_ORDER)))
    return found


def _exported_operators(node: torch.fx.Node) -> tuple[str, ...]:
    """Return the operators of the exported program that a node comes from, by torch's record of its origins.

    The record has each pass, the newest first. Before the exported program there are functions, not operators.
    """
    found: dict[str, None] = {}
    for newest in node.meta.get("from_node") or ():
        source, last = newest, ""
        while source is not None:
            last = str(source.target) if _OPERATOR.fullmatch(str(source.target)) else last
            source = next(iter(source.from_node or ()), None)
        if last:
            found[last] = None
    return tuple(found)


def _only_quantizes(node: torch.fx.Node) -> bool:
    """Return whether a node only quantizes or dequantizes an activation, as the CPU does for LPAI."""
    return node.target in q_ops or (node.target in dq_ops and not _constant_of(node))


def _constant_of(node: torch.fx.Node) -> str:
    """Return the name of the constant that a node takes first; "" for a node without one."""
    source = node.args[0] if node.args else None
    return str(source.target) if isinstance(source, torch.fx.Node) and source.op == "get_attr" else ""


def _picks(node: torch.fx.Node) -> dict[int, torch.fx.Node]:
    """Return the used outputs of `node`, each with the first node that picks it; none for a node with one output."""
    picks: dict[int, torch.fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            picks.setdefault(user.args[1], user)
    return dict(sorted(picks.items()))


def _tensor(node: torch.fx.Node, handle: int | None, output: int | None, partition: int | None) -> LayerTensor:
    value = node.meta.get("val")
    known = isinstance(value, torch.Tensor)
    attributes = node.meta.get(keys.QCOM_QUANT_ATTRS) or {}
    quantized = keys.QCOM_SCALE in attributes and known and value.is_floating_point()
    dtype = str(value.dtype).removeprefix("torch.") if known else ""
    return LayerTensor(
        handle=handle,
        output=output,
        partition=partition,
        shape=tuple(int(size) for size in value.shape) if known else (),
        dtype=_quantized_type(attributes) if quantized else dtype,
        scale=float(attributes[keys.QCOM_SCALE]) if quantized else None,
        zero_point=int(attributes[keys.QCOM_ZERO_POINT]) if quantized else None,
    )


def _quantized_type(attributes: Mapping[str, Any]) -> str:
    """Return the type by the range of the codes: `uint16` for 16 used bits of an int32 of torch."""
    least, most = int(attributes[keys.QCOM_QUANT_MIN]), int(attributes[keys.QCOM_QUANT_MAX])
    return f"{'int' if least < 0 else 'uint'}{(most - least).bit_length()}"


def compute_layers(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    quantized: bool = False,
) -> Computed:
    """Return the layers of the graph as it is: with quantized weights, and activations in floating point.

    With `weights`, the FP32 values of quantized parameters by their names, the layers are in FP32. With `quantized` all
    values are quantized by the parameters of their nodes.
    """
    layers = _Layers(module, weights, quantized=quantized)
    with state_kept(module):
        outputs = pytree.tree_leaves(layers.run(*copies(inputs)))
        return Computed(layers.values, copies(outputs))


class _Layers(torch.fx.Interpreter):  # type: ignore[misc]
    def __init__(
        self, module: torch.fx.GraphModule, weights: Mapping[str, torch.Tensor] | None, *, quantized: bool
    ) -> None:
        super().__init__(module)
        self._quantize, self._is_fp32, self._weights = quantized, weights is not None, weights or {}
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in dq_ops and (weight := self._weight(n)) is not None:
            return weight
        if self._is_fp32 and _only_quantizes(n):
            return self.env[n.args[0]]
        value = super().run_node(n)
        if self._quantize and n.op in ("call_function", "placeholder"):
            value = _fake_quantized(value, n.meta.get(keys.QCOM_QUANT_ATTRS))
        if n.op in ("call_function", "placeholder") and isinstance(value, torch.Tensor):
            self.values[n.name] = value.clone()  # a later operator may write to it
        return value

    def map_nodes_to_values(self, args: Any, n: torch.fx.Node) -> Any:
        def load(arg: torch.fx.Node) -> Any:
            attributes = arg.meta.get(keys.QCOM_REQUANTIZE, {}).get(n.name) if self._quantize else None
            return _fake_quantized(self.env[arg], attributes)

        return torch.fx.map_arg(args, load)

    def _weight(self, n: torch.fx.Node) -> torch.Tensor | None:
        weight = self._weights.get(name := _constant_of(n))
        return weight if weight is not None and weight.shape == self.fetch_attr(name).shape else None


def _fake_quantized(value: Any, attributes: Mapping[str, Any] | None) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    if not is_float or not attributes or keys.QCOM_SCALE not in attributes:
        return value
    codes = (attributes[name] for name in (keys.QCOM_QUANT_MIN, keys.QCOM_QUANT_MAX, keys.QCOM_DTYPE))
    arguments = (float(attributes[keys.QCOM_SCALE]), int(attributes[keys.QCOM_ZERO_POINT]), *codes)
    operators = torch.ops.quantized_decomposed
    return operators.dequantize_per_tensor(operators.quantize_per_tensor(value.float(), *arguments), *arguments)


REFERENCE_GRAPH = "edge_after_transform/forward"
"""Name, in an ETRecord, of the graph that ExecuTorch's QNNIntermediateDebugger compares with."""

# Two ways of computing one program in float32 differ by its rounding alone, by 100 dB and more.
_SAME_DB = 60.0


class DebugProgram(NamedTuple):
    """Compiled program with everything that its outputs are compared with."""

    edge: ExportedProgram
    """Graph of REFERENCE_GRAPH, for ExecuTorch's comparators: a saved graph loses the quantization of its nodes."""
    etrecord: Path
    nodes: list[LayerNode]
    fp32: Computed
    quantized: Computed | None
    """None for a precision without quantization."""
    inspected: Computed
    """Layers as the reference of ExecuTorch's Inspector has them: quantized weights, activations in floating point."""
    seconds: dict[str, float]
    notes: tuple[str, ...]


def compile_debug(job: Job, versions: Mapping[str, str], sample: int, folder: Path) -> DebugProgram:
    """Compile `job` for debugging and write its bundle, with the inputs of one sample, into BUNDLE of `folder`.

    All samples calibrate, as in `farm run`. Raises UsageError for a program without a layer on the backend;
    the compiler's exceptions pass through.
    """
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
            edge = utils.to_edge_transform_and_lower_to_qnn(graph, samples[0], specs, generate_etrecord=True)
            lowered = edge.exported_program()
            delegation = read_delegation(lowered.graph_module)
            if not delegation.partitions:
                raise UsageError("nothing was delegated: there is no layer to compare, as the CPU runs them all")
            needed, found = find_writes(reference, functional(exported), lowered)
        with watch.step("serialize"):
            config = ExecutorchBackendConfig(segment_alignment=utils.get_qnn_context_binary_alignment())
            program = edge.to_executorch(config)
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
            fp32 = compute_layers(unlifted, inputs, weights)
            quantized = compute_layers(unlifted, inputs, quantized=True) if is_quantized else None
            inspected = compute_layers(unlifted, inputs)
        notes = [*_named_layers(reference.run.names, unlifted.graph), *_consistency("FP32", fp32.outputs, expected)]
        if quantized is not None:
            notes += _consistency("quantized", quantized.outputs, flat_outputs(call(graph, inputs).outputs, case))
    written = found.inputs
    outputs = reference.output_specs(reference.run.program_outputs(written)[sample], written)
    program_facts = CompiledProgram(
        references={},
        outputs=in_orders_of(outputs, method),
        delegates=method.partitions,
        delegated_ops=delegation.delegated_ops,
        fallback_ops=delegation.cpu_ops,
        inputs=[inputs],
        input_orders=tuple(value.order for value in method.inputs),
        **write_facts(needed, found, reference.input_names),
    )
    key = hashlib.sha256(f"debug {bundle_key(job, versions)}".encode()).hexdigest()
    write_bundle(job, key, versions, bundle, program_facts, watch)
    return DebugProgram(
        edge=compared,
        etrecord=folder / ETRECORD,
        nodes=layer_nodes(unlifted.graph, _partitions(program), source_places(case)),
        fp32=fp32,
        quantized=quantized,
        inspected=inspected,
        seconds=watch.seconds,
        notes=tuple(notes),
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
            if isinstance(between, torch.fx.Node) and (name := _constant_of(between)):
                found[node.name, place] = name
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
        ratio = sqnr_db(before := theirs.double(), after := ours.double())
        if ratio < _SAME_DB and not torch.equal(before, after):
            problem = f"the {name} layers end in another output {index} than the {name} module has ({ratio:.1f} dB)"
            return [f"{problem}: ExecuTorch's passes changed the graph; take them with care"]
    return []
