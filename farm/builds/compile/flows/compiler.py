"""Job -> the files of a bundle, through the flow of its backend. Imports torch and executorch."""

from __future__ import annotations

import importlib
import os
import shutil
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from farm.base.backends.registry import find_backend, runs_on_cpu
from farm.base.errors import ConfigError, FarmError
from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, OPTRACE, Manifest, ProgramFacts, TensorSpec
from farm.builds.bundles.key import relevant_versions
from farm.builds.bundles.origins import write_origins
from farm.builds.bundles.ready import check_inputs, file_facts, output_specs, read_ready, write_names
from farm.builds.compile.flows.calls import Tensors, state_kept
from farm.builds.compile.flows.constants import mark_constants, mark_ready_constants
from farm.builds.compile.flows.delegation import built_operators, read_delegation
from farm.builds.compile.flows.factory import make_example, make_inputs, make_method, make_module, read_expected
from farm.builds.compile.flows.flow import Lowering, Stopwatch
from farm.builds.compile.flows.node_origins import EdgeOrigins
from farm.builds.compile.flows.outputs import named_outputs, output_steps, tensor_spec
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.builds.compile.flows.state import run_samples
from farm.builds.compile.flows.writes import (
    ComparedWrites,
    Writes,
    compare_writes,
    program_outputs,
    refused_write,
    run_reference,
)
from farm.builds.program.canonical import program_hash
from farm.builds.program.layout import to_memory
from farm.builds.program.pte import read_pte
from farm.suites.options import compile_options
from farm.suites.state import State, order_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from farm.builds.compile.flows.flow import Flow
    from farm.builds.program.layout import Order
    from farm.builds.program.pte import Method
    from farm.suites.suite import Case, Job, Target


def flow_of(backend: str) -> Flow:
    """Import and return the flow of `backend`. Raises UnknownNameError."""
    flow: Flow = importlib.import_module(find_backend(backend).flow).FLOW
    return flow


def compile_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job` into the empty `folder`, the manifest last. The compiler's exceptions pass through."""
    case = job.case
    watch = Stopwatch()
    with torch.no_grad(), settings_of_one_job():
        samples = [make_inputs(case, sample) for sample in range(case.samples)]
        make = _take_ready if case.pte else _compile
        program = make(job, samples, versions, folder, watch)
    # The inputs after the run of the FP32 module: state goes from one sample to the next.
    samples = program.inputs or samples
    write_tensors(folder / INPUTS, "input", samples, program.input_orders)
    for kind, outputs in program.references.items():
        write_tensors(folder / f"reference_{kind}", "output", outputs, [spec.order for spec in program.outputs])
    return write_manifest(job, key, versions, folder, samples, program, watch)


@contextmanager
def settings_of_one_job() -> Iterator[None]:
    """Restore torch's global settings after the body, so that the numbers of the next job do not depend on this job.

    The quantizer of ExecuTorch 1.5 turns oneDNN off on AMD, which changes the last digits of references and scales.
    """
    enabled = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


class CompiledProgram(ProgramFacts, frozen=True, kw_only=True):
    """Facts about the `.pte` of a bundle, and its tensors."""

    references: dict[str, list[Tensors]]
    """Outputs of every sample, by kind of reference."""
    inputs: list[Tensors] = msgspec.field(default_factory=list)
    """Inputs of every sample, state that was handed on among them; empty for the inputs of the case."""
    input_orders: tuple[Order, ...] = ()
    """Memory order of each input; () for C order of all inputs."""


def _compile(
    job: Job, samples: Sequence[Tensors], versions: Mapping[str, str], folder: Path, watch: Stopwatch
) -> CompiledProgram:
    case, target = job.case, job.target
    flow = flow_of(target.backend)
    whole = make_module(case)
    module = make_method(case, whole, case.method)
    # The module runs before its export, as its own error reads better than the error of an export.
    with watch.step("reference"):
        reference = run_reference(module, case, samples)
        samples = reference.run.inputs
    if reference.is_changed:
        # The program begins with the state of a new module.
        whole = make_module(case)
        module = make_method(case, whole, case.method)
    own = Lowering(
        module, make_example(case, module, samples[0]), samples, target, versions, watch, case, folder, case.method,
        reference.run.outputs,
    )  # fmt: skip
    others = {} if runs_on_cpu(target.backend) else _other_methods(case, whole, own)
    schematics = _schematics_in(folder / OPTRACE if _for_optrace(target) else None)
    with schematics, built_operators() as operators, less_work():
        try:
            lowered = flow(own._replace(others=others))
        except FarmError:
            raise
        except Exception as error:
            if any(reference.writes):
                raise refused_write(error, reference, case, target.backend) from error
            raise
    edge = lowered.edge.exported_program(case.method)
    delegation = read_delegation(edge.graph_module)
    writes = compare_writes(reference, lowered.exported, edge)
    written = writes.found.inputs
    references = {"fp32": program_outputs(reference.run, written)}
    steps: Sequence[float | None] = [None] * len(reference.run.names)
    if lowered.quantized is not None:
        with watch.step("quantized_reference"), state_kept(lowered.quantized):
            references["quantized"] = program_outputs(run_samples(lowered.quantized, case, samples), written)
        steps = output_steps(lowered.quantized)
    with watch.step("serialize"):
        origins = EdgeOrigins(lowered.edge, Path(case.folder).parent, case.method)
        program = lowered.edge.to_executorch(lowered.config)
        with (folder / MODEL).open("wb") as file:
            program.write_to_file(file)
        write_origins(folder, origins.of(program))
    state = tuple(State(len(written) + one.output, one.input) for one in case.state)
    method = written_method(folder / MODEL, case, state)
    if _for_optrace(target):
        _keep_graphs(folder / MODEL, folder / OPTRACE)
    named = named_outputs(reference, references["fp32"][0], written, steps)
    plans = program.executorch_program.execution_plan
    method_index = [plan.name for plan in plans].index(case.method)
    return CompiledProgram(
        references=references,
        outputs=in_orders_of(mark_constants(named, lowered.exported), method),
        delegates=dict(Counter(delegate.id for delegate in plans[method_index].delegates)),
        delegated_ops=delegation.delegated_ops,
        fallback_ops=dict(Counter(delegation.edge_ops) + Counter(delegation.cpu_ops)),
        operators=dict(operators),
        dynamic=any(spec.dynamic for spec in case.inputs),
        stateful=bool(writes.needed.buffers),
        method=case.method,
        method_index=method_index,
        features=() if runs_on_cpu(target.backend) else case.features.named,
        spill_fill_bytes=lowered.spill_fill_bytes,
        inputs=list(samples),
        state=state,
        writes=writes.kept,
        lost_writes=writes.lost,
        input_orders=tuple(value.order for value in method.inputs),
    )


def written_method(model: Path, case: Case, state: Sequence[State]) -> Method:
    """Return the method of `case` as the program has it.

    Raises ConfigError if no memory order of a tensor suits all of its readers and writers, or its state.
    """
    method = read_pte(model).method(case.method, "the key method of the case")
    if method.layout_problem:
        raise ConfigError(case.manifest, f"case.{case.name}", method.layout_problem)
    for one in state:
        given, taken = method.outputs[one.output], method.inputs[one.input]
        if problem := order_problem(one, given.order, taken.order):
            raise ConfigError(case.manifest, f"case.{case.name}.state", problem)
    return method


def in_orders_of(specs: Sequence[TensorSpec], method: Method) -> tuple[TensorSpec, ...]:
    """Return `specs`, of the last outputs of `method`, in the memory orders of the program."""
    values = method.outputs[len(method.outputs) - len(specs) :]
    return tuple(msgspec.structs.replace(spec, order=one.order) for spec, one in zip(specs, values, strict=True))


def _other_methods(case: Case, module: torch.nn.Module, own: Lowering) -> dict[str, Lowering]:
    """Return the lowerings of the program's other methods, beside the executed method of the case."""
    found = {}
    for name, method in case.methods.items():
        if name == case.method:
            continue
        part = msgspec.structs.replace(case, inputs=method.inputs or case.inputs)
        samples = [make_inputs(part, sample) for sample in range(case.samples)]
        called = make_method(case, module, name)
        found[name] = own._replace(
            module=called, example=make_example(part, called, samples[0]), samples=samples, method=name, outputs=()
        )
    return found


def _take_ready(
    job: Job, samples: Sequence[Tensors], versions: Mapping[str, str], folder: Path, watch: Stopwatch
) -> CompiledProgram:
    del versions  # the program was compiled elsewhere, with other versions
    case = job.case
    method = read_ready(job)
    for inputs in samples:
        check_inputs(job, method, [tensor_spec(tensor) for tensor in inputs])
    references: dict[str, list[Tensors]] = {}
    reference, written = None, tuple[int, ...]()
    with watch.step("reference"):
        if case.module or case.program:
            reference = run_reference(make_module(case), case, samples)
            samples = reference.run.inputs
            written = tuple(
                place
                for output, place in sorted(zip(method.written_outputs, method.written_inputs, strict=True))
                if output >= 0
            )
            references["fp32"] = program_outputs(reference.run, written)
        elif case.expected:
            references["fp32"] = read_expected(case)
    shutil.copyfile(Path(case.folder, case.pte), folder / MODEL)
    outputs = output_specs(method)
    if references:
        tensors = references["fp32"][0]
        specs = [tensor_spec(tensor) for tensor in tensors]
        if len(specs) == len(outputs):
            named = zip(specs, outputs, strict=True)
            specs = [msgspec.structs.replace(spec, name=one.name, written=one.written) for spec, one in named]
        if reference is not None:
            specs = named_outputs(reference, tensors, written, [None] * len(reference.run.names))
            specs = mark_ready_constants(specs, references["fp32"], partial(_export, case, samples[0]))
        # The judgement shows outputs that differ in number from the outputs of the program.
        outputs = in_orders_of(specs, method) if len(specs) == len(outputs) else tuple(specs)
    kept, lost = write_names(method), tuple[str, ...]()
    if reference is not None:
        # Delegates may keep buffers that the file is silent on.
        found = reference.writes.buffers if method.written_buffers or method.delegates else ()
        writes = ComparedWrites(reference.writes, Writes(method.written_inputs, found), reference.input_names)
        kept, lost = writes.kept, writes.lost
    facts = file_facts(method) | {
        "outputs": outputs,
        "state": tuple(State(len(written) + one.output, one.input) for one in case.state),
        "writes": kept,
        "lost_writes": lost,
    }
    facts["stateful"] |= reference is not None and bool(reference.writes.buffers)
    orders = tuple(value.order for value in method.inputs)
    return CompiledProgram(references=references, inputs=list(samples), input_orders=orders, **facts)


def _export(case: Case, inputs: Tensors) -> torch.export.ExportedProgram:
    module = make_module(case)
    example = make_example(case, module, inputs)
    return torch.export.export(module, example.inputs, dynamic_shapes=example.dynamic_shapes, strict=True)


def _for_optrace(target: Target) -> bool:
    return "profile_level" in compile_options(target)


@contextmanager
def _schematics_in(folder: Path | None) -> Iterator[None]:
    """Let QNN, which writes a schematic into the current folder, write it into `folder`, which is made."""
    if folder is None:
        yield
        return
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _keep_graphs(model: Path, folder: Path) -> None:
    """Write the context binaries of a `.pte` to `folder`, in the form for QNN's own tools."""
    from executorch.backends.qualcomm.utils.utils import dump_context_from_pte

    for name in dump_context_from_pte(str(model)):
        # ExecuTorch writes the context binaries beside the model.
        shutil.move(name, folder / Path(name).name)


def write_tensors(folder: Path, kind: str, samples: Sequence[Tensors], orders: Sequence[Order] = ()) -> None:
    """Write the tensors of all samples into the new `folder`, as a bundle has them, in `orders` or all in C order."""
    folder.mkdir(parents=True)
    for sample, tensors in enumerate(samples):
        for index, tensor in enumerate(tensors):
            elements = to_memory(tensor.detach().numpy(), orders[index] if orders else ())
            # On a full disk, numpy's `tofile` raises an error without an error number; `write_bytes` has it.
            (folder / f"{kind}_{sample}_{index}.raw").write_bytes(elements.tobytes())


def write_manifest(
    job: Job,
    key: str,
    versions: Mapping[str, str],
    folder: Path,
    samples: Sequence[Tensors],
    program: CompiledProgram,
    watch: Stopwatch,
) -> Manifest:
    """Write the manifest of the bundle in `folder`, whose other files are complete, and return it."""
    target = job.target
    manifest = Manifest(
        key=key,
        job_id=job.id,
        soc=target.soc,
        backend=target.backend,
        precision=target.precision,
        samples=len(samples),
        inputs=tuple(
            tensor_spec(tensor, order=program.input_orders[index] if program.input_orders else ())
            for index, tensor in enumerate(samples[0])
        ),
        pte_bytes=(folder / MODEL).stat().st_size,
        seconds=watch.finish(),
        peak_bytes=watch.peak_bytes,
        versions=relevant_versions(target.backend, versions, job.case),
        files={str(path.relative_to(folder)): sha256_of(path) for path in _files(folder)},
        references=tuple(program.references),
        program=program_hash(folder / MODEL),
        **{name: getattr(program, name) for name in ProgramFacts.__struct_fields__},
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "build.log")
