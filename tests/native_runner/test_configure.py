"""Configuring the runner: an ExecuTorch that it cannot be built against is refused before anything is compiled."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from farm.base.paths import data_folder
from farm.builds.runtime.packages import package_folder, packaged_tool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Configure = Callable[[str], subprocess.CompletedProcess[str]]

# A stub of the package: targets without libraries.
PACKAGE = """
foreach(name runtime etdump)
  add_library(executorch::${name} INTERFACE IMPORTED)
endforeach()
set(EXECUTORCH_INCLUDE_DIRS "${CMAKE_CURRENT_LIST_DIR}/include")
"""
HEADER = "executorch/extension/module/module.h"


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Configure against a stub of ExecuTorch's package whose header is this text."""

    def run(header: str) -> subprocess.CompletedProcess[str]:
        package = tmp_path / "executorch_stub"
        shutil.rmtree(tmp_path, ignore_errors=True)
        (package / "include" / HEADER).parent.mkdir(parents=True)
        (package / "include" / HEADER).write_text(header)
        (package / "executorch-config.cmake").write_text(PACKAGE)
        cmake, ninja = packaged_tool("cmake", "simulator"), packaged_tool("ninja", "simulator")
        return subprocess.run(
            [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dexecutorch_DIR={package}",
             "-DFARM_BUILD_BRIDGE=OFF", "-DCMAKE_CXX_COMPILER_WORKS=1", "-S", str(data_folder("native_runner")),
             "-B", str(tmp_path / "build")],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return run


def test_a_loader_that_does_not_copy_its_options_is_refused(configure: Configure) -> None:
    header = (package_folder("executorch", "include", "build") / "include" / HEADER).read_text()
    done = configure(header)
    assert done.returncode == 0, done.stderr
    older = header.replace("LoadBackendOptionsMap& backend_options() const", "LoadBackendOptionsMap* options() const")
    assert older != header
    done = configure(older)
    assert done.returncode != 0
    output = " ".join(done.stderr.split())
    assert "Module::load of this ExecuTorch does not copy the options of backends" in output
    assert "use ExecuTorch 1.5 or newer" in output
