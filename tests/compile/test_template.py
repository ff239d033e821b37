"""Template of builders without ExecuTorch: its start, its end while no builder needs it, and a start that hangs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.base.processes import Supervisor
from farm.builds.compile.protocol import TEMPLATE_NAME
from farm.builds.compile.template import BuilderTemplate
from farm.builds.toolchains.toolchain import Compiler
from farm.dispatch.device_run.health_check import health_check_job

JOB = health_check_job("SM8650", "htp")
SERVES = "from farm.base.fork_server import serve_forks\nserve_forks(lambda: None, lambda words: 0)"
HANGS = "import time\ntime.sleep(600)"


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
