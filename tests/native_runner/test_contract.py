"""The rest of what ExecuTorch's qnn_executor_runner can do, as a drop-in for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_stub import SOURCES, built_stub
from native_runner.sanitizers import runner_environment


def test_xnnpack_runs_and_takes_a_shape_below_its_bound(bare: Any, models: Path) -> None:
    bare.list_inputs(str(models / "xnnpack_input.raw"))
    (bare.folder / "shape.txt").write_text("2, 8\n")
    ran = bare.run(f"--model_path={models / 'xnnpack.pte'}", "--input_shape_path=shape.txt", "--iteration=3")
    assert ran.code == 0, ran.stderr
    assert ran.result["inputs"][0]["shape"] == [2, 8]
    assert ran.result["outputs"] == [{"shape": [2, 4], "dtype": "float32", "nbytes": 32}]
    reference = np.fromfile(models / "xnnpack_fp32.raw", np.float32)
    assert np.abs(bare.output(0, 0) - reference).max() < 1e-6
    assert np.abs(reference).max() > 0.1


def _dynamic(bare: Any, models: Path, *flags: str, inputs: str, outputs: str | None = None) -> Any:
    bare.write("x.raw", np.arange(6))
    bare.write("y.raw", 3)
    bare.list_inputs("x.raw y.raw", "x.raw y.raw")
    (bare.folder / "inputs.txt").write_text(inputs)
    if outputs is not None:
        (bare.folder / "outputs.txt").write_text(outputs)
        flags += ("--output_shape_path", "outputs.txt")
    return bare.run(f"--model_path={models / 'dynamic.pte'}", "--input_shape_path", "inputs.txt", *flags)


# As Python writes shapes: a vector is "2,", a scalar is nothing.
@pytest.mark.parametrize("outputs", [None, "2, 3\n2,\n"])
def test_outputs_have_their_real_size(bare: Any, models: Path, outputs: str | None) -> None:
    ran = _dynamic(bare, models, inputs="2, 3\n\n", outputs=outputs)
    assert ran.code == 0, ran.stderr
    assert [spec["shape"] for spec in ran.result["inputs"]] == [[2, 3], []]
    assert [spec["shape"] for spec in ran.result["outputs"]] == [[2, 3], [2]]
    for line in range(2):
        assert bare.output(line, 0).tolist() == [0, 3, 6, 9, 12, 15]
        assert bare.output(line, 1).tolist() == [9, 36]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("5, 3\n\n", "inputs.txt:1: float32[5,3] does not fit input 0, at most float32[4,3]"),
        ("2, 3, 1\n\n", "float32[2,3,1] does not fit input 0"),
        ("2, 3\n1\n", "inputs.txt:2: float32[1] does not fit input 1, at most float32[]"),
        ("2, 3\n", "'inputs.txt' has 1 lines, the method has 2 inputs"),
        ("2, x\n\n", "'x' is no size"),
        ("2, -3\n\n", "'-3' is no size"),
        ("99999999999999999999, 3\n\n", "is no size"),
        ("1, 3\n\n", "'x.raw' has 24 bytes, input 0 is float32[1,3] and needs 12"),
    ],
)
def test_a_shape_that_does_not_fit(bare: Any, models: Path, inputs: str, message: str) -> None:
    _dynamic(bare, models, inputs=inputs).fails(5, "inputs", message)
    assert bare.names() == []


def test_an_output_that_has_another_shape(bare: Any, models: Path) -> None:
    _dynamic(bare, models, inputs="2, 3\n\n", outputs="3, 3\n2,\n").fails(7, "outputs", "--output_shape_path says")
    _dynamic(bare, models, inputs="2, 3\n\n", outputs="9, 3\n2,\n").fails(5, "inputs", "does not fit output 0")


def test_a_shape_of_a_program_that_has_only_one(conv: Any) -> None:
    (conv.folder / "shape.txt").write_text("1, 3, 16, 8\n")
    (conv.folder / "x0.raw").write_bytes(bytes(1536))
    conv.list_inputs("x0.raw")
    ran = conv.run("--input_shape_path=shape.txt")
    assert ran.code in (5, 6), ran.stderr
    assert conv.names() == []


@pytest.mark.parametrize(("index", "factor"), [(0, 2), (1, 3)])
def test_each_method_of_a_program(bare: Any, models: Path, index: int, factor: int) -> None:
    bare.list_inputs(bare.write("x.raw", [1, 5]))
    ran = bare.run(f"--model_path={models / 'methods.pte'}", f"--method_index={index}")
    assert ran.code == 0, ran.stderr
    assert ran.result["method"] == ("double", "triple")[index]
    assert bare.output(0, 0).tolist() == [factor, 5 * factor]


def test_a_method_without_inputs_is_executed_for_every_line(bare: Any, models: Path) -> None:
    model = f"--model_path={models / 'nothing.pte'}"
    assert bare.run(model).code == 0
    assert bare.names() == ["output_0_0.raw"]
    (bare.folder / "input_list.txt").write_text("\n\r\n\n")
    assert bare.run(model).code == 0
    assert bare.names() == [f"output_{line}_0.raw" for line in range(3)]
    assert bare.output(2, 0, np.int64).tolist() == [5, 6, 7]
    for text, message in (("", "has no inference"), ("x\n", "1 files, the method has 0 inputs")):
        (bare.folder / "input_list.txt").write_text(text)
        bare.run(model).fails(5, "inputs", message)


def test_a_program_that_leaves_the_memory_to_its_caller(bare: Any, models: Path) -> None:
    bare.list_inputs(bare.write("x.raw", [1, 5]), bare.write("y.raw", [2, -1]))
    ran = bare.run(f"--model_path={models / 'outside.pte'}", "--iteration=2")
    assert ran.code == 0, ran.stderr
    assert bare.output(0, 0).tolist() == [2, 10]
    assert bare.output(1, 0).tolist() == [4, -2]


def test_intermediate_outputs_come_with_an_etdump(conv: Any, models: Path) -> None:
    model = f"--model_path={models / 'conv_dump.pte'}"
    ran = conv.run(model, "--dump_intermediate_outputs")
    assert ran.code == 0, ran.stderr
    values = (conv.folder / "debug_output.bin").read_bytes()
    assert b"ED00" in (conv.folder / "etdump.etdp").read_bytes()[:16]
    # The dump has the used part, not 100 MB of zeros, with the outputs of both inferences.
    for line in range(2):
        assert conv.output(line, 0).tobytes() in values
    assert conv.run(model, "--dump_intermediate_outputs", f"--debug_buffer_size={len(values)}").code == 0
    (conv.folder / "debug_output.bin").unlink()
    ran = conv.run(model, "--dump_intermediate_outputs", f"--debug_buffer_size={len(values) - 1}")
    ran.fails(8, "etdump", f"--debug_buffer_size: {len(values) - 1} bytes are too few")
    assert f"have {len(values)}" in ran.error["message"]
    assert not (conv.folder / "debug_output.bin").exists()


def test_intermediate_outputs_go_where_they_are_sent(conv: Any, models: Path) -> None:
    ran = conv.run(
        *(f"--model_path={models / 'conv_dump.pte'}", "--dump_intermediate_outputs"),
        *("--debug_output_path=d.bin", "--etdump_path=d.etdp"),
    )
    assert ran.code == 0, ran.stderr
    assert sorted(path.name for path in conv.folder.glob("d.*")) == ["d.bin", "d.etdp"]
    assert not (conv.folder / "etdump.etdp").exists()
    ran = conv.run("--dump_intermediate_outputs", "--debug_output_path=none/d.bin")
    ran.fails(8, "etdump", "cannot write 'none/d.bin'")


def test_a_shared_buffer_needs_a_device(conv: Any, models: Path) -> None:
    model = f"--model_path={models / 'conv_shared.pte'}"
    conv.run(model, "--shared_buffer").fails(3, "options", "no memory can be shared with a DSP here: libcdsprpc.so")
    assert conv.run(model).code == 0
    conv.run("--shared_buffer").fails(4, "load", "the program brings the memory of input 0")


def test_a_shared_buffer_is_what_the_program_executes_on(conv: Any, models: Path, farm_cache: Path) -> None:
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcdsprpc.so", SOURCES / "cdsprpc_stub.cpp")
    library = built_stub(farm_cache, "libcdsprpc.so", *flags)
    model = f"--model_path={models / 'conv_shared.pte'}"
    ran = conv.run(model, "--shared_buffer", env={"LD_PRELOAD": str(library)})
    assert ran.code == 0, ran.stderr
    assert [line for line in ran.stderr.splitlines() if "rpcmem stub" in line] == [
        *("rpcmem stub: allocated 3072", "rpcmem stub: allocated 8192"),
        *("rpcmem stub: freed", "rpcmem stub: freed"),
    ]
    shared = [conv.output(line, 0).tobytes() for line in range(2)]
    assert conv.run(model).code == 0
    assert [conv.output(line, 0).tobytes() for line in range(2)] == shared


def test_runtime_options_of_lpai_reach_the_backend(conv: Any, preload: Callable[[str], dict[str, str]]) -> None:
    # Each value is another one, and all of them are set before the first program loads.
    options = {"fps": 30, "ftrt_ratio": 10, "client_perf_type": 1, "affinity": 2, "core_selection": 3}
    stub = preload("process_options_stub")
    ran = conv.run(*(f"--lpai_{name}={value}" for name, value in options.items()), env=stub)
    assert ran.code == 0, ran.stderr
    output = re.findall(r"^stub: (.*)$", ran.stderr, re.MULTILINE)
    assert output == [*(f"qnn_runtime_lpai_{name}={value}" for name, value in options.items()), "loads"]
    assert re.findall(r"^stub: (.*)$", conv.run(env=stub).stderr, re.MULTILINE) == ["loads"]


def test_called_by_the_name_of_the_original_it_writes_an_etdump_and_requires_no_list(conv: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    shutil.copytree(conv.runtime, folder, copy_function=os.link)
    (folder / "qnn_executor_runner").symlink_to("farm_runner")

    def call(*flags: str) -> str:
        argv, env = [str(folder / "qnn_executor_runner"), *flags], runner_environment(folder, {})
        done = subprocess.run(argv, cwd=conv.folder, env=env, check=True, capture_output=True, text=True, timeout=120)
        return done.stderr

    call()
    assert (conv.folder / "etdump.etdp").stat().st_size > 0
    (conv.folder / "etdump.etdp").unlink()
    shutil.rmtree(conv.folder / "outputs")
    (conv.folder / "outputs").mkdir()
    assert "no 'nowhere.txt': executed with inputs of ones" in call("--etdump_path=", "--input_list_path=nowhere.txt")
    assert not (conv.folder / "etdump.etdp").exists()
    assert conv.names() == []
    assert len(json.loads((conv.folder / "result.json").read_text())["inferences"]) == 1
    assert conv.run("--input_list_path=nowhere.txt").code == 5, "by its own name it asks for the list"
