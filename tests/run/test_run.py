"""The main job, end to end, on real parts: ExecuTorch, adb, the runner on the simulator, the store, the report."""

from __future__ import annotations

import contextlib
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
from stub_home import StubHome, make_stub_home, write_stub_suite
from waiting import until

MAIN = ("run", "--soc", "SM8650", "--virtual", "2")
# Sample of the main job with every kind of case, including the cases of the suite smoke; test_operators.py has all.
SOME = (
    "(8a8w or 16a8w) and (/linear[ or /conv2d[ or /matmul[ or /add[ or /gelu[ or /softmax[ or /layer_norm[ "
    "or /max_pool2d[ or /argmax[ or topk or /where[)"
)

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
[suite.tolerance.8a8w.fp32]
sqnr_db = 20.0

[case.good]
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 3, 16, 16] }]

[case.does_not_compile]
module = "torch.nn:Conv2d"
args = [4, 8, 3]
inputs = [{ shape = [1, 3, 16, 16] }]

[case.no_signal]
module = ".ops:Zeros"
inputs = [{ shape = [1, 3, 16, 16] }]

[case.too_strict]
module = ".ops:Wrong"
inputs = [{ shape = [1, 3, 16, 16] }]
[case.too_strict.tolerance.8a8w.fp32]
sqnr_db = 300.0

[case.known]
module = ".ops:Wrong"
inputs = [{ shape = [1, 3, 16, 16] }]
[case.known.tolerance.8a8w.fp32]
sqnr_db = 300.0
[[case.known.known_issues]]
reason = "8 bits do not make 300 dB"
"""


def tables(home: FarmHome) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True)


@pytest.fixture(scope="module")
def shared(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    """Home for the tests that look at the same run."""
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def main_job(shared: FarmHome) -> dict[str, Any]:
    """Result of the README's first command, on a part of its cases, with the bundles that the cache has."""
    done = shared.farm(*MAIN, "--suite", "quantized_ops", "-k", SOME, "--json", timeout_s=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    view: dict[str, Any] = json.loads(done.stdout)
    view["stderr"] = done.stderr
    return view


def test_operators_are_compiled_and_executed(main_job: dict[str, Any]) -> None:
    assert len(main_job["jobs"]) >= 20
    check_main_job(main_job)


def check_main_job(main_job: dict[str, Any]) -> None:
    for job in main_job["jobs"]:
        [attempt] = job["attempts"]
        assert attempt["verdict"] == "passed" or attempt["known_issue"], (job["id"], attempt["reason"])
        if attempt["stage"] in ("build", "execute"):
            continue
        metrics = {measurement["metric"]: measurement for measurement in attempt["measurements"]}
        loads = {"warm_model_load_time", "verification_time"}
        assert {"latency", *loads, "pte_size", "partitions", "htp_cycles"} <= set(metrics), job["id"]
        assert len(metrics["latency"]["samples"]) >= 3
        assert metrics["partitions"]["samples"] == [1]
        assert {comparison["reference"] for comparison in attempt["comparisons"]} == {"fp32", "quantized"}
        assert attempt["device"].startswith("virtual-SM8650-")
    devices = {device["serial"]: device for device in main_job["devices"]}
    assert len(devices) == 2
    assert all(device["kind"] == "virtual" and device["jobs"] > 5 for device in devices.values())


def test_again_nothing_is_compiled_and_the_exact_numbers_are_the_same(
    shared: FarmHome, main_job: dict[str, Any]
) -> None:
    done = shared.farm(*MAIN, "--suite", "quantized_ops", "-k", SOME, "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all compiled already" in done.stderr
    again = json.loads(done.stdout)
    assert all(job["cached"] for job in again["jobs"])

    def exact(view: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
        return {
            (job["id"], measurement["metric"]): measurement["samples"]
            for job in view["jobs"]
            for measurement in job["attempts"][-1]["measurements"]
            if measurement["exact"]
        }

    assert exact(again) == exact(main_job)


def test_what_is_broken_is_caught_by_the_limits(shared: FarmHome, main_job: dict[str, Any], tmp_path: Path) -> None:
    check_mutations(main_job, shared.cache, tmp_path)


def test_smoke_shares_the_bundles(home: FarmHome, main_job: dict[str, Any]) -> None:
    del main_job
    done = home.farm(*MAIN, "--suite", "smoke", "--junitxml", "out/j.xml", "--html", "out/r.html", timeout_s=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all compiled already" in done.stderr
    assert "8 passed" in done.stdout
    assert (home.cwd / "out" / "j.xml").read_text().startswith("<?xml")
    assert "smoke" in (home.cwd / "out" / "r.html").read_text()
    assert "8 passed" in home.farm("report", "latest").stdout
    [plan] = home.state.glob("runs/*/plan.json")
    assert "farm.db" not in plan.read_text(), "the address of a store may hold a password"
    history = home.farm("history", "smoke/conv2d", "--soc", "SM8650")
    assert "virtual device" in history.stdout
    assert "passed" in history.stdout
    # Bundles from the cache have the list of operators built by QNN as well.
    table = json.loads(home.farm("jobs", "coverage", "--soc", "SM8650", "--suite", "smoke", "--json").stdout)
    [conv] = [row for row in table["builders"] if row["name"] == "conv"]
    assert conv["cells"]["8a8w"]["state"] == "passed"
    assert (table["beyond"], table["counts"]["passed"]) == ([], 8)
    assert wait_for_no_process(home) == {}


@pytest.fixture(scope="module")
def mixed(shared: FarmHome) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run with every possible end of a job."""
    folder = shared.cwd / "mine"
    folder.mkdir()
    (folder / "suite.toml").write_text(SUITE)
    (folder / "ops.py").write_text(OPS)
    done = shared.farm(*MAIN, "--suite", "./mine", "--json", timeout_s=300)
    return done, json.loads(done.stdout)


@pytest.mark.whole
def test_every_failure_says_its_stage_and_reason_and_the_run_goes_on(
    mixed: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, view = mixed
    assert done.returncode == view["exit_code"] == 1
    # For wrong numbers the second device decides.
    ended = {job["case"]: job["attempts"][-1] for job in view["jobs"]}
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
def test_the_traceback_of_a_builder_and_both_devices_of_wrong_numbers_are_shown(
    shared: FarmHome, mixed: tuple[subprocess.CompletedProcess[str], dict[str, Any]]
) -> None:
    run_id = mixed[1]["id"]
    shown = shared.farm("show", "mine/does_not_compile", "--run", run_id).stdout
    assert "    Traceback (most recent call last):" in shown
    assert "    RuntimeError: Given groups=1" in shown
    shown = shared.farm("show", "mine/too_strict", "--run", run_id).stdout
    for part in ("attempt 1 of 2: infra at numerics", "attempt 2 of 2: failed at numerics, cause numerics, decides",
                 "virtual-SM8650-0", "virtual-SM8650-1", "< 300 dB", "farm jobs rerun 'mine/too_strict"):  # fmt: skip
        assert part in shown, part


def test_inputs_and_outputs_of_wrong_numbers_are_in_the_report_and_fetched(
    shared: FarmHome, mixed: tuple[subprocess.CompletedProcess[str], dict[str, Any]], tmp_path: Path
) -> None:
    run_id = mixed[1]["id"]
    shared.farm("show", "mine/too_strict", "--run", run_id, "--files", str(tmp_path / "files"))
    for attempt in ("attempt-1", "attempt-2"):
        there = {path.name: path.stat().st_size for path in (tmp_path / "files" / attempt).iterdir()}
        assert {"input_0_0.raw", "manifest.json", "output_0_0.raw"} <= there.keys()
        assert min(there.values()) > 0
    for case in ("good", "known"):
        shown = json.loads(shared.farm("show", f"mine/{case}", "--run", run_id, "--json").stdout)
        assert not [one for one in shown["files"] if one["kind"].startswith(("input:", "output:"))]
    assert "output:output_0_0.raw" in (shared.state / "runs" / run_id / "report.html").read_text()


@pytest.mark.whole
def test_last_failed_runs_those_alone(
    shared: FarmHome, mixed: tuple[subprocess.CompletedProcess[str], dict[str, Any]]
) -> None:
    del mixed
    listed = shared.farm(*MAIN, "--suite", "./mine", "--lf", "--collect-only")
    assert {job.partition("[")[0] for job in listed.stdout.splitlines()} == {
        "mine/does_not_compile", "mine/no_signal", "mine/too_strict",
    }  # fmt: skip


def test_a_run_of_known_issues_alone_is_green(
    shared: FarmHome, mixed: tuple[subprocess.CompletedProcess[str], dict[str, Any]]
) -> None:
    del mixed
    done = shared.farm(*MAIN, "--suite", "./mine", "-k", "known or good", "--json", timeout_s=120)
    assert done.returncode == 0
    assert json.loads(done.stdout)["summary"]["verdict_line"]


@pytest.mark.parametrize(
    ("cases", "count"),
    [pytest.param("conv2d", 1, marks=pytest.mark.whole), pytest.param("smoke", 8, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_other_socs_work_the_same_in_one_run_each_on_its_own_devices(home: FarmHome, cases: str, count: int) -> None:
    socs = ("SM8350", "SM8750", "QCS9100")
    chosen = [word for soc in socs for word in ("--soc", soc)]
    view = home.json("run", *chosen, "--suite", "smoke", "-k", cases, "--virtual", "1", timeout_s=300)
    assert [job["attempts"][-1]["verdict"] for job in view["jobs"]] == ["passed"] * count * 3
    assert {job["soc"] for job in view["jobs"]} == set(socs)
    for job in view["jobs"]:
        assert job["attempts"][-1]["device"] == f"virtual-{job['soc']}-0"


@pytest.mark.whole
def test_any_case_runs_on_the_cpu_as_a_baseline(home: FarmHome) -> None:
    # Delegated to XNNPACK, and taken by none of it.
    chosen = ("--suite", "smoke", "--backend", "xnnpack", "--virtual", "1", "-k", "conv2d or layer_norm")
    done = home.farm("run", "--soc", "SM8650", *chosen, "--json", timeout_s=300, code=0)
    attempts = {job["case"]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}
    partitions = {}
    for case, attempt in attempts.items():
        assert attempt["job_id"] == f"smoke/{case}[SM8650-xnnpack-fp32]"
        assert attempt["verdict"] == "passed", attempt["reason"]
        [comparison] = attempt["comparisons"]
        assert comparison["reference"] == "fp32"
        assert comparison["sqnr_db"] > 120
        metrics = {measurement["metric"]: measurement["samples"] for measurement in attempt["measurements"]}
        assert len(metrics["latency"]) == 3
        assert "htp_cycles" not in metrics
        partitions[case] = metrics["partitions"]
    assert partitions == {"conv2d": [1], "layer_norm": [0]}
    history = home.farm("history", "smoke/conv2d", "--soc", "SM8650")
    assert "smoke/conv2d[SM8650-xnnpack-fp32]  virtual device" in history.stdout


@pytest.fixture
def stub_home(tmp_path: Path) -> StubHome:
    """Home for how a run ends: its programs are words for a stub of the runner."""
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"good": 20, "slow": 20}, {"slow": 600.0})
    return home


@pytest.fixture
def slow_run(stub_home: StubHome) -> Iterator[subprocess.Popen[str]]:
    """Run with a passed job and a job that compiles for ten minutes."""
    with stub_home.running(*MAIN, "--suite", "./mine") as process:

        def has_attempt() -> bool:
            with contextlib.suppress(sqlite3.Error), tables(stub_home) as connection:
                return bool(connection.execute("select count(*) from attempt").fetchone()[0] == 1)
            return False

        until(has_attempt, "the end of the first job")
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
    with tables(stub_home) as connection:
        assert connection.execute("select exit_code from run").fetchall() == [(130,)]


def test_a_run_whose_reader_leaves_goes_on_and_its_exit_code_is_about_the_run(stub_home: StubHome) -> None:
    with stub_home.running(*MAIN, "--suite", "./mine", "-k", "good") as process:
        assert process.stdout is not None
        assert "1 job" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    with tables(stub_home) as connection:
        assert connection.execute("select exit_code from run").fetchall() == [(0,)]
        assert connection.execute("select verdict from attempt").fetchall() == [("passed",)]


def test_kill_9_loses_nothing_that_was_finished_and_leaves_nothing(
    stub_home: StubHome, slow_run: subprocess.Popen[str]
) -> None:
    slow_run.send_signal(signal.SIGKILL)
    slow_run.wait()
    assert wait_for_no_process(stub_home) == {}
    with tables(stub_home) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        assert connection.execute("select verdict from attempt").fetchall() == [("passed",)]
        assert connection.execute("select exit_code from run").fetchall() == [(None,)]
    shown = stub_home.farm("report", "latest", code=0)
    assert "1 passed" in shown.stdout


def test_a_run_that_was_killed_when_all_was_done_is_finished_by_resuming_it(stub_home: StubHome) -> None:
    stub_home.farm(*MAIN, "--suite", "./mine", "-k", "good", timeout_s=300, code=0)
    with sqlite3.connect(stub_home.state / "farm.db") as connection:
        connection.execute("update run set exit_code = null, finished_ms = null")
    assert "1 of 1 jobs are finished" in stub_home.farm("run", "--resume", "latest", code=0).stderr
    with tables(stub_home) as connection:
        assert connection.execute("select exit_code, finished_ms is not null from run").fetchall() == [(0, 1)]
