"""The runner built in other ways: its tests once more with ASan (and LSan), UBSan and TSan, and its sources by clang.

The runner and the bridge are instrumented. ExecuTorch and QNN come built: accesses inside them and races between
their threads are not seen.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_runner.sanitizers import HERE, SYMBOLS

# TSan reports races with the watchdog, the only other thread, which ends programs in the tests of these files.
_OF_WATCHDOG = ("test_failures.py", "test_serve.py")
_LEAST_TESTS = {"address,undefined": 160, "thread": 60}


@pytest.mark.parametrize("sanitizer", SYMBOLS)
def test_nothing_is_reported(sanitizer: str, models: Path, farm_cache: Path, tmp_path: Path) -> None:
    assert models.is_dir()
    reports = tmp_path / "reports"
    reports.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
    places = [HERE / name for name in _OF_WATCHDOG] if sanitizer == "thread" else [HERE]
    wanted = {"RUNNER_SANITIZER": sanitizer, "RUNNER_SANITIZER_REPORTS": str(reports)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"),
            *("-m", "not whole", *map(str, places)),
        ],
        env={**env, **wanted, "FARM_TEST_CACHE": str(farm_cache)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    found = "\n".join(path.read_text(errors="replace") for path in sorted(reports.iterdir()))
    assert not found, found[:8000]
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= _LEAST_TESTS[sanitizer], done.stdout[-2000:]


# The runner's sources under the compiler of Android's NDK: clang takes them without a warning.
#
# For Android itself where bionic's and libc++'s headers are: FARM_ANDROID_SYSROOT names the folder that has them
# below `usr/include`, as an NDK does in toolchains/llvm/prebuilt/*/sysroot. Linking takes the NDK:
# docs/guides/runtime.md.


SYSROOT = os.environ.get("FARM_ANDROID_SYSROOT", "")
REQUIRED = os.environ.get("FARM_REQUIRE_CROSS") == "1"
SOURCES = Path(__file__).parents[2] / "native_runner/src"
EXECUTORCH = Path((importlib.util.find_spec("executorch").submodule_search_locations or [""])[0])  # type: ignore[union-attr]
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wnon-virtual-dtor", "-Wold-style-cast")
# API levels of Android: from the oldest of the farm's phones to a new one.
LEVELS = (24, 30, 35)

pytestmark = pytest.mark.whole


def clang() -> str:
    found = next((path for name in ("clang++-16", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        (pytest.fail if REQUIRED or SYSROOT else pytest.skip)("there is no clang++: install clang-16")
    return found


def checked(target: str, *flags: str) -> tuple[int, str]:
    """Return exit code and output of clang for the sources, which are one translation unit as in the build."""
    includes = [EXECUTORCH / "include", EXECUTORCH / "include/executorch/runtime/core/portable_type/c10"]
    words = [
        clang(), f"--target={target}", "-fsyntax-only", "-std=c++17", "-Werror", *WARNINGS, *flags,
        '-DFARM_RUNNER_VERSION="0"', '-DFARM_EXECUTORCH_VERSION="0"', "-DET_EVENT_TRACER_ENABLED",
        "-DC10_USING_CUSTOM_GENERATED_MACROS", *(word for path in includes for word in ("-isystem", str(path))),
    ]  # fmt: skip
    sources = sorted(SOURCES.glob("*.cpp"))
    assert len(sources) >= 25
    unit = "".join(f'#include "{source}"\n' for source in sources)
    done = subprocess.run(
        [*words, "-x", "c++", "-"], input=unit, capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stderr[:8000]


def test_clang_takes_every_source_for_arm_linux() -> None:
    headers = Path("/usr/aarch64-linux-gnu/include")
    if not headers.is_dir():
        (pytest.fail if REQUIRED else pytest.skip)(f"there is no {headers}: install g++-aarch64-linux-gnu")
    assert checked("aarch64-linux-gnu", "-isystem", str(headers)) == (0, "")


@pytest.mark.skipif(not SYSROOT, reason="FARM_ANDROID_SYSROOT names no folder with bionic's headers")
@pytest.mark.parametrize("level", LEVELS)
def test_clang_takes_every_source_for_android(level: int) -> None:
    assert (Path(SYSROOT) / "usr/include/android/api-level.h").is_file(), f"{SYSROOT}/usr/include has no bionic"
    assert checked(f"aarch64-linux-android{level}", f"--sysroot={SYSROOT}", "-fPIE") == (0, "")
