"""Run as a program, with the environment of a host SDK: compiles the models of these tests into a folder.

On the HTP, 8a8w by default:
conv.pte   conv + relu for SM8650: float32[1,3,16,16] -> float32[1,8,16,16]
conv_input_{0,1}.raw, conv_fp32_{0,1}.raw, conv_quantized_{0,1}.raw   two inputs, and outputs of both modules
conv_dump.pte     the same, compiled for intermediate outputs
conv_shared.pte   the same, for a shared buffer: it leaves the memory of inputs and outputs to its caller
conv_sm8850.pte   the same, for SM8850
add_dynamic.pte   x + y, 16a16w, uint16[1,2,3,1..8] each, SM8650
last_qnn.pte      channels-last convolution, fp16: float32[1,3,8,10] -> float32[1,8,6,8], both declared channels last
last_mixed.pte    the same, then an average pool on the CPU, which takes channels last where QNN gives C order

On the CPU:
select.pte    (float32[4,2] table, int64[3] index) -> (rows of the table, index + 1); a wrong index fails
scalar.pte    float32[2] -> (the sum, 7)
nothing.pte   no inputs -> int64[3], 5 6 7
outside.pte   float32[2] -> twice of it, in memory of its caller
dynamic.pte   (float32[1..4,3], float32[]) -> (their product, its sum over the rows float32[1..4])
xnnpack.pte   linear, relu, linear in XNNPACK: float32[1..4,8] -> float32[1..4,4]
xnnpack_input.raw, xnnpack_fp32.raw   an input of 2 rows, and its output
methods.pte   `double` and `triple` of float32[2]
noise.pte     float32[2] -> float32[2], other numbers every time; and twice the input
counter.pte   float32[2] -> the sum of all inputs since it was loaded, kept in a buffer
foreign.pte   sin in a backend that no runner has
last_xnnpack.pte  relu(x) + 1 in XNNPACK, float32[1,3,8,10] channels last -> the same
last_cpu.pte      the same in ExecuTorch's kernels, with an output in C order as well
last_output.pte   relu(x) + 1 in XNNPACK, float32[1,3,8,10] in C order -> channels last
last_input.npy, last_{qnn,xnnpack}.npy   an input of each of them, in C order, and outputs of the modules
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from executorch.backends.qualcomm._passes import TagQuantIO
from executorch.backends.qualcomm._passes.build_quant_io import BuildQuantIo
from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset, QnnExecuTorchBackendType
from executorch.backends.qualcomm.utils.constants import (
    QCOM_PASS_ACTIVATE_KEY,
    QCOM_PASS_ARGS_KWARGS_DEFAULTS_KEY,
)
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    get_qnn_context_binary_alignment,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.backend.backend_api import to_backend
from executorch.exir.backend.test.backend_with_compiler_demo import BackendWithCompilerDemo
from executorch.exir.passes import MemoryPlanningPass
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.builds.compile.flows.shortcuts.every import less_work


def module_of(forward, **parts) -> torch.nn.Module:
    """Return a module of `parts`, with a function as `forward`."""
    module = type("Made", (torch.nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module.eval()


def relu_and_one(_, x):
    return torch.relu(x.to(memory_format=torch.channels_last)) + 1


def relu_and_one_in_both_orders(_, x):
    y = torch.relu(x) + 1
    return y, y.contiguous()


def product_and_sums(_, x, y):
    product = x * y
    return product, product.sum(dim=1)


def counts(self, x):
    self.total.add_(x)
    return self.total + 0


def quantized(module, samples, dtype, soc=QcomChipset.SM8650, dynamic_shapes=None):
    exported = torch.export.export(module, samples[0], dynamic_shapes=dynamic_shapes, strict=False).module()
    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=soc)
    quantizer.set_default_quant_config(dtype, is_qat=False, is_conv_per_channel=True, is_linear_per_channel=True)
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(*sample)
    return convert_pt2e(prepared)


def spec_of(soc=QcomChipset.SM8650, *, sharing=False, **options):
    backend = generate_htp_compiler_spec(use_fp16=False, use_weight_sharing=sharing)
    return generate_qnn_executorch_compiler_spec(soc_model=soc, backend_options=backend, **options)


def compile_conv(folder: Path) -> None:
    torch.manual_seed(0)
    module = module_of(lambda self, x: torch.relu(self.conv(x)), conv=torch.nn.Conv2d(3, 8, 3, padding=1))
    samples = [(torch.randn(1, 3, 16, 16),) for _ in range(2)]

    def compile_one(name, soc=QcomChipset.SM8650, *, planned=True, **options):
        model = quantized(module, samples, QuantDtype.use_8a8w, soc)
        lowered = to_edge_transform_and_lower_to_qnn(model, samples[0], spec_of(soc, **options))
        planning = MemoryPlanningPass(alloc_graph_input=planned, alloc_graph_output=planned)
        alignment = get_qnn_context_binary_alignment()
        config = ExecutorchBackendConfig(segment_alignment=alignment, memory_planning_pass=planning)
        (folder / name).write_bytes(lowered.to_executorch(config).buffer)

    model = quantized(module, samples, QuantDtype.use_8a8w)
    with torch.no_grad():
        for i, (sample,) in enumerate(samples):
            sample.numpy().tofile(folder / f"conv_input_{i}.raw")
            module(sample).numpy().tofile(folder / f"conv_fp32_{i}.raw")
            model(sample).numpy().tofile(folder / f"conv_quantized_{i}.raw")
    compile_one("conv.pte")
    compile_one("conv_dump.pte", dump_intermediate_outputs=True)
    compile_one("conv_shared.pte", planned=False, shared_buffer=True)
    compile_one("conv_sharing.pte", sharing=True)
    compile_one("conv_sm8850.pte", QcomChipset.SM8850)


def compile_add(folder: Path) -> None:
    last = torch.export.Dim("last", min=1, max=8)
    shapes = {"x": {3: last}, "y": {3: last}}
    sample = (torch.rand(1, 2, 3, 8), torch.rand(1, 2, 3, 8))
    model = quantized(module_of(lambda _, x, y: x + y), [sample], QuantDtype.use_16a16w, dynamic_shapes=shapes)
    # Only a few operators take a dynamic shape on the HTP, and quantize operators are not among them.
    passes = get_qnn_pass_manager_cls().get_capture_program_passes()
    passes[TagQuantIO][QCOM_PASS_ACTIVATE_KEY] = True
    passes[TagQuantIO][QCOM_PASS_ARGS_KWARGS_DEFAULTS_KEY]["get_quant_io_dtype_fn"] = lambda node: (
        torch.uint16 if any(name in node.name for name in ("x", "y", "add")) else None
    )
    lowered = to_edge_transform_and_lower_to_qnn(model, sample, spec_of(), dynamic_shapes=shapes, passes_job=passes)
    program = lowered.to_executorch(ExecutorchBackendConfig(passes=[BuildQuantIo()]))
    (folder / "add_dynamic.pte").write_bytes(program.buffer)


def compile_cpu(folder: Path, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], **options) -> None:
    config = options.pop("config", None)
    program = to_edge(torch.export.export(module.eval(), inputs, strict=False, **options)).to_executorch(config)
    (folder / name).write_bytes(program.buffer)


def compile_xnnpack(folder: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    shapes = ({0: torch.export.Dim("rows", min=1, max=4)},)
    exported = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=shapes, strict=False)
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    (folder / "xnnpack.pte").write_bytes(program.buffer)
    rows = torch.randn(2, 8)
    rows.numpy().tofile(folder / "xnnpack_input.raw")
    with torch.no_grad():
        module(rows).numpy().tofile(folder / "xnnpack_fp32.raw")


def compile_last(folder: Path) -> None:
    torch.manual_seed(0)
    plain = torch.randn(1, 3, 8, 10)
    last = plain.to(memory_format=torch.channels_last)
    conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        for name, tensor in (("input", plain), ("qnn", conv(last)), ("xnnpack", relu_and_one(None, last))):
            np.save(folder / f"last_{name}.npy", tensor.contiguous().numpy())
    floats = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8650, backend_options=generate_htp_compiler_spec(use_fp16=True)
    )
    pooled = torch.nn.Sequential(conv, torch.nn.AvgPool2d(2)).eval()
    pool = {"aten.avg_pool2d.default"}
    for name, module, skipped in (("last_qnn.pte", conv, None), ("last_mixed.pte", pooled, pool)):
        lowered = to_edge_transform_and_lower_to_qnn(module, (last,), floats, skip_node_op_set=skipped)
        (folder / name).write_bytes(lowered.to_executorch().buffer)
    for name, sample in (("last_xnnpack.pte", last), ("last_output.pte", plain)):
        exported = torch.export.export(module_of(relu_and_one), (sample,), strict=False)
        program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
        (folder / name).write_bytes(program.buffer)
    compile_cpu(folder, "last_cpu.pte", module_of(relu_and_one_in_both_orders), (last,))


def compile_foreign(folder: Path) -> None:
    edge = to_edge(torch.export.export(module_of(lambda _, x: torch.sin(x)), (torch.randn(2),), strict=False))
    lowered = to_backend(BackendWithCompilerDemo.__name__, edge.exported_program(), [])
    wrapper = module_of(lambda self, x: self.lowered(x), lowered=lowered)
    inside = torch.export.export(wrapper, (torch.randn(2),), strict=False)
    (folder / "foreign.pte").write_bytes(to_edge(inside).to_executorch().buffer)


def main(target: Path) -> None:
    pair = torch.randn(2)
    compile_conv(target)
    compile_add(target)
    compile_xnnpack(target)
    compile_foreign(target)
    compile_last(target)
    double, triple = module_of(lambda _, x: x * 2), module_of(lambda _, x: x * 3)
    for name, forward, inputs in (
        (
            "select",
            lambda _, table, index: (torch.index_select(table, 0, index), index + 1),
            (torch.randn(4, 2), torch.tensor([0, 1, 2])),
        ),
        ("scalar", lambda _, x: (x.sum(), 7), (pair,)),
        ("nothing", lambda _: torch.arange(5, 8) + 0, ()),
        ("noise", lambda _, x: (x + torch.rand(2), x * 2), (pair,)),
    ):
        compile_cpu(target, f"{name}.pte", module_of(forward), inputs)
    compile_cpu(target, "counter.pte", module_of(counts, total=torch.nn.Buffer(torch.zeros(2))), (pair,))
    outside = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    compile_cpu(target, "outside.pte", double, (pair,), config=ExecutorchBackendConfig(memory_planning_pass=outside))
    rows = torch.export.Dim("rows", min=1, max=4)
    compile_cpu(
        target,
        "dynamic.pte",
        module_of(product_and_sums),
        (torch.randn(3, 3), torch.tensor(2.0)),
        dynamic_shapes=({0: rows}, {}),
    )
    modules = {"double": double, "triple": triple}
    methods = {name: torch.export.export(module, (pair,), strict=False) for name, module in modules.items()}
    (target / "methods.pte").write_bytes(to_edge(methods).to_executorch().buffer)


if __name__ == "__main__":
    with less_work():
        main(Path(sys.argv[1]))
