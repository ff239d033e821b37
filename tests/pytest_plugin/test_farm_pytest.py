"""A user's own tests on two virtual devices: fixtures, verdicts, the store, and what `farm pytest` refuses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome, wait_for_no_process
from pytest_sessions import ALONE, jobs_of, latest, pytest_words, run_tests
from waiting import until

from farm.results.attempt import Cause, Stage, Verdict
from farm.store.store import open_store

# Module and shape of farm's health check, which other tests compile as well.
SUITE = """
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize("n", range(2))
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
    # A project with an ini file and a conftest of its own.
    tests = home.cwd / "tests"
    tests.mkdir()
    (home.cwd / "here").write_text("the user's folder")
    (home.cwd / "pytest.ini").write_text("[pytest]\naddopts = -n 7 -p no:cacheprovider\n")
    (tests / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef beside(): return 1\n")
    (tests / "test_own.py").write_text(SUITE.replace("MODELS", str(models)))

    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "2", "--", "tests", timeout_s=600, env=ALONE, code=1)

    jobs = jobs_of(home)
    assert len(jobs) == 10
    last = {name: job.attempts[-1] for name, job in jobs.items()}
    expected: dict[str, tuple[Any, ...]] = {
        "test_fails": (Verdict.FAILED, "assert [1, 2] == [1, 3]", ""),
        "test_skipped": (Verdict.SKIPPED, "not today", ""),
        "test_expected": (Verdict.FAILED, "ValueError: as ever", "xfail: ticket 7"),
        **dict.fromkeys(
            ("test_device[0]", "test_device[1]", "test_program", "test_own_inputs"), (Verdict.PASSED, "", "")
        ),
    }
    assert {name: (last[name].verdict, last[name].reason, last[name].known_issue) for name in expected} == expected
    assert "what it printed" in last["test_fails"].log
    assert last["test_needs_device"].verdict is Verdict.SKIPPED
    reason = "no virtual device runs it: contexts that share weights are not simulated"
    assert reason in last["test_needs_device"].reason
    assert last["test_device_goes_away"].verdict is Verdict.INFRA
    assert (last["test_worker_dies"].verdict, last["test_worker_dies"].cause) == (Verdict.FAILED, Cause.CRASH)
    assert {one.device for one in last.values()} == {"virtual-SM8650-0", "virtual-SM8650-1"}
    assert {"latency", "htp_cycles", "pte_size"} <= {one.metric for one in last["test_program"].measurements}
    assert last["test_program"].operators
    assert not last["test_own_inputs"].measurements, "numbers of two programs are no series"
    assert {path.name for path in tests.iterdir()} == {"conftest.py", "test_own.py"}
    assert "the farm or the device is at fault" in done.stdout

    report = home.farm("report", "latest").stdout
    assert "pytest/tests/test_own.py::test_fails[SM8650-htp]" in report
    assert "-k 'test_own.py and test_fails'" in report
    assert "pte_size" in home.farm("history", "pytest/tests/test_own.py::test_program", "--soc", "SM8650").stdout
    assert not wait_for_no_process(home)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("suite", "stage", "reason"),
    [
        (
            'def test_one(bundle): bundle.module("torch.nn:NoSuchModule", [(1,)], precision="8a8w")\n',
            Stage.BUILD, "has no NoSuchModule",
        ),
        ("import no_such_module\n", None, "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)  # fmt: skip
def test_what_does_not_compile_or_cannot_be_imported_failed(
    home: FarmHome, suite: str, stage: Stage | None, reason: str
) -> None:
    run_tests(home, suite, code=1)
    (job,) = latest(home).jobs
    assert job.id.startswith("pytest/test_own.py")
    (attempt,) = job.attempts
    assert attempt.verdict is Verdict.FAILED
    assert stage in (None, attempt.stage)
    assert reason in attempt.reason


def test_ctrl_c_keeps_what_has_ended(home: FarmHome) -> None:
    (home.cwd / "test_own.py").write_text("""
import signal

def test_first(): pass

def test_second(request):
    (request.config.rootpath / "reached").touch()
    signal.pause()

def test_third(): pass
""")
    with home.running(*pytest_words(), env=ALONE) as process:
        until(lambda: (home.cwd / "reached").exists() or process.poll() is not None, "the second test")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert latest(home).exit_code == 130
    verdicts = [[one.verdict for one in job.attempts] for job in jobs_of(home).values()]
    assert verdicts == [[Verdict.PASSED], [], []]
    assert not wait_for_no_process(home)


@pytest.mark.whole
def test_a_killed_worker_leaves_its_tests_and_its_device_to_the_next(home: FarmHome) -> None:
    (home.cwd / "pytest.ini").write_text("[pytest]\naddopts = -n 7\n")
    (home.cwd / "test_more.py").write_text("def test_more(device): pass\n")
    dies = "import os\n\ndef test_dies(device): os.kill(os.getpid(), 9)\n\ndef test_after(device): pass\n"
    done = run_tests(home, dies, "--dist", "each", devices=2, code=1)
    assert "2 workers [3 items]" in done.stdout, "one for each device, whatever the ini file has"
    passed = [(Verdict.PASSED, Cause.NONE)] * 2
    found = {name: [(one.verdict, one.cause) for one in job.attempts] for name, job in jobs_of(home).items()}
    assert found == {
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
    (tmp_path / "sitecustomize.py").write_text(DIES_WHILE_IT_STARTS)
    environment = ALONE | {"PYTHONPATH": str(tmp_path)}
    done = run_tests(home, "def test_one(device): pass\n", devices=2, env=environment, code=4)
    assert "pytest ended without a recorded test" in done.stderr
    assert not wait_for_no_process(home)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-k", "nothing"], 5, "pytest collected no test"),
        pytest.param(["--no-such-option"], 2, "pytest could not start", marks=pytest.mark.whole),
    ],
)
def test_nothing_is_recorded_without_a_test(home: FarmHome, arguments: list[str], code: int, message: str) -> None:
    done = run_tests(home, "def test_one(): pass\n", *arguments, code=code)
    assert done.stderr.splitlines()[-1].startswith(f"farm: {message}")
    with open_store(home.state / "farm.db") as store:
        assert store.runs.latest_id() is None


def test_refusals(home: FarmHome) -> None:
    virtual = ("--soc", "SM8650", "--virtual", "2")
    for arguments, message in (
        ((*virtual, "--", "--tx=ssh=a"), "--tx=ssh=a: workers run on this machine"),
        ((*virtual, "--", "--pdb"), "needs a terminal"),
        ((*virtual, "--device", "a"), "--device is for attached devices"),
        (("--virtual", "2"), "--soc must be given with --virtual"),
        (("--toolchain", "1.5.0", "--", "--collect-only"), "leave --toolchain out"),
    ):
        assert message in home.farm("pytest", *arguments, code=2).stderr
        assert not home.state.exists()


def test_listing_needs_no_device(home: FarmHome) -> None:
    (home.cwd / "test_own.py").write_text("def test_one(device): pass\n")
    done = home.farm("pytest", "--", "--collect-only", "-q", "-p", "no:cacheprovider", env=ALONE, code=0)
    assert "test_own.py::test_one" in done.stdout
    assert not home.state.exists()
