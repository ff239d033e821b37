"""ExecuTorch's Qualcomm flow for HTP, LPAI and GPU: quantized, or in floating point. Imports torch and executorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import (
    QcomChipset,
    QnnExecuTorchBackendOptions,
    QnnExecuTorchBackendType,
    QnnExecuTorchGpuPrecision,
    QnnExecuTorchLpaiClientPerf,
    QnnExecuTorchLpaiCoreAffinity,
    QnnExecuTorchLpaiTargetEnv,
)
from executorch.backends.qualcomm.utils.utils import (
    generate_gpu_compiler_spec,
    generate_htp_compiler_spec,
    generate_lpai_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import ExecutorchBackendConfig
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.build.delegation import WHOLE_GRAPH_BACKENDS, read_delegation, refused_operators, require_whole_graph
from farm.build.flow import Flow, Lowered
from farm.build.key import LPAI_TARGET
from farm.errors import DelegationError, MissingToolError
from farm.options import OPTIONS, compile_options
from farm.profiles import QUANTIZED_PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executorch.exir import EdgeProgramManager

    from farm.build.flow import Example, Stopwatch
    from farm.suites import Target

_BACKEND_TYPES = {
    "htp": QnnExecuTorchBackendType.kHtpBackend,
    "lpai": QnnExecuTorchBackendType.kLpaiBackend,
    "gpu": QnnExecuTorchBackendType.kGpuBackend,
}
_LPAI_TARGETS = {"x86": QnnExecuTorchLpaiTargetEnv.kX86, "arm": QnnExecuTorchLpaiTargetEnv.kArm}


def _lower(
    module: torch.nn.Module,
    example: Example,
    samples: Sequence[tuple[torch.Tensor, ...]],
    target: Target,
    versions: Mapping[str, str],
    watch: Stopwatch,
) -> Lowered:
    with watch.step("export"):
        # Strict, because passes of ExecuTorch 1.5 (DecomposeMinMaxDim and others) read `source_fn_stack`, which
        # only that sets: without it max_dim ends the process in the QNN adaptor.
        exported = torch.export.export(module, example.inputs, dynamic_shapes=example.dynamic_shapes, strict=True)
        graph: torch.nn.Module = exported.module()
    quantized = None
    if target.precision in QUANTIZED_PRECISIONS:
        with watch.step("quantize"):
            graph = quantized = convert_pt2e(calibrate(graph, samples, target))
    with watch.step("lower"):
        edge = _to_edge(graph, example, target, compiler_specs(target, versions))
    config = ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment())
    return Lowered(edge, quantized, config)


FLOW: Flow = _lower


def calibrate(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target
) -> torch.fx.GraphModule:
    """Return `exported` with the observers that the backend's rules want, which have seen all of `samples`."""
    quantizer = QnnQuantizer(backend=_BACKEND_TYPES[target.backend], soc_model=QcomChipset[target.soc])
    quantizer.set_default_quant_config(
        QuantDtype[f"use_{target.precision}"], is_qat=False, is_conv_per_channel=True, is_linear_per_channel=True
    )
    prepared: torch.fx.GraphModule = prepare_pt2e(exported, quantizer)
    for inputs in samples:
        prepared(*inputs)
    return prepared


def compiler_specs(
    target: Target, versions: Mapping[str, str], *, dump_intermediate_outputs: bool = False, profile_level: int = 0
) -> list[Any]:
    """Return ExecuTorch's compile specs for `target`; `versions` says what else the bundle depends on: see key.py.

    A profile level among the options of the target wins over `profile_level`.
    """
    options = _numbers(target)
    return generate_qnn_executorch_compiler_spec(  # type: ignore[no-any-return]
        soc_model=QcomChipset[target.soc],
        backend_options=_backend_options(target, options, versions),
        # QNN's GPU backend prepares on the device alone, its LPAI backend on the host alone.
        online_prepare=target.backend == "gpu",
        dump_intermediate_outputs=dump_intermediate_outputs,
        profile_level=options.get("profile_level", profile_level),
    )


def _backend_options(
    target: Target, options: Mapping[str, int], versions: Mapping[str, str]
) -> QnnExecuTorchBackendOptions:
    if target.backend == "lpai":
        given: dict[str, Any] = {
            name: options[name] for name in ("fps", "ftrt_ratio", "core_selection") & options.keys()
        }
        if "client_perf_type" in options:
            given["client_perf_type"] = QnnExecuTorchLpaiClientPerf(options["client_perf_type"])
        if "affinity" in options:
            given["affinity"] = QnnExecuTorchLpaiCoreAffinity(options["affinity"])
        return generate_lpai_compiler_spec(**given, target_env=_LPAI_TARGETS[versions[LPAI_TARGET]])
    switches = {name: bool(value) for name, value in options.items() if name.startswith("use_")}
    if target.backend == "gpu":
        precision = QnnExecuTorchGpuPrecision[f"kGpuPrecision{target.precision.title()}"]
        if "precision" in options:
            precision = QnnExecuTorchGpuPrecision(options["precision"])
        return generate_gpu_compiler_spec(precision=precision, **switches)
    return generate_htp_compiler_spec(use_fp16=target.precision not in QUANTIZED_PRECISIONS, **switches)


def _numbers(target: Target) -> dict[str, int]:
    """Return the compile-time options of `target` as ExecuTorch's numbers."""
    known = OPTIONS[target.backend]
    return {name: int(known[name].words.get(value, value)) for name, value in compile_options(target).items()}


def _to_edge(graph: torch.nn.Module, example: Example, target: Target, specs: list[Any]) -> EdgeProgramManager:
    with refused_operators() as refused:
        try:
            edge = to_edge_transform_and_lower_to_qnn(
                graph, example.inputs, specs, dynamic_shapes=example.dynamic_shapes
            )
        except Exception as error:
            if "Failed to initialize QNN backend" in str(error):
                library = f"libQnn{target.backend.title()}.so"
                raise MissingToolError(
                    f"{library} of the QNN SDK does not start on this machine (its words are in the build log): "
                    f"docs/backends.md says which SDK can compile for the {target.backend} backend"
                ) from error
            if refused:
                raise DelegationError(target.backend, None, refused) from error
            raise
    if target.backend in WHOLE_GRAPH_BACKENDS:
        require_whole_graph(target.backend, read_delegation(edge.exported_program().graph_module))
    return edge
