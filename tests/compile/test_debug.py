"""The figures of `farm debug`, of real programs on the real simulator, against ExecuTorch's own Inspector."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farm.base.errors import UsageError
from farm.base.processes import Supervisor
from farm.builds.compile.debug.process import DebugProcess, require_modules
from farm.builds.compile.debug.protocol import CompileRequest, DebugReply, parse_metric
from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.suites.suite import Case, InputSpec, Job, Target

DEBUGGING = Path(__file__).with_name("debugging.py")
EDGE, QUANTIZED = "edge_after_transform/forward", "quantized/forward"


@pytest.fixture(scope="module")
def told(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of debugging.py."""
    return printed_json(DEBUGGING)


@pytest.mark.parametrize(("reference", "step"), [(EDGE, "inspector"), (QUANTIZED, "compiler")])
def test_every_delegated_node_has_the_figures_of_the_official_inspector(
    told: dict[str, Any], reference: str, step: str
) -> None:
    several = told["several"]
    official = several["official"][reference]
    names = ("convolution_default", "relu_default", "convolution_default_1", "add_tensor", "view_copy_default")
    assert {f"aten_{name}" for name in (*names, "linear_default")} == official.keys()
    ours = {name: gaps[step] for name, gaps in several["ours"].items() if step in gaps}
    assert ours.keys() == official.keys()
    for name, figures in official.items():
        assert ours[name][:3] == pytest.approx(figures, rel=1e-6, abs=1e-12), name


def test_several_inputs_in_another_order_keep_their_handles(told: dict[str, Any]) -> None:
    swapped = told["swapped"]
    # Inputs are layers in the order of the signature, and each layer reads its own.
    assert list(swapped["graph"])[:3] == ["a", "b", "c"]
    assert swapped["graph"]["aten_sigmoid_default"] == ["c"]
    readers = {tuple(read): name for name, read in swapped["graph"].items() if read in (["a"], ["b"])}
    assert len(readers) == 2
    official = swapped["official"][EDGE]
    assert {"aten_sigmoid_default", "aten_tanh_default", "aten_relu_default", *readers.values()} <= official.keys()
    for name, figures in official.items():
        assert swapped["ours"][name]["inspector"][:3] == pytest.approx(figures, rel=1e-6, abs=1e-12), name
        assert swapped["ours"][name]["compiler"][1] > 30, name
    handles = [row["tensor"]["handle"] for row in swapped["rows"] if row["tensor"]["handle"] is not None]
    assert handles == sorted(set(handles))
    # Inputs that reach the program in another order are noticed at the first layer that reads one.
    assert swapped["wrong order"]["step"] == "compiler"
    assert swapped["wrong order"]["operator"] == "aten.linear.default"


def test_a_layer_has_its_module_its_line_and_operators_ahead_of_time_and_at_run_time(told: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in told["several"]["rows"]}
    first, relu, last = (rows[f"aten_{name}"] for name in ("convolution_default", "relu_default", "linear_default"))
    assert [row["module"] for row in (first, relu, last)] == ["one", "", "last"]
    for row, ahead in ((first, "aten.conv2d.default"), (relu, "aten.relu.default"), (last, "aten.linear.default")):
        assert row["exported"] == [ahead]
        assert row["ran"] == [f"{row['name']}@0"]
    lines = DEBUGGING.read_text().partition('MODELS = """')[2].split("\n")
    for row, text in ((relu, "torch.relu(self.one(x))"), (last, "self.last((self.two(x) + x)")):
        file, _, number = row["source"].rpartition(":")
        assert file.endswith("models.py")
        assert text in lines[int(number) - 1]
    assert rows["x"]["exported"] == rows["x"]["ran"] == []
    # An operator of the CPU has its kernel beside it.
    [erf] = [row for row in told["between"]["rows"] if row["name"] == "aten_erf_default"]
    assert (erf["exported"], erf["ran"]) == (["aten.erf.default"], ["native_call_erf.out"])
    topk = [row["exported"] for row in told["between"]["rows"] if row["name"].startswith("aten_topk_default")]
    assert topk == [["aten.topk.default"]] * 2


def test_a_program_that_is_in_order_diverges_nowhere(told: dict[str, Any]) -> None:
    several = told["several"]
    assert several["first"] is None
    assert several["missing"] == []
    # The layers end in the outputs of the FP32 module and of the quantized module.
    assert all(note.startswith("metric ") for note in several["notes"])
    assert several["graph"]["aten_add_tensor"] == ["aten_convolution_default_1", "aten_relu_default"]
    for name, gaps in several["ours"].items():
        assert 30 < gaps["quantization"][1] < 60, name


def test_the_same_program_twice_is_equal_layer_by_layer(told: dict[str, Any]) -> None:
    for gaps in told["several"]["ours"].values():
        assert gaps.get("device", [0.0, math.inf, 1.0, 0.0]) == [0.0, math.inf, 1.0, 0.0]
    assert sum("device" in gaps for gaps in told["several"]["ours"].values()) >= 6


def test_a_device_that_computes_something_else_is_the_cause(told: dict[str, Any]) -> None:
    # The simulator with other inputs stands in for another device.
    other = told["several"]["other device"]
    assert (other["operator"], other["step"]) == ("aten.convolution.default", "device")


def test_a_range_that_one_outlier_takes_is_named_as_quantization(told: dict[str, Any]) -> None:
    first = told["outlier"]["first"]
    assert (first["operator"], first["step"]) == ("aten.clamp.default", "quantization")
    assert "its inputs" in first["why"]


def test_a_program_with_two_outputs_is_compared(told: dict[str, Any]) -> None:
    """The unmodified Inspector of ExecuTorch 1.5 fails on such a program."""
    compared = [name for name, gaps in told["outlier"]["ours"].items() if "compiler" in gaps]
    assert {"aten_convolution_default", "aten_relu_default", "aten_clamp_default"} <= set(compared)


def test_every_layer_of_several_partitions_is_compared_and_so_is_what_the_cpu_runs_between_them(
    told: dict[str, Any],
) -> None:
    between = told["between"]
    rows = {row["name"]: row for row in between["rows"]}
    assert (between["missing"], between["notes"]) == ([], [])
    partitions = {name: row["tensor"]["partition"] for name, row in rows.items() if name != "x"}
    assert partitions == {
        "aten_linear_default": 0,
        "aten_topk_default:0": 0,
        "aten_topk_default:1": 0,
        "aten_index_tensor": 0,
        "aten_add_tensor": 0,
        "aten_erf_default": None,
        "aten_linear_default_1": 1,
    }
    assert min(row["gaps"]["compiler"]["sqnr_db"] for name, row in rows.items() if name != "x") > 35


def test_each_output_of_an_operator_that_is_used_is_a_layer(told: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in told["between"]["rows"]}
    largest, places = rows["aten_topk_default:0"], rows["aten_topk_default:1"]
    assert largest["operator"] == places["operator"] == "aten.topk.default"
    assert rows["aten_add_tensor"]["inputs"] == ["aten_topk_default:0", "aten_index_tensor"]
    # Places are whole numbers, which have no quantization although the values beside them do.
    assert largest["tensor"]["dtype"] == "uint8"
    assert (places["tensor"]["dtype"], places["tensor"]["scale"]) == ("int64", None)
    assert places["gaps"]["compiler"]["mse"] == 0


def test_a_layer_says_what_its_tensor_is(told: dict[str, Any]) -> None:
    rows = {row["name"]: row["tensor"] for row in told["several"]["rows"]}
    assert rows["x"]["handle"] is None
    assert rows["aten_convolution_default"] == {
        "handle": rows["aten_relu_default"]["handle"] - 1, "output": None, "partition": 0, "shape": [1, 4, 4, 4],
        "dtype": "uint8", "scale": pytest.approx(0.01, abs=0.009), "zero_point": pytest.approx(128, abs=60),
    }  # fmt: skip


def test_comparators_of_the_user_s_have_the_figures_that_the_official_inspector_has_with_them(
    told: dict[str, Any],
) -> None:
    official = told["several"]["official"][EDGE]
    rows = {row["name"]: row for row in told["several"]["rows"]}
    for name, (_, sqnr, _) in official.items():
        assert rows[name]["inspector"]["scores"]["sqnr"] == {"value": pytest.approx(sqnr, rel=1e-6), "valid": True}
    scores = rows["aten_linear_default"]["gaps"]["compiler"]["scores"]
    # The name of a class becomes a valid column name; without a limit it has no verdict.
    assert scores.keys() == {"sqnr", "farthest_away_", "Shown"}
    assert scores["Shown"] == {"value": 5, "valid": None}
    assert any("SHA-256" in note and ".metrics:Farthest=0.3" in note for note in told["several"]["notes"])


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("anybodys:Cosine", "is not executed: "),
        ("no_such_package.metrics:Cosine", "no module no_such_package: put its folder on PYTHONPATH"),
        (".metrics:Several", ".metrics has no class Several"),
        (".metrics:Nobody", ".metrics has no class Nobody"),
        ("json:loads", "loads is no comparator"),
        (".metrics:Fails", "at x: ValueError: cannot compare"),
    ],
)
def test_a_comparator_that_cannot_be_used_is_refused_in_one_line(
    told: dict[str, Any], metric: str, reason: str
) -> None:
    reply = told["refused"][metric]
    assert (reply["ok"], reply["refused"], reply["infra"]) == (False, True, False)
    assert reply["reason"].startswith(f"--comparator {metric}: ")
    assert reason in reply["reason"]


def test_a_module_that_is_not_there_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("raise ValueError('imported')")
    (tmp_path / "pkg").mkdir()
    with Supervisor() as supervisor:

        def require(*metrics: str) -> None:
            compiler = Compiler(sys.executable, {"PYTHONPATH": str(tmp_path)})
            require_modules(supervisor, compiler, [parse_metric(one) for one in metrics], tmp_path)

        require("metrics:Cosine=1", "pkg.of.mine:Cosine", ".metrics:Cosine", ".pkg.metrics:Cosine")
        with pytest.raises(UsageError, match=r"^--comparator gone\.metrics:Far: no module gone: put its folder on"):
            require("metrics:Cosine", "gone.metrics:Far")
        with pytest.raises(UsageError, match=r"^--comparator \.gone:Far: no module gone in "):
            require(".gone:Far")


def test_what_a_module_raises_is_a_reply_in_one_line(told: dict[str, Any]) -> None:
    reply = told["raises"]
    assert (reply["ok"], reply["refused"], reply["infra"]) == (False, False, False)
    assert reply["reason"] == "ValueError: no such shape"
    reply = told["exits"]
    assert (reply["ok"], reply["refused"], reply["infra"]) == (False, False, False)
    assert reply["reason"] == "the compiler called exit(1): that was it"


def test_a_compiler_that_crashes_or_takes_too_long_is_a_reply(tools: Toolchain, tmp_path: Path) -> None:
    case = Case("s", "c", "torch.nn:ReLU", (InputSpec(shape=(1,)),))
    request = CompileRequest(Job(case, Target("SM8650", "htp", "8a8w")), tools.versions, 0, str(tmp_path / "out"))
    with Supervisor() as supervisor:
        process = DebugProcess(supervisor, tools.compiler, tmp_path / "one.log", tmp_path / "one")
        process.send(request)
        ended = process.receive(0.01)
        process = DebugProcess(supervisor, tools.compiler, tmp_path / "two.log", tmp_path / "two")
        process.send(request)
        os.kill(supervisor.find("debugger").pid, signal.SIGSEGV)
        crashed = process.receive(120)
    assert (ended.ok, ended.infra) == (False, False)
    assert "did not finish in 0.01 s" in ended.reason
    assert (crashed.ok, crashed.infra, crashed.reason) == (False, False, "the compiler crashed (SIGSEGV)")


@pytest.mark.parametrize("value", [None, 0.0, -1.5, 1e300, math.inf, -math.inf])
def test_a_figure_comes_through_json_as_it_was(value: float | None) -> None:
    layers = (Layer("relu", "aten.relu.default", (), {LayerStep.COMPILER: Gap(value, value, value)}),)
    reply = DebugReply(ok=True, packed_layers=msgspec.msgpack.encode(layers))
    assert msgspec.json.decode(msgspec.json.encode(reply), type=DebugReply).layers == layers
