"""Makes every model of models_small and prints what its outputs are; computes two of them as transformers does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from farm.base.resources import data_folder
from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.suites.manifests import load_suite
from farm.suites.suite import Case

REPEATED = ("llama", "mobilenet_v3", "wav2vec2")
Outputs = tuple[torch.Tensor, ...]


def outputs_of(case: Case) -> list[Outputs]:
    module = make_module(case)
    made = [module(*make_inputs(case, sample)) for sample in range(case.samples)]
    return [one if isinstance(one, tuple) else (one,) for one in made]


def described(case: Case) -> dict[str, Any]:
    by_output = [torch.stack(samples) for samples in zip(*outputs_of(case), strict=True)]
    return {
        "deviation": [float(output.std()) for output in by_output],
        "between": [float(output.std(0).mean()) for output in by_output],
        "greatest": [len(output.flatten(1).argmax(1).unique()) for output in by_output],
    }


def repeats(case: Case) -> bool:
    pairs = zip(outputs_of(case), outputs_of(case), strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def decoder_error(case: Case) -> float:
    """Feeds eight tokens in two chunks through the cache, and all of them at once to transformers."""
    decoder: Any = make_module(case)
    whole = transformers.LlamaForCausalLM(decoder.model.config)
    whole.model, whole.lm_head = decoder.model, decoder.head
    tokens = torch.arange(8).reshape(1, 8) * 7
    expected = whole(input_ids=tokens).logits
    cache = [torch.zeros(spec.shape or ()) for spec in case.inputs[2:]]
    found = []
    for start in (0, 4):
        logits, *new = decoder(tokens[:, start : start + 4].int(), torch.tensor([start], dtype=torch.int32), *cache)
        found.append(logits)
        for kept, fresh in zip(cache, new, strict=True):
            kept[:, :, start : start + 4] = fresh
    return float((torch.cat(found, 1) - expected).abs().max())


def detector_error(case: Case) -> float:
    module: Any = make_module(case)
    (pixels,) = make_inputs(case, 0)
    expected = module.detr(pixel_values=pixels, decoder_inputs_embeds=module.queries)
    scores, boxes = module(pixels)
    return max(float((scores - expected.logits).abs().max()), float((boxes - expected.pred_boxes).abs().max()))


def main() -> None:
    cases = {case.name: case for case in load_suite(Path(data_folder("test_suites"), "models_small/suite.toml")).cases}
    with torch.no_grad():
        output = {
            "models": {name: described(case) for name, case in cases.items()},
            "repeats": {name: repeats(cases[name]) for name in REPEATED},
            "decoder_error": decoder_error(cases["llama"]),
            "detector_error": detector_error(cases["detr"]),
        }
    sys.stdout.write(json.dumps(output) + "\n")


main()
