"""Run as a program: stands in for ExecuTorch's `qnn_llama_runner`, with its flags, its files and its last lines.

The file given as tokenizer, JSON, selects the behaviour: `mode` (below), `vocabulary`, and for logits
of a reference `references` (files of float32), `scale` and `zero_point`; otherwise t is followed by (5 t + 3).
"""

from __future__ import annotations

import array
import json
import os
import sys
import time
from pathlib import Path

flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
told = json.loads(Path(flags["tokenizer_path"]).read_text())
mode, vocabulary = told["mode"], told["vocabulary"]
log = sys.stderr
log.write(f"I 00:00:00.000001 executorch:runner.cpp:168] eval mode={flags['eval_mode']}\n")
if mode == "silent":
    log.write("E 00:00:00.000002 executorch:runner.cpp:230] Failed to load tokenizer with tokenizer.json\n")
    sys.exit(0)
if mode == "crash":
    os.abort()
if mode == "hang":
    time.sleep(600)
if "dump_logits_path" in flags and flags["eval_mode"] != "0":
    os.abort()

prompt = list(array.array("Q", Path(flags["tokenized_prompt"]).read_bytes()))
length = int(flags["seq_len"])
assert 0 < len(prompt) < length
references = [array.array("f", Path(path).read_bytes()) for path in told.get("references", ())]


def row_after(tokens: list[int]) -> list[int]:
    if not references:
        row = [1000] * vocabulary
        row[(5 * tokens[-1] + 3) % vocabulary] = 60000
        return row
    # The first token identifies the sequence.
    [rows] = (found for found, start in zip(references, told["starts"], strict=True) if tokens[0] == start)
    place = len(tokens) - 1
    found = rows[place * vocabulary : (place + 1) * vocabulary]
    row = [min(65535, max(0, round(value / told["scale"]) + told["zero_point"])) for value in found]
    return row[3:] + row[:3] if mode == "wrong" and place == 1 else row


tokens, dump = list(prompt), array.array("H")
for count in range(1, len(prompt) + 1):
    dump.extend(row_after(tokens[:count]))
tokens.append(max(range(vocabulary), key=dump[-vocabulary:].__getitem__))
while len(tokens) < length:
    row = row_after(tokens)
    dump.extend(row)
    tokens.append(max(range(vocabulary), key=row.__getitem__))
if "dump_logits_path" in flags:
    Path(flags["dump_logits_path"]).write_bytes(dump.tobytes()[: 7 if mode == "short" else None])
after = len(tokens) - len(prompt) - 1
now = int(time.time() * 1000)
stamps = {
    "prompt_tokens": len(prompt), "generated_tokens": after, "model_load_start_ms": now - 180,
    "model_load_end_ms": now - 100, "inference_start_ms": now - 100, "inference_end_ms": now,
    "prompt_eval_end_ms": now - 80, "first_token_ms": now - 80, "aggregate_sampling_time_ms": 1,
    "SCALING_FACTOR_UNITS_PER_SECOND": 1000,
}  # fmt: skip
if mode == "absurd":
    stamps["model_load_start_ms"] = 0
Path(flags["performance_output_path"]).write_text(f"{after / 0.1:g}")
sys.stdout.write(f"PyTorchObserver {json.dumps(stamps, separators=(',', ':'))}\n")
log.write("I 00:00:00.000009 executorch:stats.h:161] \tPrompt Tokens: 3    Generated Tokens: 5\n")
