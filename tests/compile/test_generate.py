"""Decoders that generate text: greedy tokens, bundles, and the unchanged export of ExecuTorch's own script."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from farm_home import FarmHome
from numpy.typing import NDArray
from programs import run_program

from farm.builds.bundles.bundle import Bundle
from farm.builds.compile.llm.greedy import continuation
from farm.builds.compile.llm.stand_ins import stand_ins
from farm.builds.program.pte import read_pte
from farm.builds.runtime.qnn_sdk import host_sdk

MISSING = ("torchtune", "lm_eval", "datasets")


class Counting:
    """Goes on with the next number, but after 13 with 40; counts how often it is asked, and how wide."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        self.asked.append(len(tokens))
        return [40 if token == 13 else token + 1 for token in tokens]


@pytest.mark.parametrize(
    ("draft", "calls"),
    [((), 5), ((11, 12, 13, 40, 41), 1), ((11, 12, 13, 14, 15), 2), ((9, 9, 9, 9, 9), 5)],
    ids=["no draft", "right", "wrong in the end", "wrong"],
)
def test_greedy_tokens_are_those_of_the_module_whatever_a_draft_said(draft: tuple[int, ...], calls: int) -> None:
    module = Counting()
    assert continuation(module, (3, 10), 5, (), draft) == (11, 12, 13, 40, 41)
    assert len(module.asked) <= calls
    assert max(module.asked) <= 2 + 5 - 1, "the last token needs no position"


def test_a_stop_token_is_the_last() -> None:
    assert continuation(Counting(), (10,), 5, (12, 41), (11, 12, 13, 40, 41)) == (11, 12)
    assert continuation(Counting(), (10,), 1, ()) == (11,)


@pytest.mark.skipif(any(name in sys.modules for name in MISSING), reason="it is here in earnest")
def test_what_is_missing_is_stood_in_for_and_missing_again() -> None:
    with stand_ins():
        evaluator: Any = importlib.import_module("lm_eval.models.huggingface")
        assert isinstance(evaluator.HFLM, type)
        importlib.import_module("torchtune.training")
        importlib.import_module("datasets")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("another_package_that_is_missing")
    assert not [name for name in sys.modules if name.startswith(MISSING)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lm_eval.models.huggingface")


@pytest.mark.whole
def test_a_decoder_is_compiled_with_references_for_every_token(generated_bundle: Bundle) -> None:
    generated_bundle.verify()
    manifest = generated_bundle.manifest
    generation = manifest.generation
    assert (generation.mode, generation.context, generation.prefill, generation.decode) == ("hybrid", 128, 32, 1)
    assert (generation.layers, generation.vocabulary, generation.cache_bits, generation.new) == (2, 256, 16, 16)
    assert (manifest.delegates, manifest.fallback_ops) == ({"QnnBackend": 1}, {})
    assert (manifest.method, manifest.features) == ("kv_forward", ())
    assert {"kv_forward", "prefill_forward"} < {one.name for one in read_pte(generated_bundle.model).methods}
    longest = max(generation.scored)
    assert [spec.shape for spec in manifest.outputs] == [(longest, 256)] * 2
    for sample, (length, scored) in enumerate(zip(generation.prompt_tokens, generation.scored, strict=True)):
        prompt, sequence = (np.fromfile(path, np.int32) for path in generated_bundle.input_files(sample))
        tokens = generation.tokens["quantized"][sample]
        assert [*prompt[:length], *tokens] == [*sequence[:scored]], "what is judged is what is generated"
        assert set(prompt[length:]) | set(sequence[scored:]) <= {-1}
        quantized, fp32 = (_logits(generated_bundle, kind, sample, longest) for kind in ("quantized", "fp32"))
        assert tuple(quantized[length - 1 : scored - 1].argmax(axis=1)) == tokens
        assert generation.tokens["fp32"][sample][0] == fp32[length - 1].argmax()
        assert not quantized[scored:].any()
        noise = fp32[:scored] - quantized[:scored]
        assert 10 * np.log10(np.square(fp32).sum() / np.square(noise).sum()) > 40


def _logits(bundle: Bundle, kind: str, sample: int, rows: int) -> NDArray[np.float32]:
    first, second = (bundle.folder / f"reference_{kind}" / f"output_{sample}_{index}.raw" for index in range(2))
    assert first.read_bytes() == second.read_bytes()
    return np.fromfile(first, np.float32).reshape(rows, -1)


# Unchanged export of ExecuTorch's own script: `farm exec` generates the same tokens as its quantized module.


# Untrained weights, and a tokenizer of a few sentences: the script requires both as files.
MADE = """
import json, sentencepiece, torch
from farm.builds.compile.llm.stand_ins import stand_ins
words = "Once upon a time there was a phone, and it said one token after another. ".split()
with open("text.txt", "w") as file:
    file.writelines(" ".join(words[n % 15:] + words[: n % 7]) + "\\n" for n in range(200))
sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="tokens", vocab_size=300, byte_fallback=True, model_type="bpe",
    hard_vocab_limit=False,
)
params = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=320, multiple_of=4, norm_eps=1e-5)
with stand_ins():
    from executorch.examples.qualcomm.oss_scripts.llama.model.static_llama import LlamaModel, ModelArgs
torch.manual_seed(0)
torch.save(LlamaModel(ModelArgs(**params, max_seq_len=64), ar_len=1).state_dict(), "weights.pt")
json.dump(params, open("params.json", "w"))
json.dump([{"messages": [{"role": "user", "content": " ".join(words * 3)}]}], open("samples.json", "w"))
"""
EXPORT = """
import runpy
from farm.builds.compile.llm.stand_ins import stand_ins
with stand_ins():
    runpy.run_module("executorch.examples.qualcomm.oss_scripts.llama.llama", run_name="__main__", alter_sys=True)
"""
ASKED = (
    "--decoder_model", "stories260k", "--model_mode", "hybrid", "--checkpoint", "weights.pt", "--params", "params.json",
    "--tokenizer_model", "tokens.model", "--tokenizer_bin", "tokens.bin", "--calib_samples", "samples.json",
    "--soc_model", "SM8650", "--build_folder", "build", "--prompt", "Once", "--compile_only", "--enable_x86_64",
    "--max_seq_len", "64", "--prefill_ar_len", "16", "--artifact", "made",
)  # fmt: skip
# Teacher-forced, all positions at once: the script keeps its quantized module with as many positions as the context.
SAYS = """
import json, sys, torch
import executorch.backends.qualcomm, torchao
from torch.utils._pytree import tree_unflatten
program = torch.export.load("made/decode_qdq.pt2")
users = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
shapes = [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.name in users]
said = []
for sequence in json.load(sys.stdin):
    tokens = torch.zeros(1, 64, dtype=torch.int32)
    tokens[0, : len(sequence)] = torch.tensor(sequence)
    mask = torch.full((1, 1, 64, 64), -65535.0).triu(1)
    given = [tokens, mask, torch.arange(64, dtype=torch.int32)[None], *(torch.zeros(shape) for shape in shapes[3:])]
    arguments, named = tree_unflatten(given, program.call_spec.in_spec)
    said.append(program.module()(*arguments, **named)[0][0].argmax(-1).tolist())
print(json.dumps(said))
"""


@pytest.mark.soak
def test_what_executorchs_own_script_exports_generates_as_its_quantized_module_does(
    home: FarmHome, farm_cache: Path
) -> None:
    env = {**os.environ, **host_sdk(farm_cache).env}

    def python(code: str, *arguments: str, given: str = "") -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = run_program(command, env=env, cwd=home.cwd, input=given)
        return done.stdout

    python(MADE)
    python(EXPORT, *ASKED)
    prompts = [list(range(3, 8)), list(range(20, 53))]
    (home.cwd / "ids.json").write_text(json.dumps(prompts))
    asked = ("made/stories260k_hybrid_llama_qnn.pte", "--prompt", "ids.json", "--new", "24", "--virtual", "1")
    done = home.farm("exec", *asked, "--json", timeout_s=300, code=0)
    facts = json.loads(done.stdout)
    assert (facts["mode"], facts["context"], facts["vocabulary"]) == ("hybrid", 64, 320)
    tokens = [one["tokens"] for one in facts["generated"]]
    assert [len(row) for row in tokens] == [24, 24]
    sequences = [[*prompt, *row] for prompt, row in zip(prompts, tokens, strict=True)]
    answer = python(SAYS, given=json.dumps(sequences))
    for prompt, row, output in zip(prompts, tokens, json.loads(answer.splitlines()[-1]), strict=True):
        assert row == output[len(prompt) - 1 : len(prompt) - 1 + len(row)]
