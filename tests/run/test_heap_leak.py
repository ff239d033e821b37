"""A device whose DSP heap leaks, from ExecuTorch's file over store and history to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from heap_sdk_stub import IDLE_BYTES, make_heap_sdk

CASES = Path(__file__).parent / "heap_cases"
LEAK = 9 << 20
RUN = ("run", "--soc", "SM8650", "--suite", str(CASES), "-k", "one", "--virtual", "1", "--heap", "--json")


@pytest.mark.whole
def test_a_leak_fails_the_job_and_stands_in_history_and_report(
    home: FarmHome, farm_cache: Path, tmp_path: Path
) -> None:
    views: list[dict[str, Any]] = []
    for name, settings, code in (("sound", "", 0), ("leaking", f"keep={LEAK}", 1)):
        sdk = make_heap_sdk(tmp_path / name, farm_cache, settings)
        done = home.farm(*RUN, env={"QNN_SDK_ROOT": str(sdk)}, timeout_s=500)
        assert done.returncode == code, done.stderr[-3000:]
        views.append(json.loads(done.stdout))
    [attempt] = views[1]["jobs"][0]["attempts"]
    assert (attempt["verdict"], attempt["reason"]) == (
        "failed",
        "DSP heap: 9,437,184 bytes kept, expected 4,096 or less",
    )
    samples = {row["metric"]: row["samples"] for row in attempt["measurements"]}
    assert samples["dsp_heap_before"] == [IDLE_BYTES]
    assert samples["dsp_heap_after"] == [IDLE_BYTES + LEAK]
    told = json.loads(home.farm("history", "heap_cases/one", "--metric", "dsp_heap_difference", "--json").stdout)
    assert sorted(point["value"] for point in told["points"]) == [0, LEAK]
    home.farm("report", views[1]["id"], "--html", "report.html")
    page = (home.cwd / "report.html").read_text()
    section = page[page.index('<section id="heap"') :].partition("</section>")[0]
    assert "9,437,184" in section
    assert "DSP heap: 9,437,184 bytes kept, expected 4,096 or less" in page
