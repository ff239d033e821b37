"""A user's own tests on two virtual devices: fixtures, verdicts, the store, and what `farm pytest` refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome, wait_for_no_process
from waiting import until

from farm.results.attempt import Cause, Stage, Verdict
from farm.store.store import open_store
from farm.store.view import JobView, RunView

# Other plugins of this environment take pytest longer to import than it takes to run these tests.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

# Module and shape of farm's health check, which other tests compile as well.
SUITE = """
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize("n", range(4))
def test_device(device, beside, n, tmp_path):
    assert Path("here").read_text() == "the user's folder"
    assert device.run(["getprop", "ro.soc.model"]).stdout.strip() == b"SM8650"
    assert device.run(["sh", "-c", "exit 3"]).code == 3
    assert os.environ["ANDROID_SERIAL"] == device.adb_name
    said = subprocess.run(["adb", "shell", "getprop", "ro.product.name"], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == device.serial
    device.push({"a": b"12345", "folder/b": Path(__file__)})
    assert device.pull("a", tmp_path / "a").read_bytes() == b"12345"
    assert device.run(["cat", "folder/b"]).stdout == Path(__file__).read_bytes()
    with pytest.raises(FileNotFoundError):
        device.pull("nowhere", tmp_path / "b")
    with pytest.raises(ValueError, match="5 bytes, more than 4"):
        device.pull("a", tmp_path / "b", max_bytes=4)
    with pytest.raises(TimeoutError):
        device.run(["sleep", "600"], timeout_s=0.2)


def test_program(bundle, runner):
    program = bundle.module("torch.nn:ReLU", [(1, 3, 5, 7)], precision="8a8w")
    ran = runner(program, iterations=4, profile="detailed")
    assert len(ran.latency_ms) == 4
    assert ran.operators
    np.testing.assert_allclose(ran.outputs[0][0], program.reference(), atol=0.05)


def test_own_inputs(bundle, runner, tmp_path):
    program = bundle.module("torch.nn:ReLU", [(1, 3, 5, 7)], precision="8a8w")
    samples = [[np.linspace(low, 1, 105, dtype=np.float32).reshape(1, 3, 5, 7)] for low in (-1, -2)]
    for ready in (program, bundle.pte(program.bundle.model)):
        ran = runner(ready, samples=samples)
        for sample, outputs in zip(samples, ran.outputs, strict=True):
            np.testing.assert_allclose(outputs[0], np.maximum(sample[0], 0), atol=0.05)
    with pytest.raises(Exception, match=r"float32\\[2\\], the program takes float32\\[1, 3, 5, 7\\]"):
        runner(program, [np.zeros(2, np.float32)])
    (tmp_path / "broken.pte").write_bytes(b"no program")
    with pytest.raises(Exception, match="not an ExecuTorch program"):
        bundle.pte(tmp_path / "broken.pte")


def test_needs_device(bundle, runner):
    program = bundle.pte("MODELS/conv_sharing.pte")
    runner(program, [np.zeros(one.shape, one.dtype) for one in program.inputs])


def test_fails():
    print("what it printed")
    assert [1, 2] == [1, 3]


@pytest.mark.skip(reason="not today")
def test_skipped():
    raise AssertionError


@pytest.mark.xfail(reason="ticket 7")
def test_expected():
    raise ValueError("as ever")


def test_device_goes_away():
    subprocess.run(["adb", "reboot"], check=True, timeout=60)
    raise AssertionError("this says nothing of the code")


def test_worker_dies():
    os.kill(os.getpid(), 9)
"""


def test_own_tests_on_two_devices(home: FarmHome, models: Path) -> None:
    lay_out(home.cwd, SUITE.replace("MODELS", str(models)))

    words = ["pytest", "--soc", "SM8650", "--virtual", "2", "--json", "--", "tests", "-q"]
    done = home.farm(*words, timeout_s=600, env=ALONE)

    view = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    jobs = {job["id"]: job for job in view["jobs"]}
    outcomes = {name: job["attempts"][-1] for name, job in jobs.items()}

    def of(name: str) -> dict[str, Any]:
        return outcomes[f"pytest/tests/test_own.py::{name}[SM8650-htp]"]

    passed = [*(f"test_device[{n}]" for n in range(4)), "test_program", "test_own_inputs"]
    assert {name: (of(name)["verdict"], of(name)["reason"]) for name in passed} == dict.fromkeys(passed, ("passed", ""))
    assert {one["device"] for one in outcomes.values()} == {"virtual-SM8650-0", "virtual-SM8650-1"}
    assert {"latency", "htp_cycles", "pte_size"} <= {m["metric"] for m in of("test_program")["measurements"]}
    assert of("test_program")["operators"]
    assert not of("test_own_inputs")["measurements"], "numbers of two programs are no series"

    assert (of("test_fails")["verdict"], of("test_fails")["known_issue"]) == ("failed", "")
    assert of("test_fails")["reason"] == "assert [1, 2] == [1, 3]"
    assert "what it printed" in of("test_fails")["log"]
    assert (of("test_skipped")["verdict"], of("test_skipped")["reason"]) == ("skipped", "not today")
    assert of("test_needs_device")["verdict"] == "skipped"
    reason = "no virtual device runs it: contexts that share weights are not simulated"
    assert reason in of("test_needs_device")["reason"]
    assert (of("test_expected")["verdict"], of("test_expected")["known_issue"]) == ("failed", "xfail: ticket 7")
    assert of("test_expected")["reason"] == "ValueError: as ever"
    assert of("test_device_goes_away")["verdict"] == "infra"
    assert (of("test_worker_dies")["verdict"], of("test_worker_dies")["cause"]) == ("failed", "crash")

    assert len(outcomes) == 12
    assert {path.name for path in (home.cwd / "tests").iterdir()} == {"conftest.py", "test_own.py"}
    assert "the farm or the device is at fault" in done.stderr, "pytest's own words are not in the JSON"

    report = home.farm("report", "latest")
    assert "pytest/tests/test_own.py::test_fails[SM8650-htp]" in report.stdout
    assert "-k 'test_own.py and test_fails'" in report.stdout
    history = home.farm("history", "pytest/tests/test_own.py::test_program", "--soc", "SM8650")
    assert "pte_size" in history.stdout, history.stderr
    assert not wait_for_no_process(home)


@pytest.mark.whole
def test_what_does_not_compile_failed(home: FarmHome) -> None:
    lay_out(home.cwd, 'def test_one(bundle): bundle.module("torch.nn:NoSuchModule", [(1,)], precision="8a8w")\n')

    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "1", "--", timeout_s=300, env=ALONE)

    assert done.returncode == 1, done.stderr
    (attempt,) = latest(home).jobs[0].attempts
    assert (attempt.verdict, attempt.stage, attempt.cause) == (Verdict.FAILED, Stage.BUILD, Cause.COMPILE)
    assert "has no NoSuchModule" in attempt.reason


def test_ctrl_c_keeps_what_has_ended(home: FarmHome) -> None:
    lay_out(
        home.cwd,
        """
import signal

def test_first(): pass

def test_second(request):
    (request.config.rootpath / "reached").touch()
    signal.pause()

def test_third(): pass
""",
    )
    with home.running("pytest", "--soc", "SM8650", "--virtual", "1", "--", env=ALONE) as process:
        until(lambda: (home.cwd / "reached").exists() or process.poll() is not None, "the second test")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)

    assert process.returncode == 130, output
    run = latest(home)
    assert run.exit_code == 130
    assert [len(job.attempts) for job in run.jobs] == [1, 0, 0]
    assert job(run, "test_first").attempts[0].verdict is Verdict.PASSED
    assert not wait_for_no_process(home)


@pytest.mark.whole
def test_a_killed_worker_leaves_its_tests_and_its_device_to_the_next(home: FarmHome) -> None:
    lay_out(home.cwd, "import os\n\ndef test_dies(device): os.kill(os.getpid(), 9)\n\ndef test_after(device): pass\n")
    (home.cwd / "tests/test_more.py").write_text("def test_more(device): pass\n")

    words = ["pytest", "--soc", "SM8650", "--virtual", "2", "--", "--dist", "each"]
    done = home.farm(*words, timeout_s=300, env=ALONE)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 workers [3 items]" in done.stdout, "one for each device, whatever the ini file has"
    run = latest(home)
    attempts = {name: job(run, name).attempts for name in ("test_dies", "test_after", "test_more")}
    causes = {name: [(one.verdict, one.cause) for one in found] for name, found in attempts.items()}
    passed = [(Verdict.PASSED, Cause.NONE)] * 2
    assert causes == {
        "test_dies": [(Verdict.FAILED, Cause.CRASH)] * 2, "test_after": passed, "test_more": passed,
    }  # fmt: skip
    assert not wait_for_no_process(home)


DIES_WHILE_IT_STARTS = """
import os
import sys

if "exec(eval(sys.stdin.readline()))" in " ".join(sys.orig_argv):
    os._exit(9)
"""


@pytest.mark.whole
def test_workers_that_do_not_start_end_the_session(home: FarmHome, tmp_path: Path) -> None:
    lay_out(home.cwd, "def test_one(device): pass\n")
    (tmp_path / "sitecustomize.py").write_text(DIES_WHILE_IT_STARTS)

    environment = ALONE | {"PYTHONPATH": str(tmp_path)}
    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "2", "--", timeout_s=300, env=environment)

    assert done.returncode == 4, done.stdout + done.stderr
    assert "pytest ended and no test is recorded" in done.stderr
    assert not wait_for_no_process(home)


@pytest.mark.whole
def test_what_a_module_cannot_import_failed(home: FarmHome) -> None:
    lay_out(home.cwd, "import no_such_module\n")

    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "1", "--", timeout_s=300, env=ALONE)

    assert done.returncode == 1, done.stderr
    (only,) = latest(home).jobs
    assert only.id == "pytest/tests/test_own.py[SM8650-htp]"
    assert only.attempts[0].reason == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-k", "nothing"], 5, "pytest collected no test"),
        pytest.param(["--no-such-option"], 2, "pytest could not begin", marks=pytest.mark.whole),
    ],
)
def test_nothing_is_recorded_without_a_test(home: FarmHome, arguments: list[str], code: int, message: str) -> None:
    lay_out(home.cwd, "def test_one(): pass\n")

    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "1", "--", *arguments, timeout_s=300, env=ALONE)

    assert (done.returncode, done.stderr.splitlines()[-1][: len(f"farm: {message}")]) == (code, f"farm: {message}")
    with open_store(home.state / "farm.db") as store:
        assert store.runs.latest_id() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--soc", "SM8650", "--virtual", "2", "--", "--tx=ssh=a"], "--tx=ssh=a: workers run on this machine"),
        (["--soc", "SM8650", "--virtual", "2", "--", "--pdb"], "needs a terminal"),
        (["--soc", "SM8650", "--virtual", "2", "--device", "a"], "--device is for attached devices"),
        (["--virtual", "2"], "--soc must be given with --virtual"),
        (["--toolchain", "1.5.0", "--", "--collect-only"], "leave --toolchain out"),
    ],
)
def test_refusals(home: FarmHome, arguments: list[str], message: str) -> None:
    done = home.farm("pytest", *arguments)

    assert done.returncode == 2
    assert message in done.stderr
    assert not home.state.exists()


def test_listing_needs_no_device(home: FarmHome) -> None:
    lay_out(home.cwd, "def test_one(device): pass\n")

    done = home.farm("pytest", "--", "--collect-only", "-q", env=ALONE)

    assert done.returncode == 0, done.stderr
    assert "tests/test_own.py::test_one" in done.stdout
    assert not home.state.exists()


def lay_out(folder: Path, suite: str) -> None:
    """Make a user's project, with ini file and conftest of its own."""
    (folder / "tests").mkdir()
    (folder / "here").write_text("the user's folder")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 7 -p no:cacheprovider\n")
    (folder / "tests/conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef beside(): return 1\n")
    (folder / "tests/test_own.py").write_text(suite)


def latest(home: FarmHome) -> RunView:
    with open_store(home.state / "farm.db") as store:
        run_id = store.runs.latest_id()
        assert run_id is not None
        return store.runs.view(run_id)


def job(run: RunView, name: str) -> JobView:
    return next(one for one in run.jobs if one.case.endswith(f"::{name}"))
