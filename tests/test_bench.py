"""Every program of `bench/` runs, and its last line has the keys that docs/evidence/performance.md lists."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from parts import do_without
from programs import run_program

BENCH = Path(__file__).parents[1] / "bench"
DOCUMENTED = {
    name: set(re.findall(r"`(\w+)`", keys))
    for name, keys in re.findall(
        r"^\| `(\w+\.py)` \|[^|]*\| ([^|]*) \|$",
        (BENCH.parent / "docs/evidence/performance.md").read_text(),
        re.MULTILINE,
    )
}
"""Keys of the last line, by program."""


def test_every_program_is_documented() -> None:
    programs = {path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    # compile.py and cluster.py start them.
    assert set(DOCUMENTED) == programs - {"upstream_compile.py", "stub_build_host.py"}


@pytest.mark.whole
# tests/compile/test_same_programs.py runs equal_programs.py.
@pytest.mark.parametrize("program", sorted(DOCUMENTED.keys() - {"equal_programs.py"}))
def test_it_runs(program: str, farm_cache: Path, tmp_path: Path) -> None:
    if program == "report.py" and not shutil.which("chromedriver"):
        do_without("no chromedriver: apt-get install chromium chromium-driver", "FARM_REQUIRE_CHROMIUM")
    done = run_program(
        [sys.executable, str(BENCH / program), "--quick"],
        env={**os.environ, "FARM_CACHE_DIR": str(farm_cache), "FARM_STATE_DIR": str(tmp_path / "state")},
        timeout_s=600,
    )
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == DOCUMENTED[program]
    if program == "toolchains.py":
        assert last["edits"]
        assert last["stale"] == 0
    if program == "regressions.py":
        assert last["false_alerts_per_series_night"] == 0
    if program == "leases.py":
        assert (last["double"], last["left"]) == (0, 0)
    if program == "cluster.py":
        assert (last["lost"], last["duplicated"]) == (0, 0)
    if program == "utilization.py":
        assert set(last["devices"]) == {"1", "2"}
