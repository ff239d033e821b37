"""Ends of a run from outside of its own thread leave a result: no resources, signals, aborts."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from native_runner.sanitizers import runner_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    Preload = Callable[[str], dict[str, str]]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [("thread", "a thread: Resource temporarily unavailable"), ("eventfd", "eventfd: Too many open files")],
)
def test_a_machine_without_resources_for_the_watchdog(bare: Any, preload: Preload, failing: str, reason: str) -> None:
    env = {**preload("watchdog_stub"), "STUB_FAILS": failing}
    ran = bare.run("--timeout_ms=1000", env=env)
    assert ran.code == 2, ran.stderr
    assert ran.error["stage"] == "flags"
    assert ran.error["message"] == f"cannot start what watches the run: {reason}"
    session = bare.run("--serve", env=env, result="none")
    assert (session.code, session.stdout) == (2, "")
    assert reason in session.stderr


def _hanging(stub: Any, preload: Preload) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(stub.runtime / "farm_runner"), "--input_list_path=hang.txt"],
        cwd=stub.folder,
        env=runner_environment(stub.runtime, preload("backend_stub")),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("backend stub hangs" in line for line in process.stderr)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_for_the_end_leaves_a_result(stub: Any, preload: Preload, number: signal.Signals) -> None:
    with _hanging(stub, preload) as process:
        process.send_signal(number)
        assert process.wait(60) == 11
    ran = stub.ended(process.returncode)
    assert (ran.error["stage"], ran.error["message"]) == ("execute", f"ended by {number.name}")
    assert ran.result["inferences"] == [{"line": 0, "warm_up_ns": [], "iterations_ns": []}]
    assert ran.result["load_ns"] > 0


def test_a_signal_that_was_ignored_stays_ignored(stub: Any, preload: Preload) -> None:
    # As `nohup` starts a program.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hanging = _hanging(stub, preload)
    finally:
        signal.signal(signal.SIGHUP, before)
    with hanging as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 11
    assert stub.ended(process.returncode).error["message"] == "ended by SIGTERM"


def test_a_backends_thread_that_aborts_ends_the_run_with_a_result(stub: Any, preload: Preload) -> None:
    ran = stub.run("--input_list_path=abort_in_thread.txt", env=preload("backend_stub"))
    assert ran.code == 6, ran.stderr
    assert ran.error["message"] == "ExecuTorch aborted: the stub gives up"


def test_a_backends_thread_that_aborts_while_the_result_is_written(stub: Any, preload: Preload) -> None:
    """The abort waits for the result of the ended run, and ends the process after it."""
    ran = stub.run(
        "--input_list_path=abort_late.txt", env={**preload("backend_stub"), "STUB_SLOW_RENAME": "result.json"}
    )
    assert ran.code in (0, -signal.SIGABRT), ran.stderr
    assert ran.result is not None, ran.stderr
    assert ran.result["ok"] is True
    assert stub.names() == ["output_0_0.raw"]
