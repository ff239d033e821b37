"""`farm exec --program` and `farm jobs rerun --program`: text by a stub of ExecuTorch's own runner."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elf_maker import make_elf
from farm_home import FarmHome

import farm
from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import Bundle
from farm.builds.program.pte import read_pte
from farm.builds.runtime.parts import AARCH64, X86_64
from farm.builds.runtime.runtime import Runtime
from farm.devices.execution.llama_runner import ids_of
from farm.devices.execution.raw import Observed, ObservedError, read_observed
from farm.replay.one_off import LlamaProgram, runtime_with

STUB = Path(farm.__file__).parent.parent / "tests" / "qnn_llama_runner_stub.py"
VIRTUAL = ("--soc", "SM8650", "--virtual", "1")


def stub(home: FarmHome, **told: object) -> tuple[str, ...]:
    """Return the options that select the stub, with its behaviour in `told`."""
    program = home.cwd / "qnn_llama_runner_stub"
    program.write_text(f"#!{sys.executable} -IS\n{STUB.read_text()}")
    (home.cwd / "tokenizer.json").write_text(json.dumps({"mode": "fine", "vocabulary": 24, **told}))
    return "--program", program.name, "--tokenizer", "tokenizer.json"


def test_text_of_another_program_has_its_tokens_and_times_and_a_suite_of_its_own(
    home: FarmHome, decoders: Path
) -> None:
    (home.cwd / "ids.json").write_text("[[1, 2, 3]]")
    asked = ("exec", str(decoders / "rounded.pte"), *VIRTUAL, "--prompt", "ids.json", "--new", "6")
    output = home.json(*asked, *stub(home), timeout_s=300)
    assert output["job"] == "qnn_llama_runner/rounded[SM8650-xnnpack-ready]"
    assert [one["tokens"] for one in output["generated"]] == [[18, 21, 12, 15, 6, 9]]
    measured = {one["metric"]: one["samples"] for one in output["attempt"]["measurements"]}
    assert measured["prefill_rate"] == [150.0]
    assert measured["decode_rate"] == [62.5]
    assert measured["first_token_time[3]"] == [20e6]
    assert "latency" not in measured

    # farm's own runner is not to take its place in that series.
    assert "was run by qnn_llama_runner" in home.farm("jobs", "rerun", "qnn_llama_runner/rounded", code=2).stderr


@pytest.mark.soak
def test_another_program_that_did_nothing_or_says_what_cannot_be_has_failed(home: FarmHome, decoders: Path) -> None:
    (home.cwd / "ids.json").write_text("[[1, 2, 3]]")
    asked = ("exec", str(decoders / "rounded.pte"), *VIRTUAL, "--prompt", "ids.json", "--new", "6", "--timeout", "5")
    for mode, output in (
        # The runner returns 0 after each failure too.
        ("silent", "it printed no PyTorchObserver line, and ended with 0: E 00:00:00.000002 executorch:runner.cpp"),
        ("short", "it wrote 7 bytes of logits, expected 384"),
        ("absurd", "its PyTorchObserver line is refused: it claims 17"),
        ("crash", "the runner ended with signal 6 (SIGABRT)"),
        ("hang", "the runner did not end within 5 s"),
    ):
        assert output in " ".join(home.farm(*asked, *stub(home, mode=mode), timeout_s=300, code=1).stdout.split())


@pytest.mark.whole
def test_logits_of_another_program_are_judged_against_the_references_of_a_result(
    home: FarmHome, generated_bundle: Bundle
) -> None:
    home.farm("run", *VIRTUAL, "--suite", "llm_tiny", "-k", "llama[SM8650-htp-16a8w]", timeout_s=300, code=0)
    manifest = generated_bundle.manifest
    numbers = {one.name: one.outputs[0].number for one in read_pte(generated_bundle.model).methods if one.outputs}
    answer = {
        "vocabulary": manifest.generation.vocabulary,
        "scale": numbers["get_logits_scale"],
        "zero_point": int(numbers["get_logits_zero_point"] or 0),
        "starts": [ids_of(generated_bundle, sample, 0)[0] for sample in range(manifest.samples)],
        "references": [
            str(generated_bundle.folder / "reference_quantized" / f"output_{sample}_0.raw")
            for sample in range(manifest.samples)
        ],
    }
    asked = ("jobs", "rerun", "llm_tiny/llama[SM8650-htp-16a8w]")
    now = home.json(*asked, *stub(home, **answer), timeout_s=300)["now"]["attempt"]
    assert now["job_id"] == "qnn_llama_runner/llama[SM8650-htp-16a8w]"
    by_reference = {one["reference"]: one["sqnr_db"] for one in now["comparisons"]}
    # The stub's logits equal the quantized module's to the bit: there is no noise.
    assert by_reference["quantized"] is None
    assert by_reference["fp32"] > 30
    assert "same_tokens_quantized" in {one["metric"] for one in now["measurements"]}
    facts = json.loads(home.farm("report", "latest", "--json").stdout)["fingerprint"]
    assert facts["program"].startswith("qnn_llama_runner qnn_llama_runner_stub:")

    wrong = home.farm(*asked, *stub(home, **{**answer, "mode": "wrong"}), timeout_s=300)
    assert (wrong.returncode, "against quantized" in wrong.stdout) == (1, True), wrong.stdout + wrong.stderr


RIGHT = {
    "prompt_tokens": 3, "generated_tokens": 5, "model_load_start_ms": 1000, "model_load_end_ms": 1080,
    "inference_start_ms": 1080, "prompt_eval_end_ms": 1100, "first_token_ms": 1100, "inference_end_ms": 1180,
}  # fmt: skip


def observed(text: str = "", **other: object) -> Observed:
    line = text or f"PyTorchObserver {json.dumps({**RIGHT, **other})}"
    return read_observed(f"a line before\n{line}\n\tPrompt Tokens: 3\n", 3, 6, 0.3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt_tokens": 4}, "has a prompt of 4 tokens, expected 3"),
        ({"generated_tokens": 6}, "6 tokens after the first, and 6 were asked for"),
        ({"generated_tokens": 10**30}, "is refused"),
        ({"generated_tokens": -1}, "is refused"),
        ({"first_token_ms": 2000}, "in no order"),
        ({"model_load_end_ms": 0}, "in no order"),
        ({"model_load_start_ms": 0, "model_load_end_ms": 10**6}, "claims 1000.1 s of work"),
        ({"inference_end_ms": "1180"}, "is refused"),
        ({"text": "PyTorchObserver {}"}, ""),
        ({"text": f"PyTorchObserver {'{' * 4000}}}"}, ""),
        ({"text": f"PyTorchObserver {{{'1' * 100_000}}}"}, ""),
        ({"text": "-"}, ""),
    ],
)
def test_impossible_times_are_refused(other: dict[str, Any], message: str) -> None:
    found = observed(aggregate_sampling_time_ms=1)
    assert (found.load_ms, found.first_ms, found.decode_ms) == (80, 20, 80)
    with pytest.raises(ObservedError, match=message or None):
        observed(**other)


def test_a_program_for_another_machine_is_refused(farm_cache: Path, tmp_path: Path) -> None:
    wrong, tokenizer = tmp_path / "qnn_llama_runner", tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    runtime = Runtime({}, "", "farm_runner", {}, "simulator")
    for kind, machine, output in (("simulator", AARCH64, "needs x86-64"), ("android", X86_64, "needs AArch64")):
        wrong.write_bytes(make_elf(machine))
        program = LlamaProgram(program=wrong, tokenizer=tokenizer)
        with pytest.raises(ConfigError, match=output):
            runtime_with(program, msgspec.structs.replace(runtime, kind=kind), farm_cache)
    found = runtime_with(program, runtime, farm_cache)
    assert (found.runner, set(found.files)) == ("qnn_llama_runner", {"qnn_llama_runner", "tokenizer/tokenizer.json"})
