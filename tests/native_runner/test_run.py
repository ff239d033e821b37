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
    ran = conv.run("--iteration=3", "--warm_up", "2", "--performance_output_path=speed.txt")
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
    samples = [ns for inference in result["inferences"] for ns in inference["iterations_ns"]]
    assert float((conv.folder / "speed.txt").read_text()) == pytest.approx(sum(samples) / 6 / 1e6, rel=1e-5)
    assert set(result["versions"]) == {"executorch", "runner"}
    assert 1 << 20 < result["peak_memory_bytes"] < 1 << 36


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


def test_options_reach_the_backend_and_an_etdump_is_written_only_when_asked_for(conv: Any) -> None:
    quiet = conv.run("--log_level=1", "--result_path=", "--performance_output_path=")
    assert (quiet.code, quiet.result) == (0, None)
    assert {path.name for path in conv.folder.iterdir() if path.suffix != ".raw"} == {
        "input_list.txt", "model.pte", "outputs",
    }  # fmt: skip
    loud = conv.run("--log_level=4", "--htp_performance_mode=2", "--etdump_path=e.etdp", "--profile_level=2")
    assert loud.code == 0
    assert "log_level 4" in loud.stdout + loud.stderr
    assert "log_level 4" not in quiet.stdout + quiet.stderr
    dump = (conv.folder / "e.etdp").read_bytes()
    assert b"ED00" in dump[:16]
    assert b"(cycles)" in dump


def test_several_inputs_and_outputs_keep_their_order_and_type(bare: Any, models: Path) -> None:
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    for i, index in enumerate([[3, 0, 1], [2, 2, 2]]):
        bare.write(f"table{i}.raw", table)
        bare.write(f"index{i}.raw", index, np.int64)
    # Blank lines, carriage returns and a second space do no harm.
    (bare.folder / "input_list.txt").write_bytes(b"\ntable0.raw index0.raw\r\n  \n table1.raw  index1.raw")
    ran = bare.run(f"--model_path={models / 'select.pte'}")
    assert ran.code == 0, ran.stderr
    assert [spec["dtype"] for spec in ran.result["inputs"]] == ["float32", "int64"]
    assert bare.names() == [f"output_{line}_{index}.raw" for line in range(2) for index in range(2)]
    assert bare.output(0, 0).tolist() == table[[3, 0, 1]].ravel().tolist()
    assert bare.output(1, 1, np.int64).tolist() == [3, 3, 3]


def test_a_number_is_an_output_too(bare: Any, models: Path) -> None:
    bare.list_inputs(bare.write("x.raw", [1.5, 2]))
    ran = bare.run(f"--model_path={models / 'scalar.pte'}")
    assert ran.code == 0, ran.stderr
    assert [(spec["shape"], spec["dtype"]) for spec in ran.result["outputs"]] == [([], "float32"), ([], "int64")]
    assert (bare.output(0, 0).tolist(), bare.output(0, 1, np.int64).tolist()) == ([3.5], [7])
