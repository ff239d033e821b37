"""Executions of the runner with models on the real simulator, and on the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _sqnr_db(reference: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    noise = float(np.mean((reference - actual) ** 2))
    return 10 * float(np.log10(float(np.mean(reference**2)) / noise))


def test_outputs_are_those_of_the_compiled_module(conv: Any, models: Path) -> None:
    ran = conv.run("--iteration=3", "--warm_up", "2")
    assert ran.code == 0, ran.stderr
    assert conv.names() == ["output_0_0.raw", "output_1_0.raw"]
    for i in range(2):
        actual = np.fromfile(conv.folder / "outputs" / f"output_{i}_0.raw", np.float32)
        quantized = np.fromfile(models / f"conv_quantized_{i}.raw", np.float32)
        # Both are multiples of one step. The HTP and the CPU round the input and the output, each in its own way.
        step = np.diff(np.unique(quantized)).min()
        assert np.abs(actual - quantized).max() < 2.5 * step
        assert _sqnr_db(np.fromfile(models / f"conv_fp32_{i}.raw", np.float32), actual) > 30
    result = ran.result
    assert result["ok"] is True
    assert result["exit_code"] == 0
    assert result["error"] is None
    assert result["schema"] == 1
    assert result["method"] == "forward"
    assert result["load_ns"] > 0
    assert result["verification_ns"] > 0
    assert result["inputs"] == [{"shape": [1, 3, 16, 16], "dtype": "float32", "nbytes": 3072}]
    assert result["outputs"] == [{"shape": [1, 8, 16, 16], "dtype": "float32", "nbytes": 8192}]
    assert [inference["line"] for inference in result["inferences"]] == [0, 1]
    for inference in result["inferences"]:
        assert [len(inference[key]) for key in ("warm_up_ns", "iterations_ns")] == [2, 3]
        assert min(inference["iterations_ns"]) > 0
    assert set(result["versions"]) == {"executorch", "runner"}
    assert 1 << 20 < result["peak_memory_bytes"] < 1 << 36


def test_the_performance_file_is_the_mean_of_one_execution(conv: Any) -> None:
    ran = conv.run("--iteration=4", "--warm_up=1", "--performance_output_path=speed.txt")
    samples = [ns for inference in ran.result["inferences"] for ns in inference["iterations_ns"]]
    written = float((conv.folder / "speed.txt").read_text())
    assert written == pytest.approx(sum(samples) / len(samples) / 1e6, rel=1e-5)


def test_it_runs_from_its_own_folder_with_nothing_else_in_the_environment(
    conv: Any, runtime_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "device"
    shutil.copytree(runtime_folder, folder, copy_function=shutil.copy)
    for path in conv.folder.iterdir():
        path.rename(folder / path.name)
    subprocess.run(
        ["env", "-i", "LD_LIBRARY_PATH=.", "./farm_runner"], cwd=folder, check=True, capture_output=True, timeout=120
    )
    assert (folder / "outputs" / "output_1_0.raw").stat().st_size == 8192


def test_an_etdump_is_written_only_when_asked_for(conv: Any) -> None:
    assert conv.run().code == 0
    assert not list(conv.folder.glob("*.etdp"))
    assert conv.run("--etdump_path=e.etdp", "--profile_level=2").code == 0
    dump = (conv.folder / "e.etdp").read_bytes()
    assert b"ED00" in dump[:16]
    assert b"(cycles)" in dump


def test_backend_options_reach_the_backend(conv: Any) -> None:
    quiet = conv.run("--log_level=1")
    loud = conv.run("--log_level=4", "--htp_performance_mode=2")
    assert quiet.code == loud.code == 0
    assert "log_level 4" in loud.stdout + loud.stderr
    assert "log_level 4" not in quiet.stdout + quiet.stderr


def test_several_inputs_and_outputs_keep_their_order_and_type(bare: Any, models: Path) -> None:
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    for i, index in enumerate([[3, 0, 1], [2, 2, 2]]):
        table.tofile(bare.folder / f"table{i}.raw")
        np.array(index, np.int64).tofile(bare.folder / f"index{i}.raw")
    # Blank lines, carriage returns and a second space do no harm.
    (bare.folder / "input_list.txt").write_bytes(b"\ntable0.raw index0.raw\r\n  \n table1.raw  index1.raw")
    ran = bare.run(f"--model_path={models / 'select.pte'}")
    assert ran.code == 0, ran.stderr
    assert [spec["dtype"] for spec in ran.result["inputs"]] == ["float32", "int64"]
    assert bare.names() == [f"output_{line}_{index}.raw" for line in range(2) for index in range(2)]
    rows = np.fromfile(bare.folder / "outputs" / "output_0_0.raw", np.float32).reshape(3, 2)
    assert rows.tolist() == table[[3, 0, 1]].tolist()
    assert np.fromfile(bare.folder / "outputs" / "output_1_1.raw", np.int64).tolist() == [3, 3, 3]


def test_a_number_is_an_output_too(bare: Any, models: Path) -> None:
    np.array([1.5, 2], np.float32).tofile(bare.folder / "x.raw")
    bare.list_inputs("x.raw")
    ran = bare.run(f"--model_path={models / 'scalar.pte'}")
    assert ran.code == 0, ran.stderr
    assert [(spec["shape"], spec["dtype"]) for spec in ran.result["outputs"]] == [([], "float32"), ([], "int64")]
    assert np.fromfile(bare.folder / "outputs" / "output_0_0.raw", np.float32).tolist() == [3.5]
    assert np.fromfile(bare.folder / "outputs" / "output_0_1.raw", np.int64).tolist() == [7]


def test_without_a_result_path_no_result_is_written(conv: Any) -> None:
    ran = conv.run("--result_path=", "--performance_output_path=")
    assert ran.code == 0
    assert ran.result is None
    assert sorted(path.name for path in conv.folder.glob("*.txt")) == ["input_list.txt"]
