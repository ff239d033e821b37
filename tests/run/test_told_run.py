"""Text and task given to a program by `farm run`: the measured values equal the formulae for the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from farm_home import FarmHome
from native_runner.test_generation import Stub

from farm.suites.accuracy.asked import rolling_windows

CONTEXT, WORDS = 32, [f"w{number}" for number in range(24)]
MANIFEST = """
[suite]
name = "told"
description = "d"
[case.stub]
pte = "hybrid.pte"
[case.stub.generate]
tokenizer = "tokenizer.json"
score_text = "text.txt"
task = "task.yaml"
"""
TASK = """
output_type: multiple_choice
dataset_path: questions.jsonl
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: right
metric_list: [{metric: acc}]
"""
# The right answer may or may not be the one preferred by the stub, which follows from its weights.
QUESTIONS = [
    {"text": "w1 w2 w3", "choices": ["w4 w5", "w6", "w7 w8 w9"], "right": 1},
    {"text": "w9", "choices": ["w10", "w11"], "right": 0},
]


def told(folder: Path, decoders: Path) -> list[int]:
    """Write the suite, and return the tokens of its text."""
    import tokenizers

    folder.mkdir()
    (folder / "hybrid.pte").write_bytes((decoders / "hybrid.pte").read_bytes())
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    text = np.random.default_rng(3).integers(0, len(WORDS), 70).tolist()
    (folder / "text.txt").write_text(" ".join(WORDS[token] for token in text))
    (folder / "task.yaml").write_text(TASK)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "suite.toml").write_text(MANIFEST)
    return text


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def logarithms(stub: Stub, sequence: list[int]) -> np.ndarray:
    """Return the logarithm of the probability of each token after the first."""
    logits = stub.logits(sequence)[:-1]
    every = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return every[np.arange(len(sequence) - 1), sequence[1:]]


@pytest.mark.whole
def test_perplexity_and_accuracy_of_a_program_are_those_of_its_weights(home: FarmHome, decoders: Path) -> None:
    suite = home.cwd / "told"
    text, stub = told(suite, decoders), Stub(decoders, windowed=True)
    on_cpu = ("--soc", "SM8650", "--virtual", "1", "--backend", "xnnpack")
    [job] = home.json("run", *on_cpu, "--suite", "./told", timeout_s=300)["jobs"]

    counted = [logarithms(stub, list(row))[begin - 1 :] for row, begin in rolling_windows(text, (), CONTEXT)]
    assert sum(map(len, counted)) == len(text) - 1
    perplexity = float(np.exp(-np.mean(np.concatenate(counted))))
    right = 0
    for question in QUESTIONS:
        before = ids(question["text"])
        answers = ([*before, *ids(choice)] for choice in question["choices"])
        choices = [float(np.sum(logarithms(stub, answer)[len(before) - 1 :])) for answer in answers]
        right += int(np.argmax(choices)) == question["right"]

    [attempt] = job["attempts"]
    [note, counts] = [one for one in attempt["notes"] if one.startswith(("perplexity", "acc"))]
    by_words = float(np.exp(-np.sum(np.concatenate(counted)) / len(text)))
    assert note == f"perplexity of the text {perplexity:.6g}, of 69 tokens; by its {len(text)} words {by_words:.5g}"
    assert counts.startswith(f"acc: {right} of 2 questions right (")


@pytest.mark.soak
def test_the_shipped_suite_gives_the_choices_of_the_quantized_module(home: FarmHome) -> None:
    asked = ("run", "--soc", "SM8650", "--virtual", "1", "--suite", "llm_tasks")
    [attempt] = [one for job in home.json(*asked, timeout_s=1800)["jobs"] for one in job["attempts"]]
    assert "the same choice as the quantized module in 8 of 8 questions" in attempt["notes"]
    assert any(note.startswith("perplexity of the text 3") for note in attempt["notes"])
