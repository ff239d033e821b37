"""Graphs that QNN refuses, compiled for real: the reason is QNN's line, with the module and the line of the model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from builder_runs import request_of, run_builders
from made import job

from farm.base.processes import Supervisor
from farm.builds.compile.debug.process import DebugProcess
from farm.builds.compile.debug.protocol import CompileRequest
from farm.builds.compile.protocol import BuildReply
from farm.builds.toolchains.toolchain import Toolchain
from farm.results.judge import build_failure
from farm.suites.suite import InputSpec

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
