"""Executions of the runner on the real simulator and on the CPU: outputs, flags, repetition, shapes and methods."""

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

from farm.base.backends.registry import BACKENDS

# Executions of the runner with models on the real simulator, and on the CPU.


def _sqnr_db(reference: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    noise = float(np.mean((reference - actual) ** 2))
    return 10 * float(np.log10(float(np.mean(reference**2)) / noise))


def test_outputs_are_those_of_the_compiled_module(conv: Any, models: Path) -> None:
    ran = conv.passes("--iteration=3", "--warm_up", "2", "--performance_output_path=speed.txt")
    assert conv.names() == ["output_0_0.raw", "output_1_0.raw"]
    for i in range(2):
        actual = np.fromfile(conv.folder / "outputs" / f"output_{i}_0.raw", np.float32)
        quantized = np.fromfile(models / f"conv_quantized_{i}.raw", np.float32)
        # Both are multiples of one step. The HTP and the CPU round the input and the output, each in its own way.
        step = np.diff(np.unique(quantized)).min()
        assert np.abs(actual - quantized).max() < 2.5 * step
        assert _sqnr_db(np.fromfile(models / f"conv_fp32_{i}.raw", np.float32), actual) > 30
    result = ran.result
    expected = {"ok": True, "exit_code": 0, "error": None, "schema": 1, "method": "forward"}
    expected["inputs"] = [{"shape": [1, 3, 16, 16], "dtype": "float32", "nbytes": 3072}]
    expected["outputs"] = [{"shape": [1, 8, 16, 16], "dtype": "float32", "nbytes": 8192}]
    assert {name: result[name] for name in expected} == expected
    assert min(result["load_ns"], result["verification_ns"]) > 0
    assert [inference["line"] for inference in result["inferences"]] == [0, 1]
    for inference in result["inferences"]:
        assert [len(inference[key]) for key in ("warm_up_ns", "iterations_ns")] == [2, 3]
        assert min(inference["iterations_ns"]) > 0
    samples = [ns for inference in result["inferences"] for ns in inference["iterations_ns"]]
    assert float((conv.folder / "speed.txt").read_text()) == pytest.approx(sum(samples) / 6 / 1e6, rel=1e-5)
    assert set(result["versions"]) == {"executorch", "runner"}
    assert 1 << 20 < result["peak_memory_bytes"] < 1 << 36


def test_options_reach_the_backend_and_an_etdump_is_written_only_when_asked_for(conv: Any) -> None:
    quiet = conv.run("--log_level=1", "--result_path=", "--performance_output_path=")
    assert (quiet.code, quiet.result) == (0, None)
    assert {path.name for path in conv.folder.iterdir() if path.suffix != ".raw"} == {
        "input_list.txt", "model.pte", "outputs",
    }  # fmt: skip
    loud = conv.passes("--log_level=4", "--htp_performance_mode=2", "--etdump_path=e.etdp", "--profile_level=2")
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
    ran = bare.passes(f"--model_path={models / 'select.pte'}")
    assert [spec["dtype"] for spec in ran.result["inputs"]] == ["float32", "int64"]
    assert bare.names() == [f"output_{line}_{index}.raw" for line in range(2) for index in range(2)]
    assert bare.output(0, 0).tolist() == table[[3, 0, 1]].ravel().tolist()
    assert bare.output(1, 1, np.int64).tolist() == [3, 3, 3]


def test_a_number_is_an_output_too(bare: Any, models: Path) -> None:
    bare.list_inputs(bare.write("x.raw", [1.5, 2]))
    ran = bare.passes(f"--model_path={models / 'scalar.pte'}")
    assert [(spec["shape"], spec["dtype"]) for spec in ran.result["outputs"]] == [([], "float32"), ([], "int64")]
    assert (bare.output(0, 0).tolist(), bare.output(0, 1, np.int64).tolist()) == ([3.5], [7])


# The runner's report of executions whose outputs differ from the written outputs of the last one.


_NONE: dict[str, Any] = {"count": 0, "executions": []}


def _differing(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["ok"], answer["error"]
    return [inference["differing"] for inference in answer["inferences"]]


def test_a_program_that_repeats_itself_has_none(conv: Any) -> None:
    ran = conv.run("--iteration=4", "--warm_up=2", "--etdump_path=e.etdp", "--profile_level=2")
    assert _differing(ran.result) == [_NONE, _NONE]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # The stub is wrong in the 5th, 10th, 15th and 20th execution of its process.
        (("--iteration=9",), {"count": 1, "executions": [4]}),
        (("--iteration=18", "--warm_up=4"), {"count": 4, "executions": [4, 9, 14, 19]}),
        (("--iteration=2", "--warm_up=6"), {"count": 1, "executions": [4]}),
        (("--iteration=5",), {"count": 4, "executions": [0, 1, 2, 3]}),
    ],
)
def test_every_execution_counts_and_not_only_the_last(
    stub: Any, flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    with stub.serve() as session:
        assert _differing(session.ask("--input_list_path=fifth.txt", *flags)) == [expected]
        assert _differing(session.ask("--input_list_path=work.txt", *flags)) == [_NONE]


@pytest.mark.parametrize(
    ("model", "flags", "expected"),
    [
        # Other numbers in one output are enough, and the list is bounded.
        ("noise", ("--iteration=50", "--warm_up=1"), [{"count": 50, "executions": list(range(32))}] * 2),
        # The state of the program changes with the first input alone.
        ("counter", ("--iteration=3",), [{"count": 2, "executions": [0, 1]}, _NONE]),
    ],
)
def test_a_program_that_computes_something_else_each_time_differs(
    bare: Any, models: Path, model: str, flags: tuple[str, ...], expected: list[dict[str, Any]]
) -> None:
    bare.list_inputs(bare.write("x.raw", [1, 2]), bare.write("zero.raw", [0, 0]))
    assert _differing(bare.run(f"--model_path={models / model}.pte", *flags).result) == expected


def test_a_dynamic_output_counts_as_it_is_written(bare: Any, models: Path) -> None:
    ran = _dynamic(bare, models, "--iteration=3", inputs="2, 3\n\n", outputs="2, 3\n2,\n")
    assert _differing(ran.result) == [_NONE] * 2


# The command line of the runner. None of this loads a model.


def test_version_and_help_go_to_standard_output(bare: Any) -> None:
    version = bare.passes("--version")
    assert version.stdout.startswith("farm_runner ")
    assert "executorch" in version.stdout
    help_text = bare.run("--help").stdout
    for flag in ("model_path", "input_list_path", "etdump_path", "htp_performance_mode", "result_path"):
        assert f"--{flag}\n" in help_text
    for backend in BACKENDS.values():
        for name in (name for name, option in backend.options.items() if option.when == "run"):
            assert f"--{name}\n" in help_text
    assert list(bare.folder.iterdir()) == [bare.folder / "outputs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nosuch=1"], "unknown flag '--nosuch=1'"),
        (["--nomodel_path"], "unknown flag '--nomodel_path'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--"], "unexpected argument '--'"),
        (["--model_path"], "--model_path needs a value"),
        (["--iteration=0"], "--iteration: '0' is not a whole number at least 1"),
        (["--iteration", "2x"], "--iteration: '2x' is not"),
        (["--iteration="], "--iteration: '' is not"),
        (["--warm_up=-1"], "--warm_up: '-1' is not"),
        (["--warm_up=99999999999999999999"], "--warm_up: '99999999999999999999' is not"),
        (["--profile_level=3"], "from 0 to 2"),
        (["--log_level=0"], "from 1 to 5"),
        (["--htp_performance_mode=9"], "from 0 to 8"),
        (["--keep_loaded=k.pte"], "--keep_loaded belongs to a session"),
        (["--help=perhaps"], "is not true or false"),
        (["--lpai_fps=0"], "at least 1"),
        (["--lpai_ftrt_ratio=0"], "at least 1"),
        (["--lpai_client_perf_type=3"], "from 1 to 2"),
        (["--lpai_affinity=0"], "from 1 to 2"),
        (["--lpai_core_selection=-1"], "at least 0"),
        (["--debug_buffer_size=0"], "at least 1"),
        (["--timeout_ms=-1"], "at least 0"),
        (["--generate=0"], "--generate: '0' is not a whole number at least 1"),
        (["--stop=2"], "--stop belongs to a text: --generate"),
        (["--generate=1", "--stop=2,x"], "--stop: 'x' is no token id"),
        (["--generate=1", "--iteration=2"], "--iteration: a text is generated again with --seconds"),
        (["--generate=1", "--method_index=1"], "--generate and --method_index exclude each other"),
        (["--likelihoods=true"], "--likelihoods belongs to a text: --generate"),
        (["--carry=1"], "--carry: '1' is not an output and an input"),
        (["--workspace_sharing_mode=3"], "--workspace_sharing_mode: '3' is not a whole number from 0 to 2"),
        (["--weight_cache_enabled=maybe"], "--weight_cache_enabled: 'maybe' is not true or false"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(bare: Any, arguments: list[str], message: str) -> None:
    ran = bare.run(*arguments)
    ran.fails(2, "flags", message)
    assert message in ran.stderr


def test_an_error_is_written_where_a_later_flag_says(bare: Any) -> None:
    ran = bare.run("--nosuch", "--result_path=elsewhere.json", result="elsewhere.json")
    assert ran.error["stage"] == "flags"
    assert not (bare.folder / "result.json").exists()


def test_any_bytes_in_a_path_give_a_result_that_can_be_read(bare: Any) -> None:
    name = b'a"\\\n\t\x01\xff\xc3\xa9\xf0\x9f\x98\x80'
    bare.run("--model_path", name)
    message = json.loads((bare.folder / "result.json").read_text(encoding="ascii"))["error"]["message"]
    assert 'a"\\\n\t\x01\ufffd\u00e9\U0001f600' in message


@pytest.mark.parametrize("style", ["--model_path=none.pte", "-model_path=none.pte"])
def test_flags_are_written_as_gflags_writes_them(bare: Any, style: str) -> None:
    assert "none.pte" in bare.run(style).error["message"]
    assert "none.pte" in bare.run(*style.split("=")).error["message"]
    assert "none.pte" in bare.run("--help=false", "--noversion", style).error["message"]


# The rest of what ExecuTorch's qnn_executor_runner can do, as a drop-in for it.


def test_xnnpack_runs_and_takes_a_shape_below_its_bound(bare: Any, models: Path) -> None:
    bare.list_inputs(str(models / "xnnpack_input.raw"))
    (bare.folder / "shape.txt").write_text("2, 8\n")
    ran = bare.passes(f"--model_path={models / 'xnnpack.pte'}", "--input_shape_path=shape.txt", "--iteration=3")
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
    ran = bare.passes(f"--model_path={models / 'methods.pte'}", f"--method_index={index}")
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
    bare.passes(f"--model_path={models / 'outside.pte'}", "--iteration=2")
    assert bare.output(0, 0).tolist() == [2, 10]
    assert bare.output(1, 0).tolist() == [4, -2]


def test_intermediate_outputs_come_with_an_etdump(conv: Any, models: Path) -> None:
    model = f"--model_path={models / 'conv_dump.pte'}"
    ran = conv.passes(model, "--dump_intermediate_outputs")
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
    ran = conv.passes(
        *(f"--model_path={models / 'conv_dump.pte'}", "--dump_intermediate_outputs"),
        *("--debug_output_path=d.bin", "--etdump_path=d.etdp"),
    )
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
    ran = conv.passes(model, "--shared_buffer", env={"LD_PRELOAD": str(library)})
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
    ran = conv.passes(*(f"--lpai_{name}={value}" for name, value in options.items()), env=stub)
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
