"""The runner built with a sanitizer, for test_sanitizers.py: RUNNER_SANITIZER names one for the tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from farm.builds.runtime import native as native_build
from farm.builds.runtime.native import build_native

HERE = Path(__file__).parent
# To how each makes itself known in the binary. Two go together: a build and a run of the tests less.
SYMBOLS = {"address,undefined": (b"__asan_init", b"__ubsan_handle"), "thread": (b"__tsan_func_entry",)}
SANITIZER = os.environ.get("RUNNER_SANITIZER", "")
_REPORTS = os.environ.get("RUNNER_SANITIZER_REPORTS", "")
# Signals are left to the runner, which has to report them to the farm.
_SIGNALS = ("segv", "abort", "sigbus", "sigfpe", "sigill")
# -O1 compiles instrumented sources in 60 % of the time of -O3, and removes fewer of the accesses that are checked.
_CMAKE_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG")
_TSAN_EXIT_MS = 100
"""Milliseconds that TSan waits for races at the end of a process: 1000 by default, in each of 200 processes."""


def put_sanitized_runner(cache: Path, folder: Path) -> None:
    """Replace the runner and the bridge of a runtime folder by builds with the sanitizer, if one is selected."""
    if not SANITIZER:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", f"-fsanitize={SANITIZER} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1")
        patch.setenv("LDFLAGS", f"-fsanitize={SANITIZER}")
        patch.setattr(native_build, "_FLAGS", _CMAKE_FLAGS)
        build = build_native(cache)
    for path in (build.runner, build.bridge):
        shutil.copy(path, folder / path.name)
    binary = (folder / build.runner.name).read_bytes()
    assert all(symbol in binary for symbol in SYMBOLS[SANITIZER])
    source, library = HERE / "deepbind_stub.cpp", folder / "libdeepbind_stub.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=120)


def runner_environment(runtime: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return all of the environment that a runner is started with: nothing of this machine's reaches a device."""
    wanted = {"LD_LIBRARY_PATH": str(runtime), **env}
    if SANITIZER:
        options = ":".join([f"log_path={_REPORTS}/report", *(f"handle_{name}=0" for name in _SIGNALS)])
        wanted["ASAN_OPTIONS"] = f"{options}:detect_leaks=1:verify_asan_link_order=0"
        wanted["LSAN_OPTIONS"] = f"suppressions={HERE / 'leaks.supp'}:print_suppressions=0"
        wanted["UBSAN_OPTIONS"] = f"{options}:print_stacktrace=1"
        # ExecuTorch's libraries and QNN's were built without it, so that their own locks are invisible.
        wanted["TSAN_OPTIONS"] = f"{options}:ignore_noninstrumented_modules=1:atexit_sleep_ms={_TSAN_EXIT_MS}"
        stub = str(runtime / "libdeepbind_stub.so")
        wanted["LD_PRELOAD"] = ":".join(filter(None, (stub, wanted.get("LD_PRELOAD"))))
    return wanted
