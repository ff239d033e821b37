"""Models of `models_small`: their outputs carry signal, and two of them are computed as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from farm.base.paths import data_folder
from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.suites.manifests import load_suite
from farm.suites.suite import Case

CASES = {case.name: case for case in load_suite(Path(data_folder("test_suites"), "models_small/suite.toml")).cases}
CLASSIFIERS = ("resnet", "mobilenet_v3", "efficientnet", "convnext", "vit", "bert", "mobilebert", "llama")
Outputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def outputs_of(case: Case) -> list[Outputs]:
    module = make_module(case)
    made = [module(*make_inputs(case, sample)) for sample in range(case.samples)]
    return [one if isinstance(one, tuple) else (one,) for one in made]


@pytest.mark.parametrize("name", CASES)
def test_outputs_carry_signal_that_depends_on_the_input(name: str) -> None:
    samples = outputs_of(CASES[name])
    by_output = [torch.stack(one) for one in zip(*samples, strict=True)]
    for output in by_output:
        assert 0.1 < output.std() < 10
        assert output.std(0).mean() > 0.03 * output.std()
    if name in CLASSIFIERS:
        assert len(by_output[0].flatten(1).argmax(1).unique()) > 1
    if name in ("llama", "mobilenet_v3", "wav2vec2"):
        again = outputs_of(CASES[name])
        assert all(torch.equal(a, b) for pair in zip(samples, again, strict=True) for a, b in zip(*pair, strict=True))


def test_decoder_with_a_cache_gives_what_transformers_gives_for_all_tokens_at_once() -> None:
    case = CASES["llama"]
    decoder: Any = make_module(case)
    whole = transformers.LlamaForCausalLM(decoder.model.config)
    whole.model, whole.lm_head = decoder.model, decoder.head
    tokens = torch.arange(8).reshape(1, 8) * 7
    cache = [torch.zeros(spec.shape or ()) for spec in case.inputs[2:]]
    found = []
    for start in (0, 4):
        logits, *new = decoder(tokens[:, start : start + 4].int(), torch.tensor([start], dtype=torch.int32), *cache)
        found.append(logits)
        for kept, fresh in zip(cache, new, strict=True):
            kept[:, :, start : start + 4] = fresh
    assert (torch.cat(found, 1) - whole(input_ids=tokens).logits).abs().max() < 1e-4


def test_detector_gives_what_transformers_gives_for_it() -> None:
    case = CASES["detr"]
    module: Any = make_module(case)
    (pixels,) = make_inputs(case, 0)
    expected = module.detr(pixel_values=pixels, decoder_inputs_embeds=module.queries)
    scores, boxes = module(pixels)
    assert (scores - expected.logits).abs().max() < 1e-4
    assert (boxes - expected.pred_boxes).abs().max() < 1e-4
