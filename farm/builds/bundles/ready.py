"""A `.pte` file that was compiled elsewhere, checked against its case and its target. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import cpu_backends, runs_on_cpu
from farm.base.errors import ConfigError, IllegalTargetError
from farm.builds.bundles.bundle import Manifest, TensorSpec
from farm.builds.program.pte import Method, Value, read_pte
from farm.suites.generate import DECODE
from farm.suites.options import compile_options
from farm.suites.suite import NOT_DIRECT, Job, Target


def read_ready(job: Job, how: str = "the key method of its case") -> Method:
    """Return the method that a job with a ready `.pte` runs; for a case that generates text the decoding method.

    `how` is the way to name another method, for the error.

    Raises ConfigError for a file that is no program or has no such method, IllegalTargetError for a program that was
    compiled for another SoC or backend, for options of the target that only a compiler could apply, and for direct mode
    if its runner cannot run the program.
    """
    path, target = Path(job.case.folder, job.case.pte), job.target
    program = read_pte(path)
    method = program.method(DECODE if job.case.generate is not None else job.case.method, how)
    # Direct mode selects the runner as well and is checked below.
    if compiled := [name for name in compile_options(target) if name != DIRECT_MODE]:
        names = ", ".join(compiled)
        raise IllegalTargetError(f"{path.name} is compiled already: leave the options {names} out")
    if program.qnn is None:
        if not runs_on_cpu(target.backend):
            usable = " or ".join(cpu_backends())
            raise IllegalTargetError(
                f"{path.name} has nothing for the {target.backend} backend: use --backend {usable}"
            )
    elif (program.qnn.soc, program.qnn.backend) != (target.soc, target.backend):
        raise IllegalTargetError(
            f"{path.name} is compiled for {program.qnn.soc} ({program.qnn.backend}), not for {target.soc} "
            f"({target.backend}): ask for that, or compile it again"
        )
    if packages := [name for one in method.delegates if one.qnn for name in one.qnn.op_packages]:
        problem = (
            f"wants the op package {packages[0][:200]!r}, and farm has op packages only for cases that it compiles"
        )
        raise ConfigError(path, "", f"{problem}: docs/reference/suites.md, Op packages")
    if odd := [value for value in method.inputs if not value.is_tensor]:
        raise ConfigError(path, "", f"wants an input of type {odd[0].dtype}, and farm gives tensors only")
    if method.layout_problem:
        raise ConfigError(path, "", method.layout_problem)
    if target.direct:
        _check_direct(path.name, method)
    return method


def _check_direct(name: str, method: Method) -> None:
    if is_dynamic(method):
        raise IllegalTargetError(f"{name} has dynamic sizes, and direct mode's runner requires fixed ones")
    if refused := [feature for feature in features_of(method) if feature in NOT_DIRECT]:
        names = " and ".join(refused)
        raise IllegalTargetError(f"{name}: {names} is not for direct mode (ExecuTorch 1.5): compile it without")


def ready_manifest(method: Method, target: Target, model: Path, **known: Any) -> Manifest:
    """Return the manifest, without references, of a bundle of `model` that was compiled elsewhere and runs `method`.

    `known` are the fields that the file does not decide (`key`, `job_id`, `samples`, `inputs`, `files`), and fields in
    place of the file's.
    """
    facts = {
        **file_facts(method),
        "soc": target.soc,
        "backend": target.backend,
        "precision": target.precision,
        "pte_bytes": model.stat().st_size,
        "seconds": {},
        "versions": {},
        "references": (),
    }
    return Manifest(**facts | known)


def file_facts(method: Method) -> dict[str, Any]:
    """Return the fields of `ProgramFacts` that the file of a program decides."""
    return {
        "outputs": output_specs(method),
        "delegates": method.partitions,
        "delegated_ops": None,
        "fallback_ops": dict(method.cpu_operators),
        "dynamic": is_dynamic(method),
        "stateful": method.written_buffers > 0,
        "method": method.name,
        "method_index": method.index,
        "features": features_of(method),
        "writes": write_names(method),
    }


def check_inputs(job: Job, method: Method, inputs: Sequence[TensorSpec]) -> None:
    """Raise ConfigError unless `inputs` have the dtypes and shapes of the method's inputs."""
    if len(inputs) != len(method.inputs) or not all(map(_fits, inputs, method.inputs)):
        given, wanted = (", ".join(map(str, tensors)) or "none" for tensors in (inputs, method.inputs))
        raise job.case.error("inputs", f"are {given}; {job.case.pte} takes {wanted}")


def output_specs(method: Method) -> tuple[TensorSpec, ...]:
    """Return the outputs by the program's file, written inputs among them."""
    written = dict(zip(method.written_outputs, method.written_inputs, strict=True))
    return tuple(
        TensorSpec(
            value.shape,
            value.dtype,
            order=value.order,
            name=str(written[index]) if index in written else "",
            written=index in written,
        )
        for index, value in enumerate(method.outputs)
    )


def write_names(method: Method) -> tuple[str, ...]:
    """Return the writes of a program's kernels that outlive an execution: `input 0`, `buffer`, `2 buffers`."""
    count = method.written_buffers
    buffers = ((f"{count} buffers" if count > 1 else "buffer"),) if count else ()
    return (*(f"input {position}" for position in method.written_inputs), *buffers)


def features_of(method: Method) -> tuple[str, ...]:
    """Return the features of a method that its file records: names of `farm.suites.suite.Features`."""
    options_set = ("online_prepare", "shared_buffer", "dump_intermediate_outputs", "use_weight_sharing")
    options = [delegate.qnn for delegate in method.delegates if delegate.qnn is not None]
    return tuple(name for name in options_set if any(getattr(one, name) for one in options))


def is_dynamic(method: Method) -> bool:
    """Return whether the runner needs the shapes that are executed."""
    return any(value.dynamic for value in (*method.inputs, *method.outputs))


def _fits(tensor: TensorSpec, value: Value) -> bool:
    if tensor.dtype != value.dtype or len(tensor.shape) != len(value.shape):
        return False
    sizes = list(zip(tensor.shape, value.shape, strict=True))
    return all(size <= bound for size, bound in sizes) if value.dynamic else all(size == bound for size, bound in sizes)
