"""Published decoders: what farm says that ExecuTorch expects of them, and suites of somebody's checkpoints."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farm.suites.architectures import ARCHITECTURES
from farm.suites.manifests import find_suites, load_suite
from farm.suites.prompts import decoder_params
from farm.suites.published.upstream_limits import CONTEXT, PROMPT, QUESTIONS, UPSTREAM_LIMITS

if TYPE_CHECKING:
    from farm_home import FarmHome

    from farm.suites.suite import Case

ROOT = Path(__file__).parent.parent
WHEEL = Path((importlib.util.find_spec("executorch").submodule_search_locations or [])[0])  # type: ignore[union-attr]
# Of what farm calls otherwise in a configuration of Hugging Face.
NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "vocab_size": "vocab_size",
    "head_dim": "head_dim", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip


def specs() -> tuple[dict[str, dict[str, Any]], str]:
    """Return the limits in the wheel's test, by decoder, and the source of the test."""
    tree = ast.parse((WHEEL / "backends/qualcomm/tests/test_qnn_delegate.py").read_bytes())
    [script] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "TestExampleLLMScript"]
    [table] = [
        node.value
        for node in ast.walk(script)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.llm_specs"
    ]
    assert isinstance(table, ast.Dict)
    found = {
        ast.literal_eval(key): {word.arg: ast.literal_eval(word.value) for word in value.keywords}
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None and isinstance(value, ast.Call)
    }
    return found, ast.unparse(script)


def test_the_limits_are_those_of_the_wheels_test() -> None:
    theirs, source = specs()
    # Which takes embeddings of its own, and is no decoder that farm makes.
    del theirs["gemma4-e2b"]
    ours = {
        name: {
            **one.rates, "pte_size": one.pte_bytes, "wikitext_ppl": one.word_perplexity,
            "hellaswag_acc_norm": one.acc_norm, "sqnr": one.sqnr_db,
        }
        for name, one in UPSTREAM_LIMITS.items()
    }  # fmt: skip
    assert ours == theirs
    assert f"'--max_context_len', '{CONTEXT}'" in source
    assert f"'hellaswag', '--eval_limit', '{QUESTIONS}'" in source
    assert PROMPT in source
    # Of the two that are not among these, the suite `llm` has the rates; sizes hold where weights are shared.
    suite = {case.name: case for case in load_suite(find_suites()["llm"]).cases}
    for name, size, rate in (("stories260k", 2_020_000, 1600), ("stories110m", 135_000_000, 220)):
        assert f"assertLessEqual(pte_size, {size})" in source
        assert f"assertGreaterEqual(msg['inference_speed'], {rate})" in source
        assert [one.least_decode_rate for one in suite[name].expect if one.socs] == [rate]
    # What it compares its limit of perplexity with.
    script = (WHEEL / "examples/qualcomm/oss_scripts/llama/llama.py").read_text()
    assert 'wiki_ppl = ppl_eval_result["results"][task]["word_perplexity,none"]' in script


def test_the_suite_that_ships_has_every_decoder_with_its_rates_and_sizes() -> None:
    cases = {case.name: case for case in load_suite(find_suites()["llm"]).cases}
    for name, limits in UPSTREAM_LIMITS.items():
        case = cases[f"{re.sub(r'[^a-z0-9]', '_', name)}_kv"]
        assert case.generate is not None
        assert (case.generate.architecture, case.generate.context) == (name, CONTEXT)
        assert case.precisions == (ARCHITECTURES[name].recipe,)
        found = {one.socs: (one.least_decode_rate, one.most_pte_bytes) for one in case.expect}
        wanted = {(soc,): (rate, limits.pte_bytes) for soc, rate in limits.rates.items()}
        assert found == {**wanted, (): (None, limits.pte_bytes)}, name


def test_the_table_in_the_documentation_has_them() -> None:
    text = (ROOT / "docs/guides/language_models.md").read_text()
    for name, one in UPSTREAM_LIMITS.items():
        size = f"{one.pte_bytes / 1e9:g} GB" if one.pte_bytes >= 10**9 else f"{one.pte_bytes // 10**6} MB"
        cells = [f"`{name}`", *(f"{rate:g}" for rate in one.rates.values()), size]
        cells += ["" if one.word_perplexity is None else f"{one.word_perplexity:g}"]
        cells += ["" if one.sqnr_db is None else f"{one.sqnr_db:g} dB"]
        row = f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"
        assert row in text, row


def checkpoint(folder: Path, name: str, **other: Any) -> Path:
    """Make a folder that looks like a published decoder: what is read before anything is compiled."""
    import tokenizers

    architecture = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    config = {NAMES[key]: value for key, value in architecture.params.items() if key in NAMES}
    config |= {"model_type": architecture.model_types[0], "bos_token_id": 7, **other}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    words = ["?", *dict.fromkeys(re.findall(r"\w+|[,?]", PROMPT))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(words))}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def cases_of(folder: Path) -> dict[str, Case]:
    return {case.name: case for case in load_suite(folder / "suite.toml").cases}


def test_a_folder_of_checkpoints_becomes_a_suite_with_the_limits(home: FarmHome, tmp_path: Path) -> None:
    models = tmp_path / "models"
    weights = checkpoint(models / "SmolLM2 135M", "smollm2_135m")
    checkpoint(models / "granite", "granite_3_3-2b_instruct", bos_token_id=None)
    checkpoint(models / "own", "qwen3-0_6b", num_hidden_layers=2)
    (checkpoint(models / "no-weights", "qwen3-0_6b") / "model.safetensors").unlink()
    (checkpoint(models / "no-tokenizer", "qwen3-0_6b") / "tokenizer.json").unlink()
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text("[")
    (home.cwd / "wiki.txt").write_text("a page\n")
    task = "task: t\noutput_type: multiple_choice\ndataset_path: q.jsonl\ndoc_to_text: q\ndoc_to_choice: c\n"
    (home.cwd / "hellaswag.yaml").write_text(
        task + "doc_to_target: r\ntest_split: test\nmetric_list: [{metric: acc_norm}]\n"
    )
    (home.cwd / "q.jsonl").write_text('{"q": "x", "c": ["a", "b"], "r": 0}\n')
    words = ("--checkpoints", str(models), "--text", "wiki.txt", "--task", "hellaswag.yaml")
    done = home.farm("suites", "published", "published", *words, code=0)
    for folder, why in (("own", "a 'qwen3' of other sizes"), ("no-weights", "no *.safetensors"),
                        ("no-tokenizer", "no tokenizer.json"), ("broken", "config.json cannot be read")):  # fmt: skip
        assert f"left out: {models / folder}: {why}" in done.stdout
    assert done.stdout.endswith("published: 4 cases; run them: farm run --soc SM8650 --suite published/\n")

    cases = cases_of(home.cwd / "published")
    granite = "granite_3_3_2b_instruct"
    assert list(cases) == ["smollm2_135m", "smollm2_135m_told", granite, f"{granite}_told"]
    generate = cases["smollm2_135m"].generate
    assert generate is not None
    assert (generate.hugging_face, generate.context) == (str(weights), CONTEXT)
    [tokens] = json.loads((home.cwd / "published" / generate.prompts_file).read_bytes())
    assert tokens[:4] == [7, 1, 2, 3]
    assert generate.score_file == generate.prompts_file
    assert cases["smollm2_135m"].tolerances["16a8w"].fp32.sqnr_db == 19.0
    assert [one.least_decode_rate for one in cases["smollm2_135m"].expect] == [214.0, 260.0, None]
    assert [one.most_word_perplexity for one in cases["smollm2_135m_told"].expect] == [23.0]
    scored = cases["smollm2_135m_told"].generate
    assert scored is not None
    assert (scored.wikitext, scored.prefix) == (True, (7,))
    told = cases[f"{granite}_told"]
    assert told.generate is not None
    assert (told.generate.score_text, told.generate.documents, told.generate.prefix) == ("", 10, ())
    assert [one.least_accuracy for one in told.expect] == [{"acc_norm": 0.2}]

    assert "published is there already" in home.farm("suites", "published", "published", *words, code=2).stderr


def test_what_cannot_become_a_suite_is_refused_and_leaves_nothing(home: FarmHome, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    done = home.farm("suites", "published", "published", "--checkpoints", str(models))
    assert (done.returncode, "no folder in it has a config.json" in done.stderr) == (2, True)
    checkpoint(models / "one", "smollm2_135m")
    done = home.farm("suites", "published", "My-Suite", "--checkpoints", str(models))
    assert (done.returncode, "is to be a suite's name" in done.stderr) == (2, True)
    (models / "one" / "tokenizer.json").write_text("{}")
    done = home.farm("suites", "published", "published", "--checkpoints", str(models))
    assert (done.returncode, "is no tokenizer that can be read" in done.stderr) == (2, True)
    assert [path.name for path in home.cwd.iterdir()] == []


def test_every_decoder_with_limits_becomes_cases_that_can_be_read(home: FarmHome, tmp_path: Path) -> None:
    for name in UPSTREAM_LIMITS:
        # As Hugging Face's client keeps them, and without what older configurations have not: the kinds of layers.
        checkpoint(tmp_path / "hub" / f"models--{name}" / "snapshots" / "0123abc", name)
    (home.cwd / "page.txt").write_text("a page\n")
    words = ("--checkpoints", str(tmp_path / "hub"), "--text", "page.txt", "--json")
    done = home.farm("suites", "published", "mine", *words, code=0)
    answer = json.loads(done.stdout)
    assert answer["left_out"] == []
    assert {one["architecture"] for one in answer["checkpoints"]} == set(UPSTREAM_LIMITS)
    for case in cases_of(home.cwd / "mine").values():
        assert case.generate is not None
        params = decoder_params(case)
        assert len(params.get("layer_types", ())) in {0, params["n_layers"]}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"rope_scaling": "x"}, ""),
        ({"rope_scaling": {"rope_type": "llama3", "factor": None}}, ""),
        ({"bos_token_id": None, "eos_token_id": [True, -1, 10**9, 5]}, ""),
        ({"hidden_size": 576.0}, "generate.hugging_face.dim: is 576.0, expected int"),
        ({"rope_theta": "1e5"}, "generate.hugging_face.rope_theta: is '1e5', expected float"),
    ],
)
def test_an_odd_configuration_is_read_or_left_out(
    home: FarmHome, tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    checkpoint(tmp_path / "models \N{GRINNING FACE} \"'" / "good", "qwen3-0_6b")
    odd = checkpoint(tmp_path / "models \N{GRINNING FACE} \"'" / "odd", "smollm2_135m", **other)
    left_out = home.json("suites", "published", "mine", "--checkpoints", str(odd.parent))["left_out"]
    assert left_out == ([f"{odd}: smollm2_135m.{why}"] if why else [])
    assert list(cases_of(home.cwd / "mine")) == (["qwen3_0_6b"] if why else ["qwen3_0_6b", "smollm2_135m"])
    if "eos_token_id" in other:
        assert json.loads((home.cwd / "mine/smollm2_135m.json").read_bytes())[0][0] == 5


def test_files_that_no_decoder_has_a_limit_for_are_named(home: FarmHome, tmp_path: Path) -> None:
    checkpoint(tmp_path / "models", "smollm2_135m")
    (home.cwd / "task.yaml").write_text("x")
    words = ("--checkpoints", str(tmp_path / "models"), "--task", "task.yaml")
    done = home.farm("suites", "published", "mine", *words)
    assert "left out: task.yaml: none of these decoders has a limit of accuracy" in done.stdout


def test_a_large_decoder_is_divided_as_executorchs_examples_do_it(home: FarmHome, tmp_path: Path) -> None:
    checkpoint(tmp_path / "models", "gemma-2b")
    assert home.farm("suites", "published", "mine", "--checkpoints", str(tmp_path / "models")).returncode == 0
    [case] = cases_of(home.cwd / "mine").values()
    [theirs] = [one for one in load_suite(find_suites()["llm"]).cases if one.name == "gemma_2b_kv"]
    assert case.features == theirs.features
    assert case.expect == theirs.expect


def test_one_folder_is_named_or_the_one_above_it_and_twins_go_by_their_folders(home: FarmHome, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("Base", "Tuned-v2", "tuned v2", "base_told"):
        checkpoint(models / name, "smollm2_135m")
    (models / "latest").symlink_to("Base")
    (home.cwd / "page.txt").write_text("a page\n")
    for folder, given, names in (
        ("mine", models / "Base", ["smollm2_135m"]),
        ("ours", models, ["base", "tuned_v2", "base_told_2", "tuned_v2_2"]),
    ):
        words = ("--checkpoints", str(given), "--text", "page.txt", "--json")
        done = home.farm("suites", "published", folder, *words, code=0)
        assert [one["name"] for one in json.loads(done.stdout)["checkpoints"]] == names
        assert list(cases_of(home.cwd / folder)) == [case for name in names for case in (name, f"{name}_told")]
