"""LPAI in direct mode, on a virtual device: the stub of its runner in front of the stub of its library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from farm_home import FarmHome
from lpai_sdk_stub import StubSdk

SUITE = Path(__file__).with_name("lpai_cases")
WORDS = ("--soc", "SM8850", "--suite", str(SUITE), "--backend", "lpai", "--virtual", "1", "-k", "block")


@pytest.mark.whole
def test_a_job_runs_in_the_signed_process_domain_as_root(home: FarmHome, stub_sdk: StubSdk) -> None:
    words = (*WORDS, "--option", "direct_mode=true", "--option", "fps=9", "--json")
    done = home.farm("run", *words, env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=300, code=0)
    [job] = json.loads(done.stdout)["jobs"]
    assert job["id"] == "lpai_cases/block[SM8850-lpai-8a8w-direct_mode=true-fps=9]"
    [attempt] = job["attempts"]
    assert "STUB of direct mode, domain 0" in attempt["log"]
    assert all(found["sqnr_db"] > 30 for found in attempt["comparisons"])
    # Options that are compiled in count; this machine has x86's library, where a device would have the audio DSP's.
    assert "graph_set_config fps=9 ftrt_ratio=10 client_perf_type=1" in stub_sdk.told("farm_runner")


@pytest.mark.whole
def test_one_command_runs_a_case_in_both_modes_and_compares_latency_and_bytes(
    home: FarmHome, stub_sdk: StubSdk
) -> None:
    modes = ("--options", "direct_mode=false", "--options", "direct_mode=true")
    done = home.farm(
        "perf", "compare", *WORDS, *modes, "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=400
    )
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)["jobs"]
    assert [job[side]["job_id"] for side in "ab"] == [
        f"lpai_cases/block[SM8850-lpai-8a8w-direct_mode={mode}]" for mode in ("false", "true")
    ]
    equal, total = job["outputs"]
    assert equal == total > 0
    assert job["modes_alone"]
    latency = next(one for one in job["metrics"] if one["metric"] == "latency")
    assert latency["pairs"] >= 6
    assert "STUB" in done.stderr
