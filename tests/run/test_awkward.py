"""The suite of difficult modules on the HTP simulator and on XNNPACK: each job passes or is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from warm_torch import run_script

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "test_suites" / "awkward" / "suite.toml"
CONSTANT = ("constant_beside", "empty")
"""Cases with outputs that only the graph marks as constant: files with expected values carry no mark."""
WRITES = ("input_slice", "input_add", "input_returned", "input_through_view")
_INPUT = r"(the program does not write|forward writes) to its input "
REFUSALS = {
    **dict.fromkeys((*WRITES, "second_input"), _INPUT),
    "buffer_sum": "output 0 against fp32: sqnr -",
    "buffer_returned": "forward writes to its buffer last, and the htp flow cannot compile it",
    "buffer_replaced": "the program does not write to its buffer last",
    "intermediate": "output 1 against fp32: sqnr ",
    "parameter_write": "forward writes to its parameter weight: a program has no such write",
    "with_none": r"forward returns None in output \[1\]",
    "with_number": r"forward returns 8 in output \[1\]",
    "constant_beside": "disagree on the delegate signature",
    "channels_last": "XNNPACK takes weights of convolutions in C order",
    "undefined": "sqrt is nan|the fp32 reference of output 0 has NaN",
}
"""Text in the reason of each case that does not pass everywhere: a known issue covers any failure at its stage."""


def run(home: FarmHome, suite: str, backend: str, *more: str) -> list[dict[str, Any]]:
    """Return the jobs of a run, which may fail."""
    asked = ("run", "--soc", "SM8650", "--suite", suite, "--virtual", "1", "--backend", backend, *more)
    jobs: list[dict[str, Any]] = home.json(*asked, timeout_s=500, code=None)["jobs"]
    return jobs


@pytest.fixture(scope="module")
def shared_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def jobs(shared_home: FarmHome) -> list[dict[str, Any]]:
    return [job for backend in ("htp", "xnnpack") for job in run(shared_home, "awkward", backend)]


def test_each_job_passes_or_is_refused_in_one_line(jobs: list[dict[str, Any]]) -> None:
    assert len(jobs) == 96
    for job in jobs:
        attempt = job["attempts"][-1]
        assert "\n" not in attempt["reason"]
        if attempt["verdict"] != "passed":
            assert attempt["known_issue"], attempt["reason"]
            assert re.search(REFUSALS[job["case"]], attempt["reason"]), (job["id"], attempt["reason"])


def test_passed_programs_compute_the_module_on_unseen_inputs(
    shared_home: FarmHome, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    passed = [job for job in jobs if job["attempts"][-1]["verdict"] == "passed" and job["case"] not in CONSTANT]
    asked = [
        {"key": job["attempts"][-1]["bundle_key"]} | {name: job[name] for name in ("case", "precision", "backend")}
        for job in passed
    ]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("unseen_inputs.py")
    run_script(script, str(SUITE), str(shared_home.cache), str(tmp_path), cache=shared_home.cache, folder=tmp_path)
    again = {
        (backend, job["case"]): job["attempts"][-1]
        for backend in ("htp", "xnnpack")
        for job in run(shared_home, str(tmp_path / backend), backend, "--iterations", "1", "--warm-up", "0")
    }
    expected = {(one["backend"], f"{one['case']}_{one['precision']}") for one in asked}
    assert {key: attempt["reason"] for key, attempt in again.items()} == dict.fromkeys(expected, "")
