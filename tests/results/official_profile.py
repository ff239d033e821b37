"""Program, for the environment of a host SDK, that writes profiles as ExecuTorch itself reads them.

    python official_profile.py RUNTIME FOLDER

Compiles one module of several layers for the HTP (8a8w, SM8650) in two partitions with a layer on the CPU between them,
and for XNNPACK; executes both with the runner in RUNTIME; and leaves in FOLDER, for `htp` and `xnnpack`:
NAME/result.json, NAME/etdump.etdp   files of the runner
NAME/inspector.json                  the events of ExecuTorch's Inspector, whose scales are both CYCLES: no conversion
"""

from __future__ import annotations

import json
import subprocess
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
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools import Inspector
from executorch.devtools.inspector import TimeScale
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

RUNS = ("--iteration=3", "--warm_up=1", "--profile_level=2", "--output_folder_path=.", "--etdump_path=etdump.etdp")


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        x = torch.sin(torch.relu(self.conv(x)))
        return self.linear((x + 1.0).flatten(2).transpose(1, 2))


def for_htp(module, sample):
    graph = torch.export.export(module, sample, strict=True).module()
    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=QcomChipset.SM8650)
    quantizer.set_default_quant_config(
        QuantDtype.use_8a8w, is_qat=False, is_conv_per_channel=True, is_linear_per_channel=True
    )
    prepared = prepare_pt2e(graph, quantizer)
    prepared(*sample)
    specs = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8650, backend_options=generate_htp_compiler_spec(use_fp16=False)
    )
    lowered = to_edge_transform_and_lower_to_qnn(
        convert_pt2e(prepared), sample, specs, skip_node_op_set={"aten.sin.default"}
    )
    return lowered.to_executorch(ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment()))


def for_xnnpack(module, sample):
    exported = torch.export.export(module, sample, strict=True)
    return to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()


def execute(runtime: Path, folder: Path, program, sample) -> None:
    folder.mkdir()
    (folder / "model.pte").write_bytes(program.buffer)
    sample[0].numpy().tofile(folder / "x.raw")
    (folder / "input_list.txt").write_text("x.raw\nx.raw\n")
    # A separate environment: the environment of this process has ExecuTorch's compiler.
    environment = {"LD_LIBRARY_PATH": str(runtime)}
    subprocess.run([runtime / "farm_runner", *RUNS], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    scale = TimeScale.CYCLES
    inspector = Inspector(etdump_path=str(folder / "etdump.etdp"), source_time_scale=scale, target_time_scale=scale)
    events = [
        {"block": block.name, "name": event.name, "raw": event.perf_data.raw, "instruction": event._instruction_id,
         "delegated": event.is_delegated_op}
        for block in inspector.event_blocks
        for event in block.events
    ]  # fmt: skip
    (folder / "inspector.json").write_text(json.dumps(events))


if __name__ == "__main__":
    torch.manual_seed(0)
    layers, inputs = Layers().eval(), (torch.randn(1, 3, 8, 8),)
    for name, lower in (("htp", for_htp), ("xnnpack", for_xnnpack)):
        execute(Path(sys.argv[1]), Path(sys.argv[2], name), lower(layers, inputs), inputs)
