"""Template of builders without ExecuTorch: its start, its end while no builder needs it, and a start that hangs.

A stub of torch writes down the state of the builder that calls it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from farm.base.processes import Supervisor
from farm.builds.compile.compiler_process import BuilderProcess
from farm.builds.compile.protocol import TEMPLATE_NAME
from farm.builds.compile.template import BuilderTemplate
from farm.builds.toolchains.toolchain import Compiler
from farm.dispatch.device_run.health_check import health_check_job

JOB = health_check_job("SM8650", "htp")
SERVES = "from farm.base.fork_server import serve_forks\nserve_forks(lambda: None, lambda words: 0)"
HANGS = "import time\ntime.sleep(600)"
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


def compiler_of(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    (folder / "template_stub.py").write_text(program)
    monkeypatch.setattr("farm.builds.compile.template._MODULE", "template_stub")
    return Compiler(sys.executable, {"PYTHONPATH": str(folder)})


def test_an_idle_host_keeps_no_template(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_of(SERVES, tmp_path, monkeypatch)
    template = BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)
    # More often than a template that ends by itself is started again.
    for _ in range(4):
        assert template.acquire(compiler, JOB, 60.0, lambda: False)
        process = supervisor.find(TEMPLATE_NAME).process
        template.end_unused()
        assert process.poll() is None
        template.release()
        template.end_unused()
        assert process.poll() is not None


def test_a_template_that_hangs_is_ended_and_not_waited_for_again(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_of(HANGS, tmp_path, monkeypatch)
    template = BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)
    assert template.acquire(compiler, JOB, 0.3, lambda: False) is None
    process = supervisor.find(TEMPLATE_NAME).process
    assert process.poll() is not None
    assert template.acquire(compiler, JOB, 60.0, lambda: False) is None
    assert supervisor.find(TEMPLATE_NAME).process is process


def test_a_template_without_torch_has_no_forks(supervisor: Supervisor, tmp_path: Path) -> None:
    # The failure may pass, as of a full disk; but another import in the same process finds half of torch.
    (tmp_path / "torch.py").write_text("raise OSError('no descriptors left')")
    compiler = Compiler(sys.executable, {"PYTHONPATH": str(tmp_path)})
    template = BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)
    assert template.acquire(compiler, JOB, 60.0, lambda: False) is None
    process = supervisor.find(TEMPLATE_NAME).process
    assert template.acquire(compiler, JOB, 60.0, lambda: False) is None
    assert supervisor.find(TEMPLATE_NAME).process is process
    assert "no descriptors left" in (tmp_path / "builder-template.log").read_text()


def test_a_template_with_a_thread_does_not_stay(supervisor: Supervisor, tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "torch.py").write_text(f"{thread}\ndef set_num_threads(number): ...")
    compiler = Compiler(sys.executable, {"PYTHONPATH": str(tmp_path)})
    template = BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)
    assert template.acquire(compiler, JOB, 60.0, lambda: False) is None
    assert supervisor.find(TEMPLATE_NAME).process.poll() is not None
    assert "a library has started a thread" in (tmp_path / "builder-template.log").read_text()


def test_a_fork_is_like_a_builder_that_starts_by_itself(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH_STUB)
    env = {"PYTHONPATH": str(tmp_path), "STATE": str(tmp_path)}
    compiler = Compiler(sys.executable, env, as_of_ns=time.time_ns())
    template = BuilderTemplate(supervisor, tmp_path / "cache", tmp_path)
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
