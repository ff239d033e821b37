"""ExecuTorch's Qualcomm flow for HTP, LPAI and GPU: quantized, or in floating point. Imports torch and executorch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from executorch.backends.qualcomm.custom_op.annotator import CustomOpsQuantAnnotator, IOQuantConfig
from executorch.backends.qualcomm.quantizer.quantizer import ModuleQConfig, QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.serialization import qc_schema
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option, option_to_flatbuffer
from executorch.backends.qualcomm.utils import utils
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from farm.base.backends.descriptor import DIRECT_MODE, QUANTIZED_PRECISIONS
from farm.base.backends.registry import BACKENDS, cpu_backends
from farm.base.errors import DelegationError, MisreadCodesError, MissingToolError
from farm.base.hashes import sha256_of
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import OP_PACKAGES, PACKAGES_OF, SAVER, place_of
from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows.edge_nodes import (
    delegated_graphs,
    misread_codes,
    origin_of,
    read_delegation,
    refused_operators,
    source_places,
)
from farm.builds.compile.flows.flow import Flow, Lowered, Lowering
from farm.builds.compile.flows.reference import copies, state_kept
from farm.builds.runtime.parts import AARCH64, HEXAGON, X86_64, RuntimePart, find_fault
from farm.suites.options import compile_numbers
from farm.suites.suite import Case, Features, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executorch.backends.qualcomm.quantizer.qconfig import QuantizationConfig

    from farm.base.socs import Soc
    from farm.suites.suite import OpPackage


# Op packages of the user: copies in the bundle, and their names in the program.
#
# QNN opens a package by the path in the program. The path is relative to the folder of the runner and ends with the
# hash of the package: it is the same for the compiler and for every device, and two packages never share a path.


_TARGETS, _PLATFORMS = qc_schema.QnnExecuTorchOpPackageTarget, qc_schema.QnnExecuTorchOpPackagePlatform


class _Library(NamedTuple):
    """Library of a package for one machine."""

    file: str
    folder: str
    """Folder within the folder of all packages."""
    machine: int
    hexagon: int
    target: qc_schema.QnnExecuTorchOpPackageTarget
    platform: qc_schema.QnnExecuTorchOpPackagePlatform


@contextmanager
def packages_of(case: Case, target: Target, folder: Path) -> Iterator[qc_schema.QnnExecuTorchOpPackageOptions | None]:
    """Yield ExecuTorch's options for the packages of `case`, which are copied into `folder`; None without packages.

    During the body a link in the current folder leads to them by the paths in the program. Raises ConfigError for a
    library of another machine.
    """
    if not case.features.op_packages:
        yield None
        return
    soc = find_soc(target.soc)
    packages = case.features.op_packages
    # With an incomplete package a device would compute a part of the program and then fail.
    on_device = all(one.android and f"v{soc.htp_arch}" in one.hexagon for one in packages)
    infos = [
        qc_schema.QnnExecuTorchOpPackageInfo(
            op_package_name=package.name,
            op_package_path=_keep(case, library, soc, folder),
            interface_provider=package.interface_provider,
            target=library.target,
            custom_op_name=package.operator,
            qnn_op_type_name=package.qnn_operator,
            platform=library.platform,
        )
        for package in packages
        for library in _libraries(package, soc, on_device=on_device)
    ]
    here = Path.cwd() / OP_PACKAGES
    # A process that crashed in a package may have left the link.
    here.unlink(missing_ok=True)
    here.symlink_to(folder / OP_PACKAGES)
    try:
        yield qc_schema.QnnExecuTorchOpPackageOptions(infos)
    finally:
        here.unlink()


def _libraries(package: OpPackage, soc: Soc, *, on_device: bool) -> list[_Library]:
    """Return the libraries for a program of `soc`, in the order of ExecuTorch's example."""
    [host], (on_dsp, on_cpu) = PACKAGES_OF["simulator"], PACKAGES_OF["android"]
    found = [_Library(package.library, host, X86_64, 0, _TARGETS.CPU, _PLATFORMS.X86_64)]
    if on_device:
        android = _PLATFORMS.AARCH64_ANDROID
        found = [
            _Library(package.hexagon[f"v{soc.htp_arch}"], on_dsp, HEXAGON, soc.htp_arch, _TARGETS.HTP, android),
            _Library(package.android, on_cpu, AARCH64, 0, _TARGETS.CPU, android),
            *found,
        ]
    return found


def _keep(case: Case, library: _Library, soc: Soc, folder: Path) -> str:
    """Copy a library into the bundle in `folder`, and return its path relative to `folder`."""
    get = "QNN's op package generator makes a Makefile, with a target for each machine"
    source = Path(case.folder, library.file)
    part = RuntimePart(library.file, source, library.machine, get, library.hexagon, exact=False, soc=soc.name)
    if fault := find_fault(part):
        raise case.error("features.op_packages", f"{library.file} {fault.problem}: {fault.repair}")
    place = folder / OP_PACKAGES / library.folder
    place.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copyfile(source, place / "copied.so"))
    named = copy.rename(place / f"{sha256_of(copy)}.so")
    return str(named.relative_to(folder))


def annotation_of(case: Case, config: QuantizationConfig) -> Callable[[torch.fx.GraphModule], None]:
    """Return an annotation that quantizes inputs and outputs of the packages' operators by `config`.

    ExecuTorch has no rule for operators of packages and leaves them in floating point within a quantized graph. An
    operator with a rule of ExecuTorch, which a package may contain as well, keeps that rule.
    """
    names = {package.operator for package in case.features.op_packages}

    def annotate(graph: torch.fx.GraphModule) -> None:
        annotator = CustomOpsQuantAnnotator()
        for node in graph.graph.nodes:
            if str(node.target) not in names or Q_ANNOTATION_KEY in node.meta:
                continue
            tensors = [index for index, arg in enumerate(node.args) if isinstance(arg, torch.fx.Node)]
            outputs = range(len(node.meta["val"]) if isinstance(node.meta["val"], tuple) else 1)
            specs = IOQuantConfig(
                input_quant_specs=dict.fromkeys(tensors, config.input_activation),
                output_quant_specs=dict.fromkeys(outputs, config.output_activation),
            )
            annotator.register_annotation(node.target, specs)
        annotator.build_annotation_fn()(graph)

    return annotate


def require_packaged(graph_module: torch.fx.GraphModule, case: Case) -> None:
    """Raise ConfigError for an operator of a package that QNN refused: ExecuTorch 1.5 leaves it to the CPU."""
    taken = {getattr(node.target, "__name__", "") for graph in delegated_graphs(graph_module) for node in graph.nodes}
    for package in case.features.op_packages:
        if package.operator not in taken:
            problem = (
                f"{package.operator} of {package.library} is nothing that QNN computes in this program: either the "
                "module has no such operator, or QNN refused the package: its words are in the build log"
            )
            raise case.error("features.op_packages", problem)


# Operators with blocks of weights in the precisions called `_block`, along the second dimension, the input channels.
_BLOCK_TARGETS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
_BLOCK_SIZES = (32, 16)
"""Numbers of input channels that share a scale: the first that divides the channels; else a scale per channel."""
_RULES: dict[str, Any] = {
    "is_conv_per_channel": True,
    "is_linear_per_channel": True,
    # ExecuTorch's own observer is a moving average with a hundred times more weight for the first sample than for the
    # next: all later samples are clipped to the range of the first.
    "act_observer": MinMaxObserver,
}
"""Settings of the quantizer at every precision."""
# ExecuTorch 1.5, LpaiPartitionFallbackSupport.
_WITH_WEIGHTS = "Fallback nodes with weights"
# Options that are no parameters of a backend's function for its compiler specs.
_OF_ALL_BACKENDS = ("profile_level", DIRECT_MODE)
# Features that are parameters of that function, and features that are parameters of the specs of all backends.
_OF_BACKEND = ("use_multi_contexts", "use_weight_sharing")
_OF_SPECS = ("shared_buffer", "dump_intermediate_outputs", "use_mha2sha")
# Files of QNN's Saver.
_SAVED = ("saver_output.c", "params.bin")
# Operators with graphs as arguments, by the names of torch 2.13, and the functions that make them.
_CONTROL_FLOW = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "torch's map",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
}


def _lower(lowering: Lowering) -> Lowered:
    target, watch = lowering.target, lowering.watch
    case, features = lowering.case, lowering.case.features
    exported = {name: one.export() for name, one in lowering.methods.items()}
    for program in exported.values():
        refuse_control_flow(program, case, target.backend)
    graphs: dict[str, torch.nn.Module] = {name: one.module() for name, one in exported.items()}
    quantized = None
    if target.precision in QUANTIZED_PRECISIONS:
        with watch.step("quantize"):
            for name, one in lowering.methods.items():
                graphs[name] = convert_pt2e(calibrate(graphs[name], one.samples, target, case))
        quantized = graphs[lowering.method]
    with packages_of(case, target, lowering.folder) as packages:
        if features.saver:
            with watch.step("saver"):
                specs = compiler_specs(target, lowering.versions, features, packages=packages, saver=True)
                _record_calls(graphs, lowering, specs)
        with watch.step("lower"):
            specs = compiler_specs(target, lowering.versions, features, packages=packages)
            edge = _to_edge(graphs, lowering, specs)
            programs = {name: edge.exported_program(name) for name in graphs}
            # The contexts of the program share a buffer.
            sizes = map(utils.update_spill_fill_size, programs.values()) if features.use_multi_contexts else ()
            spill_fill_bytes = max(map(int, sizes), default=None)
    if BACKENDS[target.backend].cpu_quantizes:
        _require_codes(programs.values(), target)
    own = programs[lowering.method].graph_module
    _require_skipped(own, case)
    require_packaged(own, case)
    config = ExecutorchBackendConfig(segment_alignment=utils.get_qnn_context_binary_alignment())
    if features.shared_buffer or target.direct:
        # The runner provides memory of the DSP for inputs and outputs; ExecuTorch's export_utils.py plans none either.
        config.memory_planning_pass = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return Lowered(edge, quantized, config, exported[lowering.method], spill_fill_bytes)


FLOW: Flow = _lower


def refuse_control_flow(exported: ExportedProgram, case: Case, backend: str) -> None:
    """Raise ConfigError for a graph with a branch or a loop that depends on values.

    Qualcomm's quantizer and passes of ExecuTorch 1.5 take no graph inside a graph; ExecuTorch's CPU runs branches.
    """
    for node in exported.graph_module.graph.nodes:
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        if name not in _CONTROL_FLOW:
            continue
        place = place_of(origin_of(node, source_places(case)))
        branches = "compute both branches and choose one with torch.where"
        remedy = branches if name == "cond" else "write the iterations out"
        problem = f"{_CONTROL_FLOW[name]}{place} is control flow, which {backend} does not take: {remedy}"
        raise case.error("module", f"{problem}, or run the case on {' or '.join(cpu_backends())}")


def _record_calls(graphs: Mapping[str, torch.nn.Module], lowering: Lowering, specs: list[Any]) -> None:
    """Record QNN's calls of a lowering in the bundle; `specs` are the specs of ExecuTorch's saver.

    ExecuTorch 1.5 raises SystemExit after it has recorded the first method. Raises MissingToolError without a record.
    """
    place = lowering.folder / SAVER
    for spec in specs:
        options = flatbuffer_to_option(spec.value)
        options.saver_output_dir = str(place)
        spec.value = option_to_flatbuffer(options)
    try:
        _to_edge(graphs, lowering, specs)
    except SystemExit:
        if all((place / name).is_file() for name in _SAVED):
            return
    raise MissingToolError(f"QNN's Saver left no {' and '.join(_SAVED)}: its words are in the build log")


def _require_codes(programs: Iterable[ExportedProgram], target: Target) -> None:
    """Raise MisreadCodesError if codes at the edge of a delegate have different sizes on the CPU and in QNN."""
    for program in programs:
        if (found := misread_codes(program.graph_module)) is not None:
            on_cpu, in_qnn = (str(dtype).removeprefix("torch.") for dtype in found)
            raise MisreadCodesError(target.backend, target.precision, on_cpu, in_qnn)


def _require_skipped(graph_module: torch.fx.GraphModule, case: Case) -> None:
    """Raise ConfigError for an operator or node that the case leaves to the CPU and that is not in the program."""
    features, on_cpu = case.features, read_delegation(graph_module).cpu_ops
    for key, names, there in (
        ("skip_node_ops", features.skip_node_ops, on_cpu),
        ("skip_node_ids", features.skip_node_ids, {node.name for node in graph_module.graph.nodes}),
    ):
        if missing := [name for name in names if name not in there]:
            left = ", ".join(sorted(on_cpu)) or "nothing"
            problem = f"{missing[0]!r} is nowhere in the program; left to the CPU: {left}"
            raise case.error(f"features.{key}", problem)


def calibrate(
    exported: torch.nn.Module, samples: Sequence[tuple[torch.Tensor, ...]], target: Target, case: Case | None = None
) -> torch.fx.GraphModule:
    """Return `exported` with the observers of the backend's rules, after a call with each of `samples`.

    Operators from packages of `case` are quantized as well.
    """
    quantizer = quantizer_of(target)
    if case is not None and case.features.op_packages:
        usual = quantizer.default_quant_config.quant_config
        quantizer.add_custom_quant_annotations([annotation_of(case, usual)])
    own = [name for name, _ in exported.named_buffers()]
    prepared: torch.fx.GraphModule = prepare_pt2e(exported, quantizer)
    # Only the module's own buffers are restored; the buffers of the observers keep their ranges.
    with state_kept(prepared, own):
        for inputs in samples:
            prepared(*copies(inputs))
    return prepared


def quantizer_of(target: Target) -> QnnQuantizer:
    """Return the quantizer for the backend and precision of `target`, with the backend's rules."""
    quantizer = _Quantizer(backend=backend_type(target), soc_model=qc_schema.QcomChipset[target.soc])
    quantizer.set_default_quant_config(QuantDtype[f"use_{target.precision}"], is_qat=False, **_RULES)
    return quantizer


class _Quantizer(QnnQuantizer):  # type: ignore[misc]
    """Quantizer that sets blocks of weights for precisions with blocks: ExecuTorch needs a block per node name."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        dtype = self.default_quant_config.quant_dtype
        if dtype.name.endswith("_block"):
            blocks = _blocks(model)
            self.set_block_size_map(blocks)
            # A configuration holds the block of the last node that it was applied to: each block needs its own.
            configs = {block: ModuleQConfig(dtype, **_RULES) for block in dict.fromkeys(blocks.values())}
            self.set_submodule_qconfig_list(
                [
                    (lambda node, block=block: blocks.get(node.name) == block, config)
                    for block, config in configs.items()
                ]
            )
        annotated: torch.fx.GraphModule = super().annotate(model)
        return annotated


def _blocks(model: torch.fx.GraphModule) -> dict[str, tuple[int, ...]]:
    blocks = {}
    for node in model.graph.nodes:
        if node.target not in _BLOCK_TARGETS:
            continue
        _, channels, *kernel = node.args[1].meta["val"].shape
        size = next((size for size in _BLOCK_SIZES if channels % size == 0), None)
        # HTP of QNN 2.51 reads only the first position of a larger kernel with blocks: docs/reference/suites.md.
        if size is not None and all(extent == 1 for extent in kernel):
            blocks[node.name] = (1, size, *kernel)
    return blocks


def compiler_specs(
    target: Target,
    versions: Mapping[str, str],
    features: Features = Features(),  # noqa: B008 - frozen
    *,
    packages: qc_schema.QnnExecuTorchOpPackageOptions | None = None,
    saver: bool = False,
) -> list[Any]:
    """Return ExecuTorch's compile specs for `target`, with `features` and their packages.

    `versions` are the other dependencies of the bundle: see key.py.
    """
    backend, options = BACKENDS[target.backend], compile_numbers(target)
    numbers: dict[str, int] = {name: of[target.precision] for name, of in backend.by_precision.items()}
    if backend.host_cpus:
        place = versions[HOST_CPU]
        numbers["target_env"] = backend.host_cpus["adsp" if target.direct and place == "arm" else place]
    numbers |= {name: number for name, number in options.items() if name not in _OF_ALL_BACKENDS}
    numbers |= {name: True for name in _OF_BACKEND if getattr(features, name)}
    generate = getattr(utils, backend.compiler_spec)
    kinds = get_type_hints(generate)
    given: dict[str, Any] = {name: True for name in _OF_SPECS if getattr(features, name)}
    if packages is not None:
        given["op_package_options"] = packages
    return utils.generate_qnn_executorch_compiler_spec(  # type: ignore[no-any-return]
        soc_model=qc_schema.QcomChipset[target.soc],
        backend_options=generate(**{name: kinds[name](number) for name, number in numbers.items()}),
        online_prepare=backend.online_prepare or features.online_prepare,
        saver=saver,
        profile_level=options.get("profile_level", 0),
        **given,
    )


def backend_type(target: Target) -> qc_schema.QnnExecuTorchBackendType:
    """Return ExecuTorch's number for the backend of `target`."""
    return qc_schema.QnnExecuTorchBackendType(BACKENDS[target.backend].qnn_type)


def _to_edge(graphs: Mapping[str, torch.nn.Module], lowering: Lowering, specs: list[Any]) -> EdgeProgramManager:
    target, features = lowering.target, lowering.case.features
    methods = lowering.methods
    passes_job = dep_table = None
    if features.split:
        from farm.builds.compile.flows.split import split_passes  # its imports are missing in ExecuTorch 1.3.1

        passes_job, dep_table = split_passes(features.split)
    with refused_operators() as refused:
        try:
            edge = utils.to_edge_transform_and_lower_to_qnn(
                dict(graphs),
                {name: one.example.inputs for name, one in methods.items()},
                dict.fromkeys(graphs, specs),
                dynamic_shapes={name: one.example.dynamic_shapes for name, one in methods.items()},
                passes_job=passes_job,
                dep_table=dep_table,
                skip_node_id_set=set(features.skip_node_ids),
                skip_node_op_set=set(features.skip_node_ops),
            )
        except Exception as error:
            if "Failed to initialize QNN backend" in str(error):
                library = f"libQnn{target.backend.title()}.so"
                raise MissingToolError(
                    f"{library} of the QNN SDK does not start on this machine (its output is in the build log): "
                    f"docs/reference/backends.md lists SDKs that can compile for the {target.backend} backend"
                ) from error
            if refused:
                # The pass manager raises its own error, with the error of the pass as the cause.
                weighted = any(_WITH_WEIGHTS in str(one) for one in (error, error.__cause__))
                raise DelegationError(target.backend, refused, weighted=weighted) from error
            raise
    return edge
