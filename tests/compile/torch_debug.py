"""Figures of `farm debug` on the simulator, equal to figures of ExecuTorch's Inspector, and causes of a divergence."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_sample import (
    QcomCosineSimilarityComparator,
    QcomMSEComparator,
    QcomSQNRComparator,
)
from executorch.devtools import Inspector, parse_etrecord

from farm.base.config.settings import load_config
from farm.builds.bundles.bundle import load_bundle
from farm.builds.compile.debug.compare import _gap, compare_layers, missing_layers
from farm.builds.compile.debug.compiler import DebugProgram, compile_debug, compute_layers
from farm.builds.compile.debug.debugger import Debugger
from farm.builds.compile.debug.protocol import CompileRequest, Written
from farm.builds.program.layers import Gap, Layer, LayerTensor
from farm.builds.runtime.runtime import simulator_runtime
from farm.builds.toolchains.selection import prepare
from farm.results.layers import Divergence, diagnose
from farm.suites.suite import Case, InputSpec, Job, Target

MODELS = """
import torch

class Several(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.two = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.last = torch.nn.Linear(64, 5)
    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.last((self.two(x) + x).flatten(1))

class Outlier(torch.nn.Module):
    # One column is a thousand times as great as the others: its range leaves them no step, and clamp shows it.
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("gain", torch.tensor([1.0, 3000.0, 1.0, 1.0]))
    def forward(self, x):
        far = torch.relu(self.one(x)) * self.gain
        return torch.clamp(far, -1, 1), far

class Raises(torch.nn.Module):
    def forward(self, x):
        raise ValueError("no such\\nshape")

class Exits(torch.nn.Module):
    def forward(self, x):
        raise SystemExit("that was it")

class Parted(torch.nn.Module):
    # QNN has no erf: it parts the program in two. Both outputs of topk are used, and the inputs in another order than
    # they are given in, each by an operator of its own.
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)
        self.two = torch.nn.Linear(3, 3)
        self.register_buffer("offsets", torch.rand(8))
    def forward(self, a, b, c):
        later = torch.sigmoid(c) + torch.tanh(b)
        largest, places = torch.topk(self.one(a), 3)
        return self.two(torch.erf(largest + self.offsets[places] + later[:, :3]))
"""
EDGE = "edge_after_transform/forward"


class Compared(NamedTuple):
    """Program with its layers, by name."""

    program: DebugProgram
    layers: dict[str, Layer]
    ran: Path


class Bench:
    """Compiles and runs in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load_config()
        self.versions = prepare(config).versions
        runtime = simulator_runtime(config.cache_dir)
        self.runner = folder / "runtime" / runtime.runner
        for name, path in runtime.files.items():
            link = folder / "runtime" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        (folder / "models.py").write_text(MODELS)

    def request(self, name: str, shape: tuple[int, ...] = (1, 3, 4, 4), inputs: int = 1) -> CompileRequest:
        case = Case("s", name.lower(), f".models:{name}", (InputSpec(shape=shape),) * inputs, folder=str(self.folder))
        folder = self.folder / name.lower()
        folder.mkdir(exist_ok=True)
        return CompileRequest(Job(case, Target("SM8650", "htp", "8a8w")), self.versions, 0, str(folder))

    def compile(self, name: str, **inputs: Any) -> DebugProgram:
        asked = self.request(name, **inputs)
        return compile_debug(asked.job, asked.versions, asked.sample, Path(asked.folder))

    def run(self, name: str, into: str = "ran", *, scale: float = 1.0, order: Sequence[int] = ()) -> Path:
        """Run the bundle of a model; its inputs, times `scale` and in another `order`, are of one sample."""
        bundle = load_bundle(self.folder / name.lower() / "bundle")
        ran = self.folder / name.lower() / into
        ran.mkdir()
        names = []
        for number, source in enumerate(bundle.input_files(0)):
            given = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.float32) * scale
            names.append(f"input_{number}.raw")
            (ran / names[-1]).write_bytes(given.numpy().tobytes())
        names = [names[place] for place in order] if order else names
        (ran / "input_list.txt").write_text(f"{' '.join(names)}\n")
        flags = ["--output_folder_path=.", "--etdump_path=etdump.etdp", "--dump_intermediate_outputs=true"]
        subprocess.run(
            [self.runner, f"--model_path={bundle.model}", *flags, "--debug_output_path=debug_output.bin"],
            cwd=ran, env={"LD_LIBRARY_PATH": str(self.runner.parent)}, check=True, capture_output=True,
        )  # fmt: skip
        return ran


def written(ran: Path) -> Written:
    return Written(str(ran / "etdump.etdp"), str(ran / "debug_output.bin"))


def compare(program: DebugProgram, ran: Path, other: Path | None = None) -> Compared:
    layers = compare_layers(program, written(ran), written(other) if other else None)
    return Compared(program, {layer.name: layer for layer in layers}, ran)


def first(compared: Compared) -> Divergence | None:
    return diagnose(tuple(compared.layers.values())).first


def figures(gap: Gap | None) -> tuple[float | None, ...]:
    return gap.mse, gap.sqnr_db, gap.cosine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def several(bench: Bench) -> Compared:
    """Program, twice on the simulator."""
    program = bench.compile("Several")
    return compare(program, bench.run("Several"), bench.run("Several", "again"))


@pytest.fixture(scope="module")
def parted(bench: Bench) -> Compared:
    program = bench.compile("Parted", shape=(2, 8), inputs=3)
    return compare(program, bench.run("Parted"))


@pytest.fixture(scope="module")
def official(several: Compared) -> dict[str, tuple[float, ...]]:
    """MSE, SQNR and cosine of every node, as the Inspector has them."""
    inspector = Inspector(
        etdump_path=written(several.ran).etdump, debug_buffer_path=written(several.ran).outputs,
        etrecord=parse_etrecord(str(several.program.etrecord)), reference_graph_name=EDGE,
    )  # fmt: skip
    found: dict[str, tuple[float, ...]] = {}
    for comparator in (QcomMSEComparator, QcomSQNRComparator, QcomCosineSimilarityComparator):
        table = inspector.calculate_numeric_gap(distance=comparator(several.program.edge), reference_graph=EDGE)
        for runtime, gap in zip(table["runtime_ops"], table["gap"], strict=True):
            name = runtime[0].removesuffix("@0")
            found[name] = (*found.get(name, ()), gap[0])
    return found


def test_every_delegated_node_has_the_figures_of_the_official_inspector(
    several: Compared, official: dict[str, tuple[float, ...]]
) -> None:
    names = ("convolution_default", "relu_default", "convolution_default_1", "add_tensor", "view_copy_default")
    own = {name: layer.inspector for name, layer in several.layers.items() if layer.inspector}
    assert own.keys() == official.keys() == {f"aten_{name}" for name in (*names, "linear_default")}
    for name, gap in own.items():
        assert figures(gap) == pytest.approx(official[name], rel=1e-6, abs=1e-12), name
        assert several.layers[name].gaps["compiler"].sqnr_db > 30, name


def test_a_program_that_is_in_order_diverges_nowhere(several: Compared) -> None:
    layers = several.layers
    assert first(several) is None
    assert missing_layers(tuple(layers.values())) == []
    # The layers end in the outputs of the FP32 module and of the quantized module.
    assert several.program.notes == ()
    assert list(layers["aten_add_tensor"].inputs) == ["aten_convolution_default_1", "aten_relu_default"]
    assert all(30 < layer.gaps["quantization"].sqnr_db < 60 for layer in layers.values())
    # The same program again is equal layer by layer.
    again = [layer.gaps["device"] for layer in layers.values() if "device" in layer.gaps]
    assert len(again) >= 6
    assert {(*figures(gap), gap.steps) for gap in again} == {(0.0, math.inf, 1.0, 0.0)}


def test_a_device_that_computes_something_else_is_the_cause(bench: Bench, several: Compared) -> None:
    # The simulator with other inputs stands in for another device.
    found = first(compare(several.program, several.ran, bench.run("Several", "other", scale=-0.5)))
    assert (found.operator, found.step) == ("aten.convolution.default", "device")


def test_a_range_that_one_outlier_takes_is_named_as_quantization(bench: Bench) -> None:
    # The unmodified Inspector of ExecuTorch 1.5 fails on a program with two outputs.
    outlier = compare(bench.compile("Outlier"), bench.run("Outlier"))
    found = first(outlier)
    assert (found.operator, found.step) == ("aten.clamp.default", "quantization")
    assert "its inputs" in found.why
    for name in ("convolution", "relu", "clamp"):
        assert "compiler" in outlier.layers[f"aten_{name}_default"].gaps


def test_layers_of_several_partitions_and_of_the_cpu_between_them_are_compared(parted: Compared) -> None:
    computed = {name: layer for name, layer in parted.layers.items() if name not in ("a", "b", "c")}
    assert (missing_layers(tuple(computed.values())), list(parted.program.notes)) == ([], [])
    partitions = {name: layer.tensor.partition for name, layer in computed.items()}
    assert (partitions.pop("aten_erf_default"), partitions.pop("aten_linear_default_1")) == (None, 1)
    assert {"aten_linear_default", "aten_topk_default:0", "aten_topk_default:1", "aten_add_tensor"} < partitions.keys()
    assert set(partitions.values()) == {0}
    assert min(layer.gaps["compiler"].sqnr_db for layer in computed.values()) > 30


def test_each_output_of_an_operator_that_is_used_is_a_layer(parted: Compared) -> None:
    largest, places = (parted.layers[f"aten_topk_default:{output}"] for output in (0, 1))
    assert largest.operator == places.operator == "aten.topk.default"
    # Places are whole numbers, which have no quantization although the values beside them do.
    assert largest.tensor.dtype == "uint8"
    assert (places.tensor.dtype, places.tensor.scale) == ("int64", None)
    assert places.gaps["compiler"].mse == 0


def test_inputs_in_another_order_keep_their_handles(bench: Bench, parted: Compared) -> None:
    # Inputs are layers in the order of the signature, and each layer reads its own.
    assert list(parted.layers)[:3] == ["a", "b", "c"]
    readers = {layer.operator: layer.inputs for layer in parted.layers.values() if {*layer.inputs} & {"a", "b", "c"}}
    assert readers == {
        "aten.linear.default": ("a",), "aten.tanh.default": ("b",), "aten.sigmoid.default": ("c",),
    }  # fmt: skip
    handles = [layer.tensor.handle for layer in parted.layers.values() if layer.tensor.handle is not None]
    assert handles == sorted(handles)
    # Inputs that reach the program in another order are noticed at the first layer that reads one.
    found = first(compare(parted.program, bench.run("Parted", "wrong", order=(1, 0, 2))))
    assert (found.operator, found.step) in [("aten.linear.default", "compiler"), ("aten.tanh.default", "compiler")]


def test_a_layer_has_its_tensor_its_module_its_line_and_its_operators(
    bench: Bench, several: Compared, parted: Compared
) -> None:
    convolution, relu, last = (several.layers[f"aten_{name}_default"] for name in ("convolution", "relu", "linear"))
    assert [layer.module for layer in (convolution, relu, last)] == ["one", "", "last"]
    for layer, ahead in ((convolution, "conv2d"), (relu, "relu"), (last, "linear")):
        assert (list(layer.exported), list(layer.ran)) == ([f"aten.{ahead}.default"], [f"{layer.name}@0"])
    lines = (bench.folder / "models.py").read_text().splitlines()
    for layer, text in ((relu, "torch.relu(self.one(x))"), (last, "self.last((self.two(x) + x)")):
        file, _, number = layer.source.rpartition(":")
        assert file.endswith("models.py")
        assert text in lines[int(number) - 1]
    given, tensor = several.layers["x"], convolution.tensor
    assert (list(given.exported), list(given.ran), given.tensor.handle) == ([], [], None)
    assert (tensor.output, tensor.partition, tensor.shape, tensor.dtype) == (None, 0, (1, 4, 4, 4), "uint8")
    assert tensor.scale == pytest.approx(0.01, abs=0.009)
    # An operator of the CPU has its kernel beside it.
    erf = parted.layers["aten_erf_default"]
    assert (list(erf.exported), list(erf.ran)) == (["aten.erf.default"], ["native_call_erf.out"])
    assert list(parted.layers["aten_topk_default:1"].exported) == ["aten.topk.default"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [("Raises", "ValueError: no such shape"), ("Exits", "the compiler called exit(1): that was it")],
)
def test_what_a_module_raises_is_a_reply_in_one_line(bench: Bench, model: str, reason: str) -> None:
    log = bench.folder / "log"
    log.touch()
    reply = Debugger(log).serve(bench.request(model))
    assert (reply.ok, reply.refused, reply.infra, reply.reason) == (False, False, False, reason)


# Figures of layers, in float64: squares that overflow float32, infinities and NaN.


INF, NAN = math.inf, math.nan


def gap(before: list[float], after: list[float]) -> Gap:
    node: Any = SimpleNamespace(name="add", tensor=LayerTensor())
    return _gap(node, torch.tensor(before), torch.tensor(after))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20, 1e38])
def test_figures_do_not_depend_on_the_size_of_the_values(scale: float) -> None:
    found = gap([scale, -2 * scale, 3 * scale], [1.1 * scale, -2 * scale, 3 * scale])
    assert found.sqnr_db == pytest.approx(10 * math.log10(14 / 0.01), rel=1e-4)
    assert found.cosine == pytest.approx(0.9997, abs=1e-3)
    assert found.mse == pytest.approx(0.01 / 3 * scale**2, rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ([1.0, 2.0], [1.0, INF], "has 0 NaN and 1 infinite elements"),
        ([1.0, 2.0], [NAN, 2.0], "has 1 NaN and 0 infinite elements"),
        ([1.0, INF], [1.0, -INF], "has 0 NaN and 1 infinite elements"),
        ([1.0, INF], [1.0, 65504.0], "has numbers where 1 elements are NaN or infinite before"),
        ([1.0, NAN], [1.0, 0.0], "has numbers where 1 elements are NaN or infinite before"),
    ],
)
def test_infinities_and_nan_are_named(before: list[float], after: list[float], problem: str) -> None:
    found = gap(before, after)
    assert found.problem.startswith(problem)
    assert found.sqnr_db == -INF


def test_a_mask_is_equal_to_itself_and_zeros_have_no_cosine() -> None:
    assert gap([-INF, 1.0], [-INF, 1.0]) == Gap(0.0, INF, 1.0, 0.0)
    zero = gap([0.0, 0.0], [0.5, 0.25])
    assert (zero.sqnr_db, zero.cosine) == (-INF, None)


class WrittenTwice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        y.add_(1.0)
        return y * 2.0


def test_a_layer_keeps_its_value_when_a_later_operator_writes_to_it() -> None:
    given = torch.tensor([-1.0, 2.0])
    computed = compute_layers(torch.export.export(WrittenTwice(), (given,), strict=True).module(), (given,))
    assert computed.layers["relu"].tolist() == [0.0, 2.0]
    assert [one.tolist() for one in computed.outputs] == [[2.0, 6.0]]
    assert given.tolist() == [-1.0, 2.0]
