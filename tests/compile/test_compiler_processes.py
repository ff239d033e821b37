"""Compiler processes: template and builders, their output and memory, and the process of `farm debug`."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made import job
from waiting import until

from farm.base.processes import Supervisor
from farm.builds.compile.debug.protocol import CompileRequest, DebugProcess, DebugReply
from farm.builds.compile.processes import BuilderProcess, BuilderTemplate
from farm.builds.compile.protocol import TEMPLATE_NAME
from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.dispatch.device_run.health_check import health_check_job

# Template of builders without ExecuTorch: its start, its end while no builder needs it, and a start that hangs.
#
# A stub of torch writes down the state of the builder that calls it.


JOB = health_check_job("SM8650", "htp")
SERVES = "from farm.base.fork_server import serve_forks\nserve_forks(lambda: None, lambda words: 0)"
# torch names the folder of its debug files as it is imported, from this variable or the current folder.
TORCH_STUB = """
import gc, json, locale, logging, os, pathlib, resource, signal, sys, tempfile
debug = os.path.join(os.environ.get("TORCH_COMPILE_DEBUG_DIR", os.getcwd()), "torch_compile_debug")
def set_num_threads(number):
    if pathlib.Path("/proc/self/comm").read_text() != "farm-builder\\n":
        return
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    masks = [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    umask = os.umask(0)
    os.umask(umask)
    own = ("FARM_PROCESS", "TMPDIR")
    state = {
        "signals": masks + [repr(signal.getsignal(one)).partition(" at ")[0] for one in signal.Signals],
        "umask": umask,
        "environment": {name: value for name, value in os.environ.items() if name not in own},
        "path": sys.path,
        "flags": [repr(sys.flags), sys.dont_write_bytecode, sys.pycache_prefix, gc.get_threshold(), gc.isenabled()],
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIM")
                   and name != "RLIM_INFINITY"],
        "priority": [os.nice(0), pathlib.Path("/proc/self/oom_score_adj").read_text(), sorted(os.sched_getaffinity(0))],
        "streams": [(one.encoding, one.errors, one.line_buffering) for one in (sys.stdin, sys.stdout, sys.stderr)],
        "log": [os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"), len(logging.getLogger().handlers)],
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "locale": locale.setlocale(locale.LC_ALL),
        "temporary files": os.path.relpath(tempfile.gettempdir()),
        "files of torch": os.path.relpath(debug),
        "modules of a user": [type(one).__name__ for one in sys.meta_path],
    }
    path = pathlib.Path(os.environ["STATE"], str(os.getpid()))
    path.with_suffix(".half").write_text(json.dumps(state))
    path.with_suffix(".half").rename(path)
"""


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor() as made:
        yield made


@pytest.fixture
def template(supervisor: Supervisor, tmp_path: Path) -> BuilderTemplate:
    return BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)


def compiler_with(folder: Path, module: str, text: str, **options: Any) -> Compiler:
    """Return a compiler that imports a module of this text."""
    (folder / f"{module}.py").write_text(text)
    return Compiler(sys.executable, {"PYTHONPATH": str(folder), "STATE": str(folder)}, **options)


def test_an_idle_host_keeps_no_template(
    supervisor: Supervisor, template: BuilderTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.builds.compile.processes._MODULE", "template_stub")
    compiler = compiler_with(tmp_path, "template_stub", SERVES)
    # More often than a template that ends by itself is started again.
    for _ in range(4):
        assert template.acquire(compiler, JOB, 60.0, lambda: False)
        process = supervisor.find(TEMPLATE_NAME).process
        template.end_unused()
        assert process.poll() is None
        template.release()
        template.end_unused()
        assert process.poll() is not None


@pytest.mark.parametrize(
    ("torch", "wait_s", "log"),
    [
        pytest.param("import time\ntime.sleep(600)", 0.5, "", id="hangs"),
        # The failure may pass, as of a full disk; but another import in the same process finds half of torch.
        pytest.param("raise OSError('no descriptors left')", 60.0, "no descriptors left", id="has no torch"),
        pytest.param(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            "def set_num_threads(number): ...",
            60.0, "a library has started a thread", id="has a thread",
        ),
    ],
)  # fmt: skip
def test_a_template_that_cannot_fork_is_ended_and_not_waited_for_again(
    supervisor: Supervisor, template: BuilderTemplate, tmp_path: Path, torch: str, wait_s: float, log: str
) -> None:
    compiler = compiler_with(tmp_path, "torch", torch)
    assert template.acquire(compiler, JOB, wait_s, lambda: False) is None
    process = supervisor.find(TEMPLATE_NAME).process
    assert process.poll() is not None
    assert template.acquire(compiler, JOB, 60.0, lambda: False) is None
    assert supervisor.find(TEMPLATE_NAME).process is process
    assert log in (tmp_path / "builder-template.log").read_text()


def test_a_fork_is_like_a_builder_that_starts_by_itself(
    supervisor: Supervisor, template: BuilderTemplate, tmp_path: Path
) -> None:
    compiler = compiler_with(tmp_path, "torch", TORCH_STUB, as_of_ns=time.time_ns())
    popen = template.acquire(compiler, JOB, 60.0, lambda: False)
    assert popen is not None
    states: list[dict[str, Any]] = []
    for start in (None, popen):
        builder = BuilderProcess(0, tmp_path / "cache", compiler, supervisor, tmp_path / "builder.log", start)
        file = tmp_path / str(builder._child.pid)
        until(file.exists, "the state of a builder")
        states.append(json.loads(file.read_text()))
        builder.end()
    assert states[1] == states[0]


# Output of native code in a builder: each line is in the log of the job that printed it.


TWO_JOBS = """
import ctypes, os, pathlib, signal, sys
from farm.builds.compile.builder import _printing_to
from farm.builds.compile.protocol import reply_pipe
reply_pipe()
native = ctypes.CDLL(None)
for name in ("first", "second"):
    with _printing_to(pathlib.Path(name)):
        native.printf(f"{name} from C\\n".encode())
        if name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_lines_of_native_code_are_in_the_log_of_their_job_also_after_a_crash(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    subprocess.run([sys.executable, "-c", TWO_JOBS], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (tmp_path / "first").read_text() == "first from C\n"
    assert (tmp_path / "second").read_text() == "second from C\n"


# Memory of a process that compiles one program after another.


# Compiler process of `farm debug`, without a program; torch_debug.py has the figures.


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
