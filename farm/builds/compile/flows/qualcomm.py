"""ExecuTorch's Qualcomm flow for HTP, LPAI and GPU: quantized, or in floating point. Imports torch and executorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from executorch.backends.qualcomm.quantizer.quantizer import ModuleQConfig, QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import (
    QcomChipset,
    QnnExecuTorchBackendOptions,
    QnnExecuTorchBackendType,
    QnnExecuTorchOpPackageOptions,
)
from executorch.backends.qualcomm.utils import utils
from executorch.backends.qualcomm.utils.utils import (
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.base.backends.descriptor import DIRECT_MODE, QUANTIZED_PRECISIONS
from farm.base.backends.registry import BACKENDS
from farm.base.errors import DelegationError, MisreadCodesError, MissingToolError
from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows import qnn_features
from farm.builds.compile.flows.calls import copies, state_kept
from farm.builds.compile.flows.control_flow import refuse_control_flow
from farm.builds.compile.flows.delegation import misread_codes, refused_operators
from farm.builds.compile.flows.flow import Flow, Lowered, Lowering
from farm.builds.compile.flows.op_packages import annotation_of, packages_of, require_packaged
from farm.suites.features import Features
from farm.suites.options import compile_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from executorch.exir import EdgeProgramManager

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
                qnn_features.record_calls(lambda specs: _to_edge(graphs, lowering, specs), specs, lowering.folder)
        with watch.step("lower"):
            specs = compiler_specs(target, lowering.versions, features, packages=packages)
            edge = _to_edge(graphs, lowering, specs)
            spill_fill_bytes = qnn_features.share_spill_fill(edge, features, graphs)
    _require_codes(edge, target, graphs)
    qnn_features.require_skipped(edge, case)
    require_packaged(edge, case)
    config = qnn_features.serialization(features, get_qnn_context_binary_alignment(), direct=target.direct)
    return Lowered(edge, quantized, config, exported[lowering.method], spill_fill_bytes)


FLOW: Flow = _lower


def _require_codes(edge: EdgeProgramManager, target: Target, methods: Iterable[str]) -> None:
    """Raise MisreadCodesError if codes at the edge of a delegate have different sizes on the CPU and in QNN."""
    if not BACKENDS[target.backend].cpu_quantizes:
        return
    for name in methods:
        if (found := misread_codes(edge.exported_program(name).graph_module)) is not None:
            on_cpu, in_qnn = (str(dtype).removeprefix("torch.") for dtype in found)
            raise MisreadCodesError(target.backend, target.precision, on_cpu, in_qnn)


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
    dump_intermediate_outputs: bool = False,
    saver: bool = False,
) -> list[Any]:
    """Return ExecuTorch's compile specs for `target`, with `features` and their packages.

    `versions` are the other dependencies of the bundle: see key.py.
    """
    options = compile_numbers(target)
    given = {"dump_intermediate_outputs": dump_intermediate_outputs, **qnn_features.specs_of(features)}
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
    numbers |= qnn_features.switches_of(features)
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
                    f"{library} of the QNN SDK does not start on this machine (its words are in the build log): "
                    f"docs/reference/backends.md says which SDK can compile for the {target.backend} backend"
                ) from error
            if refused:
                # The pass manager raises its own error, with the error of the pass as the cause.
                weighted = any(_WITH_WEIGHTS in str(one) for one in (error, error.__cause__))
                raise DelegationError(target.backend, refused, weighted=weighted) from error
            raise
    return edge
