"""Cases that generate text: valid tables of their manifests, and the entries that are part of the bundle's key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.base.errors import ConfigError, IllegalTargetError
from farm.base.socs import find_soc
from farm.suites.generate import ARCHITECTURES, params_of_hugging_face
from farm.suites.manifests import load_suite
from farm.suites.prompts import decoder_params, expected_of, prompts_of, read_tokens, scored_of
from farm.suites.suite import Case, plan

_SIZES = "{ dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, vocab_size = 256, hidden_dim = 128 }"
_MANIFEST = f"""
[suite]
name = "mine"
description = "a decoder of a user"
precisions = ["16a8w"]

[case.tiny]
precisions = ["16a8w", "16a4w"]
[case.tiny.generate]
architecture = "llama"
mode = "hybrid"
params = {_SIZES}
prompt_lengths = [5, 40]
"""


def _load(folder: Path, text: str = _MANIFEST) -> Case:
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text(text)
    [case] = load_suite(folder / "suite.toml").cases
    return case


def test_drawn_prompts_are_samples_and_the_same_everywhere(tmp_path: Path) -> None:
    case = _load(tmp_path / "mine")
    assert (case.samples, case.inputs, case.precisions) == (2, (), ("16a8w", "16a4w"))
    short, long = prompts_of(case)
    assert (len(short), len(long)) == (5, 40)
    # Written down once: another Python, or another machine, has to draw these.
    assert short == (137, 105, 25, 48, 122)
    assert all(0 <= token < 256 for token in long)
    assert long[:5] != short
    other = _load(tmp_path / "mine", _MANIFEST.replace("[case.tiny]", "[case.tiny]\nseed = 1"))
    assert prompts_of(other) != prompts_of(case)
    assert (scored_of(case), expected_of(case)) == ((), ())


def test_params_are_whole_with_what_the_architecture_has(tmp_path: Path) -> None:
    params = decoder_params(_load(tmp_path / "mine"))
    assert (params["dim"], params["rope_theta"], params["use_scaled_rope"]) == (64, 500000.0, True)
    qwen = _MANIFEST.replace('"llama"', '"qwen2_5-0_5b"').replace(f"params = {_SIZES}\n", "")
    params = decoder_params(_load(tmp_path / "mine", qwen))
    assert (params["n_layers"], params["vocab_size"], params["attention_qkv_bias"]) == (24, 151936, True)
    # Own sizes replace all sizes of a published decoder: no width of 4864 beside a dim of 64.
    qwen = _MANIFEST.replace('"llama"', '"qwen2_5-0_5b"').replace(", hidden_dim = 128", "")
    assert "hidden_dim" not in decoder_params(_load(tmp_path / "mine", qwen))
    gemma = decoder_params(_load(tmp_path / "mine", _MANIFEST.replace('"llama"', '"gemma"')))
    assert gemma["embedding_scale_factor"] == 8.0


def test_a_checkpoint_comes_with_its_params_and_a_folder_with_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}))
    (folder / "model.pth").write_bytes(b"weights")
    own = _MANIFEST.replace(f"params = {_SIZES}", 'params_file = "params.json"\nweights = "model.pth"')
    case = _load(folder, own)
    assert decoder_params(case)["vocab_size"] == 100
    assert case.files == ("params.json", "model.pth")

    (folder / "hf").mkdir()
    config = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 90, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    (folder / "hf" / "model.safetensors").write_bytes(b"weights")
    own = _MANIFEST.replace(f"params = {_SIZES}", 'hugging_face = "hf"').replace('"llama"', '"qwen3"')
    params = decoder_params(_load(folder, own))
    assert (params["dim"], params["hidden_dim"], params["vocab_size"], params["use_qk_norm"]) == (64, 128, 90, True)
    with pytest.raises(ConfigError, match="of model_type 'qwen3', llama is llama: name its architecture"):
        _load(folder, own.replace('"qwen3"', '"llama"'))


def test_the_rotary_embedding_is_read_from_configs_of_any_transformers() -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0}
    for rope in ({"rope_scaling": scaling}, {"rope_parameters": scaling}):
        params = params_of_hugging_face({"model_type": "llama", **rope})
        assert params == {"use_scaled_rope": True, "rope_scale_factor": 32}
    for theta in ({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 5.0}}):
        assert params_of_hugging_face({"model_type": "llama", **theta})["rope_theta"] == 5.0
    assert params_of_hugging_face({"model_type": "llama", "rope_scaling": None}) == {"use_scaled_rope": False}


def test_prompts_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[1, 2, 3], [4]]")
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, -1, -1]]))
    assert read_tokens(tmp_path / "a.json") == read_tokens(tmp_path / "a.npy") == ((1, 2, 3), (4,))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "[1, 2]", "has no list of lists of token ids"),
        ("a.json", '[["one"]]', "has 'one' among the token ids, which are whole numbers"),
        ("a.json", "[[true]]", "has 'True' among the token ids"),
        ("a.json", "[[1]", "is no JSON"),
        ("a.txt", "1", "is neither a .json nor a .npy file"),
        ("a.npy", "1", "is no array of token ids"),
        ("a.npy", np.array([[1.5]]), "has no whole numbers in one or two dimensions"),
        ("a.npy", np.array([[1, -1, 3]]), "has token ids after a -1"),
    ],
)
def test_a_file_without_token_ids_is_refused(tmp_path: Path, name: str, content: Any, says: str) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        np.save(tmp_path / name, content)
    with pytest.raises(ValueError, match=says):
        read_tokens(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"16a8w", "16a4w"]', '"8a8w"]', "tiny.precisions: '8a8w' is not for .* at -58 dB .*: legal are 16a8w"),
        ('"16a8w", "16a4w"]', '"16a4w_block"]', "own recipe for llama3_2-1b_instruct, .*: use 16a4w or 16a8w"),
        ('"16a8w", "16a4w"]', '"ready"]', "'ready' is not for a case that generates text"),
        ('"llama"', '"lama"', "generate.architecture: unknown architecture 'lama': did you mean 'llama'"),
        ("dim = 64", "dimm = 64", "generate.params: unknown parameter 'dimm': did you mean 'dim'"),
        ("dim = 64", 'dim = "64"', "generate.params.dim: is '64', expected int"),
        ("dim = 64, ", "", "generate.params: dim is missing: give dim, n_layers, n_heads, vocab_size, or name a publ"),
        ("n_layers = 2", "n_layers = 0", "generate.params.n_layers: is 0, expected at least 1"),
        ("n_kv_heads = 2", "n_kv_heads = 3", "n_kv_heads: is 3, expected a divisor of n_heads, 4"),
        ("n_heads = 4, n_kv_heads = 2", "n_heads = 6", "n_heads: is 6, expected a divisor of dim, 64"),
        ("dim = 64", "dim = 64, head_dim = 5", "head_dim: is 5, expected an even number"),
        ("[5, 40]", "[5, 129]", "prompt 1 has 129 tokens, expected at most the context, 128"),
        ("[5, 40]", "[5, 40]\nprefill = 129", "generate.prefill: is 129, expected at most the context, 128"),
        ("[5, 40]", "[5, 97]\ncontext = 100", "prompt 1 has 97 tokens, 4 chunks of prefill = 32, which are more"),
        ("prompt_lengths = [5, 40]", "", "generate: has nothing to ask: give it prompts, a prompts_file, prompt_l"),
        ("[5, 40]", "[5]\nprompts = [[1]]", "prompts and prompt_lengths are both there: leave one out"),
        ("prompt_lengths = [5, 40]", "prompts = [[1], []]", "generate.prompts: prompt 1 is empty"),
        ("prompt_lengths = [5, 40]", "prompts = [[1], [256]]", "has the token 256 in line 1, .* below the vocabulary"),
        ("prompt_lengths = [5, 40]", "prompts = [[-1]]", "has the token -1 in line 0"),
        ("[5, 40]", "[5]\nstop = [256]", "generate.stop: has the token 256, expected"),
        ("[5, 40]", '[5]\nscore_file = "no.json"', "'no.json' is no file; it is looked for in"),
        ("[5, 40]", '[5]\nexpected_file = "suite.toml"', "generate.expected_file: is for a pte"),
        ("[5, 40]", '[5]\nweights = "suite.toml"', "generate.weights: 'suite.toml' is none of .pth, .pt, .safetensors"),
        ("[5, 40]", '[5]\nparams_file = "suite.toml"', "generate.params: there is a params_file as well"),
        ("[5, 40]", '[5]\nhugging_face = "hf"', "generate.params: a Hugging Face folder has it already"),
        (f"params = {_SIZES}", 'hugging_face = "hf"', "mine/hf is no folder: download the model there first"),
        (f"params = {_SIZES}", 'params_file = "suite.toml"', "generate.params_file: suite.toml is no JSON"),
        ("[case.tiny]", '[case.tiny]\nmodule = "torch.nn:ReLU"', "case.tiny.module: is not for a case that generates"),
        ("[case.tiny]", "[case.tiny]\nsamples = 3", "case.tiny.samples: is not for .* .each prompt is one."),
        ("[case.tiny]", "[case.tiny]\nfeatures = { saver = true }", "features.saver: is not for .*: legal are shared_"),
        ('"hybrid"', '"lookahead"\nngram = 1', "generate.ngram: is 1, expected at least 2"),
        ('"hybrid"', '"lookahead"\nwindow = 60', "generate.window: decodes 128 positions at once, .*expected fewer"),
        ("vocab_size = 256", "vocab_size = 90000000", "generate.new: logits of 56 positions are .* MiB a prompt"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in _MANIFEST
    with pytest.raises(ConfigError, match=says):
        _load(tmp_path / "mine", _MANIFEST.replace(old, new, 1))


def test_a_hadamard_matrix_wants_a_head_of_a_power_of_two(tmp_path: Path) -> None:
    own = _MANIFEST.replace('"llama"', '"smollm2"').replace("dim = 64", "dim = 64, head_dim = 24")
    with pytest.raises(ConfigError, match="head_dim: is 24, expected a power of two, for its Hadamard matrix"):
        _load(tmp_path / "mine", own)


def test_a_prompt_for_lookahead_leaves_room_for_what_is_decoded_at_once(tmp_path: Path) -> None:
    own = _MANIFEST.replace('"hybrid"', '"lookahead"')
    case = _load(tmp_path / "mine", own)
    assert case.generate is not None
    assert (case.generate.decode, case.generate.methods) == (16, ("kv_forward", "prefill_forward"))
    with pytest.raises(ConfigError, match="prompt 1 has 113 tokens, and lookahead decodes 16 more at once"):
        _load(tmp_path / "mine", own.replace("[5, 40]", "[5, 113]"))


def test_a_ready_program_has_prompts_and_perhaps_what_it_has_to_say(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "net.pte").write_bytes(b"")
    (folder / "right.json").write_text("[[3, 4]]")
    ready = _MANIFEST.replace(f"params = {_SIZES}\n", "").replace('["16a8w", "16a4w"]', '["ready"]')
    ready = ready.replace("[case.tiny]", '[case.tiny]\npte = "net.pte"')
    ready = ready.replace("prompt_lengths = [5, 40]", 'prompts = [[1, 2]]\nexpected_file = "right.json"')
    case = _load(folder, ready)
    assert (prompts_of(case), expected_of(case), decoder_params(case)) == (((1, 2),), ((3, 4),), {})
    assert case.files == ("net.pte", "right.json")
    with pytest.raises(ConfigError, match="prompt_lengths: are drawn from a vocabulary, which is unknown before"):
        _load(folder, ready.replace("prompts = [[1, 2]]", "prompt_lengths = [2]"))
    with pytest.raises(ConfigError, match="generate.params: is for compiled cases, and a pte is compiled already"):
        _load(folder, ready.replace("prompts =", f"params = {_SIZES}\nprompts ="))
    (folder / "right.json").write_text("[[3, 4], [5]]")
    with pytest.raises(ConfigError, match="expected_file: has 2 lines, expected one a prompt, 1"):
        _load(folder, ready)


def test_text_is_for_htp_and_not_for_direct_mode(tmp_path: Path) -> None:
    _load(tmp_path / "mine", _MANIFEST.replace("[suite]", '[suite]\nbackends = ["htp", "gpu"]'))
    suite = load_suite(tmp_path / "mine" / "suite.toml")
    with pytest.raises(IllegalTargetError, match="mine/tiny generates text, which is for the htp backend"):
        plan([suite], [find_soc("SM8650")], "xnnpack")
    assert plan([suite], [find_soc("SM8650")], "htp")[0].id == "mine/tiny[SM8650-htp-16a8w]"
    with pytest.raises(IllegalTargetError, match="not for direct mode"):
        plan([suite], [find_soc("SM8650")], "htp", option_sets=[(("direct_mode", "true"),)])


def test_rates_are_expected_of_text_alone(tmp_path: Path) -> None:
    rates = "[[case.tiny.expect]]\nsocs = ['SM8650']\nleast_decode_rate = 37.0\nmost_perplexity = 18.0\n"
    case = _load(tmp_path / "mine", _MANIFEST + rates)
    assert [(one.least_decode_rate, one.most_perplexity) for one in case.expect] == [(37.0, 18.0)]
    with pytest.raises(ConfigError, match="least_decode_rate: Expected `float` > 0"):
        _load(tmp_path / "mine", _MANIFEST + rates.replace("37.0", "0.0"))
    relu = '[case.relu]\nmodule = "torch.nn:ReLU"\ninputs = [{ shape = [4] }]\n'
    with pytest.raises(ConfigError, match=r"relu.expect\[0\].least_decode_rate: is for a case that generates text"):
        _load(tmp_path / "mine", _MANIFEST + relu + rates.replace("tiny", "relu"))


def test_every_architecture_is_whole_or_a_family(tmp_path: Path) -> None:
    for name, architecture in ARCHITECTURES.items():
        assert architecture.published == bool(architecture.recipe), name
        own = _MANIFEST.replace('"llama"', f'"{name}"').replace("new = 16", "")
        if architecture.published:
            own = own.replace(f"params = {_SIZES}\n", "")
        elif architecture.window_mask:
            own = own.replace("dim = 64", 'dim = 64, layer_types = ["sliding_attention", "full_attention"]')
        case = _load(tmp_path / "mine", own)
        assert decoder_params(case)["vocab_size"] > 0
