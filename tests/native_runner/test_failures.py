"""Everything that can be wrong ends with its exit code, a message and a result; nothing crashes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.runtime.packages import package_folder

HERE = Path(__file__).parent


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


def test_a_model_that_is_something_else(conv: Any) -> None:
    (conv.folder / "model.pte").write_bytes(b"\x7fELF" + bytes(100_000))
    _expect(conv.run(), 4, "load", "cannot load 'model.pte'")


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


def test_a_result_that_cannot_be_written_is_no_success(conv: Any) -> None:
    ran = conv.run("--result_path=nowhere/result.json")
    assert ran.code == 7
    assert "cannot write 'nowhere/result.json'" in ran.stderr


def test_an_old_result_does_not_survive_a_new_run(conv: Any, tmp_path: Path) -> None:
    assert conv.run().code == 0
    _expect(conv.run("--model_path=none.pte"), 4, "load", "none.pte")
    # Nor a crash, which writes none.
    assert conv.run().code == 0
    crashed = conv.run("--log_level=1", env={"LD_PRELOAD": str(_preload(tmp_path, "crash_stub"))})
    assert crashed.code == -11
    assert crashed.result is None


def test_an_abort_inside_executorch_still_gives_a_result(conv: Any, tmp_path: Path) -> None:
    ran = conv.run("--log_level=1", env={"LD_PRELOAD": str(_preload(tmp_path, "abort_stub"))})
    _expect(ran, 3, "options", "ExecuTorch aborted: an internal check failed")


def _preload(folder: Path, name: str) -> Path:
    include = package_folder("executorch", "include", "build") / "include"
    library = folder / f"{name}.so"
    subprocess.run(
        [
            *("c++", "-std=c++17", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS"),
            *(f"-I{include}", f"-I{include / 'executorch/runtime/core/portable_type/c10'}"),
            *(str(HERE / f"{name}.cpp"), "-o", str(library)),
        ],
        check=True,
        timeout=120,
    )
    return library
