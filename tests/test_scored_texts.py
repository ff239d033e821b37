"""Texts and tasks as token ids: windows, choices, templates and data in lm-eval's format, tokenizers, manifests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from farm.base.errors import ConfigError
from farm.builds.bundles.key import named_files, source_digest
from farm.suites.manifests import find_suites, load_suite
from farm.suites.prompts import asked_of, detokenized, load_tokenizer, most_scored, rolling_windows, tokenize_choice
from farm.suites.suite import Case
from farm.suites.tasks import WrittenQuestion, read_task, written_questions

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
