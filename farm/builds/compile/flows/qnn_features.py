"""Features of ExecuTorch's Qualcomm compiler that cases select (farm.suites.features). Imports executorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option, option_to_flatbuffer
from executorch.backends.qualcomm.utils.utils import update_spill_fill_size
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass

from farm.base.errors import ConfigError, MissingToolError
from farm.builds.bundles.bundle import SAVER
from farm.builds.compile.flows.delegation import read_delegation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from executorch.exir import EdgeProgramManager
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    from farm.suites.features import Features
    from farm.suites.suite import Case

# Files of QNN's Saver.
_SAVED = ("saver_output.c", "params.bin")


def specs_of(features: Features) -> dict[str, Any]:
    """Return `features` as keywords of ExecuTorch's `generate_qnn_executorch_compiler_spec`."""
    return {
        name: True for name in ("shared_buffer", "dump_intermediate_outputs", "use_mha2sha") if getattr(features, name)
    }


def switches_of(features: Features) -> dict[str, bool]:
    """Return the enabled `features` that are keywords of a backend's compiler specs in ExecuTorch."""
    names = ("use_multi_contexts", "use_weight_sharing")
    return {name: True for name in names if getattr(features, name)}


def serialization(features: Features, alignment: int, *, direct: bool = False) -> ExecutorchBackendConfig:
    """Return the serialization settings of a program with `features`; `direct` selects direct mode."""
    if not features.shared_buffer and not direct:
        return ExecutorchBackendConfig(segment_alignment=alignment)
    # The runner provides memory of the DSP for inputs and outputs; ExecuTorch's export_utils.py plans none either.
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return ExecutorchBackendConfig(segment_alignment=alignment, memory_planning_pass=planning)


def share_spill_fill(edge: EdgeProgramManager, features: Features, methods: Mapping[str, Any]) -> int | None:
    """Let the contexts of a lowered program share a buffer, and return its size in bytes; None without one."""
    if not features.use_multi_contexts:
        return None
    return max(int(update_spill_fill_size(edge.exported_program(name))) for name in methods)


def require_skipped(edge: EdgeProgramManager, case: Case) -> None:
    """Raise ConfigError for an operator or node that the case leaves to the CPU and that is not in the program."""
    features, manifest = case.features, case.manifest
    if not (features.skip_node_ops or features.skip_node_ids):
        return
    module = edge.exported_program(case.method).graph_module
    left = read_delegation(module)
    nodes = {node.name for node in module.graph.nodes}
    for key, names, there in (
        ("skip_node_ops", features.skip_node_ops, {*left.cpu_ops, *left.edge_ops}),
        ("skip_node_ids", features.skip_node_ids, nodes),
    ):
        if missing := [name for name in names if name not in there]:
            place = f"case.{case.name}.features.{key}"
            left_over = ", ".join(sorted({*left.cpu_ops})) or "nothing"
            raise ConfigError(
                manifest, place, f"{missing[0]!r} is nowhere in the program; left to the CPU: {left_over}"
            )


def record_calls(lower: Callable[[list[CompileSpec]], object], specs: list[CompileSpec], folder: Path) -> None:
    """Record QNN's calls of a lowering in the folder SAVER of `folder`; `specs` are the specs of ExecuTorch's saver.

    ExecuTorch 1.5 raises SystemExit after it has recorded the first method. Raises MissingToolError without a record.
    """
    place = folder / SAVER
    for spec in specs:
        options = flatbuffer_to_option(spec.value)
        options.saver_output_dir = str(place)
        spec.value = option_to_flatbuffer(options)
    try:
        lower(specs)
    except SystemExit:
        if all((place / name).is_file() for name in _SAVED):
            return
    raise MissingToolError(f"QNN's Saver left no {' and '.join(_SAVED)}: its words are in the build log")
