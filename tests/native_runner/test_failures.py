"""Everything that can be wrong ends with its exit code, a message and a result; nothing crashes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_disk import small_disk


def test_a_model_that_is_no_program(conv: Any) -> None:
    model = conv.folder / "model.pte"
    good = model.read_bytes()
    chance = random.Random(0)
    for content in (
        *(good[:size] for size in (0, 7, 64, 4096, 54000)),
        b"\x7fELF" + bytes(100_000),
        chance.randbytes(100_000),
        bytes(4) + b"ET12" + chance.randbytes(100_000),
    ):
        model.write_bytes(content)
        conv.run().fails(4, "load", "cannot load 'model.pte'")
    model.unlink()
    conv.run().fails(4, "load", "cannot read 'model.pte': No such file")
    os.mkfifo(model)
    conv.run().fails(4, "load", "not a regular file")
    assert conv.names() == []


def test_a_model_for_a_backend_that_is_not_in_the_runner(conv: Any, models: Path) -> None:
    conv.list_inputs(conv.write("pair.raw", [0, 1]))
    ran = conv.run(f"--model_path={models / 'foreign.pte'}")
    ran.fails(4, "load", "Backend BackendWithCompilerDemo is not registered")


def test_a_model_for_another_soc_does_not_crash(conv: Any, models: Path) -> None:
    # The simulator takes programs of every SoC; a device may refuse it, at load.
    ran = conv.run(f"--model_path={models / 'conv_sm8850.pte'}")
    assert ran.code in (0, 4), ran.stderr
    assert len(conv.names()) == (2 if ran.code == 0 else 0)


def test_bytes_of_a_program_that_changed_are_no_success_without_outputs(conv: Any) -> None:
    good = (conv.folder / "model.pte").read_bytes()
    chance = random.Random(2)
    for _ in range(8):
        bad = bytearray(good)
        bad[chance.randrange(64, 1024)] ^= 1 << chance.randrange(8)
        (conv.folder / "model.pte").write_bytes(bad)
        for path in (conv.folder / "outputs").iterdir():
            path.unlink()
        ran = conv.run()
        # Some changes crash QNN, which trusts its input.
        assert ran.code in (0, 4, 5, 6, -signal.SIGSEGV), ran.stderr
        assert (ran.result or {"exit_code": -signal.SIGSEGV})["exit_code"] == ran.code
        assert len(conv.names()) == (2 if ran.code == 0 else 0)


@pytest.mark.parametrize("missing", ["libQnnHtp.so", "real"])
def test_a_runtime_without_qnn_or_without_the_library_behind_the_bridge(
    conv: Any, tmp_path: Path, missing: str
) -> None:
    folder = tmp_path / "runtime"
    shutil.copytree(conv.runtime, folder, copy_function=os.link)
    (folder / missing).rename(tmp_path / "elsewhere")
    ran = type(conv)(conv.folder, folder).run()
    ran.fails(4, "load", "cannot load method 'forward'")
    assert ("farm qnn bridge: cannot load the real library" in ran.stderr) == (missing == "real")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (None, None, "cannot read 'input_list.txt'"),
        ("", None, "has no inference"),
        (" \r\n \n", None, "has no inference"),
        ("x0.raw\n\nnowhere.raw\n", 1, "input_list.txt:3: cannot read 'nowhere.raw'"),
        ("x0.raw x1.raw\n", 0, "2 files, the method has 1 inputs"),
    ],
)
def test_a_list_of_inputs_that_cannot_be_executed(conv: Any, text: str | None, line: int | None, message: str) -> None:
    (conv.folder / "input_list.txt").unlink()
    if text is not None:
        (conv.folder / "input_list.txt").write_text(text)
    ran = conv.run()
    ran.fails(5, "inputs", message)
    assert ran.error["line"] == line
    assert conv.names() == []


@pytest.mark.parametrize("size", [0, 3073])
def test_an_input_of_the_wrong_size(conv: Any, size: int) -> None:
    (conv.folder / "x1.raw").write_bytes(bytes(size))
    ran = conv.run()
    ran.fails(5, "inputs", f"input_list.txt:2: 'x1.raw' has {size} bytes, input 0 is float32[1,3,16,16]")
    assert ran.error["line"] == 1
    # Known before the first inference: nothing ran.
    assert ran.result["inferences"] == []
    assert conv.names() == []


def test_a_failing_execution_keeps_what_went_before(bare: Any, models: Path) -> None:
    table = bare.write("table.raw", np.zeros((4, 2)))
    good, bad = (bare.write(f"{last}.raw", [0, 1, last], np.int64) for last in (2, 99))
    bare.list_inputs(f"{table} {good}", f"{table} {bad}", f"{table} {good}")
    ran = bare.run(f"--model_path={models / 'select.pte'}", "--iteration=2", "--etdump_path=e.etdp")
    ran.fails(6, "execute", "index[2] = 99 is out of range")
    assert (ran.error["line"], ran.error["code"]) == (1, 0x12)
    assert [len(inference["iterations_ns"]) for inference in ran.result["inferences"]] == [2, 0]
    assert bare.names() == ["output_0_0.raw", "output_0_1.raw"]


def test_a_failing_middle_iteration(stub: Any) -> None:
    ran = stub.run("--input_list_path=third.txt", "--iteration=5", "--warm_up=1")
    ran.fails(6, "execute", "(execution 2 of inference 0, both from 0)")
    assert len(ran.result["inferences"][0]["iterations_ns"]) == 1
    assert stub.names() == []


def test_a_full_disk(conv: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "12k") as full:
        ran = conv.run(f"--output_folder_path={full}")
        ran.fails(7, "outputs", "output_1_0.raw: cannot write")
        assert "No space left" in ran.error["message"]
        # Whole or not at all.
        assert [(path.name, path.stat().st_size) for path in full.iterdir()] == [("output_0_0.raw", 8192)]


@pytest.mark.parametrize(
    ("flag", "code", "stage", "message"),
    [
        ("--method_index=1", 4, "load", "the program has 1 method(s)"),
        ("--output_folder_path=nowhere", 7, "outputs", "cannot write into folder 'nowhere'"),
        ("--output_folder_path=input_list.txt", 7, "outputs", "cannot write into folder 'input_list.txt'"),
        ("--performance_output_path=nowhere/speed.txt", 7, "outputs", "nowhere/speed.txt"),
        ("--etdump_path=nowhere/e.etdp", 8, "etdump", "cannot write 'nowhere/e.etdp'"),
        (f"--heap_profiling_path={'x' * 256}", 3, "options", "has a text of 256 bytes, ExecuTorch takes 255"),
    ],
)
def test_a_flag_that_cannot_be_followed(conv: Any, flag: str, code: int, stage: str, message: str) -> None:
    conv.run(flag).fails(code, stage, message)


def test_an_output_that_cannot_be_written(conv: Any) -> None:
    (conv.folder / "outputs" / "output_1_0.raw").mkdir()
    ran = conv.run()
    ran.fails(7, "outputs", "output_1_0.raw: cannot write")
    assert ran.error["line"] == 1
    assert conv.names() == ["output_0_0.raw", "output_1_0.raw"]


@pytest.mark.parametrize(
    ("flags", "env", "stage"),
    [
        ([], {}, "execute"),
        # The thread that runs the job gets no processor between its start and its first step.
        ([], {"STUB_PREEMPTED": "1"}, "flags"),
        (["--working_folder=."], {"STUB_PREEMPTED": "1"}, ""),
        (["--working_folder=."], {"STUB_SLOW_CHDIR": "1"}, ""),
    ],
)
def test_a_run_that_takes_too_long(stub: Any, flags: list[str], env: dict[str, str], stage: str) -> None:
    ran = stub.run("--input_list_path=hang.txt", "--timeout_ms=50", *flags, env=env)
    ran.fails(9, stage or ran.error["stage"], "not finished after 50 ms")


@pytest.mark.parametrize(
    ("flag", "code", "message"),
    [
        # A result would be in the wrong folder.
        ("--working_folder=nowhere", 2, "--working_folder: cannot change into 'nowhere': No such file"),
        ("--result_path=nowhere/result.json", 7, "cannot write 'nowhere/result.json'"),
    ],
)
def test_a_result_that_cannot_be_written_is_no_success(conv: Any, flag: str, code: int, message: str) -> None:
    ran = conv.run(flag)
    assert (ran.code, ran.result) == (code, None)
    assert message in ran.stderr


def test_an_old_result_does_not_survive_a_new_run(conv: Any, preload: Any) -> None:
    conv.passes()
    conv.run("--model_path=none.pte").fails(4, "load", "none.pte")
    # An old result does not survive a crash either, which writes none.
    conv.passes()
    crashed = conv.run("--log_level=1", env=preload("crash_stub"))
    assert (crashed.code, crashed.result) == (-signal.SIGSEGV, None)


def test_an_abort_inside_executorch_still_gives_a_result(conv: Any, preload: Any) -> None:
    aborted = conv.run("--log_level=1", env=preload("abort_stub"))
    aborted.fails(3, "options", "ExecuTorch aborted: an internal check failed")


@pytest.mark.parametrize(
    ("failing", "reason"),
    [("thread", "a thread: Resource temporarily unavailable"), ("eventfd", "eventfd: Too many open files")],
)
def test_a_machine_without_resources_for_the_watchdog(bare: Any, preload: Any, failing: str, reason: str) -> None:
    env = {**preload("watchdog_stub"), "STUB_FAILS": failing}
    ran = bare.run("--timeout_ms=1000", env=env)
    ran.fails(2, "flags", f"cannot start what watches the run: {reason}")
    session = bare.run("--serve", env=env, result="none")
    assert (session.code, session.stdout) == (2, "")
    assert reason in session.stderr


def _hanging(stub: Any) -> subprocess.Popen[str]:
    process = stub.start("--input_list_path=hang.txt", stderr=subprocess.PIPE, text=True)
    assert any("backend stub hangs" in line for line in process.stderr)
    return process


def _ended_by(stub: Any, hanging: subprocess.Popen[str], *signals: signal.Signals) -> Any:
    with hanging as process:
        for number in signals:
            process.send_signal(number)
        assert process.wait(60) == 11
    return stub.ended(11)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_for_the_end_leaves_a_result(stub: Any, number: signal.Signals) -> None:
    ran = _ended_by(stub, _hanging(stub), number)
    assert (ran.error["stage"], ran.error["message"]) == ("execute", f"ended by {number.name}")
    assert ran.result["inferences"] == [{"line": 0, "warm_up_ns": [], "iterations_ns": []}]
    assert ran.result["load_ns"] > 0


def test_a_signal_that_was_ignored_stays_ignored(stub: Any) -> None:
    # As `nohup` starts a program.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hanging = _hanging(stub)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert _ended_by(stub, hanging, signal.SIGHUP, signal.SIGTERM).error["message"] == "ended by SIGTERM"


def test_a_backends_thread_that_aborts_ends_the_run_with_a_result(stub: Any) -> None:
    ran = stub.run("--input_list_path=abort_in_thread.txt")
    ran.fails(6, ran.error["stage"], "ExecuTorch aborted: the stub gives up")


def test_a_backends_thread_that_aborts_while_the_result_is_written(stub: Any) -> None:
    """The abort waits for the result of the ended run, and ends the process after it."""
    ran = stub.run("--input_list_path=abort_late.txt", env={"STUB_SLOW_RENAME": "result.json"})
    assert ran.code in (0, -signal.SIGABRT), ran.stderr
    assert ran.result is not None, ran.stderr
    assert ran.result["ok"] is True
    assert stub.names() == ["output_0_0.raw"]
