"""Shortcuts of a compilation: equal results with fewer calls of torch, and none for versions that were not tried."""

from __future__ import annotations

import copy
import inspect
import io
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from executorch.backends.qualcomm.partition.utils import generate_qnn_executorch_option
from executorch.backends.qualcomm.serialization import qc_schema_serialize
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from executorch.backends.qualcomm.utils import qnn_sdk_setup
from executorch.exir.dialects.edge import _ops
from made_modules import buffer_of, module_of
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from torch._dynamo import functional_export
from torch._export import utils
from torch.export import ExportedProgram, _trace, decomp_utils
from torchao.quantization.pt2e import qat_utils
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows.flow import Example, Lowering, Stopwatch
from farm.builds.compile.flows.qualcomm import calibrate, compiler_specs
from farm.builds.compile.flows.shortcuts import executorch_reads, graph_code, tried
from farm.builds.compile.flows.shortcuts import shared_exports as sharing
from farm.builds.compile.flows.shortcuts.bn_patterns import bn_patterns
from farm.builds.compile.flows.shortcuts.composite_operators import single_scan_per_list
from farm.builds.compile.flows.shortcuts.executorch_reads import (
    edge_types_by_libyaml,
    options_read_once,
    vendor_from_kernel,
)
from farm.builds.compile.flows.shortcuts.flat_graphs import flat_graphs
from farm.builds.compile.flows.shortcuts.settled_programs import settled_programs
from farm.suites.suite import Case, Target

X = torch.linspace(-1.0, 1.0, 32).reshape(1, 4, 8)
INPUTS = (X,)
TARGET = Target("SM8650", "htp", "8a8w")
CPU = Target("SM8650", "xnnpack", "fp32")


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


def writes_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls.add_(1)
    return x + self.calls


def writes_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0) * 2.0


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """Yield a list that grows with each call of a function."""
    calls: list[int] = []
    function = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    with patch.object(owner, name, count):
        yield calls


def export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...] = INPUTS, **options: Any) -> ExportedProgram:
    return torch.export.export(module, inputs, strict=True, **options)


def lowering(module: torch.nn.Module, case: str = "net", **changes: Any) -> Lowering:
    with torch.no_grad():
        outputs = [tuple(module(*INPUTS))]
    made = Case("mine", case, module="any", inputs=())
    plain = Lowering(module, Example(INPUTS, None), [INPUTS], TARGET, {}, Stopwatch(), made, Path(), outputs=outputs)
    return plain._replace(**changes)


def hooked() -> torch.nn.Module:
    """Return a module with a hook, which is code beside its class."""
    made = Net()
    made.register_forward_hook(lambda _module, _inputs, outputs: outputs)
    return made


PLAIN = lowering(Net())


@pytest.mark.parametrize(
    ("lowerings", "exports"),
    [
        ((PLAIN, lowering(Net())), 1),
        ((PLAIN, lowering(Net(weight=0.75))), 2),
        ((PLAIN, lowering(Net(factor=3.0))), 2),
        ((PLAIN, lowering(Net(most=8.0))), 2),
        # Both signs of zero.
        ((lowering(Net(weight=0.0)), lowering(Net(weight=-0.0))), 2),
        # Another class of the same name, as after an edit.
        ((PLAIN, lowering(type("Net", (Net,), {})())), 2),
        ((lowering(hooked()),) * 2, 2),
        ((lowering(Net(), target=CPU),) * 2, 2),
        ((PLAIN, lowering(Net(), "other")), 2),
        ((lowering(Net(), outputs=()),) * 2, 2),
        ((PLAIN, lowering(Net(), "other"), lowering(Net())), 3),
    ],
)
def test_an_export_is_shared_by_modules_that_are_equal_and_by_no_others(
    lowerings: tuple[Lowering, ...], exports: int
) -> None:
    sharing._last.clear()
    with counted(torch.export, "export") as calls, sharing.shared_exports():
        for one in lowerings:
            one.export()
    assert len(calls) == exports


def test_an_export_whose_weights_were_written_is_not_shared() -> None:
    sharing._last.clear()
    with counted(torch.export, "export") as calls, sharing.shared_exports():
        for one in (lowering(Net()), lowering(Net())):
            next(iter(one.export().state_dict.values())).data.add_(1.0)
    assert len(calls) == 2


def shown(program: ExportedProgram) -> list[str]:
    """Return everything of a program that a later step reads."""
    nodes = [
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {getattr(node.meta.get('val'), 'shape', '')} "
        f"{[str(kind) for _, kind in (node.meta.get('nn_module_stack') or {}).values()]} "
        f"{[str(function) for _, function in node.meta.get('source_fn_stack') or []]}"
        for node in program.graph.nodes
    ]
    return [*nodes, str(program.graph_signature), str(list(program.state_dict)), str(program.call_spec)]


DYNAMIC = {"dynamic_shapes": {"input": {1: torch.export.Dim("size", min=2, max=8)}}}


@pytest.mark.parametrize(
    ("graph", "inputs", "options", "traced"),
    [
        (lambda: convert_pt2e(calibrate(export(Net()).module(), [INPUTS], TARGET)), INPUTS, {}, 0),
        (lambda: export(Net()).module(), INPUTS, {}, 0),
        (lambda: export(module_of(lambda _, x, _unread: torch.relu(x)), (X, X)).module(), (X, X + 1), {}, 0),
        (lambda: export(module_of(writes_buffer, calls=buffer_of(0.0))).module(), INPUTS, {}, 1),
        (lambda: export(module_of(lambda _, x: x + torch.rand_like(x))).module(), INPUTS, {}, 1),
        (lambda: export(torch.nn.ReLU(), **DYNAMIC).module(), INPUTS, DYNAMIC, 1),
    ],
    ids=["quantized", "not quantized", "unread input", "written buffer", "random", "dynamic"],
)
def test_a_flat_graph_is_exported_without_dynamo_to_the_same_program_and_any_other_with_it(
    graph: Callable[[], torch.nn.Module], inputs: tuple[torch.Tensor, ...], options: dict[str, Any], traced: int
) -> None:
    module = graph()
    plain = shown(export(module, inputs, **options))
    with counted(functional_export, "_dynamo_graph_capture_for_export") as calls, flat_graphs():
        assert shown(export(module, inputs, **options)) == plain
    assert len(calls) == traced


def test_a_program_without_operators_of_the_table_is_its_own_decomposition() -> None:
    sigmoid, relu = torch.ops.aten.sigmoid.default, torch.ops.aten.relu.default
    with settled_programs():
        first = export(Net()).run_decompositions({})
        assert first.run_decompositions({}) is first
        assert first.run_decompositions({sigmoid: relu}) is not first
        assert first.run_decompositions(torch.export.default_decompositions()) is not first
        edited = export(Net()).run_decompositions({})
        next(node for node in edited.graph.nodes if node.target is sigmoid).target = relu
        assert edited.run_decompositions({}) is not edited
        for module in (module_of(writes_buffer, calls=buffer_of(0.0)), module_of(writes_input)):
            written = export(module).run_decompositions({})
            assert written.run_decompositions({}) is not written
    assert first.run_decompositions({}) is not first


def test_no_pattern_is_exported_that_matches_nothing() -> None:
    graph = export(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.ReLU()).eval()).module()
    before = [f"{node.op} {node.name} {node.args}" for node in graph.graph.nodes]
    with counted(qat_utils, "_get_aten_graph_module_for_pattern") as calls, bn_patterns():
        short = qat_utils._fold_conv_bn_qat(graph)
    # torchao itself exports its patterns for 15 s, and leaves a graph without convolutions as it was.
    assert calls == []
    assert [f"{node.op} {node.name} {node.args}" for node in short.graph.nodes] == before


def test_the_vendor_of_the_processor_is_the_same_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read = qnn_sdk_setup._read_cpu_vendor
    asked = read()
    with vendor_from_kernel(), patch.object(subprocess, "Popen", side_effect=AssertionError):
        assert qnn_sdk_setup._read_cpu_vendor() == asked
    with vendor_from_kernel(), patch.object(executorch_reads, "_PROCESSORS", Path(os.devnull)):
        assert qnn_sdk_setup._read_cpu_vendor() == asked
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with vendor_from_kernel():
        assert qnn_sdk_setup._read_cpu_vendor is read


def test_the_types_of_edge_operators_are_the_same_from_another_parser() -> None:
    plain = _ops._load_edge_dialect_info()
    with edge_types_by_libyaml(), patch.object(YAML, "get_constructor_parser", side_effect=AssertionError):
        assert _ops._load_edge_dialect_info() == plain
    assert len(plain) > 100
    # Another user of ruamel.yaml gets its own parser: comments stay, and files are read.
    with edge_types_by_libyaml():
        assert isinstance(YAML().load("a: 1  # why"), CommentedMap)
        assert YAML(typ="safe").load(io.StringIO("a: 1")) == {"a": 1}


# Shortcuts that are not taken with other versions, with a function that each replaces.
GATED = (
    (settled_programs, ExportedProgram, "run_decompositions"),
    (flat_graphs, _trace, "_export_to_torch_ir"),
    (bn_patterns, qat_utils, "_fold_conv_bn_qat_helper"),
    (edge_types_by_libyaml, YAML, "load"),
)


@pytest.mark.parametrize("known", [True, False])
def test_untried_versions_are_not_changed(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "is_tried", lambda: known)
    for shortcut, owner, name in GATED:
        before = getattr(owner, name)
        with shortcut():
            assert (getattr(owner, name) is not before) == known, name


@pytest.mark.parametrize(
    ("package", "known", "unknown"),
    [
        ("torch", ["2.13.0", "2.13.0+cpu", "2.13.0+cu126"], ["2.12.1", "2.14.0", "2.13.0a0+gita1b2", "2.13.0+1234567"]),
        ("executorch", ["1.5.1"], ["1.6.0a0+1234567", "1.5.1+1234567", "1.5.0", "1.4.1", "1.3.1", ""]),
        ("torchao", ["0.18.0"], ["0.19.0", ""]),
    ],
)
def test_versions_that_were_tried_are_releases_for_any_processor(
    package: str, known: list[str], unknown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tried.installed()
    for version in (*known, *unknown):
        monkeypatch.setattr(tried, "installed", lambda one=version: {**here, package: one})
        assert tried.is_tried() == (version in known), version


def composite_names() -> set[str]:
    return {operator.name() for operator in decomp_utils._collect_all_valid_cia_ops()}


def test_the_list_of_composite_operators_is_the_same_after_one_look_and_has_later_registrations() -> None:
    plain = composite_names()
    with counted(utils, "_materialize_cpp_cia_ops") as looks:
        with single_scan_per_list():
            assert composite_names() == plain
            assert len(looks) == 1
            with torch.library._scoped_library("farm_test", "DEF") as library:
                library.define("double(Tensor x) -> Tensor")
                library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
                assert composite_names() - plain == {"farm_test::double"}
        looks.clear()
        composite_names()
        assert len(looks) > 1


def test_options_are_decoded_once_and_each_reader_has_its_own() -> None:
    specs = [compiler_specs(Target(soc, "htp", "8a8w"), {HOST_CPU: "arm"}) for soc in ("SM8650", "SM8750")]
    first, other = (generate_qnn_executorch_option(one) for one in specs)
    with counted(qc_schema_serialize, "_flatc_decompile") as runs:
        with options_read_once():
            mine, yours = flatbuffer_to_option(first), flatbuffer_to_option(first)
            assert mine == yours
            mine.online_prepare = not mine.online_prepare
            assert flatbuffer_to_option(first) == yours
            assert [int(flatbuffer_to_option(one).soc_info.soc_model) for one in (first, other)] == [57, 69]
            assert len(runs) == 2
        flatbuffer_to_option(first)
        assert len(runs) == 3


def test_code_of_a_graph_is_generated_when_it_is_read_and_after_each_edit() -> None:
    def ones(module: torch.nn.Module) -> list[float]:
        return module(torch.zeros(2)).tolist()

    with counted(torch.fx.Graph, "python_code") as generated:
        with graph_code.late_code():
            module = torch.fx.symbolic_trace(module_of(lambda _, x: torch.sigmoid(torch.relu(x + 1.0))))
            for _ in range(3):
                module.recompile()
            assert generated == []
            assert "relu" in module.code
            assert list(inspect.signature(module.forward).parameters) == ["x"]
            for node in module.graph.nodes:
                if node.target is torch.relu:
                    node.target = torch.neg
            assert ones(module)[0] == pytest.approx(1 / (1 + math.exp(-1.0)))
            module.recompile()
            edited = ones(module)
            assert edited[0] == pytest.approx(1 / (1 + math.exp(1.0)))
            assert "neg" in str(module)
            assert len(generated) == 2, "once for each state of the graph that was read"
            copied, later = copy.deepcopy(module), torch.fx.GraphModule(module, module.graph)
        assert ones(copied) == ones(later) == edited
        generated.clear()
        later.recompile()
        assert len(generated) == 1
