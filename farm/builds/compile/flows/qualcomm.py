"""ExecuTorch's Qualcomm flow for HTP, LPAI and GPU: quantized, or in floating point. Imports torch and executorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from executorch.backends.qualcomm.quantizer.quantizer import ModuleQConfig, QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import (
    QcomChipset,
    QnnExecuTorchBackendOptions,
    QnnExecuTorchBackendType,
    QnnExecuTorchOpPackageOptions,
)
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option, option_to_flatbuffer
from executorch.backends.qualcomm.utils import utils
from executorch.backends.qualcomm.utils.utils import (
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
    update_spill_fill_size,
)
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.base.backends.descriptor import DIRECT_MODE, QUANTIZED_PRECISIONS
from farm.base.backends.registry import BACKENDS, cpu_backends
from farm.base.errors import ConfigError, DelegationError, MisreadCodesError, MissingToolError
from farm.builds.bundles.bundle import SAVER
from farm.builds.bundles.key import HOST_CPU
from farm.builds.bundles.origins import place_of
from farm.builds.compile.flows.calls import copies, state_kept
from farm.builds.compile.flows.delegation import misread_codes, read_delegation, refused_operators
from farm.builds.compile.flows.flow import Flow, Lowered, Lowering
from farm.builds.compile.flows.node_origins import origin_of, source_places
from farm.builds.compile.flows.op_packages import annotation_of, packages_of, require_packaged
from farm.suites.features import Features
from farm.suites.options import compile_numbers
from farm.suites.suite import Case, Target

# Operators with blocks of weights in the precisions called `_block`, along the second dimension, the input channels.
_BLOCK_TARGETS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
_BLOCK_SIZES = (32, 16)
"""Numbers of input channels that share a scale: the first that divides the channels; else a scale per channel."""
_RULES: dict[str, Any] = {
    "is_conv_per_channel": True,
    "is_linear_per_channel": True,
    # ExecuTorch's own observer is a moving average with a hundred times more weight for the first sample than for the
    # next: all later samples are clipped to the range of the first.
    "act_observer": MinMaxObserver,
}
"""Settings of the quantizer at every precision."""
# ExecuTorch 1.5, LpaiPartitionFallbackSupport.
_WITH_WEIGHTS = "Fallback nodes with weights"
# Options that are no parameters of a backend's function for its compiler specs.
_OF_ALL_BACKENDS = ("profile_level", DIRECT_MODE)
# Features that are parameters of that function, and features that are parameters of the specs of all backends.
_OF_BACKEND = ("use_multi_contexts", "use_weight_sharing")
_OF_SPECS = ("shared_buffer", "dump_intermediate_outputs", "use_mha2sha")
# Files of QNN's Saver.
_SAVED = ("saver_output.c", "params.bin")
# Operators with graphs as arguments, by the names of torch 2.13, and the functions that make them.
_CONTROL_FLOW = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "torch's map",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
}


def _lower(lowering: Lowering) -> Lowered:
    target, watch = lowering.target, lowering.watch
    case, features = lowering.case, lowering.case.features
    exported = {name: one.export() for name, one in lowering.methods.items()}
    for program in exported.values():
        refuse_control_flow(program, case, target.backend)
    graphs: dict[str, torch.nn.Module] = {name: one.module() for name, one in exported.items()}
    quantized = None
    if target.precision in QUANTIZED_PRECISIONS:
        with watch.step("quantize"):
            for name, one in lowering.methods.items():
                graphs[name] = convert_pt2e(calibrate(graphs[name], one.samples, target, case))
        quantized = graphs[lowering.method]
    with packages_of(case, target, lowering.folder) as packages:
        if features.saver:
            with watch.step("saver"):
                specs = compiler_specs(target, lowering.versions, features, packages=packages, saver=True)
                _record_calls(graphs, lowering, specs)
        with watch.step("lower"):
            specs = compiler_specs(target, lowering.versions, features, packages=packages)
            edge = _to_edge(graphs, lowering, specs)
            programs = {name: edge.exported_program(name) for name in graphs}
            # The contexts of the program share a buffer.
            sizes = map(update_spill_fill_size, programs.values()) if features.use_multi_contexts else ()
            spill_fill_bytes = max(map(int, sizes), default=None)
    if BACKENDS[target.backend].cpu_quantizes:
        _require_codes(programs.values(), target)
    own = programs[lowering.method].graph_module
    _require_skipped(own, case)
    require_packaged(own, case)
    config = ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment())
    if features.shared_buffer or target.direct:
        # The runner provides memory of the DSP for inputs and outputs; ExecuTorch's export_utils.py plans none either.
        config.memory_planning_pass = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return Lowered(edge, quantized, config, exported[lowering.method], spill_fill_bytes)


FLOW: Flow = _lower


def refuse_control_flow(exported: ExportedProgram, case: Case, backend: str) -> None:
    """Raise ConfigError for a graph with a branch or a loop that depends on values.

    Qualcomm's quantizer and passes of ExecuTorch 1.5 take no graph inside a graph; ExecuTorch's CPU runs branches.
    """
    for node in exported.graph_module.graph.nodes:
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        if name not in _CONTROL_FLOW:
            continue
        place = place_of(origin_of(node, source_places(case)))
        remedy = "write the iterations out"
        if name == "cond":
            remedy = "compute both branches and choose one with torch.where"
        problem = f"{_CONTROL_FLOW[name]}{place} is control flow, which {backend} does not take: {remedy}"
        raise ConfigError(
            case.manifest, f"case.{case.name}.module", f"{problem}, or run the case on {' or '.join(cpu_backends())}"
        )


def _record_calls(graphs: Mapping[str, torch.nn.Module], lowering: Lowering, specs: list[Any]) -> None:
    """Record QNN's calls of a lowering in the bundle; `specs` are the specs of ExecuTorch's saver.

    ExecuTorch 1.5 raises SystemExit after it has recorded the first method. Raises MissingToolError without a record.
    """
    place = lowering.folder / SAVER
    for spec in specs:
        options = flatbuffer_to_option(spec.value)
        options.saver_output_dir = str(place)
        spec.value = option_to_flatbuffer(options)
    try:
        _to_edge(graphs, lowering, specs)
    except SystemExit:
        if all((place / name).is_file() for name in _SAVED):
            return
    raise MissingToolError(f"QNN's Saver left no {' and '.join(_SAVED)}: its words are in the build log")


def _require_codes(programs: Iterable[ExportedProgram], target: Target) -> None:
    """Raise MisreadCodesError if codes at the edge of a delegate have different sizes on the CPU and in QNN."""
    for program in programs:
        if (found := misread_codes(program.graph_module)) is not None:
            on_cpu, in_qnn = (str(dtype).removeprefix("torch.") for dtype in found)
            raise MisreadCodesError(target.backend, target.precision, on_cpu, in_qnn)


def _require_skipped(graph_module: torch.fx.GraphModule, case: Case) -> None:
    """Raise ConfigError for an operator or node that the case leaves to the CPU and that is not in the program."""
    features, on_cpu = case.features, read_delegation(graph_module).cpu_ops
    for key, names, there in (
        ("skip_node_ops", features.skip_node_ops, on_cpu),
        ("skip_node_ids", features.skip_node_ids, {node.name for node in graph_module.graph.nodes}),
    ):
        if missing := [name for name in names if name not in there]:
            left = ", ".join(sorted(on_cpu)) or "nothing"
            problem = f"{missing[0]!r} is nowhere in the program; left to the CPU: {left}"
            raise ConfigError(case.manifest, f"case.{case.name}.features.{key}", problem)


def calibrate(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target, case: Case | None = None
) -> torch.fx.GraphModule:
    """Return `exported` with the observers of the backend's rules, after a call with each of `samples`.

    Operators from packages of `case` are quantized as well.
    """
    quantizer = quantizer_of(target)
    if case is not None and case.features.op_packages:
        usual = quantizer.default_quant_config.quant_config
        quantizer.add_custom_quant_annotations([annotation_of(case, usual)])
    own = [name for name, _ in exported.named_buffers()]
    prepared: torch.fx.GraphModule = prepare_pt2e(exported, quantizer)
    # Only the module's own buffers are restored; the buffers of the observers keep their ranges.
    with state_kept(prepared, own):
        for inputs in samples:
            prepared(*copies(inputs))
    return prepared


def quantizer_of(target: Target) -> QnnQuantizer:
    """Return the quantizer for the backend and precision of `target`, with the backend's rules."""
    quantizer = _Quantizer(backend=backend_type(target), soc_model=QcomChipset[target.soc])
    quantizer.set_default_quant_config(QuantDtype[f"use_{target.precision}"], is_qat=False, **_RULES)
    return quantizer


class _Quantizer(QnnQuantizer):  # type: ignore[misc]
    """Quantizer that sets blocks of weights for precisions with blocks: ExecuTorch needs a block per node name."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        dtype = self.default_quant_config.quant_dtype
        if dtype.name.endswith("_block"):
            blocks = _blocks(model)
            self.set_block_size_map(blocks)
            # A configuration holds the block of the last node that it was applied to: each block needs its own.
            configs = {block: ModuleQConfig(dtype, **_RULES) for block in dict.fromkeys(blocks.values())}
            self.set_submodule_qconfig_list(
                [
                    (lambda node, block=block: blocks.get(node.name) == block, config)
                    for block, config in configs.items()
                ]
            )
        annotated: torch.fx.GraphModule = super().annotate(model)
        return annotated


def _blocks(model: torch.fx.GraphModule) -> dict[str, tuple[int, ...]]:
    blocks = {}
    for node in model.graph.nodes:
        if node.target not in _BLOCK_TARGETS:
            continue
        _, channels, *kernel = node.args[1].meta["val"].shape
        size = next((size for size in _BLOCK_SIZES if channels % size == 0), None)
        # HTP of QNN 2.51 reads only the first position of a larger kernel with blocks: docs/reference/suites.md.
        if size is not None and all(extent == 1 for extent in kernel):
            blocks[node.name] = (1, size, *kernel)
    return blocks


def compiler_specs(
    target: Target,
    versions: Mapping[str, str],
    features: Features = Features(),  # noqa: B008 - frozen
    *,
    packages: QnnExecuTorchOpPackageOptions | None = None,
    saver: bool = False,
) -> list[Any]:
    """Return ExecuTorch's compile specs for `target`, with `features` and their packages.

    `versions` are the other dependencies of the bundle: see key.py.
    """
    options = compile_numbers(target)
    given: dict[str, Any] = {name: True for name in _OF_SPECS if getattr(features, name)}
    if packages is not None:
        given["op_package_options"] = packages
    return generate_qnn_executorch_compiler_spec(  # type: ignore[no-any-return]
        soc_model=QcomChipset[target.soc],
        backend_options=_backend_options(target, options, versions, features),
        online_prepare=BACKENDS[target.backend].online_prepare or features.online_prepare,
        saver=saver,
        profile_level=options.get("profile_level", 0),
        **given,
    )


def _backend_options(
    target: Target, options: Mapping[str, int], versions: Mapping[str, str], features: Features
) -> QnnExecuTorchBackendOptions:
    backend = BACKENDS[target.backend]
    numbers: dict[str, int] = {name: of[target.precision] for name, of in backend.by_precision.items()}
    if backend.host_cpus:
        place = versions[HOST_CPU]
        numbers["target_env"] = backend.host_cpus["adsp" if target.direct and place == "arm" else place]
    numbers |= {name: number for name, number in options.items() if name not in _OF_ALL_BACKENDS}
    numbers |= {name: True for name in _OF_BACKEND if getattr(features, name)}
    generate = getattr(utils, backend.compiler_spec)
    kinds = get_type_hints(generate)
    return generate(**{name: kinds[name](number) for name, number in numbers.items()})


def backend_type(target: Target) -> QnnExecuTorchBackendType:
    """Return ExecuTorch's number for the backend of `target`."""
    return QnnExecuTorchBackendType(BACKENDS[target.backend].qnn_type)


def _to_edge(graphs: Mapping[str, torch.nn.Module], lowering: Lowering, specs: list[Any]) -> EdgeProgramManager:
    target, features = lowering.target, lowering.case.features
    methods = lowering.methods
    passes_job = dep_table = None
    if features.split:
        from farm.builds.compile.flows.split import split_passes

        passes_job, dep_table = split_passes(features.split)
    with refused_operators() as refused:
        try:
            edge = to_edge_transform_and_lower_to_qnn(
                dict(graphs),
                {name: one.example.inputs for name, one in methods.items()},
                dict.fromkeys(graphs, specs),
                dynamic_shapes={name: one.example.dynamic_shapes for name, one in methods.items()},
                passes_job=passes_job,
                dep_table=dep_table,
                skip_node_id_set=set(features.skip_node_ids),
                skip_node_op_set=set(features.skip_node_ops),
            )
        except Exception as error:
            if "Failed to initialize QNN backend" in str(error):
                library = f"libQnn{target.backend.title()}.so"
                raise MissingToolError(
                    f"{library} of the QNN SDK does not start on this machine (its output is in the build log): "
                    f"docs/reference/backends.md lists SDKs that can compile for the {target.backend} backend"
                ) from error
            if refused:
                # The pass manager raises its own error, with the error of the pass as the cause.
                weighted = any(_WITH_WEIGHTS in str(one) for one in (error, error.__cause__))
                raise DelegationError(target.backend, refused, weighted=weighted) from error
            raise
    return edge
