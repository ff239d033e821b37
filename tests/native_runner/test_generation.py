"""Programs that generate text: outputs for all prompts and widths of calls, and refusals.

The stub of a decoder is in floating point on the CPU, and gives the result of NumPy without caches. This CPU is
none of the farm's targets: bench/generate.py has a real decoder, on the simulator.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_disk import small_disk
from waiting import until

CONTEXT, VOCABULARY = 32, 24


@dataclass(frozen=True)
class Stub:
    """The decoder of compile_decoders.py, over a whole sequence at once."""

    folder: Path
    windowed: bool

    @cached_property
    def weights(self) -> dict[str, Any]:
        return {name: array.astype(float) for name, array in np.load(self.folder / "weights.npz").items()}

    def logits(self, tokens: list[int]) -> Any:
        """Return the logits; row n predicts the token after token n."""
        weights, count = self.weights, len(tokens)
        hidden = weights["token"][tokens] + weights["place"][:count]
        distance = np.subtract.outer(np.arange(count), np.arange(count))
        for layer in range(len(weights["q"])):
            window = weights["window"] if self.windowed and layer else count
            seen = (distance >= 0) & (distance < window)
            parts = [
                (hidden @ weights[name][layer]).reshape(count, int(weights["heads"]), -1) for name in ("q", "k", "v")
            ]
            q, k, v = (part.transpose(1, 0, 2) for part in parts)
            scores = np.where(seen, q @ k.transpose(0, 2, 1), -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            hidden = hidden + (scores @ v).transpose(1, 0, 2).reshape(count, -1)
        return hidden @ weights["out"]

    def says(self, prompt: list[int], new: int) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + new and len(tokens) <= CONTEXT:
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def _put(workspace: Any, decoders: Path, name: str, *lines: list[list[int]], padding: int = 0) -> Stub:
    """Put a decoder into a workspace, with the sequences of each line as its inputs."""
    shutil.copy(decoders / f"{name}.pte", workspace.folder / "model.pte")
    names = []
    for number, sequences in enumerate(lines):
        padded = [[*tokens, *[-1] * padding] for tokens in sequences]
        files = [workspace.write(f"{number}_{index}.raw", row, np.int32) for index, row in enumerate(padded)]
        names.append(" ".join(files))
    workspace.list_inputs(*names)
    return Stub(decoders, windowed=name == "hybrid")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("hybrid", []),
        ("hybrid", ["--prefill_method="]),
        ("lookahead", []),
        ("lookahead", ["--prefill_method="]),
        ("whole", []),
    ],
    ids=["hybrid", "kv", "lookahead", "lookahead alone", "prefill without caches"],
)
def test_it_says_what_the_decoder_says(bare: Any, decoders: Path, name: str, flags: list[str]) -> None:
    lengths = (1, 7, 8, 9, 20, 31, 32)
    prompts = [_prompt(length, length) for length in lengths]
    scored = [_prompt(CONTEXT - 3, 100 + length)[: CONTEXT - length % 5] for length in lengths]
    # A scored sequence of its own, the prompt's, and all of the context.
    scored[2], scored[-1] = prompts[2], prompts[-1]
    stub = _put(bare, decoders, name, *map(list, zip(prompts, scored, strict=True)), padding=3)
    ran = bare.passes("--generate=40", "--tokens_path=tokens.txt", "--warm_up=2", *flags)
    generated = ran.result["generated"]
    assert [one["line"] for one in generated] == list(range(len(prompts)))
    for prompt, one in zip(prompts, generated, strict=True):
        assert one["tokens"] == stub.says(prompt, 40)
        assert one["prompt_tokens"] == len(prompt)
        assert one["ended"] == "context"
        assert min(one["prefill_ns"] + one["steps_ns"]) > 0
        assert 0 < one["first_token_ns"] <= one["total_ns"] >= sum(one["prefill_ns"] + one["steps_ns"])
    tokens = [f"{one['line']} {token}" for one in generated for token in one["tokens"]]
    assert (bare.folder / "tokens.txt").read_text().splitlines() == tokens
    outputs = 1 if "--prefill_method=" in flags else 2
    assert [tuple(one["shape"]) for one in ran.result["outputs"]] == [(len(scored[0]) + 3, VOCABULARY)] * outputs
    assert [tuple(one["shape"]) for one in ran.result["inputs"]] == [(4,), (len(scored[0]) + 3,)]
    assert len(bare.names()) == outputs * len(prompts)
    for line, sequence in enumerate(scored):
        for index in range(outputs):
            rows = bare.output(line, index).reshape(-1, VOCABULARY)
            np.testing.assert_allclose(rows[: len(sequence)], stub.logits(sequence), atol=1e-3)
            assert not rows[len(sequence) :].any()
    assert len(rows) == len(scored[-1]) + 3
    methods = ["kv_forward"] if outputs == 1 else ["prefill_forward", "kv_forward"]
    assert list(ran.result["method_loads_ns"]) == methods
    assert ran.result["method"] == "kv_forward"
    assert ran.result["load_ns"] >= sum(ran.result["method_loads_ns"].values())


def test_calls_are_counted_and_timed_one_by_one(bare: Any, decoders: Path) -> None:
    prompts = [_prompt(17), _prompt(3)]
    stub = _put(bare, decoders, "hybrid", *([prompt] for prompt in prompts))
    ran = bare.passes("--generate=5", "--etdump_path=etdump.etdp")
    assert (bare.folder / "etdump.etdp").stat().st_size > 0
    for prompt, one in zip(prompts, ran.result["generated"], strict=True):
        assert one["tokens"] == stub.says(prompt, 5)
        # Chunks of 8, the last of them with the first token; then a token a call.
        assert (len(one["prefill_ns"]), len(one["steps_ns"])) == (-(-len(prompt) // 8), 4)
        assert one["ended"] == "new"
    steps = [one["steps_ns"] for one in ran.result["generated"]]
    assert [one["iterations_ns"] for one in ran.result["inferences"]] == steps
    assert (ran.result["outputs"], bare.names()) == ([], [])
    assert float((bare.folder / "inference_speed.txt").read_text()) > 0


def test_guesses_that_are_right_save_calls_and_change_no_token(bare: Any, decoders: Path) -> None:
    prompts = [_prompt(length, length) for length in range(1, 13)]
    stub = _put(bare, decoders, "lookahead", *([prompt] for prompt in prompts))
    ran = bare.passes("--generate=16")
    assert [one["tokens"] for one in ran.result["generated"]] == [stub.says(prompt, 16) for prompt in prompts]
    calls = [len(one["steps_ns"]) for one in ran.result["generated"]]
    assert max(calls) <= 15
    assert min(calls) < 15


def test_a_stop_token_ends_the_text(bare: Any, decoders: Path) -> None:
    prompt = _prompt(5)
    output = _put(bare, decoders, "hybrid", [prompt]).says(prompt, 8)
    ran = bare.passes("--generate=8", f"--stop=99,{output[3]}")
    (one,) = ran.result["generated"]
    assert one["tokens"] == output[: output.index(output[3]) + 1]
    assert one["ended"] == "stop"
    first = bare.passes("--generate=8", f"--stop={output[0]}")
    (one,) = first.result["generated"]
    assert (one["tokens"], one["steps_ns"]) == (output[:1], [])
    assert first.result["inferences"][0]["iterations_ns"] == [one["total_ns"]]


def test_seconds_are_filled_with_the_prompts_in_turn(bare: Any, decoders: Path) -> None:
    prompts = [_prompt(4), _prompt(9)]
    stub = _put(bare, decoders, "hybrid", *([prompt, prompt] for prompt in prompts))
    begin = time.monotonic()
    ran = bare.passes("--generate=12", "--seconds=1", "--tokens_path=tokens.txt")
    assert time.monotonic() - begin >= 1
    generated = ran.result["generated"]
    assert len(generated) > 4
    assert [one["line"] for one in generated] == [number % 2 for number in range(len(generated))]
    expected = [stub.says(prompt, 12) for prompt in prompts]
    for one in generated[:-1]:
        assert one["tokens"] == expected[one["line"]]
    assert generated[-1]["tokens"] == expected[generated[-1]["line"]][: len(generated[-1]["tokens"])]
    assert generated[-1]["ended"] in ("seconds", "new")
    assert len(ran.result["inferences"]) == 2
    assert len((bare.folder / "tokens.txt").read_text().splitlines()) == sum(len(one["tokens"]) for one in generated)


@pytest.mark.parametrize("index", [0, 1])
def test_sequences_that_are_none_are_refused_before_anything_is_executed(bare: Any, decoders: Path, index: int) -> None:
    for tokens, message in (
        ([], "has no token"),
        ([-1, -1], "has no token"),
        ([3, VOCABULARY], f"has the token {VOCABULARY} at position 1: the vocabulary is 0 to {VOCABULARY - 1}"),
        ([3, -7], "has the token -7 at position 1"),
        ([3, -1, 4], "goes on behind its end"),
        ([1] * (CONTEXT + 1), f"has {CONTEXT + 1} tokens, the program takes {CONTEXT}"),
    ):
        wrong = [[3], [3]]
        wrong[index] = tokens
        _put(bare, decoders, "hybrid", [[1, 2], [1, 2]], wrong)
        ran = bare.run("--generate=2")
        ran.fails(5, "inputs", f"line 2: '1_{index}.raw' {message}")
        assert ran.error["line"] == 1
    assert bare.names() == []


@pytest.mark.parametrize(
    ("flags", "stage", "message"),
    [
        (["--generate=1", "--decode_method=no"], "load", "has no method 'no', only: kv_forward, prefill_forward"),
        (["--generate=1", "--prefill_method=no"], "load", "has no method 'no'"),
        (
            ["--generate=1", "--decode_method=get_n_layers"],
            "load",
            "method 'get_n_layers' is not a static decoder: its first input is not the tokens",
        ),
        (["--generate=1", "--tokens_path=no/tokens.txt"], "outputs", "cannot write 'no/tokens.txt'"),
    ],
)
def test_flags_that_cannot_be(bare: Any, decoders: Path, flags: list[str], stage: str, message: str) -> None:
    _put(bare, decoders, "hybrid", [[1]])
    ran = bare.run(*flags)
    assert ran.error["stage"] == stage, ran.stderr
    assert message in ran.error["message"]


def test_what_is_over_time_has_a_result_with_all_that_was_said(bare: Any, decoders: Path) -> None:
    stub = _put(bare, decoders, "hybrid", [_prompt(4), _prompt(4)])
    ran = bare.run("--generate=12", "--seconds=60", "--timeout_ms=500", "--tokens_path=tokens.txt")
    assert ran.code == 9, ran.stderr
    # The output is reset between two texts, so that a later text takes the stub no longer.
    assert ran.error["stage"] in ("execute", "outputs")
    generated = ran.result["generated"]
    assert generated[0]["tokens"] == stub.says(_prompt(4), 12)
    assert [one["ended"] for one in generated[:-1]] == ["new"] * (len(generated) - 1)
    # Room for more is left behind them.
    written = (bare.folder / "tokens.txt").read_text().rstrip("\n").splitlines()
    assert len(written) >= sum(len(one["tokens"]) for one in generated) - 1
    assert bare.names() == ["output_0_0.raw", "output_0_1.raw"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV], ids=["cancelled", "crashed"])
def test_no_token_is_lost_when_it_ends_early(bare: Any, decoders: Path, number: signal.Signals) -> None:
    stub = _put(bare, decoders, "hybrid", [_prompt(4)])
    tokens = bare.folder / "tokens.txt"
    flags = ("--generate=12", "--seconds=60", "--tokens_path=tokens.txt")
    with bare.start(*flags, stderr=subprocess.DEVNULL) as process:
        until(lambda: tokens.is_file() and tokens.read_text().count(" ") >= 12, "12 tokens", 60)
        assert process.poll() is None
        process.send_signal(number)
        code = process.wait()
    output = [int(line.split()[1]) for line in tokens.read_text().rstrip("\n").splitlines()]
    assert output[:12] == stub.says(_prompt(4), 12)
    ran = bare.ended(code)
    if number == signal.SIGSEGV:
        assert (code, ran.result) == (-number, None)
    else:
        assert (code, ran.error["message"]) == (11, "ended by SIGTERM")
        assert abs(sum(len(one["tokens"]) for one in ran.result["generated"]) - len(output)) <= 1


def test_a_disk_that_fills_ends_it_with_all_that_was_said(bare: Any, decoders: Path, tmp_path: Path) -> None:
    stub = _put(bare, decoders, "hybrid", [_prompt(4)])
    with small_disk(tmp_path / "full", "64k") as full:
        ran = bare.run("--generate=12", "--seconds=60", f"--output_folder_path={full}", "--tokens_path=tokens.txt")
        assert list(full.iterdir()) == []
    assert (ran.code, ran.error["stage"]) == (7, "outputs"), ran.stderr
    assert ran.error["message"].startswith(f"cannot write into folder '{full}': No space left on device")
    generated = ran.result["generated"]
    assert len(generated) > 10
    assert [one["tokens"] for one in generated] == [stub.says(_prompt(4), 12)] * len(generated)
    assert [len(one["iterations_ns"]) for one in ran.result["inferences"]] == [11]


def test_jobs_of_a_session_generate_as_single_runs_do(bare: Any, decoders: Path) -> None:
    prompts = [_prompt(12), _prompt(2)]
    stub = _put(bare, decoders, "hybrid", *([prompt, prompt] for prompt in prompts))
    with bare.serve() as session:
        for _ in range(3):
            answer = session.ask("--generate=6", "--tokens_path=tokens.txt")
            assert answer["ok"] is True
            assert [one["tokens"] for one in answer["generated"]] == [stub.says(prompt, 6) for prompt in prompts]
        assert session.ask("--generate=6", "--seconds=60", "--timeout_ms=200")["exit_code"] == 9


def test_state_is_carried_from_line_to_line(bare: Any, decoders: Path) -> None:
    shutil.copy(decoders / "stateful.pte", bare.folder / "model.pte")
    xs = np.float32([[1, 2], [3, 4], [5, 6]])
    start = bare.write("start.raw", [10, 20])
    bare.list_inputs(*(f"{bare.write(f'x{line}.raw', x)} {start}" for line, x in enumerate(xs)))
    # How often a line is executed does not matter.
    bare.passes("--carry=1:1", "--iteration=3", "--warm_up=1")
    for line, total in enumerate(np.cumsum(xs, axis=0) + np.float32([10, 20])):
        assert bare.output(line, 1).tolist() == total.tolist()
        assert bare.output(line, 0).tolist() == (2 * total).tolist()
    bare.passes()
    assert bare.output(2, 1).tolist() == [15, 26]
    bare.run("--carry=1:2").fails(4, "load", "the method has 2 outputs and 2 inputs")


def test_weights_that_methods_share_are_refused_before_they_crash(bare: Any, decoders: Path) -> None:
    shutil.copy(decoders / "sharing.pte", bare.folder / "model.pte")
    bare.list_inputs(bare.write("x.raw", np.zeros(16)))
    for index in range(2):
        ran = bare.run(f"--method_index={index}")
        ran.fails(4, "load", "weights that its methods share, which QNN on x86-64 cannot load")


@pytest.mark.parametrize("name", ["hybrid", "lookahead"])
def test_likelihoods_are_two_logarithms_for_each_position(bare: Any, decoders: Path, name: str) -> None:
    prompts = [_prompt(length, length) for length in (4, 9)]
    scored = [prompts[0] + _prompt(12, 1), prompts[1]]
    stub = _put(bare, decoders, name, *map(list, zip(prompts, scored, strict=True)))
    bare.write("1_1.raw", [*scored[1], *[-1] * (len(scored[0]) - len(scored[1]))], np.int32)
    ran = bare.passes("--generate=1", "--likelihoods=true")
    assert [tuple(one["shape"]) for one in ran.result["outputs"]] == [(len(scored[0]), 2)]
    assert len(bare.names()) == len(prompts)
    for line, tokens in enumerate(scored):
        logits = stub.logits(tokens)
        every = logits - logits.max(axis=-1, keepdims=True)
        every -= np.log(np.exp(every).sum(axis=-1, keepdims=True))
        expected = np.zeros((len(scored[0]), 2))
        for row, following in enumerate(tokens[1:]):
            expected[row] = every[row, following], every[row].max()
        np.testing.assert_allclose(bare.output(line, 0).reshape(-1, 2), expected, atol=1e-4)
