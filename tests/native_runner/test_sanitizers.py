"""The tests of the runner once more, with builds of the runner with ASan (and LSan), UBSan and TSan.

The runner and the bridge are instrumented. ExecuTorch and QNN come built: accesses inside them and races between
their threads are not seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from native_runner.sanitizers import HERE, SYMBOLS

# The test requires an empty environment, and a sanitizer has its options there.
_LEFT_OUT = "test_it_runs_from_its_own_folder_with_nothing_else_in_the_environment"
# TSan reports races with the watchdog, the only other thread, which ends programs in the tests of these files.
_OF_WATCHDOG = ("test_failures.py", "test_serve.py")
_LEAST_TESTS = {"address,undefined": 160, "thread": 60}


@pytest.mark.whole
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
            *("-m", "not whole", "-k", f"not {_LEFT_OUT}", *map(str, places)),
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
