"""Published decoders: their limits in test_suites/published.toml, and suites that include these."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from executorch_checkout import installed

from farm.base.errors import ConfigError
from farm.suites.generate import ARCHITECTURES
from farm.suites.manifests import find_suites, load_suite
from farm.suites.prompts import asked_of, decoder_params, generate_of, prefix_of
from farm.suites.suite import Case

ROOT = Path(__file__).parent.parent
WHEEL = installed()
# Names in a configuration of Hugging Face that differ from farm's.
NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "vocab_size": "vocab_size",
    "head_dim": "head_dim", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip


def specs() -> tuple[dict[str, dict[str, Any]], str]:
    """Return the limits in the wheel's test, by decoder, and the source of the test."""
    tree: Any = ast.parse((WHEEL / "backends/qualcomm/tests/test_qnn_delegate.py").read_bytes())
    script = next(one for one in tree.body if getattr(one, "name", "") == "TestExampleLLMScript")
    assigned = [node for node in ast.walk(script) if isinstance(node, ast.Assign)]
    table = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "self.llm_specs")
    found = {
        ast.literal_eval(key): {word.arg: ast.literal_eval(word.value) for word in value.keywords}
        for key, value in zip(table.keys, table.values, strict=True)
    }
    return found, ast.unparse(script)


TASK = """
task: t
output_type: multiple_choice
dataset_path: q.jsonl
doc_to_text: q
doc_to_choice: c
doc_to_target: r
test_split: test
metric_list: [{metric: acc_norm}]
"""


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name)


def checkpoint(folder: Path, name: str, **other: Any) -> Path:
    """Make a folder that looks like a published decoder, with the files that are read before compiling."""
    import tokenizers

    architecture = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    config = {NAMES[key]: value for key, value in architecture.params.items() if key in NAMES}
    config |= {"model_type": architecture.model_types[0], "bos_token_id": 7, **other}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    words = {"?": 0, "I": 1, "would": 2, "like": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def cases_of(folder: Path, include: str = "") -> dict[str, Case]:
    """Return the cases of a suite in `folder` that includes `published`."""
    manifest = folder / "suite.toml"
    manifest.write_text(
        f'[suite]\nname = "{folder.name}"\ndescription = "mine"\n[[include]]\nsuite = "published"\n{include}\n'
    )
    return {case.name: case for case in load_suite(manifest).cases}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Return the cases of a folder with every decoder, a text and a task."""
    folder = tmp_path_factory.mktemp("suites") / "mine"
    for name in specs()[0].keys() & ARCHITECTURES.keys():
        # Older configurations lack the kinds of layers.
        checkpoint(folder / slug(name), name)
    (folder / "page.txt").write_text("I would\n")
    (folder / "hellaswag.yaml").write_text(TASK)
    (folder / "q.jsonl").write_text('{"q": "I", "c": ["would", "like"], "r": 0}\n')
    return cases_of(folder)


def test_the_limits_are_those_of_the_wheels_test(cases: dict[str, Case]) -> None:
    theirs, source = specs()
    # gemma4-e2b takes embeddings of its own; farm makes no such decoder.
    del theirs["gemma4-e2b"]
    assert len(cases) == 2 * len(theirs)
    for name, limits in theirs.items():
        case, answer = cases[slug(name)], cases[f"{slug(name)}_likelihood"]
        params = decoder_params(case)
        assert len(params.get("layer_types", ())) in {0, params["n_layers"]}
        recipe = ARCHITECTURES[name].recipe
        assert case.precisions == answer.precisions == (recipe,)
        generate = generate_of(case)
        assert (generate.architecture, generate.mode) == (name, "kv")
        rates = {one.socs[0]: one.least_decode_rate for one in case.expect if one.socs}
        ours = {
            **rates, "pte_size": case.expect[0].most_pte_bytes,
            "wikitext_ppl": answer.expect[0].most_word_perplexity,
            "hellaswag_acc_norm": (answer.expect[0].least_accuracy or {}).get("acc_norm"),
            "sqnr": case.tolerances[recipe].fp32.sqnr_db if recipe in case.tolerances else None,
        }  # fmt: skip
        assert ours == limits, name
        assert {one.most_pte_bytes for one in case.expect} == {limits["pte_size"]}
        assert f"'--max_context_len', '{generate.context}'" in source
        assert generate.texts[0] in source
        if generate_of(answer).task:
            assert f"'hellaswag', '--eval_limit', '{generate_of(answer).documents}'" in source
    # The suite `llm` has the rates of the two stories decoders; their sizes hold where weights are shared.
    suite = {case.name: case for case in load_suite(find_suites()["llm"]).cases}
    for name, size, rate in (("stories260k", 2_020_000, 1600), ("stories110m", 135_000_000, 220)):
        assert f"assertLessEqual(pte_size, {size})" in source
        assert f"assertGreaterEqual(msg['inference_speed'], {rate})" in source
        assert [one.least_decode_rate for one in suite[name].expect if one.socs] == [rate]
    # The figure that its limit of perplexity is for.
    script = (WHEEL / "examples/qualcomm/oss_scripts/llama/llama.py").read_text()
    assert 'wiki_ppl = ppl_eval_result["results"][task]["word_perplexity,none"]' in script


def test_the_suite_that_ships_has_every_decoder_with_its_rates_and_sizes(cases: dict[str, Case]) -> None:
    drawn = {case.name: case for case in load_suite(find_suites()["llm"]).cases}
    for case in (case for case in cases.values() if not generate_of(case).scores_likelihood):
        same = drawn[f"{case.name}_kv"]
        assert (same.precisions, same.features, same.expect) == (case.precisions, case.features, case.expect)
        ours, theirs = generate_of(case), generate_of(same)
        assert (theirs.architecture, theirs.context) == (ours.architecture, ours.context)


def test_the_table_in_the_documentation_has_them() -> None:
    text = (ROOT / "docs/guides/language_models.md").read_text()
    for name, limits in specs()[0].items():
        if name not in ARCHITECTURES:
            continue
        size = limits["pte_size"]
        cells = [f"`{name}`", f"{limits['SM8650']:g}", f"{limits['SM8750']:g}"]
        cells += [f"{size / 1e9:g} GB" if size >= 10**9 else f"{size // 10**6} MB"]
        cells += ["" if limits["wikitext_ppl"] is None else f"{limits['wikitext_ppl']:g}"]
        cells += ["" if limits["sqnr"] is None else f"{limits['sqnr']:g} dB"]
        row = f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"
        assert row in text, row


def test_a_case_without_its_files_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    checkpoint(folder / "smollm2_135m", "smollm2_135m")
    assert list(cases_of(folder)) == ["smollm2_135m"]
    (folder / "page.txt").write_text("I would\n")
    found = cases_of(folder)
    assert list(found) == ["smollm2_135m", "smollm2_135m_likelihood"]
    assert {case.folder for case in found.values()} == {str(folder)}
    assert {case.suite for case in found.values()} == {"mine"}
    checkpoint(tmp_path / "Qwen3-0.6B", "qwen3-0_6b")
    (folder / "qwen3_0_6b").symlink_to(tmp_path / "Qwen3-0.6B")
    assert list(cases_of(folder, 'cases = ["qwen3_0_6b"]')) == ["qwen3_0_6b"]


def test_what_has_no_files_or_other_ones_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ConfigError, match=f"no case has its files in {folder}"):
        cases_of(folder)
    checkpoint(folder / "smollm2_135m", "smollm2_135m")
    with pytest.raises(ConfigError, match="unknown case 'gemma_2b'.*files are in"):
        cases_of(folder, 'cases = ["gemma_2b"]')
    checkpoint(folder / "gemma_2b", "qwen3-0_6b")
    with pytest.raises(ConfigError, match="is of model_type 'qwen3'"):
        cases_of(folder)


@pytest.mark.parametrize(
    ("other", "tokens"),
    [({}, (7,)), ({"bos_token_id": None, "eos_token_id": [True, -1, 5]}, (5,)), ({"bos_token_id": None}, ())],
)
def test_texts_begin_with_the_token_of_config_json(
    tmp_path: Path, other: dict[str, Any], tokens: tuple[int, ...]
) -> None:
    folder = tmp_path / "mine"
    checkpoint(folder / "smollm2_135m", "smollm2_135m", **other)
    case = cases_of(folder)["smollm2_135m"]
    assert prefix_of(case) == tokens
    asked = asked_of(case, 1024, 49152)
    assert asked.prompts == asked.scored
    assert asked.prompts[0][: len(tokens) + 4] == (*tokens, 1, 2, 3, 0)
    assert case.samples == 1


def test_a_text_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    checkpoint(folder / "smollm2_135m", "smollm2_135m")
    case = cases_of(folder)["smollm2_135m"]
    with pytest.raises(ConfigError, match=r"generate.texts: text 0 has \d+ tokens, expected 1 to 3"):
        asked_of(case, 3, 49152)
    with pytest.raises(ConfigError, match="gives the token 7, and the decoder has 0 to 4"):
        asked_of(case, 1024, 5)
    checkpoint(folder / "qwen3_0_6b", "qwen3-0_6b", bos_token_id=10**9)
    with pytest.raises(ConfigError, match="has the token 1000000000, which the decoder has not"):
        cases_of(folder)
