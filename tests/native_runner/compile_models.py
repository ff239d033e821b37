"""Run as a program, with the environment of a host SDK: compiles the models of these tests into a folder.

conv.pte   conv + relu, 8a8w, on the HTP of SM8650: float32[1,3,16,16] -> float32[1,8,16,16]
conv_input_{0,1}.raw, conv_fp32_{0,1}.raw, conv_quantized_{0,1}.raw   two inputs, and outputs of both modules
select.pte   on the CPU: (float32[4,2] table, int64[3] index) -> (rows of the table, index + 1); a wrong index fails
scalar.pte   on the CPU: float32[2] -> (the sum, 7)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset, QnnExecuTorchBackendType
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import ExecutorchBackendConfig, to_edge
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


class ConvRelu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


class Select(torch.nn.Module):
    def forward(self, table, index):
        return torch.index_select(table, 0, index), index + 1


class Scalar(torch.nn.Module):
    def forward(self, x):
        return x.sum(), 7


def compile_conv(folder: Path) -> None:
    torch.manual_seed(0)
    module = ConvRelu().eval()
    samples = [torch.randn(1, 3, 16, 16) for _ in range(2)]
    exported = torch.export.export(module, (samples[0],), strict=False).module()
    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=QcomChipset.SM8650)
    quantizer.set_default_quant_config(
        QuantDtype.use_8a8w, is_qat=False, is_conv_per_channel=True, is_linear_per_channel=True
    )
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(sample)
    quantized = convert_pt2e(prepared)
    spec = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8650, backend_options=generate_htp_compiler_spec(use_fp16=False)
    )
    lowered = to_edge_transform_and_lower_to_qnn(quantized, (samples[0],), spec)
    config = ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment())
    (folder / "conv.pte").write_bytes(lowered.to_executorch(config).buffer)
    with torch.no_grad():
        for i, sample in enumerate(samples):
            sample.numpy().tofile(folder / f"conv_input_{i}.raw")
            module(sample).numpy().tofile(folder / f"conv_fp32_{i}.raw")
            quantized(sample).numpy().tofile(folder / f"conv_quantized_{i}.raw")


def compile_cpu(folder: Path, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    program = to_edge(torch.export.export(module.eval(), inputs, strict=False)).to_executorch()
    (folder / name).write_bytes(program.buffer)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    compile_conv(target)
    compile_cpu(target, "select.pte", Select(), (torch.randn(4, 2), torch.tensor([0, 1, 2])))
    compile_cpu(target, "scalar.pte", Scalar(), (torch.randn(2),))
