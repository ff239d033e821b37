"""Job -> the files of a bundle, through ExecuTorch's Qualcomm flow. Imports torch and executorch."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
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
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from farm.build.bundle import INPUTS, MANIFEST, MODEL, Manifest, TensorSpec, sha256_of
from farm.build.factory import make_inputs, make_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.suites import Job

import msgspec


class _Stopwatch:
    """Wall time by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 4)

    def finish(self) -> dict[str, float]:
        self.seconds["total"] = round(time.perf_counter() - self._started, 4)
        return self.seconds


def compile_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job` into the empty `folder`, the manifest last. What the compiler raises passes through."""
    watch = _Stopwatch()
    case, target = job.case, job.target
    with torch.no_grad():
        module = make_module(case)
        samples = [make_inputs(case, sample) for sample in range(case.samples)]
        # First, as an error of the module itself reads better than what an export makes of it.
        with watch.step("reference"):
            fp32 = [_outputs(module, inputs) for inputs in samples]
        with watch.step("export"):
            # Strict, because passes of ExecuTorch 1.5 (DecomposeMinMaxDim and others) read `source_fn_stack`, which
            # only that sets: without it max_dim ends the process in the QNN adaptor.
            exported = torch.export.export(module, samples[0], strict=True).module()
        with watch.step("quantize"):
            quantized = _quantize(exported, samples, target.soc, target.precision)
        with watch.step("quantized_reference"):
            reference = [_outputs(quantized, inputs) for inputs in samples]
        with watch.step("lower"):
            edge = to_edge_transform_and_lower_to_qnn(quantized, samples[0], _compiler_specs(target.soc))
            delegated_ops, fallback_ops = _delegation(edge.exported_program().graph_module)
        with watch.step("serialize"):
            config = ExecutorchBackendConfig(segment_alignment=get_qnn_context_binary_alignment())
            program = edge.to_executorch(config)
            with (folder / MODEL).open("wb") as file:
                program.write_to_file(file)
    delegates = Counter(delegate.id for delegate in program.executorch_program.execution_plan[0].delegates)
    (folder / INPUTS).mkdir()
    for sample, inputs in enumerate(samples):
        _write(folder / INPUTS, "input", sample, inputs)
    for kind, outputs in (("fp32", fp32), ("quantized", reference)):
        (folder / f"reference_{kind}").mkdir()
        for sample, tensors in enumerate(outputs):
            _write(folder / f"reference_{kind}", "output", sample, tensors)
    manifest = Manifest(
        key=key,
        job_id=job.id,
        soc=target.soc,
        backend=target.backend,
        precision=target.precision,
        samples=case.samples,
        inputs=tuple(_spec(tensor) for tensor in samples[0]),
        outputs=tuple(_spec(tensor) for tensor in reference[0]),
        pte_bytes=(folder / MODEL).stat().st_size,
        delegates=dict(delegates),
        delegated_ops=delegated_ops,
        fallback_ops=fallback_ops,
        seconds=watch.finish(),
        versions=dict(versions),
        files={str(path.relative_to(folder)): sha256_of(path) for path in _files(folder)},
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


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


def _compiler_specs(soc: str) -> list[Any]:
    return generate_qnn_executorch_compiler_spec(  # type: ignore[no-any-return]
        soc_model=QcomChipset[soc],
        backend_options=generate_htp_compiler_spec(use_fp16=False),
    )


def _outputs(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    result = module(*inputs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _delegation(graph_module: torch.fx.GraphModule) -> tuple[int, dict[str, int]]:
    """Return the number of nodes inside delegates, and the operators outside with how often they stand there."""
    lowered = get_lowered_submodules(graph_module)
    inside = sum(
        node.op == "call_function"
        for _, submodule, _ in lowered
        for node in submodule.original_module.graph_module.graph.nodes
    )
    outside: Counter[str] = Counter()
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", str(node.target))
        if name not in ("executorch_call_delegate", "getitem"):
            outside[str(node.target)] += 1
    return inside, dict(outside)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _write(folder: Path, kind: str, sample: int, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        # Not numpy's tofile: on a full disk that raises an error without a number, which nobody can tell apart.
        (folder / f"{kind}_{sample}_{index}.raw").write_bytes(tensor.detach().contiguous().numpy().tobytes())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "build.log")
