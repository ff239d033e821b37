"""Takes shortcuts one by one with small graphs, and prints as JSON how often torch was asked and what came out."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from executorch.backends.qualcomm.utils import qnn_sdk_setup
from executorch.exir.dialects.edge import _ops
from ruamel.yaml import YAML
from torch._dynamo import functional_export
from torch.export import ExportedProgram, _trace
from torchao.quantization.pt2e import qat_utils
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from farm.builds.compile.flows.flow import Example, Lowering, Stopwatch
from farm.builds.compile.flows.qualcomm import calibrate
from farm.builds.compile.flows.shortcuts import processor_vendor, tried
from farm.builds.compile.flows.shortcuts import shared_exports as sharing
from farm.builds.compile.flows.shortcuts.bn_patterns import bn_patterns
from farm.builds.compile.flows.shortcuts.edge_types import edge_types_by_libyaml
from farm.builds.compile.flows.shortcuts.flat_graphs import flat_graphs
from farm.builds.compile.flows.shortcuts.processor_vendor import vendor_from_kernel
from farm.builds.compile.flows.shortcuts.settled_programs import settled_programs
from farm.suites.suite import Case, Target

INPUTS = (torch.linspace(-1.0, 1.0, 32).reshape(1, 4, 8),)
TARGET = Target("SM8650", "htp", "8a8w")
CPU = Target("SM8650", "xnnpack", "fp32")
read_cpu_vendor = qnn_sdk_setup._read_cpu_vendor

# Shortcuts that are not taken with other versions, with a function that each replaces.
GATED = (
    (settled_programs, ExportedProgram, "run_decompositions"),
    (flat_graphs, _trace, "_export_to_torch_ir"),
    (bn_patterns, qat_utils, "_fold_conv_bn_qat_helper"),
    (edge_types_by_libyaml, YAML, "load"),
)
VERSIONS = {
    "torch": ("2.13.0", "2.13.0+cpu", "2.13.0+cu126", "2.12.1", "2.14.0", "2.13.0a0+gitabc123", "2.13.0+1234567"),
    "executorch": ("1.5.1", "1.6.0a0+1234567", "1.5.1+1234567", "1.5.0", "1.4.1", "1.4.0", "1.3.1", ""),
    "torchao": ("0.18.0", "0.19.0"),
}


class Net(torch.nn.Module):
    """Module with weights, an operator of two results, and a number that is no weight."""

    def __init__(self, weight: float = 0.5, factor: float = 2.0, most: float = 9.0) -> None:
        super().__init__()
        self.most = most
        self.linear, self.factor = torch.nn.Linear(8, 8), factor
        torch.nn.init.constant_(self.linear.weight, weight)
        torch.nn.init.constant_(self.linear.bias, 0.25)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.clamp(x, max=self.most)
        one, other = torch.split(self.linear(x) * self.factor, 4, dim=2)
        return torch.sigmoid(other), one


class Writes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class WritesInput(torch.nn.Module):
    """Module that writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x * 2.0


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Unread(torch.nn.Module):
    def forward(self, x: torch.Tensor, _unread: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x))


def counted(owner: Any, name: str, act: Callable[[], object]) -> int:
    """Return how often `act` calls a function."""
    calls: list[int] = []
    function = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    with patch.object(owner, name, count):
        act()
    return len(calls)


def export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...] = INPUTS, **options: Any) -> ExportedProgram:
    return torch.export.export(module, inputs, strict=True, **options)


def lowering(module: torch.nn.Module, case: str = "net") -> Lowering:
    with torch.no_grad():
        outputs = module(*INPUTS)
    made = Case("mine", case, module="any", inputs=())
    return Lowering(
        module, Example(INPUTS, None), [INPUTS], TARGET, {}, Stopwatch(), made, Path(), outputs=[tuple(outputs)]
    )


def edited() -> torch.nn.Module:
    """Return a module of another class with the same name and weights, as after an edit of its file."""
    made: torch.nn.Module = type("Net", (Net,), {})()
    return made


def hooked() -> torch.nn.Module:
    """Return a module with a hook, which is code beside its class."""
    made = Net()
    made.register_forward_hook(lambda _module, _inputs, outputs: outputs)
    return made


def exports(*lowerings: Lowering, written: bool = False) -> int:
    """Return how many of `lowerings`, one after the other, are exported; `written` for a step that writes weights."""

    def act() -> None:
        with sharing.shared_exports():
            for one in lowerings:
                exported = one.export()
                if written:
                    next(iter(exported.state_dict.values())).data.add_(1.0)

    sharing._last.clear()
    return counted(torch.export, "export", act)


def shown(program: ExportedProgram) -> list[str]:
    """Return everything of a program that a later step reads."""
    nodes = [
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {getattr(node.meta.get('val'), 'shape', '')} "
        f"{[str(kind) for _, kind in (node.meta.get('nn_module_stack') or {}).values()]} "
        f"{[str(function) for _, function in node.meta.get('source_fn_stack') or []]}"
        for node in program.graph.nodes
    ]
    return [*nodes, str(program.graph_signature), str(list(program.state_dict)), str(program.call_spec)]


def quantized(module: torch.nn.Module) -> torch.nn.Module:
    graph: torch.nn.Module = convert_pt2e(calibrate(export(module).module(), [INPUTS], TARGET))
    return graph


def flat(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...] = INPUTS, **options: Any) -> dict[str, object]:
    """Return whether the export of a graph is the same with the shortcut, and how often dynamo traced it."""
    plain, short = shown(export(module, inputs, **options)), list[str]()

    def act() -> None:
        with flat_graphs():
            short.extend(shown(export(module, inputs, **options)))

    traced = counted(functional_export, "_dynamo_graph_capture_for_export", act)
    return {"same": plain == short, "traced": traced}


def settled() -> dict[str, bool]:
    """Return which decompositions of a program give the program itself."""
    table = torch.export.default_decompositions()
    with settled_programs():
        first = export(Net()).run_decompositions({})
        again = first.run_decompositions({})
        other = first.run_decompositions({torch.ops.aten.sigmoid.default: torch.ops.aten.relu.default})
        whole = first.run_decompositions(table)
        edited = export(Net()).run_decompositions({})
        node = next(node for node in edited.graph.nodes if node.target is torch.ops.aten.sigmoid.default)
        node.target = torch.ops.aten.relu.default
        after_edit = edited.run_decompositions({})
        written = [export(module).run_decompositions({}) for module in (Writes(), WritesInput())]
    return {
        "nothing to decompose": again is first,
        "an operator of the table": other is first,
        "all operators": whole is first,
        "an edited graph": after_edit is edited,
        "a written buffer or input": any(one.run_decompositions({}) is one for one in written),
        "outside": first.run_decompositions({}) is first,
    }


def patterns(*, short: bool) -> dict[str, object]:
    """Return how many patterns torchao exports for a graph with batch_norm alone, and the graph afterwards."""
    graph = export(Norm().eval()).module()
    found: list[torch.fx.GraphModule] = []

    def act() -> None:
        if short:
            with bn_patterns():
                found.append(qat_utils._fold_conv_bn_qat(graph))
        else:
            found.append(qat_utils._fold_conv_bn_qat(graph))

    exported = counted(qat_utils, "_get_aten_graph_module_for_pattern", act) if short else -1
    if not short:
        act()
    return {"exported": exported, "graph": [f"{node.op} {node.name} {node.args}" for node in found[0].graph.nodes]}


def vendor() -> dict[str, bool]:
    """Return what ExecuTorch learns about the processor with the shortcut."""
    asked = qnn_sdk_setup._read_cpu_vendor()
    no_process = patch.object(subprocess, "Popen", side_effect=AssertionError)
    no_vendor = patch.object(processor_vendor, "_PROCESSORS", Path(os.devnull))
    no_package = patch("importlib.util.find_spec", lambda _: None)
    with vendor_from_kernel(), no_process:
        same = qnn_sdk_setup._read_cpu_vendor() == asked
    with vendor_from_kernel(), no_vendor:
        other = qnn_sdk_setup._read_cpu_vendor() == asked
    with no_package, vendor_from_kernel():
        unchanged = qnn_sdk_setup._read_cpu_vendor is read_cpu_vendor
    return {"without a process": same, "not from the kernel": other, "without py-cpuinfo": unchanged}


def edge_types() -> dict[str, bool]:
    """Return whether the types of edge operators are the same with the shortcut."""
    plain = _ops._load_edge_dialect_info()
    with edge_types_by_libyaml(), patch.object(YAML, "get_constructor_parser", side_effect=AssertionError):
        short = _ops._load_edge_dialect_info()
    return {"same": short == plain, "many": len(plain) > 100}


def untried(package: str) -> int:
    """Return how many functions of torch and torchao are replaced with a version of `package` that was not tried."""
    others = {**tried.installed(), package: "9.9.9"}
    replaced = 0
    with patch.object(tried, "installed", lambda: others):
        for shortcut, owner, name in GATED:
            before = getattr(owner, name)
            with shortcut():
                replaced += getattr(owner, name) is not before
    return replaced


def main() -> None:
    dim = torch.export.Dim("size", min=2, max=8)
    print(  # noqa: T201 - the output of this script
        json.dumps(
            {
                "exports": {
                    "made again": exports(lowering(Net()), lowering(Net())),
                    "other weights": exports(lowering(Net()), lowering(Net(weight=0.75))),
                    "another number": exports(lowering(Net()), lowering(Net(factor=3.0))),
                    "a number without effect": exports(lowering(Net()), lowering(Net(most=8.0))),
                    "the other sign of zero": exports(lowering(Net(weight=0.0)), lowering(Net(weight=-0.0))),
                    "an edited class": exports(lowering(Net()), lowering(edited())),
                    "a hook": exports(*[lowering(hooked())] * 2),
                    "for the CPU": exports(*[lowering(Net())._replace(target=CPU)] * 2),
                    "written weights": exports(lowering(Net()), lowering(Net()), written=True),
                    "another case": exports(lowering(Net()), lowering(Net(), "other")),
                    "unknown outputs": exports(*[lowering(Net())._replace(outputs=())] * 2),
                    "another in between": exports(lowering(Net()), lowering(Net(), "other"), lowering(Net())),
                },
                "flat": {
                    "quantized": flat(quantized(Net())),
                    "not quantized": flat(export(Net()).module()),
                    "written buffer": flat(export(Writes()).module()),
                    "random": flat(export(Draws()).module()),
                    "unread input": flat(export(Unread(), (*INPUTS, *INPUTS)).module(), (INPUTS[0], INPUTS[0] + 1)),
                    "dynamic": flat(
                        export(torch.nn.ReLU(), dynamic_shapes={"input": {1: dim}}).module(),
                        dynamic_shapes={"input": {1: dim}},
                    ),
                },
                "settled": settled(),
                "vendor": vendor(),
                "edge types": edge_types(),
                "patterns": [patterns(short=True), patterns(short=False)],
                "replaced": {package: untried(package) for package in ("", *tried.TRIED)},
                "versions": {
                    f"{package} {version}": tried.is_tried({**tried.installed(), package: version})
                    for package, versions in VERSIONS.items()
                    for version in versions
                },
            }
        )
    )


if __name__ == "__main__":
    main()
