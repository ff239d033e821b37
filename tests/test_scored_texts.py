"""Texts and tasks as token ids, and published decoders with their limits in test_suites/published.toml."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from executorch_checkout import installed

from farm.base.errors import ConfigError
from farm.builds.bundles.key import named_files, source_digest
from farm.suites.generate import ARCHITECTURES
from farm.suites.manifests import find_suites, load_suite
from farm.suites.prompts import (
    asked_of,
    decoder_params,
    detokenized,
    generate_of,
    load_tokenizer,
    most_scored,
    prefix_of,
    rolling_windows,
    tokenize_choice,
)
from farm.suites.suite import Case
from farm.suites.tasks import WrittenQuestion, read_task, written_questions

# Texts and tasks as token ids: windows, choices, templates and data in lm-eval's format, tokenizers, manifests.


TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: q.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{q}} A:"
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
"""
QUESTIONS: list[dict[str, Any]] = [
    {"q": "one?", "c": ["yes", "no"], "a": 1},
    {"q": "two?", "c": ["a", "bb", "ccc"], "a": 0},
]
DECODER = """
architecture = "llama"
params = { dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, hidden_dim = 128, vocab_size = 256 }
"""


def written(folder: Path, task: str = TASK, questions: list[dict[str, Any]] = QUESTIONS) -> Path:
    (folder / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    path = folder / "task.yaml"
    path.write_text(task)
    return path


def asked(folder: Path, task: str = TASK, questions: list[dict[str, Any]] = QUESTIONS) -> list[WrittenQuestion]:
    return written_questions(read_task(written(folder, task, questions)), None)


def case_of(folder: Path, generate: str, rest: str = "") -> Case:
    suite = folder / "told"
    suite.mkdir(exist_ok=True)
    head = '[suite]\nname = "told"\ndescription = "d"\nprecisions = ["16a8w"]\n'
    (suite / "suite.toml").write_text(f"{head}[case.tiny.generate]\n{DECODER}{generate}\n{rest}")
    [case] = load_suite(suite / "suite.toml").cases
    return case


def test_each_token_of_a_text_counts_once_and_the_last_window_has_all_that_fits_before_it() -> None:
    windows = rolling_windows(range(10), (), 4)
    assert windows == [((0, 1, 2, 3), 1), ((3, 4, 5, 6), 1), ((6, 7, 8, 9), 1)]
    uneven = rolling_windows(range(9), (), 4)
    assert uneven == [((0, 1, 2, 3), 1), ((3, 4, 5, 6), 1), ((5, 6, 7, 8), 2)]
    assert [token for row, answer in uneven for token in row[answer:]] == list(range(1, 9))
    # A token of the beginning makes the first one count.
    assert rolling_windows(range(3), (99,), 8) == [((99, 0, 1, 2), 1)]
    assert rolling_windows([7], (), 4) == []
    # With a prompt in chunks, whole chunks fit.
    assert [most_scored(context=c, prefill=32, decode=d) for c, d in ((128, 1), (100, 1), (128, 16))] == [128, 96, 112]


def test_spaces_before_a_choice_are_tokens_of_it() -> None:
    encode = load_tokenizer("bytes", Path())
    assert tokenize_choice(encode, "A: ", "x", ()) == (tuple(b"A: x"), 2)
    assert tokenize_choice(encode, "A:", " yes", (1, 2)) == ((1, 2, *b"A: yes"), 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # A template, a column by its name, a list, a table, an index, a choice in words, and a description before all.
        (("", ""), ("Q: one? A:", ("yes", "no"), (1,))),
        (("doc_to_choice: \"{{c}}\"", "doc_to_choice: c"), ("Q: one? A:", ("yes", "no"), (1,))),
        (("doc_to_choice: \"{{c}}\"", "doc_to_choice: [A, B]"), ("Q: one? A:", ("A", "B"), (1,))),
        (("doc_to_choice: \"{{c}}\"", "doc_to_choice: {x: A, y: B}"), ("Q: one? A:", ("A", "B"), (1,))),
        (("doc_to_target: \"{{a}}\"", "doc_to_target: a"), ("Q: one? A:", ("yes", "no"), (1,))),
        (("doc_to_target: \"{{a}}\"", "doc_to_target: 0"), ("Q: one? A:", ("yes", "no"), (0,))),
        (("doc_to_target: \"{{a}}\"", "doc_to_target: \"{{c[a]}}\""), ("Q: one? A:", ("yes", "no"), (1,))),
        (("doc_to_target: \"{{a}}\"", "doc_to_target: \"[0, {{a}}]\""), ("Q: one? A:", ("yes", "no"), (0, 1))),
        (("doc_to_text:", "description: \"{{q}}\\n\"\ndoc_to_text:"), ("one?\nQ: one? A:", ("yes", "no"), (1,))),
        (("Q: {{q}}", "{{q | upper | regex_replace('E.$', '')}}"), ("ON A:", ("yes", "no"), (1,))),
    ],
)  # fmt: skip
def test_the_ways_to_say_what_a_question_is(
    tmp_path: Path, change: tuple[str, str], expected: tuple[str, tuple[str, ...], tuple[int, ...]]
) -> None:
    assert asked(tmp_path, TASK.replace(*change), QUESTIONS[:1]) == [WrittenQuestion(*expected)]


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (TASK + "process_docs: !function utils.f", "runs Python code"),
        (TASK + "num_fewshot: 5", "num_fewshot: examples before a question are not drawn here"),
        (TASK + "gen_prefix: Hm", "gen_prefix: farm does not know it"),
        (TASK.replace("multiple_choice", "generate_until"), "output_type: is 'generate_until'"),
        (TASK.replace("json\n", "allenai/ai2_arc\n", 1), "dataset_path: is 'allenai/ai2_arc', and nothing"),
        (TASK.replace("q.jsonl", "gone.jsonl"), "'gone.jsonl' is no .json or .jsonl file"),
        (TASK.replace("{test: q.jsonl}", "{dev: q.jsonl}"), "test_split: is 'test', and data_files has dev"),
        (TASK.replace("}}\n", "}, field: x}\n", 1), "dataset_kwargs.field: only data_files is known"),
        (TASK + "metric_list: []", "metric_list: is empty"),
        (TASK + "metric_list: [{metric: f1}]", r"metric_list\[0\]: is 'f1'"),
        (TASK + "metric_list: [{metric: acc, aggregation: median}]", r"metric_list\[0\].aggregation"),
        (TASK.replace('doc_to_target: "{{a}}"', ""), "doc_to_target: is missing"),
        (TASK + "include: task.yaml", "include each other in a circle"),
        (TASK.replace("{test: q.jsonl}", "{1: x, a: y}"), "test_split: is 'test', and data_files has 1, a"),
        (TASK.replace("test_split: test", "test_split: [test]"), "test_split: is .'test'., and data_files has"),
        (f"{TASK}metadata: [&a [x], {'*a, ' * 17}]", "has more than 16 aliases"),
        (f"{TASK}# {'x' * (1 << 20)}", "is larger than 1048576 bytes"),
        (f"{TASK}description: null", "description: is None, expected a text"),
        ("- a list", "has no table"),
        ("a: [", "is no YAML"),
    ],
)  # fmt: skip
def test_what_of_a_task_would_change_its_numbers_is_refused_by_name(tmp_path: Path, task: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_task(written(tmp_path, task))


def test_a_task_whose_files_include_each_other_often_is_refused_at_once(tmp_path: Path) -> None:
    for level in range(14):
        (tmp_path / f"{level}.yaml").write_text(f"include: [{', '.join([f'{level + 1}.yaml'] * 9)}]\n")
    (tmp_path / "14.yaml").write_text("task: last\n")
    with pytest.raises(ConfigError, match="reads more than 256 files"):
        read_task(tmp_path / "0.yaml")


@pytest.mark.parametrize(
    ("task", "question", "problem"),
    [
        (TASK.replace("{{q}}", "{{r}}"), {}, "doc_to_text: question 0: 'r' is undefined"),
        (TASK.replace("{{q}}", "{{q.__class__.__mro__}}"), {}, "doc_to_text: question 0: access to attribute"),
        (TASK.replace("Q: {{q}} A:", "{{a}}"), {}, "doc_to_text: question 0 has '1', expected a text"),
        (TASK, {"c": ["only"]}, "doc_to_choice: question 0 has .*, expected a list of two texts or more"),
        (TASK, {"c": ["", "no"]}, "none of them empty"),
        (TASK.replace('"{{c}}"', '"{{q}}"'), {}, "doc_to_choice: question 0 has 'one.', expected a template"),
        (TASK, {"a": 2}, "doc_to_target: question 0 has 2, expected a choice, or its index, 0 to 1"),
        (TASK, {"a": "maybe"}, "doc_to_target: question 0 has 'maybe'"),
    ],
)  # fmt: skip
def test_what_makes_no_question_is_refused_with_its_number(
    tmp_path: Path, task: str, question: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        asked(tmp_path, task, [{**QUESTIONS[0], **question}])


def test_what_is_included_stands_below_what_includes_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TASK + 'target_delimiter: "-"\ndescription: base')
    (tmp_path / "other.yaml").write_text("description: other\ntask: named")
    path = written(tmp_path, "include: [other.yaml, base.yaml]\nmetric_list: [{metric: acc}]")
    task = read_task(path)
    assert (task.description, task.target_delimiter, task.metrics) == ("other", "-", ("acc",))
    assert {file.name for file in task.files} == {"task.yaml", "other.yaml", "base.yaml", "q.jsonl"}


def test_choices_are_put_after_their_question_and_windows_before_all_of_them(tmp_path: Path) -> None:
    case = case_of(tmp_path, "prompt_lengths = [3]")
    written(Path(case.folder))
    (Path(case.folder) / "text.txt").write_text("Ärger" * 60, encoding="utf-8")
    case = case_of(tmp_path, 'tokenizer = "bytes"\nscore_text = "text.txt"\nwindows = 2\ntask = "task.yaml"')
    found = asked_of(case, 128, 256)
    assert found.likelihoods is not None
    assert [len(row) for row in found.scored[:2]] == [128, 128]
    assert bytes(found.scored[2]) == b"Q: one? A: yes"
    assert bytes(found.prompts[2]) == b"Q: one? A:"
    assert found.likelihoods.windows == 2
    assert [(one.right, one.lengths) for one in found.likelihoods.questions] == [((1,), (3, 2)), ((0,), (1, 2, 3))]
    assert found.likelihoods.first_counted == (1, 1, 10, 10, 10, 10, 10)


def test_a_page_of_wikitext_is_scored_without_its_marks_and_counted_with_them(tmp_path: Path) -> None:
    page = (
        " \n = A star = \n \n It 's 3 @,@ 500 or 2 @.@ 5 half @-@ lives , they say ; the stars ' own ( \" one \" ) . "
        "At 20 \N{DEGREE SIGN} C \n = = Later = = \n "
    )
    # The result of lm-eval 0.4.13; 200,000 random texts gave the same.
    text = (
        "\n= A star =\n\nIt's 3,500 or 2.5 half-lives, they say; the stars' own (\"one\"). "
        "At 20\N{DEGREE SIGN}C\n== Later ==\n"
    )
    assert detokenized(page) == text
    case = case_of(tmp_path, "prompt_lengths = [3]")
    (Path(case.folder) / "text.txt").write_text(page, encoding="utf-8")
    # lm-eval splits at white space: what stands before the first and behind the last counts, empty as it is.
    words = len(page.split()) + 2
    for context, more, scored, counted in (
        (256, "", page, words), (256, "wikitext = true", text, words), (100, "windows = 1", page[:100], 0),
    ):  # fmt: skip
        case = case_of(tmp_path, f'tokenizer = "bytes"\nscore_text = "text.txt"\ncontext = {context}\n{more}')
        found = asked_of(case, context, 256)
        assert [bytes(row).decode() for row in found.scored] == [scored]
        assert found.likelihoods is not None
        assert found.likelihoods.words == counted


def test_what_is_longer_than_the_context_loses_its_beginning_and_is_counted(tmp_path: Path) -> None:
    case = case_of(tmp_path, "prompt_lengths = [3]")
    written(Path(case.folder))
    case = case_of(tmp_path, 'tokenizer = "bytes"\ntask = "task.yaml"\ndocuments = 1')
    found = asked_of(case, 10, 256)
    assert found.likelihoods is not None
    assert [bytes(row) for row in found.scored] == [b"ne? A: yes", b"one? A: no"]
    assert (found.likelihoods.cut, found.likelihoods.first_counted) == (2, (6, 7))
    with pytest.raises(ConfigError, match="a choice has 4 tokens, expected at most 3"):
        asked_of(case, 4, 256)
    with pytest.raises(ConfigError, match=r"generate.tokenizer: bytes gives the token 81, and the decoder has 0 to 63"):
        asked_of(case, 128, 64)


@pytest.mark.parametrize(
    ("generate", "rest", "problem"),
    [
        ('score_text = "text.txt"', "", "generate.tokenizer: is missing"),
        ('tokenizer = "gone.json"\nscore_text = "text.txt"', "", "'gone.json' is no file"),
        ('tokenizer = "bytes"\nprompt_lengths = [3]', "", "generate.tokenizer: is for score_text or task or texts"),
        ("prompt_lengths = [3]\nwikitext = true", "", "generate.wikitext: is for score_text"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"\nprompt_lengths = [3]', "",
         "generate.prompt_lengths: is for prompts"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"\nnew = 4', "", "generate.new: is for prompts"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"\ndocuments = 4', "", "generate.documents: is for task"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"\nprefix = [256]', "", "generate.prefix: has the token 256"),
        ('tokenizer = "bytes"\ntask = "bad.yaml"', "", "output_type: is None"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"', "[case.tiny.tolerance.16a8w]\nquantized = {kl = 0.1}",
         "tolerance.16a8w.quantized.kl: is a figure that this case has not"),
        ("prompt_lengths = [3]", "[case.tiny.tolerance.16a8w]\nquantized = {other_choices = 0}",
         "quantized.other_choices: is a figure that this case has not"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"', "[[case.tiny.expect]]\nleast_accuracy = {acc = 2.0}",
         "least_accuracy"),
        ('tokenizer = "bytes"\nscore_text = "text.txt"\nwindows = 2',
         "[[case.tiny.expect]]\nmost_word_perplexity = 9.0", "most_word_perplexity: is of the words of a whole"),
        ("prompt_lengths = [3]", "[[case.tiny.expect]]\nmost_word_perplexity = 9.0", "most_word_perplexity: is of the"),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_meant_is_refused_when_it_is_read(
    tmp_path: Path, generate: str, rest: str, problem: str
) -> None:
    case = case_of(tmp_path, "prompt_lengths = [3]")
    Path(case.folder, "text.txt").write_text("text")
    Path(case.folder, "bad.yaml").write_text("task: bad")
    with pytest.raises(ConfigError, match=problem):
        case_of(tmp_path, generate, rest)


def test_the_key_of_a_bundle_has_text_task_and_data_by_their_content(tmp_path: Path) -> None:
    case = case_of(tmp_path, "prompt_lengths = [3]")
    folder = Path(case.folder)
    written(folder)
    (folder / "text.txt").write_text("text")
    case = case_of(tmp_path, 'tokenizer = "bytes"\nscore_text = "text.txt"\ntask = "task.yaml"')
    assert {path.name for path in named_files(case)} == {"text.txt", "task.yaml", "q.jsonl"}
    digests = {source_digest(case)}
    for name in ("text.txt", "task.yaml", "q.jsonl"):
        (folder / name).write_text((folder / name).read_text() + "\n")
        digests.add(source_digest(case))
    assert len(digests) == 4


def test_tokenizers_of_files_are_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    assert load_tokenizer("model", tmp_path)("a b c") == [0, 1, 2]

    pytest.importorskip("tiktoken")
    # Ranks of bytes and of one pair: "ab" is the lowest that applies.
    import base64

    ranks = {bytes([one]): one for one in range(256)} | {b"ab": 256}
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    assert load_tokenizer("tokenizer.model", tmp_path)("abc") == [256, ord("c")]

    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken.json: is no tokenizer that can be read"):
        load_tokenizer("broken.json", tmp_path)


def test_the_suite_that_ships_has_a_text_and_questions() -> None:
    [case] = load_suite(find_suites()["llm_tasks"]).cases
    found = asked_of(case, 128, 256)
    assert found.likelihoods is not None
    assert (found.likelihoods.windows, len(found.likelihoods.questions), found.likelihoods.cut) == (4, 8, 0)
    assert not math.isclose(len(set(found.prompts)), len(found.prompts)), "choices of a question share their prompt"


# Published decoders: their limits in test_suites/published.toml, and suites that include these.


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


HELLASWAG = """
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
    (folder / "hellaswag.yaml").write_text(HELLASWAG)
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
