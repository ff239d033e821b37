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


def run(home: FarmHome, suite: str, backend: str, *more: str) -> dict[str, Any]:
    asked = ("run", "--soc", "SM8650", "--suite", suite, "--virtual", "1", "--backend", backend, "--json", *more)
    done = home.farm(*asked, timeout_s=500)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-2000:]
    view: dict[str, Any] = json.loads(done.stdout)
    return view


@pytest.fixture(scope="module")
def shared_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def jobs(shared_home: FarmHome) -> list[dict[str, Any]]:
    return [job for backend in ("htp", "xnnpack") for job in run(shared_home, "awkward", backend)["jobs"]]


def attempt_of(jobs: list[dict[str, Any]], case: str, precision: str) -> dict[str, Any]:
    [job] = [job for job in jobs if (job["case"], job["precision"]) == (case, precision)]
    attempt: dict[str, Any] = job["attempts"][-1]
    return attempt


def test_each_job_passes_or_is_refused_in_one_line(jobs: list[dict[str, Any]]) -> None:
    assert len(jobs) == 96
    for job in jobs:
        attempt = job["attempts"][-1]
        assert "\n" not in attempt["reason"]
        if attempt["verdict"] != "passed":
            assert attempt["known_issue"], attempt["reason"]
            assert re.search(REFUSALS[job["case"]], attempt["reason"]), (job["id"], attempt["reason"])


@pytest.mark.parametrize("case", WRITES)
def test_a_program_without_the_write_fails_and_one_with_it_passes(jobs: list[dict[str, Any]], case: str) -> None:
    lost = attempt_of(jobs, case, "8a8w")
    assert (lost["verdict"], lost["stage"]) == ("failed", "build")
    assert lost["reason"].startswith("the program does not write to its input x, as the module does: return the new")
    assert "forward writes to its input x, and the htp flow cannot" in attempt_of(jobs, case, "fp16")["reason"]
    kept = attempt_of(jobs, case, "fp32")
    assert kept["verdict"] == "passed"
    assert "writes to its input x" in kept["notes"]
    assert {one["name"] for one in kept["comparisons"]} == {"", "input x as written"}


def test_a_buffer_is_written_once_per_sample(jobs: list[dict[str, Any]]) -> None:
    for case, name in (("buffer_sum", "total"), ("buffer_returned", "last"), ("counter", "calls")):
        kept = attempt_of(jobs, case, "fp32")
        assert kept["verdict"] == "passed"
        assert f"writes to its buffer {name}: each sample is executed once, as its state goes on" in kept["notes"]
    for precision in ("8a8w", "fp16", "fp32"):
        assert "does not write to its buffer last" in attempt_of(jobs, "buffer_replaced", precision)["reason"]


def test_outputs_have_names(jobs: list[dict[str, Any]]) -> None:
    expected = {
        "named": ["out", "aux"],
        "nested": ["[0]", "[1].0", "[1].1"],
        "fields": ["boxes", "levels.p3", "levels.p4"],
    }
    for case, names in expected.items():
        for precision in ("8a8w", "fp16", "fp32"):
            found = attempt_of(jobs, case, precision)
            assert found["verdict"] == "passed"
            assert [one["name"] for one in found["comparisons"] if one["reference"] == "fp32"] == names


def test_every_program_that_passed_computes_the_module_on_unseen_inputs(
    shared_home: FarmHome, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    passed = [job for job in jobs if job["attempts"][-1]["verdict"] == "passed" and job["case"] not in CONSTANT]
    asked = [
        {
            "case": job["case"],
            "precision": job["precision"],
            "backend": job["backend"],
            "key": job["attempts"][-1]["bundle_key"],
        }
        for job in passed
    ]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("unseen_inputs.py")
    run_script(script, str(SUITE), str(shared_home.cache), str(tmp_path), cache=shared_home.cache, folder=tmp_path)
    again = {
        (backend, job["case"]): job["attempts"][-1]
        for backend in ("htp", "xnnpack")
        for job in run(shared_home, str(tmp_path / backend), backend, "--iterations", "1", "--warm-up", "0")["jobs"]
    }
    expected = {(one["backend"], f"{one['case']}_{one['precision']}") for one in asked}
    assert {key: attempt["reason"] for key, attempt in again.items()} == dict.fromkeys(expected, "")
