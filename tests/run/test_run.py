"""The main job, end to end, on real parts: ExecuTorch, adb, the runner on the simulator, the store, the report."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome, wait_for_no_process
from mutations import check_mutations
from stub_home import StubHome, make_stub_home, next_stub_home, write_stub_suite
from waiting import until

MAIN = ("run", "--soc", "SM8650", "--virtual", "2")
# Sample of the main job with every kind of case, including the cases of the suite smoke; test_operators.py has all.
CASES = ("linear", "conv2d", "matmul", "add", "gelu", "softmax", "layer_norm", "max_pool2d", "argmax", "where")
SOME = f"(8a8w and ({' or '.join(f'/{case}[' for case in CASES)} or topk)) or (16a8w and /linear[)"

STUBS = {"good": 20, "slow": 20}

OPS = """
import torch
class Zeros(torch.nn.Module):
    def forward(self, x):
        return torch.relu(-x * x)
class Wrong(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""

SUITE = """
[suite]
name = "mine"
description = "what can go wrong"
tolerance.8a8w.fp32.sqnr_db = 20.0

[case]
good = { module = "torch.nn:ReLU", inputs = [{ shape = [1, 3, 16, 16] }] }
does_not_compile = { module = "torch.nn:Conv2d", args = [4, 8, 3], inputs = [{ shape = [1, 3, 16, 16] }] }
no_signal = { module = ".ops:Zeros", inputs = [{ shape = [1, 3, 16, 16] }] }

[case.too_strict]
module = ".ops:Wrong"
inputs = [{ shape = [1, 3, 16, 16] }]
tolerance.8a8w.fp32.sqnr_db = 300.0

[case.known]
module = ".ops:Wrong"
inputs = [{ shape = [1, 3, 16, 16] }]
tolerance.8a8w.fp32.sqnr_db = 300.0
known_issues = [{ reason = "8 bits do not make 300 dB" }]
"""


@pytest.fixture(scope="module")
def shared(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    """Home for the tests that look at the same run."""
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def main_job(shared: FarmHome) -> dict[str, Any]:
    """Result of the README's first command, on a part of its cases, with the bundles that the cache has."""
    view: dict[str, Any] = shared.json(*MAIN, "--suite", "quantized_ops", "-k", SOME, timeout_s=1500)
    return view


def test_operators_are_compiled_and_executed(main_job: dict[str, Any]) -> None:
    assert len(main_job["jobs"]) >= 12
    for job in main_job["jobs"]:
        [attempt] = job["attempts"]
        assert attempt["verdict"] == "passed" or attempt["known_issue"], (job["id"], attempt["reason"])
        if attempt["stage"] in ("build", "execute"):
            continue
        metrics = {measurement["metric"]: measurement["samples"] for measurement in attempt["measurements"]}
        loads = {"warm_model_load_time", "verification_time"}
        assert {"latency", *loads, "pte_size", "partitions", "htp_cycles"} <= set(metrics), job["id"]
        assert len(metrics["latency"]) == 1, "a simulator runs once after its warm-up"
        assert metrics["partitions"] == [1]
        assert {comparison["reference"] for comparison in attempt["comparisons"]} == {"fp32", "quantized"}
    devices = {device["serial"]: (device["kind"], device["jobs"] > 0) for device in main_job["devices"]}
    assert devices == dict.fromkeys(("virtual-SM8650-0", "virtual-SM8650-1"), ("virtual", True))


def test_what_is_broken_is_caught_by_the_limits(shared: FarmHome, main_job: dict[str, Any], tmp_path: Path) -> None:
    check_mutations(main_job, shared.cache, tmp_path)


def exact(view: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Return the exact numbers of the jobs in 8a8w."""
    return {
        (job["case"], measurement["metric"]): measurement["samples"]
        for job in view["jobs"]
        for measurement in job["attempts"][-1]["measurements"]
        if measurement["exact"] and job["precision"] == "8a8w"
    }


def test_smoke_compiles_nothing_again_and_has_the_same_numbers(home: FarmHome, main_job: dict[str, Any]) -> None:
    written = ("--junitxml", "out/j.xml", "--html", "out/r.html")
    done = home.farm(*MAIN, "--suite", "smoke", *written, "--json", code=0)
    assert "all compiled already" in done.stderr
    view = json.loads(done.stdout)
    assert all(job["cached"] for job in view["jobs"])
    numbers = exact(view)
    assert len({case for case, _ in numbers}) == 8
    assert numbers.items() <= exact(main_job).items()
    assert (home.cwd / "out" / "j.xml").read_text().startswith("<?xml")
    assert "smoke" in (home.cwd / "out" / "r.html").read_text()
    assert "8 passed" in home.farm("report", "latest").stdout
    [plan] = home.state.glob("runs/*/plan.json")
    assert "farm.db" not in plan.read_text(), "the address of a store may hold a password"
    history = home.farm("history", "smoke/conv2d", "--soc", "SM8650")
    assert "virtual device" in history.stdout
    assert "passed" in history.stdout
    # Bundles from the cache have the list of operators built by QNN as well.
    table = home.json("jobs", "coverage", "--soc", "SM8650", "--suite", "smoke")
    [conv] = [row for row in table["builders"] if row["name"] == "conv"]
    assert conv["cells"]["8a8w"]["state"] == "passed"
    assert (table["beyond"], table["counts"]["passed"]) == ([], 8)
    assert wait_for_no_process(home) == {}


@pytest.fixture(scope="module")
def mixed(shared: FarmHome) -> dict[str, Any]:
    """Run with every possible end of a job."""
    folder = shared.cwd / "mine"
    folder.mkdir()
    (folder / "suite.toml").write_text(SUITE)
    (folder / "ops.py").write_text(OPS)
    view: dict[str, Any] = shared.json(*MAIN, "--suite", "./mine", timeout_s=300, code=1)
    return view


@pytest.mark.whole
def test_every_failure_has_its_stage_and_reason(mixed: dict[str, Any]) -> None:
    assert mixed["exit_code"] == 1
    # For wrong numbers the second device decides.
    ended = {job["case"]: job["attempts"][-1] for job in mixed["jobs"]}
    assert ended["good"]["verdict"] == "passed"
    broken = ended["does_not_compile"]
    assert (broken["verdict"], broken["stage"]) == ("failed", "build")
    assert "expected input[1, 3, 16, 16] to have 4 channels" in broken["reason"]
    assert "Traceback" in broken["log"]
    assert ended["no_signal"]["verdict"] == "failed"
    assert "constant" in ended["no_signal"]["reason"] or "zero" in ended["no_signal"]["reason"]
    assert (ended["too_strict"]["verdict"], ended["too_strict"]["stage"]) == ("failed", "numerics")
    assert "300" in ended["too_strict"]["reason"]
    assert ended["known"]["known_issue"] == "8 bits do not make 300 dB"


@pytest.mark.whole
def test_tracebacks_and_both_devices_of_wrong_numbers_are_shown(shared: FarmHome, mixed: dict[str, Any]) -> None:
    run_id = mixed["id"]
    shown = shared.farm("show", "mine/does_not_compile", "--run", run_id).stdout
    assert "    Traceback (most recent call last):" in shown
    assert "    RuntimeError: Given groups=1" in shown
    shown = shared.farm("show", "mine/too_strict", "--run", run_id).stdout
    for part in ("attempt 1 of 2: infra at numerics", "attempt 2 of 2: failed at numerics, cause numerics, decides",
                 "virtual-SM8650-0", "virtual-SM8650-1", "< 300 dB", "farm jobs rerun 'mine/too_strict"):  # fmt: skip
        assert part in shown, part


def test_inputs_and_outputs_of_wrong_numbers_are_kept(shared: FarmHome, mixed: dict[str, Any], tmp_path: Path) -> None:
    run_id = mixed["id"]
    shared.farm("show", "mine/too_strict", "--run", run_id, "--files", str(tmp_path / "files"))
    for attempt in ("attempt-1", "attempt-2"):
        there = {path.name: path.stat().st_size for path in (tmp_path / "files" / attempt).iterdir()}
        assert {"input_0_0.raw", "manifest.json", "output_0_0.raw"} <= there.keys()
        assert min(there.values()) > 0
    for case in ("good", "known"):
        files = shared.json("show", f"mine/{case}", "--run", run_id)["files"]
        assert not [one for one in files if one["kind"].startswith(("input:", "output:"))]
    assert "output:output_0_0.raw" in (shared.state / "runs" / run_id / "report.html").read_text()


@pytest.mark.whole
def test_other_socs_work_the_same_in_one_run_each_on_its_own_devices(home: FarmHome) -> None:
    socs = ("SM8350", "SM8750", "QCS9100")
    chosen = [word for soc in socs for word in ("--soc", soc)]
    view = home.json("run", *chosen, "--suite", "smoke", "-k", "conv2d", "--virtual", "1", timeout_s=300)
    ended = {job["soc"]: (job["attempts"][-1]["verdict"], job["attempts"][-1]["device"]) for job in view["jobs"]}
    assert ended == {soc: ("passed", f"virtual-{soc}-0") for soc in socs}


@pytest.mark.whole
def test_any_case_runs_on_the_cpu_as_a_baseline(home: FarmHome) -> None:
    # Delegated to XNNPACK, and taken by none of it.
    chosen = ("--suite", "smoke", "--backend", "xnnpack", "--virtual", "1", "-k", "conv2d or layer_norm")
    partitions = {}
    for job in home.json("run", "--soc", "SM8650", *chosen, timeout_s=300)["jobs"]:
        attempt = job["attempts"][-1]
        assert attempt["verdict"] == "passed", attempt["reason"]
        assert [(one["reference"], one["sqnr_db"] > 120) for one in attempt["comparisons"]] == [("fp32", True)]
        metrics = {measurement["metric"]: measurement["samples"] for measurement in attempt["measurements"]}
        assert (len(metrics["latency"]), "htp_cycles" in metrics) == (1, False)
        partitions[job["id"]] = metrics["partitions"]
    expected = {"conv2d": [1], "layer_norm": [0]}
    assert partitions == {f"smoke/{case}[SM8650-xnnpack-fp32]": count for case, count in expected.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> StubHome:
    """Home whose programs are words for a stub of the runner, with the bundles of `good` and of the health check."""
    home = make_stub_home(tmp_path_factory.mktemp("stub") / "home")
    write_stub_suite(home, "mine", STUBS)
    home.farm(*MAIN, "--suite", "./mine", "-k", "good", code=0)
    return home


@pytest.fixture
def stub_home(compiled: StubHome, tmp_path: Path) -> StubHome:
    """Home for how a run ends; `slow` compiles for ten minutes."""
    home = next_stub_home(compiled, tmp_path / "stub")
    write_stub_suite(home, "mine", STUBS, {"slow": 600.0})
    return home


@pytest.fixture
def slow_run(stub_home: StubHome) -> Iterator[subprocess.Popen[str]]:
    """Run with a passed job and a job that compiles for ten minutes."""
    with stub_home.running(*MAIN, "--suite", "./mine") as process:
        until(lambda: stub_home.rows("select * from attempt"), "the end of the first job")
        yield process


def test_ctrl_c_reports_what_there_is_and_leaves_nothing(stub_home: StubHome, slow_run: subprocess.Popen[str]) -> None:
    os.killpg(slow_run.pid, signal.SIGINT)
    assert slow_run.wait(120) == 130
    assert slow_run.stdout is not None
    output = slow_run.stdout.read()
    assert "1 passed" in output
    assert "Traceback" not in output
    assert "farm: finishing the running jobs; Ctrl-C again stops at once" in output
    assert "executes the missing jobs" in output.splitlines()[-1]
    assert wait_for_no_process(stub_home) == {}
    assert stub_home.rows("select exit_code from run") == [(130,)]


def test_a_run_whose_reader_leaves_goes_on_and_its_exit_code_is_about_the_run(stub_home: StubHome) -> None:
    with stub_home.running(*MAIN, "--suite", "./mine", "-k", "good") as process:
        assert process.stdout is not None
        assert "1 job" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert stub_home.rows("select exit_code from run") == [(0,)]
    assert stub_home.rows("select verdict from attempt") == [("passed",)]


def test_kill_9_loses_no_finished_job_and_leaves_nothing(stub_home: StubHome, slow_run: subprocess.Popen[str]) -> None:
    slow_run.send_signal(signal.SIGKILL)
    slow_run.wait()
    assert wait_for_no_process(stub_home) == {}
    assert stub_home.rows("pragma integrity_check") == [("ok",)]
    assert stub_home.rows("select verdict from attempt") == [("passed",)]
    assert stub_home.rows("select exit_code from run") == [(None,)]
    shown = stub_home.farm("report", "latest", code=0)
    assert "1 passed" in shown.stdout


def test_a_run_that_was_killed_when_all_was_done_is_finished_by_resuming_it(stub_home: StubHome) -> None:
    stub_home.farm(*MAIN, "--suite", "./mine", "-k", "good", timeout_s=300, code=0)
    with sqlite3.connect(stub_home.state / "farm.db") as connection:
        connection.execute("update run set exit_code = null, finished_ms = null")
    assert "1 of 1 jobs are finished" in stub_home.farm("run", "--resume", "latest", code=0).stderr
    assert stub_home.rows("select exit_code, finished_ms is not null from run") == [(0, 1)]
