"""Generated and given text: refused reports, judgement of logits and tokens, rates, likelihoods and choices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from farm.builds.bundles.bundle import LIKELIHOOD_COLUMNS, Generation
from farm.results.attempt import Direction, Measurement
from farm.results.generation import report_problem
from farm.results.judge import expectation_problem, slow_problem
from farm.results.likelihoods import answers, logarithms_of, perplexity, word_perplexity
from farm.results.measurements import WINDOWS, rate_measurements, stretch
from farm.results.runner_report import Generated, RunnerReport
from farm.suites.figures import kl_divergence, worst_position_db
from farm.suites.generate import Generate
from farm.suites.prompts import Likelihoods, TaskQuestion
from farm.suites.suite import Expectation, Limits, Tolerance

from .conftest import measured
from .generated_text import KINDS, MS, GeneratedText

# Generated and given text: refused reports, judgement of logits and tokens, likelihoods and choices.


# Generated text: refused reports, judgement of logits and tokens, and measurements.


VOCABULARY, NEW, POSITIONS = 6, 3, 7
PROMPTS = ((1, 2), (3, 4, 5, 0))
CHOSEN = ((2, 2, 1), (0, 1, 5))


def logits_for(tokens: tuple[int, ...], prompt: int, seed: int) -> np.ndarray:
    """Logits that choose `tokens` after the prompt, [POSITIONS, VOCABULARY]; zero beyond."""
    rows = np.zeros((POSITIONS, VOCABULARY), np.float32)
    rows[: len(tokens)] = np.random.default_rng(seed).normal(size=(len(tokens), VOCABULARY))
    for row in range(prompt - 1, len(tokens) - 1):
        rows[row, tokens[row + 1]] = 5.0
    return rows


def make(root: Path, *, hybrid: bool = False) -> GeneratedText:
    """Return two prompts, generated as in the references."""
    generation = Generation(
        mode="hybrid" if hybrid else "kv", context=16, prefill=4 if hybrid else 0, decode=1, layers=2,
        vocabulary=VOCABULARY, cache_bits=16, new=NEW, prompt_tokens=(2, 4), scored=(5, 7),
        tokens=dict.fromkeys(KINDS, CHOSEN),
    )  # fmt: skip
    texts = [(*prompt, *chosen) for prompt, chosen in zip(PROMPTS, CHOSEN, strict=True)]
    rows = [logits_for(text, len(PROMPTS[sample]), sample) for sample, text in enumerate(texts)]
    made = GeneratedText(root, generation, rows, CHOSEN, outputs=2 if hybrid else 1)
    for sample, text in enumerate(texts):
        for place, (tokens, length) in enumerate(((PROMPTS[sample], 4), (text, POSITIONS))):
            padded = np.array([*tokens, *[-1] * (length - len(tokens))], np.int32)
            padded.tofile(made.bundle_folder / f"inputs/input_{sample}_{place}.raw")
    return made


@pytest.fixture
def text(tmp_path: Path) -> GeneratedText:
    return make(tmp_path)


def test_text_as_its_references_have_it_passes_with_everything_measured(text: GeneratedText) -> None:
    attempt = text.judge()
    assert (attempt.verdict, attempt.reason, attempt.notes) == ("passed", "", ())
    numbers = measured(attempt)
    assert numbers["worst_position_quantized[0]"] == (math.inf, math.inf)
    assert numbers["kl_fp32[0]"] == (0.0, 0.0)
    assert numbers["perplexity_ratio_quantized[0]"] == (1.0, 1.0)
    assert numbers["same_tokens_quantized"] == (1.0, 1.0)
    assert numbers["margin_fp32[0]"] == (1.0,) * 6
    assert numbers["latency"] == (2 * MS,) * 4
    assert numbers["first_token_time[4]"] == (4 * MS,)
    assert {"decode_rate", "prefill_rate", "method_load_time[kv_forward]", "perplexity[0]"} <= numbers.keys()


@pytest.mark.parametrize(
    ("limits", "scale", "reason"),
    [
        # Without a word in the manifest.
        (None, 1.01, "output 0 against quantized: sqnr 40 dB < "),
        (Limits(sqnr_db=0.0, kl=1e-3), 0.5, "output 0 against fp32: kl "),
        (Limits(sqnr_db=0.0, perplexity_ratio=1.05), 0.5, "output 0 against fp32: perplexity_ratio "),
    ],
)
def test_a_text_has_limits_of_its_own(text: GeneratedText, limits: Limits | None, scale: float, reason: str) -> None:
    text.tolerance = Tolerance(fp32=limits) if limits else None
    text.set_output(0, text.output(0) * scale)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason.startswith(reason)


def test_a_token_that_differs_is_a_note_and_decides_nothing(text: GeneratedText) -> None:
    # The device's own logits prefer this token: in FP32 the two are close together.
    text.tolerance = Tolerance(fp32=Limits(sqnr_db=10.0))
    text.generated[0]["tokens"] = [2, 3, 1]
    rows = text.output(0)
    rows[2, 3] = 5.1
    text.set_output(0, rows)
    rows[2, 3] = 4.9
    text.set_reference(0, rows, "fp32")
    attempt = text.judge()
    assert (attempt.verdict, attempt.reason) == ("passed", "")
    assert attempt.notes == (
        "prompt 0: token 2 of 3 is 3, the quantized module chooses 2",
        "prompt 0: token 2 of 3 is 3, the FP32 module chooses 2",
    )
    numbers = measured(attempt)
    assert numbers["same_tokens_quantized"] == pytest.approx((1 / 3, 1.0))
    # The text after a differing token is another text, without references.
    assert numbers["margin_fp32[0]"] == pytest.approx((1.0, math.exp(-0.1), 1.0, 1.0, 1.0), abs=1e-6)
    # A token that FP32 finds improbable breaks a margin.
    text.tolerance = Tolerance(fp32=Limits(sqnr_db=0.0, margin=0.95))
    attempt = text.judge()
    assert (attempt.verdict, attempt.reason[:36]) == ("failed", "output 0 against fp32: margin 0.9048")


def test_tokens_that_decide(text: GeneratedText) -> None:
    text.add(0, CHOSEN[0])
    text.add(1, CHOSEN[1][:2], "seconds")
    assert text.judge().verdict == "passed", "rounds repeat the first"
    text.generated[2]["tokens"] = [2, 2, 4]
    assert text.judge().reason == "prompt 0: round 2 gave 4 as token 3, the first round 1"
    del text.generated[2:]
    text.generated[1]["tokens"] = [0, 2, 5]
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
    assert attempt.reason.startswith("prompt 1: token 2 that was generated is 2, and its own logits for the same text")
    text.generated[1]["tokens"] = list(CHOSEN[1])
    generation = msgspec.structs.replace(text.generation, tokens={"expected": (CHOSEN[0], (0, 1, 4))})
    text.manifest = msgspec.structs.replace(text.manifest, generation=generation)
    attempt = text.judge()
    assert (attempt.verdict, attempt.reason) == ("failed", "prompt 1: token 3 is 5, expected 4")


def test_prefill_is_compared_with_decode(tmp_path: Path) -> None:
    hybrid = make(tmp_path, hybrid=True)
    for one in hybrid.generated:
        one["prefill_ns"] = [MS]
    attempt = hybrid.judge()
    assert (attempt.verdict, measured(attempt)["prefill_quantized[0]"]) == ("passed", (math.inf, math.inf))
    hybrid.tolerance = Tolerance(quantized=Limits(sqnr_db=10.0, prefill_db=45.0))
    rows = hybrid.output(1)
    rows[:4] *= 1.01
    hybrid.set_output(1, rows)
    attempt = hybrid.judge()
    assert (attempt.verdict, attempt.reason) == ("failed", "output 0 against quantized: prefill 40 dB < 45 dB")


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        (Limits(sqnr_db=-60.0, kl=1e-3), "kl "),
        (Limits(sqnr_db=-60.0, worst_position_db=20.0), "worst_position "),
        (Limits(sqnr_db=-60.0, perplexity_ratio=1.01), "perplexity_ratio "),
    ],
)
def test_tokens_that_both_sides_rule_out_hide_no_other_difference(
    text: GeneratedText, limits: Limits, broken: str
) -> None:
    for sample in range(2):
        rows = text.output(sample)
        rows[:, 3] = -math.inf
        text.set_output(sample, rows)
        for kind in KINDS:
            text.set_reference(sample, rows, kind)
    text.tolerance = Tolerance(quantized=limits)
    equal = measured(text.judge())
    assert equal["kl_fp32[0]"] == (0.0, 0.0)
    assert equal["worst_position_quantized[0]"] == (math.inf, math.inf)
    assert equal["perplexity[0]"][0] > 1.0
    text.set_output(0, text.output(0) * 0.3)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason.startswith(f"output 0 against quantized: {broken}")


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        # A token of the text that is ruled out breaks its perplexity.
        (PROMPTS[1][1], -math.inf, "perplexity is 1.0142e+304, expected 1000 or less"),
        (slice(None), -math.inf, "perplexity was not measured, expected 1000 or less"),
        (2, math.nan, "output 0 of prompt 1 has NaN or infinity among its numbers"),
        (2, math.inf, "output 0 of prompt 1 has NaN or infinity among its numbers"),
    ],
)
def test_logits_of_a_ready_program_have_to_be_numbers(
    text: GeneratedText, place: int | slice, value: float, reason: str
) -> None:
    text.without_references()
    text.expect = (Expectation(most_perplexity=1000.0),)
    assert text.judge().verdict == "passed"
    rows = text.output(1)
    rows[0, place] = value
    text.set_output(1, rows)
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage, attempt.reason) == ("failed", "numerics", reason)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "it has tokens of 1 of 2 prompts"),
        ({"line": 0}, "generated[1] is of prompt 0, expected 1"),
        ({"prompt_tokens": 3}, "generated[1] has a prompt of 3 tokens, expected 4"),
        ({"tokens": [0, 6, 5]}, "generated[1] has token 6, the vocabulary has 6"),
        ({"tokens": [0, 1, 5, 5]}, "generated[1] has 4 tokens, 3 were asked for"),
        ({"tokens": [0, 1]}, "generated[1] ended by 'new' with 2 tokens"),
        ({"tokens": [0, 1], "ended": "seconds"}, "generated[1] ended by 'seconds' with 2 tokens"),
        ({"tokens": [0, 1], "ended": "stop"}, "generated[1] ended by 'stop' with 2 tokens"),
        ({"tokens": [0, 1], "ended": "context"}, "generated[1] ended by 'context' with 2 tokens"),
        ({"prefill_ns": [1] * 5}, "generated[1] has 5 calls for a prompt of 4 tokens"),
        ({"steps_ns": [1]}, "generated[1] has 1 steps for 2 tokens after the first"),
        ({"total_ns": None}, "generated[1] does not report its time"),
        ({"first_token_ns": 99 * MS}, "generated[1] has a first token before its prompt, or after its end"),
        ({"total_ns": 5 * MS}, "generated[1] has steps that took longer than all of it"),
        ({"steps_ns": [MS, MS]}, "inferences[1] has other durations than the steps of its prompt"),
    ],
)
def test_a_report_that_contradicts_what_was_asked_is_refused(
    text: GeneratedText, changes: dict[str, Any], problem: str
) -> None:
    inferences = [{"line": line, "iterations_ns": one["steps_ns"]} for line, one in enumerate(text.generated)]
    text.generated[1] |= changes
    if not changes:
        text.generated.pop()
    report = msgspec.convert({"schema": 1, "ok": True, "exit_code": 0, "inferences": inferences}, RunnerReport)
    report = msgspec.structs.replace(
        report, generated=tuple(msgspec.convert(one, Generated) for one in text.generated)
    )  # fmt: skip
    assert report_problem(text.generation, report) == problem


def test_a_refused_report_is_no_ones_fault_but_the_farms(text: GeneratedText) -> None:
    text.generated[0]["tokens"] = [2, 2, 77]
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage, attempt.measurements) == ("infra", "pull", ())
    assert attempt.reason == "result.json is refused: generated[0] has token 77, the vocabulary has 6"
    text.generated[0]["tokens"] = list(CHOSEN[0])
    for _ in range(100):
        for line, tokens in enumerate(CHOSEN):
            text.add(line, tokens)
    text.run_seconds = 0.1
    attempt = text.judge()
    assert (attempt.verdict, "it claims 1." in attempt.reason) == ("infra", True), "more than the wall time"


def test_figures_of_logits_leave_out_what_is_beyond_the_end() -> None:
    reference = np.array([[3.0, 1.0], [1.0, 2.0], [0.0, 0.0]])
    assert worst_position_db(reference, reference) == math.inf
    assert worst_position_db(reference * 1.1, reference) == pytest.approx(20.0)
    assert worst_position_db(np.zeros((2, 2)), np.zeros((2, 2))) is None
    # Something where there ought to be nothing.
    assert worst_position_db(np.ones((3, 2)), reference) == -math.inf
    assert kl_divergence(reference, reference) == 0.0
    # A constant is no difference between probabilities.
    assert kl_divergence(reference + 7.0, reference) == pytest.approx(0.0, abs=1e-12)
    p, q = 1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(-1.0))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert kl_divergence(np.array([[2.0, 1.0]]), np.array([[3.0, 1.0]])) == pytest.approx(expected)


# Given texts: log-likelihoods from logits by hand, perplexity, choices, intervals, limits and expectations.


TEXT_VOCABULARY, TEXT_POSITIONS = 5, 6
# A window of a text, then a question with two choices, of two tokens and of one.
SEQUENCES = ((0, 1, 2, 3), (4, 0, 1, 2), (4, 0, 3))
FIRST_COUNTED = (1, 2, 2)
LIKELIHOODS = Likelihoods(
    first_counted=FIRST_COUNTED, windows=1, questions=(TaskQuestion(right=(1,), lengths=(8, 3)),),
    metrics=("acc", "acc_norm"), words=2,
)  # fmt: skip
GENERATION = Generation(
    mode="kv", context=8, prefill=0, decode=1, layers=1, vocabulary=TEXT_VOCABULARY, cache_bits=16, new=1,
    prompt_tokens=(4, 2, 2), scored=(4, 4, 3), likelihoods=LIKELIHOODS,
)  # fmt: skip


def rows_of_texts(logits: np.ndarray, sequence: tuple[int, ...]) -> np.ndarray:
    """Return the rows for a sequence with logits [tokens, VOCABULARY], by the formula, in Python's own numbers."""
    rows = np.zeros((TEXT_POSITIONS, LIKELIHOOD_COLUMNS), np.float32)
    for row, following in enumerate(sequence[1:]):
        normal = math.log(sum(math.exp(value) for value in logits[row]))
        rows[row] = logits[row][following] - normal, max(logits[row]) - normal
    return rows


def made(seed: int = 0) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [rows_of_texts(numbers.normal(size=(len(one), TEXT_VOCABULARY)), one) for one in SEQUENCES]


def test_sums_of_logarithms_choose_and_characters_divide() -> None:
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    rows = [np.zeros((TEXT_POSITIONS, LIKELIHOOD_COLUMNS), np.float32) for _ in SEQUENCES]
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
    rows = [np.zeros((TEXT_POSITIONS, LIKELIHOOD_COLUMNS), np.float32) for _ in SEQUENCES]
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


# Rates and times of a generation, from what its runner reports.


def generated(line: int, prompt: int, steps: list[int], **more: Any) -> Generated:
    """A prompt whose first token takes a millisecond for each of its own, and the others `steps` of milliseconds."""
    first = prompt * MS
    whole: dict[str, Any] = {
        "tokens": (7,) * (1 + len(steps)),
        "prefill_ns": (first,),
        "steps_ns": tuple(step * MS for step in steps),
        "first_token_ns": first,
        "total_ns": first + sum(steps) * MS,
    }
    return Generated(line, prompt, **whole | more)


def rates_of(*rounds: Generated, context: int = 128, prompts: int = 0, **report: Any) -> dict[str, Measurement]:
    one_round = tuple(one.prompt_tokens for one in rounds[: prompts or len(rounds)])
    generation = Generation("kv", context, 0, 1, 2, 256, 16, 16, prompt_tokens=one_round)
    whole = RunnerReport(1, True, 0, generated=rounds, **report)
    return {one.metric: one for one in rate_measurements(generation, whole)}


def test_a_rate_has_what_the_runner_does_between_two_steps_in_it() -> None:
    one = generated(0, 8, [2, 2], total_ns=(8 + 4 + 4) * MS)
    assert rates_of(one)["decode_rate"].samples == pytest.approx((250,))


def test_the_curve_is_over_positions_of_the_context_and_the_same_for_every_prompt() -> None:
    assert [stretch(context) for context in (1, 8, 9, 128, 129, 4096)] == [1, 1, 2, 16, 32, 512]
    found = rates_of(generated(0, 14, [1, 1, 5]), generated(1, 40, [9]))
    assert {name: one.samples for name, one in found.items() if "step" in name} == {
        "step_time[0-15]": (MS, MS),
        "step_time[16-31]": (5 * MS,),
        "step_time[32-47]": (9 * MS,),
    }
    lookahead = rates_of(generated(0, 0, [1, 1], tokens=(7,) * 33))
    assert list(lookahead)[-2:] == ["step_time[0-15]", "step_time[16-31]"], "a step gives many tokens"


def test_a_fall_shows_under_sustained_load_and_only_there() -> None:
    first = generated(0, 8, [2] * 20)
    assert not [name for name in rates_of(first) if name.startswith("sustained")]
    rounds = [first, *(generated(0, 8, [2 + number // 5] * 20) for number in range(10))]
    found = rates_of(*rounds, prompts=1)
    rates = found["sustained_rate"].samples
    assert len(rates) == WINDOWS
    assert rates[0] == pytest.approx(500), "of decoding alone, whatever the prompts take"
    assert rates[-1] == pytest.approx(1000 / 3)
    assert found["sustained_fall"].samples == pytest.approx((1 / 3,))
    assert len(found["decode_rate"].samples) == 1, "of the first round"
    steady = rates_of(*[first] * 30, prompts=1)
    assert steady["sustained_fall"].samples == pytest.approx((0.0,), abs=1e-9)


def test_what_is_not_known_is_left_out() -> None:
    crashed = generated(0, 8, [2, 2], total_ns=None)
    assert set(rates_of(crashed)) == {"first_token_time[8]", "prefill_rate", "step_time[0-15]"}
    assert set(rates_of(generated(0, 8, []))) == {"first_token_time[8]", "prefill_rate"}
    assert rates_of(Generated(0, 8)) == {}
    few = [generated(0, 8, [2]) for _ in range(4)]
    assert "sustained_fall" not in rates_of(*few, prompts=1)
