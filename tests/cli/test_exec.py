"""`farm exec` as a user calls it: compiled programs and modules, on the simulator and on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from elf_maker import make_elf
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.base.errors import ConfigError, UsageError
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import TensorSpec
from farm.builds.bundles.generation import generation_of
from farm.builds.program.pte import Delegate, Method, Value, read_pte
from farm.builds.runtime.parts import HEXAGON, RuntimePart
from farm.devices.execution.raw import RawResult
from farm.dispatch.request.profiling import Profile
from farm.replay.exec_plan import (
    Contexts,
    before_the_end,
    cpu_line,
    error_line,
    file_lines,
    find_module,
    is_cut_short,
    plan_generation,
    precision_of,
    qnn_line,
    read_contexts,
    size_line,
    vtcm_line,
)
from farm.replay.properties import CheckLine, Level
from farm.replay.ready_program import ReadyRequest, plan_ready, random_sample, read_list, read_samples, run_ready
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.numerics import compare
from farm.store.store import open_store

# `farm exec` as a user calls it: programs that were compiled elsewhere, on the simulator and on the CPU.


VIRTUAL = ("--virtual", "1")


def test_two_inferences_on_the_simulator_are_shown_compared_saved_and_recorded(home: FarmHome, models: Path) -> None:
    # Memory that a DSP would share is ordinary memory on the simulator.
    inputs = [str(models / f"conv_input_{n}.raw") for n in range(2)]
    expected = [word for n in range(2) for word in ("--expect", str(models / f"conv_quantized_{n}.raw"))]
    answer = home.json(
        "exec", str(models / "conv_shared.pte"), *VIRTUAL, "--inputs", *inputs, *expected,
        "--output", "out", "--profile", "detailed", "--iterations", "2",
    )  # fmt: skip
    assert (answer["job"], answer["inferences"], answer["random_inputs"]) == (
        "exec/conv_shared[SM8650-htp-ready]",
        2,
        False,
    )
    attempt = answer["attempt"]
    [comparison] = attempt["comparisons"]
    assert (comparison["output"], comparison["reference"], comparison["sqnr_db"] > 35) == (0, "expected", True)
    assert "the program ran; the comparison has no limit and decides nothing" in attempt["notes"]
    for sample, shown in enumerate(answer["outputs"]):
        array = np.load(home.cwd / "out" / f"output_{sample}_0.npy")
        assert (array.shape, array.dtype) == ((1, 8, 16, 16), np.float32)
        assert (home.cwd / "out" / f"output_{sample}_0.raw").read_bytes() == array.tobytes()
        assert (shown["greatest"], shown["first"]) == (array.max(), array.ravel()[:8].tolist())
    assert b"ED00" in (home.cwd / "out" / "etdump.etdp").read_bytes()[:12]
    assert len(next(one["samples"] for one in attempt["measurements"] if one["metric"] == "latency")) == 4
    assert any("convolution" in row["node"] for row in attempt["operators"])
    with open_store(f"sqlite:///{home.state / 'farm.db'}", readonly=True) as store:
        view = store.runs.view(answer["run"])
        kept = {one.kind for one in store.runs.artifacts(answer["run"])}
    assert (view.exit_code, [job.id for job in view.jobs]) == (0, [answer["job"]])
    assert kept == {"etdump", "output:output_0_0.raw", "output:output_1_0.raw"}
    again = home.farm("exec", str(models / "conv.pte"), *VIRTUAL, "--output", "out", code=2)
    assert "out is there already" in again.stderr


def test_a_program_for_the_cpu_tells_random_inputs_shows_its_outputs_and_tells_its_failure(
    home: FarmHome, models: Path
) -> None:
    program = ("exec", str(models / "select.pte"), "--soc", "sm8650", *VIRTUAL)
    done = home.farm(*program, "--seed", "7", "--option", "weight_cache_enabled=true", code=0)
    assert "NO INPUTS GIVEN: they are random (seed 7)" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "exec/select[SM8650-xnnpack-ready-weight_cache_enabled=true]"
    assert {
        "  input 1   int64[3]  random: 0 or 1, seed 7",
        "  output 1  int64[3]",
        "VIRTUAL: times and cycles are of a simulator, not comparable with hardware",
        "note: it ran; there is no reference for its outputs",
    } <= set(lines)
    np.ones((4, 2), np.float32).tofile(home.cwd / "table.raw")
    np.save(home.cwd / "index.npy", np.array([0, 1, 9]))
    done = home.farm(*program, "--inputs", "table.raw", "index.npy", code=1)
    assert "failed: execute:" in done.stdout
    assert "output 0" not in done.stdout


def test_a_channels_last_program_takes_and_gives_arrays_in_c_order(home: FarmHome, models: Path) -> None:
    np.load(models / "last_input.npy").tofile(home.cwd / "input.raw")
    wanted = np.load(models / "last_qnn.npy")
    wanted.tofile(home.cwd / "wanted.raw")
    inputs = ("--inputs", str(models / "last_input.npy"), "input.raw")
    right = ("--expect", str(models / "last_qnn.npy"), "--expect", "wanted.raw")
    program = str(models / "last_qnn.pte")
    answer = home.json("exec", program, "--soc", "SM8650", *VIRTUAL, "--output", "out", *inputs, *right)
    [comparison] = answer["attempt"]["comparisons"]
    assert comparison["sqnr_db"] is None or comparison["sqnr_db"] > 60
    for sample in range(2):
        array = np.load(home.cwd / "out" / f"output_{sample}_0.npy")
        np.testing.assert_allclose(array, wanted, atol=0.01)


def test_an_impossible_request_is_one_line_and_exit_code_2(home: FarmHome, models: Path) -> None:
    for words, message in {
        "conv.pte --soc SM8850": "conv.pte is compiled for SM8650 (htp), not for SM8850 (htp)",
        "conv.pte --input-list gone.txt": "gone.txt: No such file or directory",
        "conv.pte --inputs a.raw --inputs b.raw c.raw": "c.raw stands alone",
        "last_mixed.pte": "keep the module and its inputs in C order, without memory_format=torch.channels_last",
        "last_output.pte --soc SM8650 --inputs last_input.npy last_input.npy --state 0:0": (
            "--state 0:0: output 0 lies in the order [0, 2, 3, 1] in memory, input 0 in C order"
        ),
    }.items():
        assert message in home.refused("exec", *words.split(), *VIRTUAL, cwd=models)
    assert not home.state.exists()


def refused(**named: Any) -> str:
    with pytest.raises(UsageError) as caught:
        plan_ready(ReadyRequest(**named))
    return str(caught.value)


def test_a_program_that_nothing_here_could_run_is_refused_before_anything_is_pushed(models: Path) -> None:
    sharing = "contexts that share weights are not simulated: attach a SM8650, or compile it for --virtual with"
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("scalar", {}, "name the one it should run on, as with --soc SM8650"),
        ("scalar", {"soc": "SM8651"}, "did you mean 'SM8650'"),
        ("foreign", {"soc": "SM8650"}, "BackendWithCompilerDemo"),
        ("conv", {"backend": "xnnpack"}, "compiled for SM8650 (htp), not for SM8650 (xnnpack)"),
        ("conv", {"backend": "lpai"}, "SM8650 has no lpai backend"),
        ("conv", {"options": ("use_dlbc=true",)}, "leave the options use_dlbc out"),
        ("methods", {"soc": "SM8650"}, "no method 'forward': it has 'double', 'triple': name one of them with"),
        ("gone", {}, "gone.pte: No such file or directory"),
        ("conv_dump", {}, "use --profile off"),
        ("conv_sharing", {"virtual": True}, sharing),
    ]
    for name, fields, message in rows:
        assert message in refused(model=models / f"{name}.pte", **fields)
    # The attached device decides whether it can share weights.
    for fine in ({"model": models / "conv_dump.pte", "profile": Profile.OFF}, {"model": models / "conv_sharing.pte"}):
        assert plan_ready(ReadyRequest(**fine)).job.target.soc == "SM8650"  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_name_the_file_and_what_the_program_takes(models: Path, tmp_path: Path) -> None:
    fits, wanted = np.zeros((1, 3, 16, 16), np.float32), "input 0 is float32[1, 3, 16, 16]"
    arrays = {"float": fits.astype(float), "flat": fits[0], "object": np.array([{}], object), "huge": np.zeros(1)}
    for name, array in {**arrays, **{f"rows{n}": np.zeros((n, 8), np.float32) for n in (2, 3, 5)}}.items():
        np.save(tmp_path / f"{name}.npy", array)
    huge = (tmp_path / "huge.npy").read_bytes().replace(b"(1,)", b"(9999999999,)")
    for name, content in (("huge.npy", huge), ("cut.npy", b"\x93NUMPY\x01\x00"), ("short.raw", b"123")):
        (tmp_path / name).write_bytes(content)
    shutil.copy(models / "conv_input_0.raw", tmp_path / "good.raw")
    rows: list[tuple[str, list[str], str]] = [
        ("conv", ["short.raw"], f"short.raw: has 3 bytes, {wanted} and has 3072"),
        ("conv", ["float.npy"], f"is float64[1, 3, 16, 16], {wanted}"),
        ("conv", ["flat.npy"], f"is float32[3, 16, 16], {wanted}"),
        *(("conv", [f"{name}.npy"], "is no .npy file of numbers") for name in ("object", "cut", "huge")),
        ("select", ["good.raw"], "1 input files for a program with float32[4, 2], int64[3]: 2 for every inference"),
        ("nothing", ["good.raw"], "no input"),
        ("xnnpack", ["rows2.npy"], "give expected outputs with --expect"),
        ("xnnpack", ["rows2.npy", "rows3.npy"], "one shape for all"),
        ("xnnpack", ["rows5.npy"], "input 0 is float32[4, 8] at most"),
    ]
    for model, names, message in rows:
        files = tuple(tmp_path / name for name in names)
        assert message in refused(model=models / f"{model}.pte", soc="SM8650", inputs=files)
    good, expected = tmp_path / "good.raw", models / "conv_fp32_0.raw"
    assert "of 1 inferences are expected" in refused(model=models / "conv.pte", inputs=(good, good), expect=(expected,))


def test_inputs_in_another_order_of_bytes_or_axes_are_the_same_inputs(models: Path, tmp_path: Path) -> None:
    plain = np.fromfile(models / "conv_input_0.raw", np.float32).reshape(1, 3, 16, 16)
    np.save(tmp_path / "odd.npy", np.asfortranarray(plain).astype(">f4"))
    for source in (models / "conv_input_0.raw", tmp_path / "odd.npy"):
        [[read]] = plan_ready(ReadyRequest(model=models / "conv.pte", inputs=(source,))).samples
        assert (read.dtype, read.tobytes()) == (np.dtype(np.float32), plain.tobytes())


@pytest.mark.parametrize(("expected", "verdict"), [(None, "passed"), ((2, 3), "passed"), ((2, 4), "failed")])
def test_outputs_below_their_bounds_are_taken_in_the_shape_that_the_runner_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: tuple[int, ...] | None, verdict: str
) -> None:
    raw = RawResult(job_id="j", serial="s", workspace=PurePosixPath("/"), folder=tmp_path / "raw", started_ms=1)
    raw.folder.mkdir()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    values.tofile(raw.output(0, 0))
    report = {"schema": 1, "ok": True, "exit_code": 0, "load_ns": 1,
              "outputs": [{"shape": [2, 3], "dtype": "float32", "nbytes": 24}]}  # fmt: skip
    (raw.folder / "result.json").write_text(json.dumps(report))
    attempts: list[Attempt] = []

    def run_stub(*arguments: Any) -> None:
        attempts.append(arguments[-1](raw, Attempt("j", Verdict.PASSED, Stage.DONE, "")))

    monkeypatch.setattr("farm.replay.ready_program.run_one", run_stub)
    right = () if expected is None else ((np.zeros(expected, np.float32),),)
    bounds = TensorSpec(expected or (2, 8), "float32")
    ready: Any = SimpleNamespace(samples=(values,), outputs=(bounds,), expected=right)
    _, [figures] = run_ready(Any, Any, ready, Any, tmp_path / "out")
    assert figures.shape == (2, 3)
    assert np.array_equal(np.load(tmp_path / "out" / "output_0_0.npy"), values)
    [attempt] = attempts
    wrong = "output 0 of inference 0 has the shape [2, 3], expected [2, 4]"
    assert (attempt.verdict, attempt.reason) == (verdict, wrong if verdict == "failed" else "")


def test_an_input_list_names_files_beside_it(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("a.raw 'b c.raw'\n\nd.raw\n")
    assert read_list(listed) == [tmp_path / "a.raw", tmp_path / "b c.raw", tmp_path / "d.raw"]
    listed.write_text("a\0.raw a\0.npy")
    for name in read_list(listed):
        with pytest.raises(UsageError, match="null"):
            read_samples([name], [Value((2,), "float32")], "input")
    listed.write_text("'open")
    with pytest.raises(UsageError, match=r"list\.txt: is no list of files"):
        read_list(listed)


def test_random_inputs_are_the_same_for_the_same_seed() -> None:
    values = [Value((2, 3), "float16"), Value((4,), "bool"), Value((), "uint16"), Value((5,), "int32")]
    first, again, other = (random_sample(values, seed) for seed in (1, 1, 2))
    assert [(one.dtype.name, one.shape) for one in first] == [(value.dtype, value.shape) for value in values]
    assert all(np.array_equal(one, same) for one, same in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert set(first[3].tolist()) <= {0, 1}


def test_the_bundle_is_whole_and_another_one_for_other_inputs(models: Path, tmp_path: Path) -> None:
    model = tmp_path / "My Model.v2.pte"
    shutil.copy(models / "conv.pte", model)
    one, other, changed = (plan_ready(ReadyRequest(model=model, seed=seed)) for seed in (1, 2, 3))
    assert one.job.id == "exec/my_model_v2[SM8650-htp-ready]"
    bundle = one.bundle(load_config())
    bundle.verify()
    assert bundle.manifest.key == one.bundle(load_config()).manifest.key != other.bundle(load_config()).manifest.key
    assert (bundle.manifest.delegates, bundle.manifest.references) == ({"QnnBackend": 1}, ())
    with model.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UsageError, match="was changed while it was read"):
        changed.bundle(load_config())


@pytest.mark.whole
def test_a_method_of_a_program_is_named_and_each_has_a_bundle_of_its_own(home: FarmHome, models: Path) -> None:
    means, keys = {}, set()
    for method in ("double", "triple"):
        document = home.json(
            "exec", "methods.pte", "--method", method, "--soc", "SM8650", *VIRTUAL, cwd=models, timeout_s=120
        )
        means[method] = document["outputs"][0]["mean"]
        keys.add(document["attempt"]["bundle_key"])
    assert means["triple"] == pytest.approx(1.5 * means["double"])
    assert len(keys) == 2


def test_the_state_that_one_inference_leaves_is_taken_by_the_next(home: FarmHome, decoders: Path) -> None:
    np.save(home.cwd / "zeros.npy", np.zeros(2, np.float32))
    for number in range(3):
        np.save(home.cwd / f"x{number}.npy", np.full(2, 10.0**number, np.float32))
    rows = [name for number in range(3) for name in (f"x{number}.npy", "zeros.npy")]
    asked = ("exec", str(decoders / "stateful.pte"), "--soc", "SM8650", *VIRTUAL, "--inputs", *rows)
    home.farm(*asked, "--state", "1:1", "--output", "out", timeout_s=300, code=0)
    totals = [np.load(home.cwd / "out" / f"output_{number}_1.npy").tolist() for number in range(3)]
    assert totals == [[1, 1], [11, 11], [111, 111]]
    for state, message in (("1:2", "names input 2, and there are 2, from 0"), ("1", "is not OUTPUT:INPUT")):
        assert message in home.farm(*asked, "--state", state, code=2).stderr


def test_text_is_generated_shown_and_saved(home: FarmHome, decoders: Path) -> None:
    (home.cwd / "ids.json").write_text("[[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]")
    asked = ("exec", str(decoders / "hybrid.pte"), "--soc", "SM8650", *VIRTUAL, "--prompt", "ids.json", "--new", "6")
    output = home.json(*asked, "--output", "out", timeout_s=300)
    assert (output["job"], output["mode"], output["context"]) == ("exec/hybrid[SM8650-xnnpack-ready]", "hybrid", 32)
    found = [(one["prompt_tokens"], len(one["tokens"]), one["ended"]) for one in output["generated"]]
    assert found == [(3, 6, "new"), (10, 6, "new")]
    saved = json.loads((home.cwd / "out" / "tokens.json").read_text())
    assert saved == [one["tokens"] for one in output["generated"]]
    assert all(0 < one["first_token_ms"] < one["total_ms"] for one in output["generated"])
    metrics = {one["metric"] for one in output["attempt"]["measurements"]}
    assert {"first_token_time[3]", "first_token_time[10]", "prefill_rate", "decode_rate"} <= metrics

    # The token that came second ends the text, and a terminal shows it.
    stop = next(token for token in saved[0][1:] if token != saved[0][0])
    shown = home.farm(*asked, "--stop", str(stop), timeout_s=300, code=0)
    tokens = saved[0][: saved[0].index(stop) + 1]
    assert f"prompt 0 (3 tokens): {len(tokens)} tokens, the last of them a stop token" in shown.stdout
    assert "    " + " ".join(map(str, tokens)) in shown.stdout.splitlines()


def test_tokens_of_a_runner_that_was_killed_are_its_own(decoders: Path) -> None:
    program = read_pte(decoders / "hybrid.pte")
    generation = generation_of(program, prompts=[[1] * 3, [2] * 31, [3]], new=3, stop=[7])
    found = before_the_end("0 4\n0 5\n0 6\n1 7\n0 4\n2 9\n\n\nodd\n2 \n9 1\n-1 2\n", generation)
    # Prompt 0 was generated after twice, and the text of prompt 1 was over.
    assert [(one.line, one.prompt_tokens, one.tokens) for one in found] == [
        (0, 3, (4, 5, 6)), (1, 31, (7,)), (2, 1, (9,)),
    ]  # fmt: skip
    assert [is_cut_short(one, generation) for one in found] == [False, False, True]
    assert before_the_end("", generation) == ()


def test_prompts_that_do_not_fit_are_refused(models: Path, decoders: Path, tmp_path: Path) -> None:
    def refusal(path: Path, model: Path = decoders / "hybrid.pte", soc: str = "SM8650", stop: int = 7) -> str:
        program = ReadyRequest(model=model, soc=soc, virtual=True)
        with pytest.raises((UsageError, ConfigError)) as caught:
            plan_generation(program, path, 4, (stop,))
        return str(caught.value)

    path, array = tmp_path / "ids.json", tmp_path / "ids.npy"
    assert "ids.json: No such file or directory" in refusal(path)
    for text, message in {
        "[[1, 2, 99]]": "prompt 0 has the token 99, and the vocabulary has 0 to 23",
        json.dumps([[1] * 33]): "prompt 0 has 33 tokens, and the context takes 1 to 32",
        "[[1], []]": "ids.json: prompt 1 has no token",
        "[]": "ids.json: has no prompt",
        "[" * 100_000: "ids.json: is no JSON",
    }.items():
        path.write_text(text)
        assert message in refusal(path)
    path.write_text("[[1]]")
    assert "generates no text: it has no method 'kv_forward'" in refusal(path, models / "conv.pte")
    assert "name the one it should run on, as with --soc SM8650" in refusal(path, soc="")
    assert "the stop token 24 is none: the vocabulary has 0 to 23" in refusal(path, stop=24)
    np.save(array, np.full((2, 3), -1))
    array.write_bytes(array.read_bytes().replace(b"(2, 3)", b"(2, 99999999999)"))
    assert "ids.npy: is no array of token ids" in refusal(array)


def test_options_for_tensors_alone_or_for_text_alone_are_refused(home: FarmHome, decoders: Path) -> None:
    (home.cwd / "ids.json").write_text("[[1, 2]]")
    for words, message in {
        "--prompt ids.json --seed 1": "--seed is for a program of tensors: leave it, or --prompt, out",
        "--prompt ids.json --profile basic": "no profile is taken while text is generated",
        "--new 3": "--new is for generated text: it needs --prompt",
    }.items():
        asked = ("exec", str(decoders / "hybrid.pte"), "--soc", "SM8650", *VIRTUAL)
        assert message in home.farm(*asked, *words.split(), code=2).stderr


# `farm exec net.py:Net`: a module without suite or TOML, and the fit of a program before a device is used.


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(3, 8, 3)

    def forward(self, image):
        return torch.relu(self.conv(image))

    @staticmethod
    def example_inputs():
        return (torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8),)


class Bare(torch.nn.Module):
    def forward(self, image):
        return image + 1
"""


@pytest.mark.whole
def test_a_module_is_compiled_for_each_soc_shows_its_fit_and_is_compared_with_fp32(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    answer = home.json(
        "exec", "net.py:Net", "--soc", "SM8650", "--soc", "SM8450", "--virtual", "1", "--iterations", "1"
    )
    programs: list[dict[str, Any]] = answer["programs"]
    assert [one["job"] for one in programs] == [f"exec/net_net_8a8w[{soc}-htp-ready]" for soc in ("SM8650", "SM8450")]
    for one in programs:
        fit = {line["name"]: line for line in one["fit"]}
        assert list(fit) == ["SoC", "QNN", "skel", "on the CPU", "error", "size", "VTCM"]
        assert {line["level"] for line in one["fit"]} == {"ok"}
        assert "against FP32, by the quantized module on the CPU" in fit["error"]["text"]
        [comparison] = one["attempt"]["comparisons"]
        assert (comparison["reference"], comparison["sqnr_db"] > 25) == ("expected", True)
        assert one["inputs"] == [{"dtype": "float32", "shape": [1, 3, 8, 8], "source": "example input 0"}]


@pytest.mark.whole
def test_a_module_without_example_inputs_is_refused_before_anything_is_compiled(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    for name, problem in (("Bare", "neither Bare nor net.py has example_inputs"), ("Nope", "has no Nope")):
        done = home.farm("exec", f"net.py:{name}", "--soc", "SM8650", "--virtual", "1")
        assert done.returncode == 2, done.stderr
        assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_impossible_requests_are_one_line(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    for words, problem in {
        "net.py:Net": "is compiled for an SoC: name it, as with --soc SM8650",
        "gone.py:Net --soc SM8650": "gone.py does not exist",
        "net.py:Net --soc SM8650 --prompt ids.json": "--prompt is for a .pte file",
        "net.py:Net --soc SM8650 --soc SM8450 --device x": "--device is for one --soc",
    }.items():
        assert problem in home.refused("exec", *words.split())


def test_a_module_is_named_by_file_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").touch()
    module = find_module("net.py:Net")
    assert module is not None
    assert (module.file, module.name, module.label) == (tmp_path / "net.py", "Net", "net_Net")
    assert [find_module(name) for name in ("model.pte", "net.py")] == [None, None]
    assert [precision_of(name, "") for name in ("htp", "xnnpack", "gpu")] == ["8a8w", "fp32", "fp16"]


METHOD = Method("forward", (), (), (Delegate("QnnBackend"),), {"aten::add.out": 1, "aten::sort.values": 3})
REFERENCE = np.linspace(-1, 1, 100, dtype=np.float32)
NEAR, FAR = (compare(REFERENCE * np.float32(ratio), REFERENCE) for ratio in (1.001, 1.3))
FITS, LARGE = Value((1, 3, 224, 224), "float32"), Value((1, 64, 512, 512), "float32")


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        (qnn_line("2.51.0", "v2.51.0.260929181845"), Level.OK, "compiled by QNN 2.51.0, the runtime has 2.51.0"),
        (qnn_line("2.51.0", "2.47.0"), Level.ERROR, "compiled by QNN 2.51.0, newer than the runtime's 2.47.0"),
        (qnn_line("", "2.47.0"), Level.OK, ""),
        (qnn_line("2.51.0", ""), Level.WARNING, ""),
        (cpu_line(METHOD, on_cpu=False), Level.WARNING, "aten::sort.values 3, aten::add.out 1, beside 1 delegated"),
        (cpu_line(METHOD, on_cpu=True), Level.OK, ""),
        (cpu_line(msgspec.structs.replace(METHOD, cpu_operators={}), on_cpu=False), Level.OK, "no operator"),
        # An error is a warning above a tenth of the amplitude.
        (error_line([NEAR], is_compared=True), Level.OK, ""),
        (error_line([NEAR, FAR], is_compared=True), Level.WARNING, "output 1 SQNR 10.5 dB"),
        (error_line(None, is_compared=False), Level.WARNING, "unknown"),
        (error_line(None, is_compared=True), Level.OK, ""),
        (error_line([], is_compared=False), Level.OK, ""),
        # A context beyond 4 GB does not fit, and a large tensor is a warning.
        (size_line(1000, Contexts((), "")), Level.OK, "1.0 kB"),
        (size_line(5 << 30, Contexts((1 << 20, (4 << 30) + 1), "2.51.0")), Level.ERROR, ""),
        (vtcm_line(find_soc("SM8650"), [FITS]), Level.OK, "8 MB, more than each input and output"),
        (vtcm_line(find_soc("SM8650"), [FITS, LARGE]), Level.WARNING, ""),
    ],
)
def test_the_fit_of_a_program_has_levels(line: CheckLine, level: Level, text: str) -> None:
    assert line.level is level
    assert text in line.text


def test_files_of_an_attached_device_are_checked_before_a_device_is_looked_for(home: FarmHome, models: Path) -> None:
    done = home.farm("exec", str(models / "conv.pte"))
    assert done.returncode == 4, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("  ok       SoC")
    [skel] = [line for line in lines if line.startswith("  warning  skel")]
    assert "libQnnHtpV75Skel.so is missing" in skel
    [qnn] = [line for line in lines if line.startswith("  warning  files") and "libQnnHtp.so" in line]
    assert "libQnnSystem.so is missing, libQnnHtp.so is missing" in qnn, "files with one repair share a line"


def test_a_skel_of_another_hexagon_is_named(tmp_path: Path) -> None:
    name, soc = "libQnnHtpV75Skel.so", find_soc("SM8650")
    for arch, levels in ((0x75, [Level.OK, Level.OK]), (0x73, [Level.WARNING])):
        (tmp_path / name).write_bytes(make_elf(HEXAGON, arch))
        part = RuntimePart(name, tmp_path / name, HEXAGON, "get it", hexagon=soc.htp_arch, soc=soc.name)
        lines = list(file_lines([part]))
        assert [line.level for line in lines[: len(levels)]] == levels
    assert "is a skel for V73 (e_flags 0x73), SM8650 needs V75" in lines[0].line


def test_contexts_of_a_real_program_have_their_size_and_their_qnn(models: Path) -> None:
    path = models / "conv.pte"
    contexts = read_contexts(path)
    assert len(contexts.sizes) == len(read_pte(path).methods[0].delegates) == 1
    assert 0 < contexts.sizes[0] < path.stat().st_size
    assert contexts.qnn.startswith("2.")
    assert read_contexts(models / "select.pte") == Contexts((), "")
