"""Job -> the files of a bundle, through the flow of its backend. Imports torch and executorch."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import get_lowered_submodules

from farm.build.bundle import INPUTS, MANIFEST, MODEL, Manifest, TensorSpec, sha256_of
from farm.build.factory import make_inputs, make_module
from farm.build.flow import Stopwatch
from farm.build.key import relevant_versions
from farm.errors import IllegalTargetError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from farm.build.flow import Flow
    from farm.suites import Job

_FLOWS = {"htp": "farm.build.qualcomm", "xnnpack": "farm.build.xnnpack"}


def flow_of(backend: str) -> Flow:
    """Import and return the flow of `backend`. Raises IllegalTargetError for one that cannot be compiled for yet."""
    if backend not in _FLOWS:
        raise IllegalTargetError(f"farm cannot compile for the {backend} backend yet, only for {', '.join(_FLOWS)}")
    flow: Flow = importlib.import_module(_FLOWS[backend]).FLOW
    return flow


def compile_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job` into the empty `folder`, the manifest last. What the compiler raises passes through."""
    case, target = job.case, job.target
    flow = flow_of(target.backend)
    watch = Stopwatch()
    with torch.no_grad():
        module = make_module(case)
        samples = [make_inputs(case, sample) for sample in range(case.samples)]
        # First, as an error of the module itself reads better than what an export makes of it.
        with watch.step("reference"):
            references = {"fp32": [_outputs(module, inputs) for inputs in samples]}
        lowered = flow(module, samples, target, watch)
        delegated_ops, fallback_ops = _delegation(lowered.edge.exported_program().graph_module)
        if lowered.quantized is not None:
            with watch.step("quantized_reference"):
                references["quantized"] = [_outputs(lowered.quantized, inputs) for inputs in samples]
        with watch.step("serialize"):
            program = lowered.edge.to_executorch(lowered.config)
            with (folder / MODEL).open("wb") as file:
                program.write_to_file(file)
    delegates = Counter(delegate.id for delegate in program.executorch_program.execution_plan[0].delegates)
    (folder / INPUTS).mkdir()
    for sample, inputs in enumerate(samples):
        _write(folder / INPUTS, "input", sample, inputs)
    for kind, outputs in references.items():
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
        outputs=tuple(_spec(tensor) for tensor in references["fp32"][0]),
        pte_bytes=(folder / MODEL).stat().st_size,
        delegates=dict(delegates),
        delegated_ops=delegated_ops,
        fallback_ops=fallback_ops,
        seconds=watch.finish(),
        versions=relevant_versions(target.backend, versions),
        files={str(path.relative_to(folder)): sha256_of(path) for path in _files(folder)},
        references=tuple(references),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


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
            # Printed, an edge operator has its whole schema.
            outside[name if isinstance(node.target, EdgeOpOverload) else str(node.target)] += 1
    return inside, dict(outside)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _write(folder: Path, kind: str, sample: int, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        # Not numpy's tofile: on a full disk that raises an error without a number, which nobody can tell apart.
        (folder / f"{kind}_{sample}_{index}.raw").write_bytes(tensor.detach().contiguous().numpy().tobytes())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "build.log")
