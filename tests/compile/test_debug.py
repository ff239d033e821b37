"""Compiler process of `farm debug`, without a program; torch_debug.py has the figures."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from made import job

from farm.base.errors import UsageError
from farm.base.processes import Supervisor
from farm.builds.compile.debug.process import DebugProcess, require_modules
from farm.builds.compile.debug.protocol import CompileRequest, DebugReply, parse_metric
from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.builds.toolchains.toolchain import Compiler, Toolchain


def test_a_module_that_is_not_there_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("raise ValueError('imported')")
    (tmp_path / "pkg").mkdir()
    compiler = Compiler(sys.executable, {"PYTHONPATH": str(tmp_path)})
    with Supervisor() as supervisor:
        for problem, *metrics in (
            ("", "metrics:Cosine=1", "pkg.of.mine:Cosine", ".metrics:Cosine", ".pkg.metrics:Cosine"),
            ("gone.metrics:Far: no module gone: put its folder on", "metrics:Cosine", "gone.metrics:Far"),
            (".gone:Far: no module gone in ", ".gone:Far"),
        ):
            found = ""
            try:
                require_modules(supervisor, compiler, [parse_metric(one) for one in metrics], tmp_path)
            except UsageError as error:
                found = str(error)
            assert found.startswith(f"--comparator {problem}") == bool(problem), found


def test_a_compiler_that_crashes_or_takes_too_long_is_a_reply(tools: Toolchain, tmp_path: Path) -> None:
    request = CompileRequest(job(), tools.versions, 0, str(tmp_path / "out"))
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


@pytest.mark.parametrize("value", [None, -1.5, math.inf, -math.inf])
def test_a_figure_comes_through_json_as_it_was(value: float | None) -> None:
    layers = (Layer("relu", "aten.relu.default", (), {LayerStep.COMPILER: Gap(value, value, value)}),)
    reply = DebugReply(ok=True, packed_layers=msgspec.msgpack.encode(layers))
    assert msgspec.json.decode(msgspec.json.encode(reply), type=DebugReply).layers == layers
