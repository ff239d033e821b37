"""ExecuTorch's Qualcomm flow: quantized, or in fp16, for HTP. Imports torch and executorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset, QnnExecuTorchBackendType
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import ExecutorchBackendConfig
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.build.flow import Flow, Lowered
from farm.profiles import QUANTIZED_PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.build.flow import Stopwatch
    from farm.suites import Target


def _lower(
    module: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target, watch: Stopwatch
) -> Lowered:
    with watch.step("export"):
        # Strict, because passes of ExecuTorch 1.5 (DecomposeMinMaxDim and others) read `source_fn_stack`, which
        # only that sets: without it max_dim ends the process in the QNN adaptor.
        graph: torch.nn.Module = torch.export.export(module, samples[0], strict=True).module()
    quantized = None
    if target.precision in QUANTIZED_PRECISIONS:
        with watch.step("quantize"):
            graph = quantized = _quantize(graph, samples, target.soc, target.precision)
    with watch.step("lower"):
        specs = _compiler_specs(target.soc, use_fp16=quantized is None)
        edge = to_edge_transform_and_lower_to_qnn(graph, samples[0], specs)
    config = ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment())
    return Lowered(edge, quantized, config)


FLOW: Flow = _lower


def _quantize(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], soc: str, precision: str
) -> torch.nn.Module:
    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=QcomChipset[soc])
    quantizer.set_default_quant_config(
        QuantDtype[f"use_{precision}"], is_qat=False, is_conv_per_channel=True, is_linear_per_channel=True
    )
    prepared = prepare_pt2e(exported, quantizer)
    for inputs in samples:
        prepared(*inputs)
    converted: torch.nn.Module = convert_pt2e(prepared)
    return converted


def _compiler_specs(soc: str, *, use_fp16: bool) -> list[Any]:
    return generate_qnn_executorch_compiler_spec(  # type: ignore[no-any-return]
        soc_model=QcomChipset[soc],
        backend_options=generate_htp_compiler_spec(use_fp16=use_fp16),
    )
