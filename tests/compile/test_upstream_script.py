"""Unchanged export of ExecuTorch's own script: `farm exec` generates the same tokens as its quantized module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome
from programs import run_program

from farm.builds.runtime.simulator import host_sdk

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
