from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from farm.builds.bundles.bundle import Bundle
from farm.builds.compile.llm.greedy import continuation
from farm.builds.compile.llm.stand_ins import stand_ins
from farm.builds.program.pte import read_pte

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
    assert generation is not None
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
