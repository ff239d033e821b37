"""Parts beside the runner: the bridge to QNN, the heap figures of the DSP, and the configuration of its build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built_stub import qnn_stub
from heap_sdk_stub import IDLE_BYTES, build_heap_stub
from programs import run_program

from farm.base.paths import data_folder
from farm.builds.runtime.native import build_native
from farm.builds.runtime.packages import package_folder, packaged_tool
from farm.results.heap import parse_heap

# The bridge hands one word over where a library reads it, and changes nothing else. The library here is a stub;
# test_run.py shows that the real one works behind the bridge.


HERE = Path(__file__).parent
SOC_MODEL = 57


def _create(
    bridge: Path, real: Path | str, option: int = 0, custom_option: int = 0
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, HERE / "call_device_create.py", bridge, *map(str, (option, custom_option, SOC_MODEL))]
    env = {"FARM_QNN_REAL_HTP": str(real)}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_soc_model_is_where_the_library_reads_it_and_other_configs_pass_as_they_are(farm_cache: Path) -> None:
    """From core API 2.36 on both places have it: QNN 2.49, core API 2.38, reads one, older and newer QNN the other."""
    bridge = build_native(farm_cache).bridge
    for core_minor, options, words in (
        (26, (), f"{SOC_MODEL} 0"),
        (35, (), f"{SOC_MODEL} 0"),
        (36, (), f"{SOC_MODEL} {SOC_MODEL}"),
        (36, (1, 0), f"{SOC_MODEL} 0"),
        (36, (0, 1), f"{SOC_MODEL} 0"),
    ):
        done = _create(bridge, qnn_stub(farm_cache, core_minor), *options)
        assert done.stdout.strip() == f"{words} 0", done.stderr


def test_a_library_that_is_not_there_is_named(farm_cache: Path) -> None:
    done = _create(build_native(farm_cache).bridge, "/nowhere/libQnnHtp.so")
    assert "cannot load the real library: /nowhere/libQnnHtp.so" in done.stderr
    assert "error 1000" in done.stderr


def test_the_bridge_shows_its_one_entry_point_and_needs_no_c_plus_plus_runtime(farm_cache: Path) -> None:
    bridge = str(build_native(farm_cache).bridge)
    symbols = run_program(["nm", "--dynamic", "--defined-only", bridge]).stdout.splitlines()
    assert [line.split()[-1] for line in symbols] == ["QnnInterface_getProviders"]
    dynamic = run_program(["readelf", "--dynamic", bridge]).stdout
    assert "Library soname: [libQnnHtp.so]" in dynamic
    assert "NODELETE" in dynamic
    assert "stdc++" not in dynamic


# ExecuTorch's own code for the DSP's heap, over a stub of a DSP that reports one.


HEAP = ("--heap_profiling_path=heap.txt", "--profile_level=2")


@pytest.fixture
def heap_stub(farm_cache: Path) -> Callable[..., dict[str, str]]:
    """From settings of the stub to the environment that puts it behind the bridge."""
    library = build_heap_stub(farm_cache)
    return lambda settings="": {"FARM_QNN_REAL_HTP": str(library), "HEAP_STUB": settings}


def _stated(folder: Path) -> tuple[int | None, int | None, str]:
    heap = parse_heap((folder / "heap.txt").read_bytes())
    return heap.before, heap.after, heap.problem


@pytest.mark.parametrize(
    ("level", "settings", "is_measured"), [("1", "", True), ("2", "", True), ("0", "", False), ("2", "silent", False)]
)
def test_a_profiled_run_writes_both_numbers(
    conv: Any, heap_stub: Any, level: str, settings: str, is_measured: bool
) -> None:
    conv.passes("--heap_profiling_path=heap.txt", f"--profile_level={level}", env=heap_stub(settings))
    assert (conv.folder / "heap.txt").exists() == is_measured
    assert not is_measured or _stated(conv.folder) == (IDLE_BYTES, IDLE_BYTES, "")


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ("keep=9437184", (IDLE_BYTES, IDLE_BYTES + 9437184, "")),
        # Events out of order are no measurement. The name of the first begins the file anew, whenever it comes.
        ("swapped", (IDLE_BYTES, None, "after_context_freed is missing")),
        ("twice", (IDLE_BYTES, None, "after_context_freed stands 2 times")),
    ],
)
def test_events_are_stated_as_they_came(conv: Any, heap_stub: Any, settings: str, stated: Any) -> None:
    assert conv.run(*HEAP, env=heap_stub(settings)).code == 0
    assert _stated(conv.folder) == stated


def test_every_job_of_a_session_has_a_file_of_its_own_from_the_first_context_to_the_last(
    conv: Any, heap_stub: Any
) -> None:
    with conv.serve(*HEAP, env=heap_stub("keep=4096")) as session:
        for jobs in range(2):
            folder = conv.folder / f"job{jobs}"
            (folder / "outputs").mkdir(parents=True)
            for name in ("model.pte", "input_list.txt", "x0.raw", "x1.raw"):
                (folder / name).symlink_to(conv.folder / name)
            assert session.ask(f"--working_folder={folder}", "--heap_profiling_path=heap.txt")["ok"] is True
            assert _stated(folder) == (IDLE_BYTES + jobs * 4096, IDLE_BYTES + (jobs + 1) * 4096, "")
        # ExecuTorch takes the path once a process.
        answer = session.ask("--heap_profiling_path=other.txt")
        assert answer["error"]["stage"] == "options"
        assert "needs a process of its own" in answer["error"]["message"]


def test_the_job_after_a_refused_context_starts_from_none(conv: Any, heap_stub: Any) -> None:
    with conv.serve(*HEAP, env=heap_stub("refuse=1")) as session:
        answer = session.ask("--heap_profiling_path=heap.txt")
        assert (answer["ok"], answer["error"]["stage"]) == (False, "load")
        assert not (conv.folder / "heap.txt").exists()
        assert session.ask("--heap_profiling_path=heap.txt")["ok"] is True
        assert _stated(conv.folder) == (IDLE_BYTES, IDLE_BYTES, "")


# Configuring the runner: an ExecuTorch that it cannot be built against is refused before anything is compiled.

# A stub of the package: targets without libraries.
PACKAGE = """
foreach(name runtime etdump)
  add_library(executorch::${name} INTERFACE IMPORTED)
endforeach()
set(EXECUTORCH_INCLUDE_DIRS "${CMAKE_CURRENT_LIST_DIR}/include")
"""
HEADER = "executorch/extension/module/module.h"


def configured(folder: Path, header: str) -> subprocess.CompletedProcess[str]:
    """Configure against a stub of ExecuTorch's package whose header is this text."""
    package = folder / "executorch_stub"
    (package / "include" / HEADER).parent.mkdir(parents=True)
    (package / "include" / HEADER).write_text(header)
    (package / "executorch-config.cmake").write_text(PACKAGE)
    cmake, ninja = packaged_tool("cmake", "simulator"), packaged_tool("ninja", "simulator")
    return subprocess.run(
        [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dexecutorch_DIR={package}",
         "-DFARM_BUILD_BRIDGE=OFF", "-DCMAKE_CXX_COMPILER_WORKS=1", "-S", str(data_folder("native_runner")),
         "-B", str(folder / "build")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_loader_that_does_not_copy_its_options_is_refused(tmp_path: Path) -> None:
    header = (package_folder("executorch", "include", "build") / "include" / HEADER).read_text()
    done = configured(tmp_path / "present", header)
    assert done.returncode == 0, done.stderr
    older = header.replace("LoadBackendOptionsMap& backend_options() const", "LoadBackendOptionsMap* options() const")
    assert older != header
    done = configured(tmp_path / "older", older)
    assert done.returncode != 0
    output = " ".join(done.stderr.split())
    assert "Module::load of this ExecuTorch does not copy the options of backends" in output
    assert "use ExecuTorch 1.5 or newer" in output
