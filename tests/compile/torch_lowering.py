"""Lowering: parts of a graph that a backend takes, settings in compile specs, and op packages in a program.

Graphs are lowered to HTP, some with operators that are excluded from HTP. Libraries of op packages are ELF headers.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from elf_maker import make_elf
from executorch.backends.qualcomm.partition.utils import generate_qnn_executorch_option
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir.dialects._ops import ops as exir_ops
from made_modules import module_of
from torch._higher_order_ops import executorch_call_delegate

from farm.base.backends.registry import BACKENDS
from farm.base.errors import ConfigError, DelegationError, MissingToolError
from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows.edge_nodes import EdgeOrigins, misread_codes, read_delegation
from farm.builds.compile.flows.flow import Example, Lowering, Stopwatch
from farm.builds.compile.flows.qualcomm import FLOW, compiler_specs, packages_of, refuse_control_flow
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.builds.compile.flows.split import split_passes
from farm.builds.compile.protocol import reason_of
from farm.suites.suite import Case, Features, InputSpec, OpPackage, Target

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


def reused(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the result of four operators; the inputs of the last are the outputs of the first and the third."""
    first = torch.relu(x)
    return torch.sigmoid(first * first) + first


def branches(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of two branches of two operators that do not need each other."""
    left, right = torch.sigmoid(torch.relu(x)), torch.tanh(torch.abs(x))
    return left + right


def lower(module: torch.nn.Module, excluded: Iterable[str] = (), shares: int = 0) -> Any:
    specs = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8850, backend_options=generate_htp_compiler_spec(use_fp16=True)
    )
    passes, after = split_passes(shares) if shares else (None, None)
    with less_work():
        return to_edge_transform_and_lower_to_qnn(
            module.eval(), INPUTS, specs, skip_node_op_set=set(excluded), passes_job=passes, dep_table=after
        )


SIGMOID, COPY = "aten.sigmoid.default", "dim_order_ops._clone_dim_order.default"


@pytest.mark.parametrize(
    ("module", "excluded", "shares", "partitions", "cpu_ops"),
    [
        (Chain(), [], 0, 1, {}),
        # The operator at the end is on the CPU though there is one partition.
        (module_of(lambda _, x: torch.sigmoid(torch.relu(x + 1.0))), [SIGMOID], 0, 1, {SIGMOID: 1}),
        # No value goes around a copy: the output of the first operator is copied once, for the second and for the last.
        (module_of(reused), [], 4, 4, {COPY: 3}),
        # Branches that do not need each other are no shares of their own: ExecuTorch would join them again.
        (module_of(branches), [], 3, 3, {COPY: 4}),
        (
            module_of(lambda _, x: (x + x) * x + x),
            ["aten.add.Tensor", "aten.mul.Tensor"],
            0,
            0,
            {"aten.add.Tensor": 2, "aten.mul.Tensor": 1},
        ),
    ],
)
def test_partitions_and_operators_on_the_cpu_are_counted(
    module: torch.nn.Module, excluded: list[str], shares: int, partitions: int, cpu_ops: dict[str, int]
) -> None:
    found = read_delegation(lower(module, excluded, shares).exported_program().graph_module)
    assert (found.partitions, found.cpu_ops) == (partitions, cpu_ops)
    assert (found.delegated_ops > 3) == (partitions > 0 and not excluded)


def test_an_error_within_a_pass_is_told_in_place_of_the_list_of_passes() -> None:
    with pytest.raises(Exception, match="SplitGraph") as raised:
        lower(module_of(branches), shares=99)
    assert reason_of(raised.value).startswith("pass SplitGraph: ValueError: ")
    assert reason_of(raised.value).endswith(" operators of the graph need each other in turn: too few for 99 shares")


def test_nodes_of_every_delegate_and_those_on_the_cpu_say_where_they_come_from() -> None:
    edge = lower(Chain(), [SIGMOID])
    split = read_delegation(edge.exported_program().graph_module)
    assert (split.partitions, split.cpu_ops) == (2, {SIGMOID: 1})
    case = Case("any", "chain", module="", inputs=(), folder=str(Path(__file__).parent / "suite"))
    origins = EdgeOrigins(edge, case, "forward").of(edge.to_executorch())
    code = Path(__file__).read_text().splitlines()

    def said(origin: Any) -> tuple[str, str]:
        file, _, line = origin.source.partition(":")
        assert file == Path(__file__).name
        return origin.module, code[int(line) - 1].strip()

    first, second = (origins.calls[call] for call in sorted(origins.calls, key=int))
    [kernel] = origins.kernels.values()
    assert said(first["aten_add_tensor"]) == said(kernel) == ("gate.0", "return torch.sigmoid(x + 1.0)")
    outside = ("", "return torch.relu(self.gate(x) * 2.0)")
    assert said(second["aten_mul_tensor"]) == said(second["aten_relu_default"]) == outside


@pytest.mark.parametrize(
    ("on_cpu", "greatest", "misread"),
    [
        (torch.int32, 65535, ["torch.int32", "torch.uint16"]),
        # A toolchain that holds them as QNN does is not refused.
        (torch.uint16, 65535, []),
        (torch.uint8, 255, []),
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_codes_that_a_delegate_would_read_in_another_size_are_seen(
    on_cpu: torch.dtype, greatest: int, misread: list[str], *, is_output: bool
) -> None:
    graph, ops = torch.fx.Graph(), exir_ops.edge.quantized_decomposed
    codes = (0.5, 0, 0, greatest, on_cpu)
    value = graph.placeholder("x")
    if not is_output:
        value = graph.call_function(ops.quantize_per_tensor.default, (value, *codes))
    value = graph.call_function(executorch_call_delegate, (graph.get_attr("lowered_module_0"), value))
    value = graph.call_function(operator.getitem, (value, 0))
    if is_output:
        value = graph.call_function(ops.dequantize_per_tensor.default, (value, *codes))
    graph.output((value,))
    root = torch.nn.Module()
    root.lowered_module_0 = torch.nn.Module()
    assert [str(dtype) for dtype in misread_codes(torch.fx.GraphModule(root, graph)) or ()] == misread


def test_a_long_list_of_operators_is_cut() -> None:
    error = DelegationError("lpai", {f"aten.op{n}.default": n + 1 for n in range(9)}, weighted=False)
    assert "aten.op5.default (6 times) and 3 more, and without it lowering fails" in str(error)
    assert len(str(error)) < 400


def decoded(specs: Any) -> dict[str, Any]:
    return asdict(flatbuffer_to_option(generate_qnn_executorch_option(specs)))


def specs_of(soc: str, backend: str, precision: str, *options: tuple[str, str], host: str = "arm") -> dict[str, Any]:
    """Return all settings in the compile specs of a target; settings of its backend are in the top level as well."""
    found = decoded(compiler_specs(Target(soc, backend, precision, options), {HOST_CPU: host}))
    return {**found, **found["backend_options"], **found["backend_options"][f"{backend}_options"]}


LPAI = {"fps": 1, "ftrt_ratio": 10, "client_perf_type": 1, "affinity": 1, "core_selection": 0, "target_env": 1}
LPAI_OPTIONS = (
    ("affinity", "hard"), ("client_perf_type", "non_real_time"), ("core_selection", "2"), ("fps", "9"),
    ("ftrt_ratio", "30"), ("lpai_fps", "77"),
)  # fmt: skip
GPU = {"use_memory_optimizations": True, "use_node_optimizations": True, "use_weight_sharing": False}
GPU_OPTIONS = (("precision", "hybrid"), ("use_memory_optimizations", "false"), ("use_weight_sharing", "true"))
# How fast a program runs on HTP is a matter of run time.
HTP_OPTIONS = (("htp_performance_mode", "balanced"), ("profile_level", "optrace"), ("use_dlbc", "true"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (specs_of("SM8850", "lpai", "8a8w"), {"backend_type": 4, "online_prepare": False, **LPAI}),
        # A virtual device is this machine.
        (specs_of("SM8850", "lpai", "8a8w", host="x86"), {**LPAI, "target_env": 0}),
        # Options of run time are not compiled in.
        (
            specs_of("SM8850", "lpai", "8a8w", *LPAI_OPTIONS),
            {"fps": 9, "ftrt_ratio": 30, "client_perf_type": 2, "affinity": 2, "core_selection": 2, "target_env": 1},
        ),
        (
            specs_of("SM8650", "gpu", "fp16"),
            {"backend_type": 1, "online_prepare": True, "precision": 1, "use_queue_recording": True, **GPU},
        ),
        (specs_of("SM8650", "gpu", "fp32"), {"online_prepare": True, "precision": 0}),
        (
            specs_of("SM8650", "gpu", "fp16", *GPU_OPTIONS),
            {**GPU, "precision": 2, "use_memory_optimizations": False, "use_weight_sharing": True},
        ),
        (
            specs_of("SM8650", "htp", "fp16"),
            {"backend_type": 2, "online_prepare": False, "profile_level": 0, "precision": 1, "use_dlbc": False},
        ),
        (
            specs_of("SM8650", "htp", "8a8w", *HTP_OPTIONS),
            {
                "profile_level": 3, "precision": 0, "use_dlbc": True,
                "performance_mode": specs_of("SM8650", "htp", "fp16")["performance_mode"],
            },
        ),
    ],
)  # fmt: skip
def test_options_of_a_target_are_compiled_in(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: found[name] for name in expected} == expected


def test_defaults_of_lpai_are_executorchs() -> None:
    defaults, options = BACKENDS["lpai"].frame_defaults, BACKENDS["lpai"].options
    found = {name: int(options[name].words.get(value, value)) for name, value in defaults.items()}
    assert found == {name: LPAI[name] for name in found}


def test_the_library_of_the_wheel_does_not_compile_for_the_gpu_and_the_reason_is_said() -> None:
    target, case = Target("SM8650", "gpu", "fp16"), Case("any", "chain", module="", inputs=())
    lowering = Lowering(Chain(), Example(INPUTS, None), [INPUTS], target, {HOST_CPU: "arm"}, Stopwatch(), case, Path())
    with pytest.raises(MissingToolError, match=r"^libQnnGpu\.so of the QNN SDK does not start on this machine"):
        FLOW(lowering)


# QnnExecuTorch* of ExecuTorch 1.5, qc_schema: target of a package, platform.
PACKAGE_CPU, PACKAGE_HTP = 1, 2
X86_64, ANDROID = 1, 2
LIBRARIES = {
    "x86.so": make_elf(62, wide=True), "arm.so": make_elf(183, wide=True),
    "v75.so": make_elf(164, 0x75), "v79.so": make_elf(164, 0x79),
}  # fmt: skip


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def package_infos(
    folder: Path, soc: str, *, libraries: Mapping[str, bytes] = LIBRARIES, android: str = "arm.so", v75: str = "v75.so"
) -> list[dict[str, Any]]:
    """Return the packages in the program of a job, each with the hash of its content in place of its path's."""
    for name, content in libraries.items():
        (folder / name).write_bytes(content)
    package = OpPackage(
        "Package", "my_ops.mul3.default", "Mul3", "Get", "x86.so", android=android, hexagon={"v75": v75}
    )
    features = Features(op_packages=(package,))
    case = Case("any", "mul3", module="", inputs=(), features=features, folder=str(folder))
    target = Target(soc, "htp", "fp16")
    with packages_of(case, target, folder / "bundle") as packages:
        specs = compiler_specs(target, {HOST_CPU: "arm"}, features, packages=packages)
        infos = decoded(specs)["op_package_options"]["op_package_infos"]
        for info in infos:
            # Open the files like QNN, which has only these paths.
            info["sha256"] = hashlib.sha256(Path(info["op_package_path"]).read_bytes()).hexdigest()
    assert not Path("op_packages").exists()
    return sorted(infos, key=lambda info: info["op_package_path"])


def test_a_program_names_a_library_for_each_machine_by_its_content(suite: Path) -> None:
    infos = package_infos(suite, "SM8650")
    assert [(info["target"], info["platform"]) for info in infos] == [
        (PACKAGE_CPU, ANDROID), (PACKAGE_HTP, ANDROID), (PACKAGE_CPU, X86_64),
    ]  # fmt: skip
    for info, place in zip(infos, ("android", "hexagon", "x86_64"), strict=True):
        assert info["op_package_path"] == f"op_packages/{place}/{info['sha256']}.so"
        assert (suite / "bundle" / info["op_package_path"]).is_file()
        named = [info[f"{key}_name"] for key in ("op_package", "custom_op", "qnn_op_type")]
        assert (named, info["interface_provider"]) == (["Package", "my_ops.mul3.default", "Mul3"], "Get")


def test_a_program_for_another_dsp_is_for_virtual_devices_alone(suite: Path) -> None:
    assert [info["platform"] for info in package_infos(suite, "SM8750")] == [X86_64]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"android": "x86.so"}, "x86.so is made for x86-64, expected AArch64: QNN's op package generator"),
        ({"v75": "v79.so"}, r"v79.so is made for V79 \(e_flags 0x79\), SM8650 needs V75 or older"),
        ({"libraries": {**LIBRARIES, "x86.so": b"#!/bin/sh"}}, "x86.so is no little-endian ELF file"),
    ],
)
def test_a_library_for_something_else_is_refused(suite: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"suite\.toml: case\.mul3\.features\.op_packages: {says}"):
        package_infos(suite, "SM8650", **changes)


# Control flow in a module: refused with the function and its line, before anything is quantized or lowered.


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y - 1.0, (x,))


class Inside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x))


class Loop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y * 2.0), (count, x))[1]


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.where(x.sum() > 0, x * 2.0, x - 1.0)


def refuse(module: torch.nn.Module) -> None:
    exported = torch.export.export(module, (torch.ones(1, 8),), strict=True)
    refuse_control_flow(
        exported, Case("s", "c", ".ops:M", (InputSpec((1, 8)),), folder=str(Path(__file__).parent)), "htp"
    )


@pytest.mark.parametrize(
    ("module", "function", "place", "remedy"),
    [
        (Branch(), "torch.cond", "", "compute both branches and choose one with torch.where"),
        (Inside(), "torch.cond", "module body, ", "compute both branches and choose one with torch.where"),
        (Loop(), "torch.while_loop", "", "write the iterations out"),
    ],
)
def test_control_flow_is_refused_with_its_line(
    monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module, function: str, place: str, remedy: str
) -> None:
    # A builder has no folder of a suite in its search path: sources are relative to the folder above the suite.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(Path(__file__).parent)])
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(number for number, line in lines if f"return {function}(" in line)
    with pytest.raises(ConfigError) as raised:
        refuse(module)
    where = f"{place}compile/{Path(__file__).name}:{line}"
    assert f"{function} ({where}) is control flow, which htp does not take: " in str(raised.value)
    assert str(raised.value).endswith(f"{remedy}, or run the case on xnnpack")


def test_a_choice_by_torch_where_is_not_refused() -> None:
    refuse(Plain())
