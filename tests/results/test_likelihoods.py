"""Given texts: log-likelihoods from logits by hand, perplexity, choices, intervals, limits and expectations."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from farm.builds.bundles.bundle import LIKELIHOOD_COLUMNS, Generation
from farm.results.attempt import Direction, Measurement
from farm.results.judge import expectation_problem, slow_problem
from farm.results.likelihoods import answers, logarithms_of, perplexity, word_perplexity
from farm.suites.accuracy.asked import Likelihoods, TaskQuestion
from farm.suites.generate import Generate
from farm.suites.suite import Expectation, Limits, Tolerance

from .conftest import measured
from .generated_text import GeneratedText

VOCABULARY, POSITIONS = 5, 6
# A window of a text, then a question with two choices, of two tokens and of one.
SEQUENCES = ((0, 1, 2, 3), (4, 0, 1, 2), (4, 0, 3))
FIRST_COUNTED = (1, 2, 2)
LIKELIHOODS = Likelihoods(
    first_counted=FIRST_COUNTED, windows=1, questions=(TaskQuestion(right=(1,), lengths=(8, 3)),),
    metrics=("acc", "acc_norm"), words=2,
)  # fmt: skip
GENERATION = Generation(
    mode="kv", context=8, prefill=0, decode=1, layers=1, vocabulary=VOCABULARY, cache_bits=16, new=1,
    prompt_tokens=(4, 2, 2), scored=(4, 4, 3), likelihoods=LIKELIHOODS,
)  # fmt: skip


def rows_of(logits: np.ndarray, sequence: tuple[int, ...]) -> np.ndarray:
    """Return the rows for a sequence with logits [tokens, VOCABULARY], by the formula, in Python's own numbers."""
    rows = np.zeros((POSITIONS, LIKELIHOOD_COLUMNS), np.float32)
    for row, following in enumerate(sequence[1:]):
        normal = math.log(sum(math.exp(value) for value in logits[row]))
        rows[row] = logits[row][following] - normal, max(logits[row]) - normal
    return rows


def made(seed: int = 0) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [rows_of(numbers.normal(size=(len(one), VOCABULARY)), one) for one in SEQUENCES]


def test_sums_of_logarithms_choose_and_characters_divide() -> None:
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    rows = [np.zeros((POSITIONS, LIKELIHOOD_COLUMNS), np.float32) for _ in SEQUENCES]
    # Three tokens of the text count: 1/2, 1/8, 1/2; the second is not the likeliest.
    rows[0][:3] = [(half, half), (eighth, half), (half, half)]
    # 1/2 * 1/8 for eight characters, and 1/8 for three: the tokens before them do not count.
    rows[1][:3] = [(-9, -9), (half, half), (eighth, half)]
    rows[2][:2] = [(-9, -9), (eighth, half)]
    answer = logarithms_of(GENERATION, rows)
    assert [len(one) for one in answer.logarithms] == [3, 2, 1]
    assert [list(one) for one in answer.greedy] == [[True, False, True], [True, False], [False]]
    found = perplexity(LIKELIHOODS, answer)
    assert found == pytest.approx((2 * 8 * 2) ** (1 / 3), rel=1e-6)
    assert word_perplexity(LIKELIHOODS, answer) == pytest.approx((2 * 8 * 2) ** (1 / 2), rel=1e-6)
    assert word_perplexity(msgspec.structs.replace(LIKELIHOODS, words=0), answer) is None
    # -2.77 against -2.08; for each character -0.35 against -0.69.
    assert answers(LIKELIHOODS, answer).chosen == {"acc": (1,), "acc_norm": (0,)}
    assert answers(LIKELIHOODS, answer).right == {"acc": 1, "acc_norm": 0}


def test_the_first_of_equal_choices_is_chosen_and_what_is_no_number_never() -> None:
    rows = [np.zeros((POSITIONS, LIKELIHOOD_COLUMNS), np.float32) for _ in SEQUENCES]
    assert answers(LIKELIHOODS, logarithms_of(GENERATION, rows)).chosen["acc"] == (0,)
    rows[1][1, 0] = math.nan
    assert answers(LIKELIHOODS, logarithms_of(GENERATION, rows)).chosen["acc"] == (1,)
    rows[0][1, 0] = math.nan
    assert perplexity(LIKELIHOODS, logarithms_of(GENERATION, rows)) is None


@pytest.fixture
def ran(tmp_path: Path) -> GeneratedText:
    """Given text on a virtual device, equal to the references."""
    generate = Generate(tokenizer="bytes", task="task.yaml", score_text="text.txt")
    ran = GeneratedText(tmp_path, GENERATION, made(), [(0,)] * len(SEQUENCES), generate=generate)
    ran.tolerance, ran.simulated = Tolerance(quantized=Limits(sqnr_db=20.0)), True
    return ran


def test_perplexity_and_accuracy_are_measured_of_the_device_and_of_both_references(ran: GeneratedText) -> None:
    attempt = ran.judge()
    assert (attempt.verdict, attempt.reason) == ("passed", "")
    found = measured(attempt)
    answer = logarithms_of(GENERATION, made())
    assert found["perplexity[0]"] == found["perplexity_fp32[0]"] == (perplexity(LIKELIHOODS, answer),)
    assert found["perplexity_ratio_quantized[0]"] == (1.0,)
    right = answers(LIKELIHOODS, answer).right
    assert found["accuracy[acc]"] == found["accuracy_quantized[acc]"] == (float(right["acc"]),)
    assert (found["questions"], found["other_choices_quantized[0]"], found["lost_answers_fp32[0]"]) == (
        (1.0,), (0.0,), (0.0,),
    )  # fmt: skip
    # Sequences have no first token time, and two logarithms give no divergence.
    assert not any(name.startswith(("first_token_time", "kl_")) for name in found)
    assert attempt.notes[0].startswith("perplexity of the text ")
    assert ", of 3 tokens (" in attempt.notes[0]
    assert attempt.notes[1].startswith(f"acc: {right['acc']} of 1 questions right (")
    assert "the same choice as the quantized module in 1 of 1 questions" in attempt.notes


def test_another_choice_than_the_quantized_modules_breaks_its_limit(ran: GeneratedText) -> None:
    ran.tolerance = Tolerance(quantized=Limits(sqnr_db=-60.0, other_choices=0))
    chosen = answers(LIKELIHOODS, logarithms_of(GENERATION, made())).chosen["acc"][0]
    rows = made()[1 + chosen]
    rows[1, 0] -= 50
    ran.set_output(1 + chosen, rows)
    attempt = ran.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
    assert "other_choices 1 > 0" in attempt.reason
    assert measured(attempt)["other_choices_quantized[0]"] == (1.0,)
    ran.tolerance = Tolerance(quantized=Limits(sqnr_db=-60.0, other_choices=1))
    assert ran.judge().verdict == "passed"


def test_a_text_that_is_less_likely_breaks_the_limit_of_the_ratio(ran: GeneratedText) -> None:
    ran.tolerance = Tolerance(quantized=Limits(sqnr_db=-20.0, perplexity_ratio=1.05))
    ran.set_output(0, made()[0] * 1.1)
    assert "perplexity_ratio 1." in ran.judge().reason


def test_a_case_says_how_likely_and_how_right_it_has_to_be(ran: GeneratedText) -> None:
    for metric in ("perplexity", "word_perplexity"):
        ran.expect = (Expectation(**{f"most_{metric}": 1.5}),)
        attempt = ran.judge()
        assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
        assert attempt.reason.startswith(f"{metric} is ")
        assert attempt.reason.endswith(", expected 1.5 or less")
    numbers = [Measurement("accuracy[acc]", "1", Direction.HIGHER, (0.5,)),
               Measurement("questions", "count", Direction.NONE, (8.0,))]  # fmt: skip
    for least, problem in (
        ({"acc": 0.5}, ""), ({"acc": 0.6}, "acc is 0.5 (4 of 8), expected 0.6 or more"),
        ({"acc_norm": 0.5}, "acc_norm was not measured, expected 0.5 or more"),
    ):  # fmt: skip
        assert expectation_problem(Expectation(least_accuracy=least), numbers) == problem


@pytest.mark.parametrize("backend", ["htp", "xnnpack"])
def test_accuracy_is_expected_of_every_backend_and_nan_is_never_right(ran: GeneratedText, backend: str) -> None:
    ran.without_references()
    ran.backend = backend
    ran.expect = (Expectation(least_accuracy={"acc": 0.0}),)
    assert ran.judge().verdict == "passed"
    ran.expect = (Expectation(most_perplexity=1.0),)
    attempt = ran.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
    ran.expect = (Expectation(least_accuracy={"acc": 0.0}),)
    for sample, rows in enumerate(made()):
        ran.set_output(sample, rows * math.nan)
    attempt = ran.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
    assert attempt.reason == "output 0 of prompt 0 has NaN or infinity among its numbers"


def test_rates_are_expected_of_attached_devices_alone(ran: GeneratedText) -> None:
    ran.expect = (Expectation(least_prefill_rate=1e6),)
    assert ran.judge().verdict == "passed"
    ran.simulated = False
    attempt = ran.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "execute")
    assert attempt.reason == "prefill_rate is 1000 tokens/s, expected 1e+06 or more"
    numbers = [Measurement("decode_rate", "tokens/s", Direction.HIGHER, (10.0, 30.0, 20.0))]
    for expected, problem in (
        (Expectation(least_decode_rate=20.0), ""),
        (Expectation(least_decode_rate=21.0), "decode_rate is 20 tokens/s, expected 21 or more"),
        (Expectation(least_prefill_rate=1.0), "prefill_rate was not measured, expected 1 tokens/s or more"),
    ):
        assert slow_problem(expected, numbers) == problem
