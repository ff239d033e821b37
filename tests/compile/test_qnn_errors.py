"""Reason of a failed compile: QNN's line in the log, with the module and the line of the model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from builder_runs import request_of, run_builders
from made import job

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Origin
from farm.builds.compile.debug.protocol import CompileRequest, DebugProcess
from farm.builds.compile.protocol import BuildReply
from farm.builds.compile.watched import explained, noting_node, take_node
from farm.builds.toolchains.toolchain import Toolchain
from farm.results.judge import build_failure
from farm.suites.suite import InputSpec

# Choice of the log line with the reason of a failed compile. The logs are QNN's, of real compilations and issues.


EMPTY = "AssertionError: Failed to generate Qnn context binary."
ORIGINS = {
    "aten_convolution_default": Origin("decoder.up", "models/unet.py:42"),
    "aten_relu_default": Origin("", "net.py:7"),
    "aten_instance_norm_default": Origin("norm", "net.py:9"),
}
BUILD = """\
[INFO] [Qnn ExecuTorch]: Caching: Caching is in SAVE MODE.
[ERROR] [Qnn ExecuTorch]:  <E> unexpected GraphHtpSettings option 66

[INFO 2026-11-27 04:59:22,400 qnn_preprocess.py:230] Processing Method(0): (1/1)
[INFO 2026-11-27 04:59:22,407 qnn_preprocess.py:122] Visiting: aten_relu_default, aten.relu.default
"""
ENDS = """\
[ERROR] [Qnn ExecuTorch]:  <E> Failed to construct common node for graph 260

[ERROR] [Qnn ExecuTorch]:  <E> Failed to add node with err 6007

[ERROR] [Qnn ExecuTorch]: Failed to add node to Qnn Graph with error: 6007
[ERROR] [Qnn ExecuTorch]: Fail to compile QNN graph
"""
TYPES = """\
[ERROR] [Qnn ExecuTorch]:  <E> Unsupported input/output datatypes requested for the HTP Op 'TransposeConv2d' in the \
node 'aten_convolution_default'. There is a mismatch for the combination of inputs and outputs.
[ERROR] [Qnn ExecuTorch]:  <E> Requested I/O datatype set:
[ERROR] [Qnn ExecuTorch]:  <E> Supported I/O datatype sets for the configuration: FP16
[ERROR] [Qnn ExecuTorch]:  <E> Please refer to the 'HTP Backend Op Definition Supplement' section of QNN SDK
[ERROR] [Qnn ExecuTorch]:  <E> QnnBackend_validateOpConfig failed 3110
[ERROR] [Qnn ExecuTorch]:  <E> Failed to validate op aten_convolution_default with error 0xc26
[WARNING] [Qnn ExecuTorch]: Qnn Backend op validation failed with error: 3110
"""
SCALE = "[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:3207::ERROR:Output def has a bad scale (nan, inf, or too small).\n"
IMPROPER = "[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:3282::ERROR:node 35, output 0  has improper OutputDef\n"
WEIGHT = "[ERROR] [Qnn ExecuTorch]:  <E> Op Dequantize does not support per-channel quant tensor\n"
UNREADABLE = (
    "[WARNING] [Qnn ExecuTorch]: Failed to interpret QNN context binary. Error code 30010. Try verifying binary with "
    "online-prepare format.\n"
)
TCM = """\
[ ERROR ] initial_sequencer_dp.cc:149:ERROR:A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires \
0x2400000 bytes of TCM, which is greater than the TCM size of 0x800000!
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> "aten_instance_norm_default" generated: Requires 0x2400000 bytes of TCM
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> RouterX86 graph prepare failed 13
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> Failed to finalize graph (id: 1) with err 1002
"""
KERNEL = """\
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:204:ERROR:could not create op: q::flat_from_vtcm
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:1519::ERROR:Op 0x12cb0000000b0 preparation failed with err:-1
[ERROR] [Qnn ExecuTorch]:  <E> "aten_relu_default" generated: could not create op
"""
RANK = """\
[ERROR] [Qnn ExecuTorch]:  <E> [4294967295] has incorrect Rank 7.
[ERROR] [Qnn ExecuTorch]:  <E> [4294967295] has incorrect Rank 7.
[ERROR] [Qnn ExecuTorch]:  <E> QnnBackend_validateOpConfig failed 3110
[ERROR] [Qnn ExecuTorch]:  <E> Failed to validate op aten_relu_default with error 0xc26
"""
LEFT_OVER = """\
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:4214::ERROR:Oops: Could not prepare op with id 0x4014000000d1
[ERROR] [Qnn ExecuTorch]:  <E> "quantized_decomposed_dequantize_per_tensor_default_1" generated: could not create op
[ERROR] [Qnn ExecuTorch]:  <E> RouterX86 graph prepare failed 18
"""


ODD = "the scale of aten_relu_default is inf"
UNSUPPORTED = (
    "Unsupported input/output datatypes requested for the HTP Op 'TransposeConv2d' in the node "
    "'aten_convolution_default' (module decoder.up, models/unet.py:42)"
)
NO_ROOM = (
    'A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires 0x2400000 bytes of TCM, which is greater '
    "than the TCM size of 0x800000!, in aten_instance_norm_default (module norm, net.py:9)"
)
NOT_MADE = '"quantized_decomposed_dequantize_per_tensor_default_1" generated: could not create op'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (BUILD + SCALE + IMPROPER + ENDS, f"QNN: Output def has a bad scale (nan, inf, or too small); {ODD}"),
        # A weight that was left alone is no reason: the operator that it was for is.
        (TYPES + BUILD + WEIGHT + ENDS, f"QNN: {UNSUPPORTED}; Op Dequantize does not support per-channel quant tensor"),
        (TYPES + BUILD + ENDS, f"QNN: {UNSUPPORTED}"),
        (RANK + BUILD + LEFT_OVER + ENDS, f"QNN: has incorrect Rank 7, in aten_relu_default (net.py:7); {NOT_MADE}"),
        # An operator on the CPU is no reason where something else failed.
        (TYPES + BUILD + SCALE + ENDS, f"QNN: Output def has a bad scale (nan, inf, or too small); {ODD}"),
        (BUILD + UNREADABLE + ENDS, "QNN: Failed to interpret QNN context binary. Error code 30010"),
        (BUILD + TCM, f"QNN: {NO_ROOM}"),
        (BUILD + KERNEL + ENDS, "QNN: could not create op: q::flat_from_vtcm, in aten_relu_default (net.py:7)"),
        ("nothing of QNN\n", f"{EMPTY}; {ODD}"),
    ],
)
def test_the_reason_is_the_line_of_qnn_that_others_follow_from(log: str, reason: str) -> None:
    assert explained(EMPTY, log, ORIGINS, [ODD]) == reason


@pytest.mark.parametrize("reason", ["ValueError: Qnn is not at fault", "the compiler called exit(7)",
                                    "MissingToolError: libQnnGpu.so of the QNN SDK does not start"])  # fmt: skip
def test_a_reason_that_says_more_stays(reason: str) -> None:
    assert explained(reason, TYPES + BUILD + SCALE + ENDS, ORIGINS, ["the scale of a is inf"]) == reason


def test_a_hostile_log_costs_no_time() -> None:
    started = time.process_time()
    for piece in ("[ERROR] ", "[ ERROR ]", "in the node '", '"a" generated', "QnnDsp <E> ", "Failed to validate op a "):
        explained(EMPTY, piece * (1_000_000 // len(piece)), {})
        explained(EMPTY, f"{piece}\n" * 20_000, {})
    assert time.process_time() - started < 10.0


def test_a_compiler_that_ends_by_itself_leaves_no_file_and_a_killed_one_its_node(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("printed\n")
    with noting_node(log) as note:
        note("aten_convolution_default (module a, very/long.py:1)")
        note("aten_relu_default (net.py:7)")
        # The caller sees this state during the compile, or after the compiler was killed.
        assert take_node(log) == "aten_relu_default (net.py:7)"
        assert log.read_text() == "printed\n\nfarm: the compiler was at aten_relu_default (net.py:7)\n"
        assert take_node(log) == ""
    assert list(tmp_path.iterdir()) == [log]
    with noting_node(log):
        pass
    assert take_node(log) == ""


def test_a_full_disk_does_not_fail_a_job_over_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with noting_node(tmp_path / "build.log") as note:
        monkeypatch.setattr("os.pwrite", full)
        note("aten_relu_default")


def test_a_refused_write_has_the_line_of_qnn_as_well() -> None:
    # The module writes to its only input, and the partition is left without inputs.
    log = (
        BUILD
        + """\
[ERROR] [Qnn ExecuTorch]:  <E> No graph inputs present for graph [0]
[ERROR] [Qnn ExecuTorch]:  <E> Context binary size calculation failed
[ERROR] [Qnn ExecuTorch]:  <E> Failed to get serialized binary
[ERROR] [Qnn ExecuTorch]:  <E> Failed to get context binary size with err 0x7532
[ERROR] [Qnn ExecuTorch]: Can't determine the size of graph binary to be saved to cache. Error 30002
"""
    )
    refused = "ConfigError: mine/suite.toml: case.a.module: forward writes to its input x: return the new value instead"
    empty = EMPTY.partition(": ")[2]
    found = explained(f"{refused} ({empty})", log, ORIGINS)
    assert found == f"{refused} (QNN: No graph inputs present for graph [0])"
    assert explained(f"{refused} (an own reason)", log, ORIGINS) == f"{refused} (an own reason)"
    assert explained(f"{refused} ({empty})", BUILD, ORIGINS) == f"{refused} ({empty})"


# Graphs that QNN refuses, compiled for real: the reason is QNN's line, with the module and the line of the model.


OPS = """
import os, signal, torch

class Masked(torch.nn.Module):
    def forward(self, x):
        mask = torch.full((8, 8), float("-inf")).triu(1)  # line 6
        return torch.softmax(x + mask, -1)

class Volume(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Conv3d(3, 4, 3))

    def forward(self, x):
        return self.body(x)  # the line of the module's call

class Nan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.full((8,), float("nan")))

    def forward(self, x):
        return x * self.c  # line 23

class Log(torch.nn.Module):
    def forward(self, x):
        return torch.log(x.relu()) + x  # line 27

class Divided(torch.nn.Module):
    def forward(self, x):
        return x / x.relu() + x  # line 31

class Overflows(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x * 1e4) + x  # line 35

class Rank7(torch.nn.Module):
    def forward(self, x):
        return (x.reshape(1, 2, 2, 2, 2, 2, 2).permute(0, 6, 5, 4, 3, 2, 1) * 2.0).relu()  # line 39

class Up(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(3, 8, 3)

    def forward(self, x):
        return self.up(x)  # line 47

class Dies(torch.nn.Module):
    # A stub of an op builder of QNN that ends the process, or hangs.
    def __init__(self, number):
        super().__init__()
        from executorch.backends.qualcomm.builders.node_visitor_manager import _node_visitor_dict
        def end(*_):
            os.kill(os.getpid(), number) if number else signal.pause()
        _node_visitor_dict["aten.sigmoid.default"].define_node = end
        self.gate = torch.nn.Sequential(torch.nn.Sigmoid())

    def forward(self, x):
        return self.gate(x)
"""


class Refused(NamedTuple):
    """How a job was refused."""

    reply: BuildReply
    log: str
    reason: str
    """Reason as recorded."""


@pytest.fixture(scope="module")
def refuse(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Refused]]:
    """Compile modules, one after the other in one process: loading torch for each would take longer."""

    def run(*wanted: tuple[str, tuple[int, ...], str, str], timeout_s: float = 300.0) -> dict[str, Refused]:
        folder = tmp_path_factory.mktemp("refused")
        suite = folder / "suite"
        suite.mkdir()
        (suite / "ops.py").write_text(OPS)
        requests = []
        for name, shape, precision, soc in wanted:
            module, _, number = name.partition(" ")
            args = (int(number),) if number else ()
            made = job(
                name, soc, precision=precision, module=f".ops:{module}", args=args, inputs=(InputSpec(shape),),
                folder=str(suite),
            )  # fmt: skip
            requests.append(request_of(made, tools.versions, folder))
        replies = run_builders(requests, tools.compiler, folder / "cache", folder, timeout_s=timeout_s)
        assert list(folder.glob("*.at")) == []
        found = {}
        for request, reply in zip(requests, replies, strict=True):
            log = Path(request.log).read_text(errors="replace")
            recorded = build_failure(request.job, reply.reason, log).reason
            found[request.job.case.name] = Refused(reply, log, recorded)
        return found

    return run


@pytest.fixture(scope="module")
def refused(refuse: Callable[..., dict[str, Refused]]) -> dict[str, Refused]:
    return refuse(
        ("Masked", (1, 8, 8), "8a8w", "SM8650"),
        ("Volume", (1, 3, 8, 8, 8), "16a16w", "SM8650"),
        ("Nan", (1, 8), "8a8w", "SM8650"),
        (f"Dies {signal.SIGSEGV:d}", (1, 8), "8a8w", "SM8650"),
    )


def test_an_infinite_mask_is_named_with_its_line(refused: dict[str, Refused]) -> None:
    reason = refused["Masked"].reason
    assert reason.startswith(
        "QNN: Output def has a bad scale (nan, inf, or too small); aten_full_default is made of -inf"
    )
    assert "(suite/ops.py:6)" in reason
    assert "use a finite mask such as -65504 in place of -inf" in reason
    assert "AssertionError: Failed to generate Qnn context binary." in refused["Masked"].log


def test_an_operator_without_such_data_types_is_named_with_its_module(refused: dict[str, Refused]) -> None:
    reason = refused["Volume"].reason
    assert reason.startswith(
        "QNN: Unsupported input/output datatypes requested for the HTP Op 'Conv3d' in the node "
        "'aten_convolution_default' (module body.1, suite/ops.py:15)"
    )
    assert "HTP has no Conv3d with these data types: compile it in another precision" in reason


def test_a_nan_that_calibration_meets_is_named(refused: dict[str, Refused]) -> None:
    assert refused["Nan"].reason == (
        "AssertionError: min nan should be less than max nan; c is nan; mul is nan (suite/ops.py:23)"
    )


def test_a_compiler_that_a_signal_ends_leaves_its_operator_and_its_stack(refused: dict[str, Refused]) -> None:
    died = refused[f"Dies {signal.SIGSEGV:d}"]
    assert not died.reply.infra
    assert died.reason.startswith("the compiler crashed (SIGSEGV); it was at aten_sigmoid_default (module gate.0, ")
    assert "farm: the compiler was at aten_sigmoid_default" in died.log
    assert "Fatal Python error: Segmentation fault" in died.log
    assert "qnn_partitioner.py" in died.log, "the stack leads to what asked for the operator"


@pytest.mark.whole
def test_other_refusals_name_node_and_line_as_well(refuse: Callable[..., dict[str, Refused]]) -> None:
    found = refuse(
        ("Log", (1, 8), "8a8w", "SM8650"),
        ("Divided", (1, 8), "16a8w", "SM8650"),
        ("Overflows", (1, 8), "8a8w", "SM8650"),
        ("Rank7", (1, 64), "8a8w", "SM8650"),
        ("Up", (1, 3, 8, 8), "16a16w", "SM8450"),
    )
    expected = {
        "Log": ("the scale of aten_log_default is inf (suite/ops.py:27)", "clamp before exp, log and a division"),
        "Divided": ("the scale of aten_div_tensor is inf (suite/ops.py:31)",),
        "Overflows": ("the scale of aten_exp_default is inf (suite/ops.py:35)",),
        "Rank7": ("has incorrect Rank 7, in aten_relu_default (suite/ops.py:39)", "could not create op"),
        "Up": (
            "has incorrect Value 69, expected >= 73, in aten_convolution_default (module up, suite/ops.py:47)",
            "built for Hexagon V73 with these data types, and the SoC has V69",
        ),
    }
    for name, words in expected.items():
        assert found[name].reason.startswith("QNN: "), name
        assert [word for word in words if word not in found[name].reason] == [], found[name].reason


@pytest.mark.whole
def test_a_compiler_that_is_killed_or_takes_too_long_leaves_its_operator(
    refuse: Callable[..., dict[str, Refused]],
) -> None:
    found = refuse(
        *((f"Dies {number:d}", (1, 8), "8a8w", "SM8650") for number in (signal.SIGKILL, 0, signal.SIGABRT)),
        timeout_s=30.0,
    )
    for one in found.values():
        assert "it was at aten_sigmoid_default (module gate.0, " in one.reason
        assert "farm: the compiler was at aten_sigmoid_default" in one.log
    killed, overdue, aborted = found.values()
    assert killed.reply.infra
    assert "the builder process was killed (signal 9)" in killed.reason
    assert "did not finish in 30 s" in overdue.reason
    assert "in end" in overdue.log, "its stack"
    assert aborted.reason.startswith("the compiler crashed (SIGABRT)")


@pytest.mark.whole
def test_debugging_names_what_qnn_refused_as_well(tools: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/ops.py").write_text(OPS)
    masked = job(module=".ops:Masked", inputs=(InputSpec((1, 8, 8)),), folder=str(tmp_path / "suite"))
    with Supervisor() as supervisor:
        process = DebugProcess(supervisor, tools.compiler, tmp_path / "debug.log", tmp_path / "work")
        process.send(CompileRequest(masked, tools.versions, 0, str(tmp_path / "out")))
        reply = process.receive(300)
    assert reply.reason.startswith("QNN: Output def has a bad scale"), reply.reason
    assert "aten_full_default is made of -inf (suite/ops.py:6)" in reply.reason
