"""Lowers a few graphs to HTP, some with operators that are excluded from HTP, and prints the results.

Prints the decoded compile specs of a few targets as well, and the result of a compilation for the GPU.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import operator
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from executorch.backends.qualcomm.partition.utils import generate_qnn_executorch_option
from executorch.backends.qualcomm.serialization import qc_schema_serialize
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir.dialects._ops import ops as exir_ops
from torch._export import utils
from torch._higher_order_ops import executorch_call_delegate
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program
from torch.fx.traceback import NodeSource, NodeSourceAction

from farm.base.errors import FarmError
from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows.delegation import misread_codes, read_delegation
from farm.builds.compile.flows.flow import Example, Lowering, Stopwatch
from farm.builds.compile.flows.node_origins import EdgeOrigins
from farm.builds.compile.flows.op_packages import packages_of
from farm.builds.compile.flows.qualcomm import FLOW, compiler_specs
from farm.builds.compile.flows.shortcuts import graph_code
from farm.builds.compile.flows.shortcuts.composite_operators import cached_kernels, single_scan_per_list
from farm.builds.compile.flows.shortcuts.delegate_options import options_read_once
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.builds.compile.flows.split import split_passes
from farm.builds.compile.protocol import reason_of
from farm.suites.features import Features, OpPackage
from farm.suites.suite import Case, Target

sys.path.append(str(Path(__file__).parents[1]))
from collections.abc import Iterable

from elf_maker import make_elf

INPUTS = (torch.ones(1, 8),)


class Gate(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + 1.0)


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Sequential(Gate())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gate(x) * 2.0)


class End(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.relu(x + 1.0))


class Reused(torch.nn.Module):
    """Four operators; the inputs of the last are the outputs of the first and the third."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(x)
        return torch.sigmoid(first * first) + first


class Branches(torch.nn.Module):
    """Two branches of two operators that do not need each other, until the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.sigmoid(torch.relu(x)), torch.tanh(torch.abs(x))
        return left + right


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x) * x + x


def lower(module: torch.nn.Module, left: Iterable[str] = (), shares: int = 0) -> dict[str, object]:
    specs = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8850, backend_options=generate_htp_compiler_spec(use_fp16=True)
    )
    passes, after = split_passes(shares) if shares else (None, None)
    with less_work():
        edge = to_edge_transform_and_lower_to_qnn(
            module.eval(), INPUTS, specs, skip_node_op_set=set(left), passes_job=passes, dep_table=after
        )
    delegation = read_delegation(edge.exported_program().graph_module)
    origins = EdgeOrigins(edge, Path(__file__).parent, "forward").of(edge.to_executorch())
    return {**delegation._asdict(), "origins": msgspec.to_builtins(origins)}


def misread(on_cpu: torch.dtype, least: int, greatest: int, *, output: bool) -> list[str]:
    """Return the type of the codes on the CPU and in QNN, in a graph that is quantized around a delegate."""
    graph, ops = torch.fx.Graph(), exir_ops.edge.quantized_decomposed
    codes = (0.5, 0, least, greatest, on_cpu)
    value = graph.placeholder("x")
    if not output:
        value = graph.call_function(ops.quantize_per_tensor.default, (value, *codes))
    value = graph.call_function(executorch_call_delegate, (graph.get_attr("lowered_module_0"), value))
    value = graph.call_function(operator.getitem, (value, 0))
    if output:
        value = graph.call_function(ops.dequantize_per_tensor.default, (value, *codes))
    graph.output((value,))
    root = torch.nn.Module()
    root.lowered_module_0 = torch.nn.Module()
    return [str(dtype) for dtype in misread_codes(torch.fx.GraphModule(root, graph)) or ()]


def why_not(module: torch.nn.Module, shares: int) -> str:
    try:
        lower(module, shares=shares)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        return reason_of(error)
    return ""


def specs_of(target: Target, *, virtual: bool = False) -> dict[str, object]:
    versions = {HOST_CPU: "x86" if virtual else "arm"}
    options = flatbuffer_to_option(generate_qnn_executorch_option(compiler_specs(target, versions)))
    return asdict(options)


def compile_for_gpu() -> str:
    try:
        target, versions = Target("SM8650", "gpu", "fp16"), {HOST_CPU: "arm"}
        case = Case("any", "chain", module="", inputs=())
        FLOW(Lowering(Chain(), Example(INPUTS, None), [INPUTS], target, versions, Stopwatch(), case, Path()))
    except FarmError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def op_packages(soc: str, files: dict[str, bytes], **device: Any) -> dict[str, object] | str:
    """Return the compiled parts of a package with `files` and the parts in the bundle; or the refusal."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    target, versions = Target(soc, "htp", "fp16"), {HOST_CPU: "arm"}
    features = Features(op_packages=(OpPackage("Package", "my_ops.mul3.default", "Mul3", "Get", "x86.so", **device),))
    case = Case("any", "mul3", module="", inputs=(), features=features, folder=str(folder))
    try:
        with packages_of(case, target, folder / "bundle") as packages:
            specs = compiler_specs(target, versions, features, packages=packages)
            infos = asdict(flatbuffer_to_option(generate_qnn_executorch_option(specs)))["op_package_options"]
            found = {info["op_package_path"]: info for info in infos["op_package_infos"]}
            # Open the files like QNN, which has only these paths.
            opened = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in found}
    except FarmError as error:
        return str(error).replace(str(folder), "")
    names = {str(path.relative_to(folder / "bundle")) for path in (folder / "bundle").rglob("*.so")}
    return {"infos": found, "opened": opened, "files": sorted(names), "left": sorted(Path.cwd().glob("op_packages"))}


def composite_operators() -> dict[str, object]:
    def names() -> set[str]:
        return {operator.name() for operator in decomp_utils._collect_all_valid_cia_ops()}

    def count() -> None:
        looks.append(1)
        look()

    plain, look, looks = names(), utils._materialize_cpp_cia_ops, list[int]()
    utils._materialize_cpp_cia_ops = count
    with single_scan_per_list():
        inside, first = names(), len(looks)
        with torch.library._scoped_library("farm_test", "DEF") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
            registered = names()
    after = len(looks)
    names()
    return {
        "same": inside == plain,
        "looks": first,
        "new": sorted(registered - plain),
        "looks after": len(looks) - after,
    }


def kernels(*, kept: bool, again: bool = False) -> dict[str, object]:
    """Return the kernels of two composite operators during an override, and whether it is taken back."""
    overridden = {torch.ops.aten.linear.default: refuse, torch.ops.aten.conv2d.default: torch.zeros}

    def shown() -> list[dict[str, str]]:
        return [{str(key): type(one).__name__ for key, one in name.py_kernels.items()} for name in overridden]

    def rules() -> list[bool]:
        return [name in fake_impls.op_implementations_dict for name in overridden]

    before = [dict(name.py_kernels) for name in overridden]
    with cached_kernels() if kept else nullcontext():
        override = exported_program._override_composite_implicit_decomp
        for _ in range(1 + again):
            with override(overridden):
                composite = torch._C.DispatchKey.CompositeImplicitAutograd
                found = {"kernels": shown(), "rules": rules()}
                own = [name.py_kernels[composite] is one for name, one in overridden.items()]
    left = [name.py_kernels == one for name, one in zip(overridden, before, strict=True)]
    return {**found, "own": own, "left": left, "rules left": rules()}


def refuse(*_arguments: object) -> object:
    return NotImplemented


def changed_kernels() -> dict[str, bool]:
    """Return whether a kernel that is registered between two overrides is in the second, and there afterwards."""
    operator, key = torch.ops.aten.linear.default, torch._C.DispatchKey.CPU
    with cached_kernels():
        override = exported_program._override_composite_implicit_decomp
        with override({operator: refuse}):
            pass
        operator.py_impl(key)(refuse)
        with override({operator: refuse}):
            inside = operator.py_kernels[key] is refuse
    after = operator.py_kernels.pop(key) is refuse
    operator._dispatch_cache.clear()
    return {"inside": inside, "after": after}


def read_options() -> dict[str, object]:
    """Return how often options are decoded, and whether a reader sees the changes of another one."""

    def count(*arguments: object) -> None:
        runs.append(1)
        run(*arguments)

    runs, run = list[int](), qc_schema_serialize._flatc_decompile
    specs = [compiler_specs(Target(soc, "htp", "8a8w"), {HOST_CPU: "arm"}) for soc in ("SM8650", "SM8750")]
    first, other = (generate_qnn_executorch_option(one) for one in specs)
    qc_schema_serialize._flatc_decompile = count
    try:
        with options_read_once():
            mine, yours = flatbuffer_to_option(first), flatbuffer_to_option(first)
            same = mine == yours
            mine.online_prepare = not mine.online_prepare
            socs = [int(flatbuffer_to_option(one).soc_info.soc_model) for one in (first, other)]
            found = {"same": same, "own": mine != flatbuffer_to_option(first), "socs": socs, "runs": len(runs)}
        flatbuffer_to_option(first)
    finally:
        qc_schema_serialize._flatc_decompile = run
    return {**found, "runs after": len(runs)}


def late_code() -> dict[str, object]:
    """Return the answers of a graph module whose code is generated late."""
    counted = list[int]()
    plain = torch.fx.Graph.python_code

    def count(graph: torch.fx.Graph, **given: object) -> object:
        counted.append(1)
        return plain(graph, **given)

    def ones(module: torch.nn.Module) -> list[float]:
        return module(torch.zeros(2)).tolist()

    torch.fx.Graph.python_code = count
    try:
        with graph_code.late_code():
            module = torch.fx.symbolic_trace(End())
            for _ in range(3):
                module.recompile()
            found: dict[str, object] = {"before it is read": len(counted), "relu": "relu" in module.code}
            found["signature"] = list(inspect.signature(module.forward).parameters)
            for node in module.graph.nodes:
                if node.target is torch.relu:
                    node.target = torch.neg
            found["generated code"] = ones(module)
            module.recompile()
            found["edited"] = ones(module)
            found["printed"] = "neg" in str(module)
            found["generated"] = len(counted)
            copied, later = copy.deepcopy(module), torch.fx.GraphModule(module, module.graph)
        found["outlives"] = [ones(copied), ones(later)]
        counted.clear()
        later.recompile()
        return found | {"afterwards": len(counted)}
    finally:
        torch.fx.Graph.python_code = plain


def shared_origins() -> dict[str, bool]:
    node = next(iter(torch.fx.symbolic_trace(End()).graph.nodes))
    source = NodeSource(node, "pass", NodeSourceAction.CREATE)
    with graph_code.shared_origins():
        inside = copy.deepcopy([source])[0]
    after = copy.deepcopy([source])[0]
    return {"inside": inside is source, "after": after is source, "equal": after == source}


LPAI = (
    ("affinity", "hard"), ("client_perf_type", "non_real_time"), ("core_selection", "2"), ("fps", "9"),
    ("ftrt_ratio", "30"), ("lpai_fps", "77"),
)  # fmt: skip
GPU = (("precision", "hybrid"), ("use_memory_optimizations", "false"), ("use_weight_sharing", "true"))
PACKAGE = {
    "x86.so": make_elf(62, wide=True), "arm.so": make_elf(183, wide=True),
    "v75.so": make_elf(164, 0x75), "v79.so": make_elf(164, 0x79),
}  # fmt: skip
HTP = (("htp_performance_mode", "balanced"), ("profile_level", "optrace"), ("use_dlbc", "true"))

if __name__ == "__main__":
    sys.stdout.write(json.dumps({
        "graphs": {
            "whole": lower(Chain()),
            "split": lower(Chain(), ["aten.sigmoid.default"]),
            "end": lower(End(), ["aten.sigmoid.default"]),
            "shares": lower(Reused(), shares=4),
            "branches": lower(Branches(), shares=3),
            "nothing": lower(Sums(), ["aten.add.Tensor", "aten.mul.Tensor"]),
        },
        "specs": {
            "lpai": specs_of(Target("SM8850", "lpai", "8a8w")),
            "lpai virtual": specs_of(Target("SM8850", "lpai", "8a8w"), virtual=True),
            "lpai options": specs_of(Target("SM8850", "lpai", "8a8w", LPAI)),
            "gpu fp16": specs_of(Target("SM8650", "gpu", "fp16")),
            "gpu fp32": specs_of(Target("SM8650", "gpu", "fp32")),
            "gpu options": specs_of(Target("SM8650", "gpu", "fp16", GPU)),
            "htp fp16": specs_of(Target("SM8650", "htp", "fp16")),
            "htp options": specs_of(Target("SM8650", "htp", "8a8w", HTP)),
        },
        "gpu": compile_for_gpu(),
        "codes": {
            "16 in 32": [misread(torch.int32, 0, 65535, output=output) for output in (False, True)],
            "16 in 16": [misread(torch.uint16, 0, 65535, output=output) for output in (False, True)],
            "8 in 8": [misread(torch.uint8, 0, 255, output=output) for output in (False, True)],
        },
        "too many shares": why_not(Branches(), shares=99),
        "composite": composite_operators(),
        "kernels": {
            "torch": kernels(kept=False),
            "first": kernels(kept=True),
            "again": kernels(kept=True, again=True),
            "changed": changed_kernels(),
        },
        "read options": read_options(),
        "late code": late_code(),
        "shared origins": shared_origins(),
        "op packages": {
            "on devices": op_packages("SM8650", PACKAGE, android="arm.so", hexagon={"v75": "v75.so"}),
            "another DSP": op_packages("SM8750", PACKAGE, android="arm.so", hexagon={"v75": "v75.so"}),
            "mixed up": op_packages("SM8650", PACKAGE, android="x86.so", hexagon={"v75": "v75.so"}),
            "newer DSP": op_packages("SM8650", PACKAGE, android="arm.so", hexagon={"v75": "v79.so"}),
            "no library": op_packages("SM8650", {"x86.so": b"#!/bin/sh"}),
        },
    }))  # fmt: skip
