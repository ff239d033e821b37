"""Everything that can be wrong ends with its exit code, a message and a result; nothing crashes."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_disk import small_disk


def _expect(ran: Any, code: int, stage: str, message: str) -> None:
    assert ran.code == code, ran.stderr
    assert ran.error["stage"] == stage
    assert message in ran.error["message"]
    assert f"farm_runner: {stage}: " in ran.stderr


def test_a_missing_model(bare: Any) -> None:
    _expect(bare.run(), 4, "load", "cannot read 'model.pte': No such file")


def test_a_model_that_is_no_file(bare: Any) -> None:
    os.mkfifo(bare.folder / "model.pte")
    _expect(bare.run(), 4, "load", "not a regular file")


@pytest.mark.parametrize("size", [0, 7, 64, 4096, 54000])
def test_a_truncated_model(conv: Any, size: int) -> None:
    model = conv.folder / "model.pte"
    model.write_bytes(model.read_bytes()[:size])
    _expect(conv.run(), 4, "load", "cannot load 'model.pte'")
    assert conv.names() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF" + bytes(100_000),
        random.Random(0).randbytes(100_000),
        bytes(4) + b"ET12" + random.Random(1).randbytes(100_000),
    ],
    ids=["empty", "elf", "random", "random with the identifier of a program"],
)
def test_a_model_that_is_something_else(conv: Any, content: bytes) -> None:
    (conv.folder / "model.pte").write_bytes(content)
    _expect(conv.run(), 4, "load", "cannot load 'model.pte'")
    assert conv.names() == []


def test_a_model_for_a_backend_that_is_not_in_the_runner(stub: Any) -> None:
    _expect(stub.run("--input_list_path=work.txt"), 4, "load", "Backend BackendWithCompilerDemo is not registered")


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


def test_a_method_that_is_not_there(conv: Any) -> None:
    _expect(conv.run("--method_index=1"), 4, "load", "the program has 1 method(s)")


def test_a_missing_backend_library(conv: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    shutil.copytree(conv.runtime, folder, copy_function=os.link)
    (folder / "libQnnHtp.so").unlink()
    _expect(type(conv)(conv.folder, folder).run(), 4, "load", "cannot load method 'forward'")


def test_the_bridge_without_the_real_library(conv: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    shutil.copytree(conv.runtime, folder, copy_function=os.link)
    shutil.rmtree(folder / "real")
    ran = type(conv)(conv.folder, folder).run()
    _expect(ran, 4, "load", "cannot load method 'forward'")
    assert "farm qnn bridge: cannot load the real library" in ran.stderr


def test_a_missing_input_list(conv: Any) -> None:
    (conv.folder / "input_list.txt").unlink()
    _expect(conv.run(), 5, "inputs", "cannot read 'input_list.txt'")
    assert conv.names() == []


@pytest.mark.parametrize("text", ["", "\n\n", " \r\n \n"])
def test_an_input_list_without_an_inference(conv: Any, text: str) -> None:
    (conv.folder / "input_list.txt").write_text(text)
    _expect(conv.run(), 5, "inputs", "has no inference")


@pytest.mark.parametrize("size", [0, 3071, 3073, 1 << 20])
def test_an_input_of_the_wrong_size(conv: Any, size: int) -> None:
    (conv.folder / "x1.raw").write_bytes(bytes(size))
    ran = conv.run()
    _expect(ran, 5, "inputs", f"input_list.txt:2: 'x1.raw' has {size} bytes, input 0 is float32[1,3,16,16]")
    assert ran.error["line"] == 1
    # Known before the first inference: nothing ran.
    assert ran.result["inferences"] == []
    assert conv.names() == []


def test_a_missing_input(conv: Any) -> None:
    conv.list_inputs("x0.raw", "", "nowhere.raw")
    ran = conv.run()
    _expect(ran, 5, "inputs", "input_list.txt:3: cannot read 'nowhere.raw'")
    assert ran.error["line"] == 1


def test_too_many_inputs(conv: Any) -> None:
    conv.list_inputs("x0.raw x1.raw")
    _expect(conv.run(), 5, "inputs", "2 files, the method has 1 inputs")


def test_a_failing_execution_keeps_what_went_before(bare: Any, models: Path) -> None:
    np.zeros((4, 2), np.float32).tofile(bare.folder / "table.raw")
    np.array([0, 1, 2], np.int64).tofile(bare.folder / "good.raw")
    np.array([0, 1, 99], np.int64).tofile(bare.folder / "bad.raw")
    bare.list_inputs("table.raw good.raw", "table.raw bad.raw", "table.raw good.raw")
    ran = bare.run(f"--model_path={models / 'select.pte'}", "--iteration=2", "--etdump_path=e.etdp")
    _expect(ran, 6, "execute", "index[2] = 99 is out of range")
    assert ran.error["line"] == 1
    assert ran.error["code"] == 0x12
    assert [len(inference["iterations_ns"]) for inference in ran.result["inferences"]] == [2, 0]
    assert bare.names() == ["output_0_0.raw", "output_0_1.raw"]


def test_a_failing_middle_iteration(stub: Any, preload: Any) -> None:
    ran = stub.run("--input_list_path=third.txt", "--iteration=5", "--warm_up=1", env=preload("backend_stub"))
    _expect(ran, 6, "execute", "(execution 2 of inference 0, both from 0)")
    assert len(ran.result["inferences"][0]["iterations_ns"]) == 1
    assert stub.names() == []


def test_a_full_disk(conv: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "12k") as full:
        ran = conv.run(f"--output_folder_path={full}")
        _expect(ran, 7, "outputs", "output_1_0.raw: cannot write")
        assert "No space left" in ran.error["message"]
        # Whole or not at all.
        assert [(path.name, path.stat().st_size) for path in full.iterdir()] == [("output_0_0.raw", 8192)]


@pytest.mark.parametrize("folder", ["nowhere", "input_list.txt"])
def test_an_output_folder_that_is_none(conv: Any, folder: str) -> None:
    ran = conv.run(f"--output_folder_path={folder}")
    _expect(ran, 7, "outputs", f"cannot write into folder '{folder}'")
    assert ran.result["inferences"] == []


def test_an_output_that_cannot_be_written(conv: Any) -> None:
    (conv.folder / "outputs" / "output_1_0.raw").mkdir()
    ran = conv.run()
    _expect(ran, 7, "outputs", "output_1_0.raw: cannot write")
    assert ran.error["line"] == 1
    assert conv.names() == ["output_0_0.raw", "output_1_0.raw"]


def test_a_performance_file_that_cannot_be_written(conv: Any) -> None:
    _expect(conv.run("--performance_output_path=nowhere/speed.txt"), 7, "outputs", "nowhere/speed.txt")


def test_an_etdump_that_cannot_be_written(conv: Any) -> None:
    _expect(conv.run("--etdump_path=nowhere/e.etdp"), 8, "etdump", "cannot write 'nowhere/e.etdp'")


def test_a_run_that_takes_too_long(stub: Any, preload: Any) -> None:
    ran = stub.run("--input_list_path=hang.txt", "--timeout_ms=200", env=preload("backend_stub"))
    _expect(ran, 9, "execute", "not finished after 200 ms")


def test_a_limit_that_is_over_as_soon_as_it_begins(stub: Any, preload: Any) -> None:
    """The thread that runs the job gets no processor between its start and its first step."""
    env = {**preload("backend_stub"), "STUB_PREEMPTED": "1"}
    ran = stub.run("--input_list_path=hang.txt", "--timeout_ms=50", env=env)
    _expect(ran, 9, "flags", "not finished after 50 ms")


@pytest.mark.parametrize("slow", ["STUB_PREEMPTED", "STUB_SLOW_CHDIR"])
def test_a_limit_that_is_over_before_the_working_folder_is_entered(stub: Any, preload: Any, slow: str) -> None:
    flags = (f"--working_folder={stub.folder}", "--input_list_path=hang.txt", "--timeout_ms=50")
    ran = stub.run(*flags, env={**preload("backend_stub"), slow: "1"})
    assert ran.code == 9, ran.stderr
    assert ran.error["message"] == "not finished after 50 ms"


def test_a_working_folder_that_is_none(conv: Any) -> None:
    ran = conv.run("--working_folder=nowhere")
    assert ran.code == 2
    assert "--working_folder: cannot change into 'nowhere': No such file" in ran.stderr
    # A result would be in the wrong folder.
    assert ran.result is None


def test_a_text_that_executorch_would_cut(conv: Any) -> None:
    _expect(
        conv.run(f"--heap_profiling_path={'x' * 256}"), 3, "options", "has a text of 256 bytes, ExecuTorch takes 255"
    )


def test_a_result_that_cannot_be_written_is_no_success(conv: Any) -> None:
    ran = conv.run("--result_path=nowhere/result.json")
    assert ran.code == 7
    assert "cannot write 'nowhere/result.json'" in ran.stderr


def test_an_old_result_does_not_survive_a_new_run(conv: Any, preload: Any) -> None:
    assert conv.run().code == 0
    _expect(conv.run("--model_path=none.pte"), 4, "load", "none.pte")
    # An old result does not survive a crash either, which writes none.
    assert conv.run().code == 0
    crashed = conv.run("--log_level=1", env=preload("crash_stub"))
    assert crashed.code == -11
    assert crashed.result is None


def test_an_abort_inside_executorch_still_gives_a_result(conv: Any, preload: Any) -> None:
    ran = conv.run("--log_level=1", env=preload("abort_stub"))
    _expect(ran, 3, "options", "ExecuTorch aborted: an internal check failed")
