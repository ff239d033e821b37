"""Job -> the files of a bundle, through the flow of its backend. Imports torch and executorch."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
from executorch.exir import ExecutorchProgramManager

from farm.base.backends.registry import find_backend, runs_on_cpu
from farm.base.errors import FarmError
from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import (
    INPUTS,
    MANIFEST,
    MODEL,
    OPTRACE,
    Manifest,
    ProgramFacts,
    TensorSpec,
    write_origins,
)
from farm.builds.bundles.key import relevant_versions
from farm.builds.bundles.ready import check_inputs, file_facts, read_ready
from farm.builds.compile.flows.edge_nodes import EdgeOrigins, built_operators, read_delegation
from farm.builds.compile.flows.factory import make_example, make_inputs, make_method, make_module, read_expected
from farm.builds.compile.flows.flow import Flow, Lowering, Stopwatch
from farm.builds.compile.flows.reference import (
    Reference,
    Tensors,
    Writes,
    find_writes,
    functional,
    mark_constants,
    mark_ready_constants,
    refused_write,
    run_reference,
    run_samples,
    state_kept,
    tensor_spec,
    write_facts,
)
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.builds.program.canonical import program_hash
from farm.builds.program.pte import Method, Order, read_pte, to_memory
from farm.suites.options import compile_options
from farm.suites.suite import Case, Job, State, order_problem


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
    return write_bundle(job, key, versions, folder, program, watch)


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
    inputs: Sequence[Tensors]
    """Inputs of every sample, state that was handed on among them."""
    input_orders: tuple[Order, ...] = ()
    """Memory order of each input; () for C order of all inputs."""


def _compile(
    job: Job, samples: Sequence[Tensors], versions: Mapping[str, str], folder: Path, watch: Stopwatch
) -> CompiledProgram:
    case, target = job.case, job.target
    flow = flow_of(target.backend)
    whole, module, reference = run_module(case, samples, watch)
    samples = reference.run.inputs
    lowering = Lowering(
        module, make_example(case, module, samples[0]), samples, target, versions, watch, case, folder, case.method,
        reference.run.outputs,
    )  # fmt: skip
    on_cpu, for_optrace = runs_on_cpu(target.backend), "profile_level" in compile_options(target)
    if not on_cpu:
        lowering = lowering._replace(others=_other_methods(case, whole, lowering))
    if for_optrace:
        (folder / OPTRACE).mkdir()
    # QNN writes a schematic into the current folder.
    with chdir(folder / OPTRACE if for_optrace else Path.cwd()), built_operators() as operators, less_work():
        try:
            lowered = flow(lowering)
        except Exception as error:
            if any(reference.writes) and not isinstance(error, FarmError):
                raise refused_write(error, reference, case, target.backend) from error
            raise
    edge = lowered.edge.exported_program(case.method)
    delegation = read_delegation(edge.graph_module)
    exported = functional(lowered.exported)
    needed, found = find_writes(reference, exported, edge)
    written = found.inputs
    references = {"fp32": reference.run.program_outputs(written)}
    if lowered.quantized is not None:
        with watch.step("quantized_reference"), state_kept(lowered.quantized):
            references["quantized"] = run_samples(lowered.quantized, case, samples).program_outputs(written)
    with watch.step("serialize"):
        origins = EdgeOrigins(lowered.edge, case, case.method)
        program = lowered.edge.to_executorch(lowered.config)
        state = tuple(State(len(written) + one.output, one.input) for one in case.state)
        method = write_program(program, folder, case, state)
        write_origins(folder, origins.of(program))
    if for_optrace:
        _keep_graphs(folder / MODEL, folder / OPTRACE)
    outputs = reference.output_specs(references["fp32"][0], written, lowered.quantized)
    return CompiledProgram(
        references=references,
        outputs=in_orders_of(mark_constants(outputs, exported), method),
        delegates=method.partitions,
        delegated_ops=delegation.delegated_ops,
        fallback_ops=delegation.cpu_ops,
        operators=dict(operators),
        dynamic=any(spec.dynamic for spec in case.inputs),
        stateful=bool(needed.buffers),
        method=case.method,
        method_index=method.index,
        features=() if on_cpu else case.features.named,
        spill_fill_bytes=lowered.spill_fill_bytes,
        inputs=samples,
        state=state,
        input_orders=tuple(value.order for value in method.inputs),
        **write_facts(needed, found, reference.input_names),
    )


def run_module(
    case: Case, samples: Sequence[Tensors], watch: Stopwatch
) -> tuple[torch.nn.Module, torch.nn.Module, Reference]:
    """Return the module of `case`, the module of its executed method, and its reference: results for `samples`.

    The module runs before its export, as its own error reads better than the error of an export.
    """
    whole = make_module(case)
    module = make_method(case, whole, case.method)
    with watch.step("reference"):
        reference = run_reference(module, case, samples, lambda: make_method(case, make_module(case), case.method))
    return whole, module, reference


def write_program(program: ExecutorchProgramManager, folder: Path, case: Case, state: Sequence[State]) -> Method:
    """Write the program of a bundle in `folder`, and return the method of `case` as the file has it.

    Raises ConfigError if no memory order of a tensor suits all of its readers and writers, or its state.
    """
    with (folder / MODEL).open("wb") as file:
        program.write_to_file(file)
    method = read_pte(folder / MODEL).method(case.method, "the key method of the case")
    if method.layout_problem:
        raise case.error("", method.layout_problem)
    for one in state:
        given, taken = method.outputs[one.output], method.inputs[one.input]
        if problem := order_problem(one, given.order, taken.order):
            raise case.error("state", problem)
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
    facts = file_facts(method)
    for inputs in samples:
        check_inputs(job, method, [tensor_spec(tensor) for tensor in inputs])
    references: dict[str, list[Tensors]] = {}
    outputs, written = facts["outputs"], tuple[int, ...]()
    with watch.step("reference"):
        if case.module or case.program:
            reference = run_reference(make_module(case), case, samples, partial(make_module, case))
            samples = reference.run.inputs
            places = sorted(zip(method.written_outputs, method.written_inputs, strict=True))
            written = tuple(place for output, place in places if output >= 0)
            references["fp32"] = reference.run.program_outputs(written)
            specs = reference.output_specs(references["fp32"][0], written)
            outputs = mark_ready_constants(specs, references["fp32"], partial(_export, case, samples[0]))
            # Delegates may keep buffers that the file is silent on.
            found = reference.writes.buffers if method.written_buffers or method.delegates else ()
            facts |= write_facts(reference.writes, Writes(method.written_inputs, found), reference.input_names)
            facts["stateful"] |= bool(reference.writes.buffers)
        elif case.expected:
            references["fp32"] = read_expected(case)
            specs = [tensor_spec(tensor) for tensor in references["fp32"][0]]
            if len(specs) == len(outputs):
                named = zip(specs, outputs, strict=True)
                specs = [msgspec.structs.replace(spec, name=one.name, written=one.written) for spec, one in named]
            outputs = specs
    shutil.copyfile(Path(case.folder, case.pte), folder / MODEL)
    # The judgement shows outputs that differ in number from the outputs of the program.
    is_same_number = len(outputs) == len(method.outputs)
    facts["outputs"] = in_orders_of(outputs, method) if is_same_number else tuple(outputs)
    facts["state"] = tuple(State(len(written) + one.output, one.input) for one in case.state)
    orders = tuple(value.order for value in method.inputs)
    return CompiledProgram(references=references, inputs=samples, input_orders=orders, **facts)


def _export(case: Case, inputs: Tensors) -> torch.export.ExportedProgram:
    module = make_module(case)
    return functional(make_example(case, module, inputs).export(module))


def _keep_graphs(model: Path, folder: Path) -> None:
    """Write the context binaries of a `.pte` to `folder`, in the form for QNN's own tools."""
    from executorch.backends.qualcomm.utils.utils import dump_context_from_pte

    for name in dump_context_from_pte(str(model)):
        # ExecuTorch writes the context binaries beside the model.
        shutil.move(name, folder / Path(name).name)


def write_bundle(
    job: Job, key: str, versions: Mapping[str, str], folder: Path, program: CompiledProgram, watch: Stopwatch
) -> Manifest:
    """Write the tensors and then the manifest of the bundle in `folder`, whose program and other files are complete."""
    inputs, orders = program.inputs, program.input_orders or ((),) * len(program.inputs[0])
    _write_tensors(folder / INPUTS, "input", inputs, orders)
    for kind, outputs in program.references.items():
        _write_tensors(folder / f"reference_{kind}", "output", outputs, [spec.order for spec in program.outputs])
    target = job.target
    manifest = Manifest(
        key=key,
        job_id=job.id,
        soc=target.soc,
        backend=target.backend,
        precision=target.precision,
        samples=len(inputs),
        inputs=tuple(tensor_spec(tensor, order) for tensor, order in zip(inputs[0], orders, strict=True)),
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


def _write_tensors(folder: Path, kind: str, samples: Sequence[Tensors], orders: Sequence[Order]) -> None:
    folder.mkdir(parents=True)
    for sample, tensors in enumerate(samples):
        for index, tensor in enumerate(tensors):
            elements = to_memory(tensor.detach().numpy(), orders[index])
            # On a full disk, numpy's `tofile` raises an error without an error number; `write_bytes` has it.
            (folder / f"{kind}_{sample}_{index}.raw").write_bytes(elements.tobytes())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "build.log")
