"""Job -> the files of a bundle, through the flow of its backend. Imports torch and executorch."""

from __future__ import annotations

import importlib
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec
import torch

from farm.build.bundle import INPUTS, MANIFEST, MODEL, OPTRACE, Manifest, TensorSpec, sha256_of
from farm.build.delegation import read_delegation
from farm.build.factory import make_inputs, make_module
from farm.build.flow import Stopwatch
from farm.build.key import relevant_versions
from farm.errors import UnknownNameError
from farm.options import compile_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from farm.build.flow import Flow
    from farm.suites import Job, Target

_FLOWS = {
    **dict.fromkeys(("htp", "lpai", "gpu"), "farm.build.qualcomm"),
    "xnnpack": "farm.build.xnnpack",
}


def flow_of(backend: str) -> Flow:
    """Import and return the flow of `backend`. Raises UnknownNameError."""
    if backend not in _FLOWS:
        raise UnknownNameError("backend", backend, _FLOWS)
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
        with _schematics(folder / OPTRACE if _for_optrace(target) else None):
            lowered = flow(module, samples, target, versions, watch)
        delegation = read_delegation(lowered.edge.exported_program().graph_module)
        if lowered.quantized is not None:
            with watch.step("quantized_reference"):
                references["quantized"] = [_outputs(lowered.quantized, inputs) for inputs in samples]
        with watch.step("serialize"):
            program = lowered.edge.to_executorch(lowered.config)
            with (folder / MODEL).open("wb") as file:
                program.write_to_file(file)
    if _for_optrace(target):
        from farm.build.optrace import keep_graphs

        keep_graphs(folder / MODEL, folder / OPTRACE)
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
        delegated_ops=delegation.delegated_ops,
        fallback_ops=dict(Counter(delegation.edge_ops) + Counter(delegation.cpu_ops)),
        seconds=watch.finish(),
        versions=relevant_versions(target.backend, versions),
        files={str(path.relative_to(folder)): sha256_of(path) for path in _files(folder)},
        references=tuple(references),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def _for_optrace(target: Target) -> bool:
    return "profile_level" in compile_options(target)


def _schematics(folder: Path | None) -> AbstractContextManager[None]:
    if folder is None:
        return nullcontext()
    from farm.build.optrace import schematics_in

    return schematics_in(folder)


def _outputs(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    result = module(*inputs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _write(folder: Path, kind: str, sample: int, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        # Not numpy's tofile: on a full disk that raises an error without a number, which nobody can tell apart.
        (folder / f"{kind}_{sample}_{index}.raw").write_bytes(tensor.detach().contiguous().numpy().tobytes())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "build.log")
