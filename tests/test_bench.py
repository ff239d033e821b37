"""Every program of `bench/` runs, and its last line has the keys that docs/performance.md lists."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from bench_programs import BENCH, documented_keys, run_bench
from generation_mutations import MUTATIONS

if TYPE_CHECKING:
    from pathlib import Path

# Other programs start these: upstream_compile.py is a part of compile.py, bisect_commits.py and same_programs.py are
# parts of toolchains.py.
_PARTS = ("bisect_commits.py", "same_programs.py", "upstream_compile.py")


def test_every_program_is_documented() -> None:
    programs = {path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert {name.split()[0] for name in documented_keys()} == programs - set(_PARTS)


@pytest.mark.whole
@pytest.mark.parametrize("program", sorted(documented_keys()))
def test_it_runs(program: str, farm_cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if program == "report.py" and not (os.environ.get("FARM_REQUIRE_CHROMIUM") or shutil.which("chromedriver")):
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver")
    if program == "generate.py":
        # What it mutates.
        request.getfixturevalue("generated_bundle")
    env = {"FARM_CACHE_DIR": str(farm_cache), "FARM_STATE_DIR": str(tmp_path / "state")}
    last = run_bench(program, env=env)
    if program == "toolchains.py":
        assert last["edits"]
        assert last["stale"] == 0
    if program == "cluster.py":
        assert (last["lost"], last["duplicated"]) == (0, 0)
    if program == "generate.py":
        assert last["mutations_caught"] == len(MUTATIONS)
    if program == "utilization.py":
        assert set(last["devices"]) == {"1", "8"}
