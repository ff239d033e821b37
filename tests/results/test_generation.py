"""Generated text: refused reports, judgement of logits and tokens, and measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest

from farm.builds.bundles.bundle import Bundle, Generation, Manifest, TensorSpec
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Attempt, Cause
from farm.results.generation import report_problem
from farm.results.judge import judge
from farm.results.runner_report import Generated, RunnerReport
from farm.suites.figures import kl_divergence, worst_position_db
from farm.suites.generate import Generate
from farm.suites.suite import Case, Expectation, Job, Limits, Target, Tolerance

VOCABULARY, NEW = 6, 3
PROMPTS = ((1, 2), (3, 4, 5, 0))
POSITIONS = 7
MS = 1_000_000


def logits_for(tokens: tuple[int, ...], prompt: int, seed: int) -> np.ndarray:
    """Logits that choose `tokens` after the prompt, [POSITIONS, VOCABULARY]; zero beyond."""
    rows = np.zeros((POSITIONS, VOCABULARY), np.float32)
    rows[: len(tokens)] = np.random.default_rng(seed).normal(size=(len(tokens), VOCABULARY))
    for row in range(prompt - 1, len(tokens) - 1):
        rows[row, tokens[row + 1]] = 5.0
    return rows


def padded(tokens: tuple[int, ...], length: int) -> np.ndarray:
    return np.array([*tokens, *[-1] * (length - len(tokens))], np.int32)


class Text:
    """Files of a device for two prompts, generated as in the references; tests change them."""

    def __init__(self, root: Path, *, hybrid: bool = False) -> None:
        self.folder, self.bundle_folder = root / "raw", root / "bundle"
        self.folder.mkdir()
        for name in ("inputs", "reference_fp32", "reference_quantized"):
            (self.bundle_folder / name).mkdir(parents=True)
        self.chosen = [(2, 2, 1), (0, 1, 5)]
        self.tolerance: Tolerance | None = None
        self.expect: tuple[Expectation, ...] = ()
        outputs = (TensorSpec((POSITIONS, VOCABULARY), "float32"),) * (2 if hybrid else 1)
        self.manifest = Manifest(
            key="0123456789abcdef", job_id="llm/tiny[SM8650-htp-16a8w]", soc="SM8650", backend="htp", precision="16a8w",
            samples=2, inputs=(TensorSpec((4,), "int32"), TensorSpec((POSITIONS,), "int32")), outputs=outputs,
            pte_bytes=1000, delegates={"QnnBackend": 1}, delegated_ops=7, fallback_ops={}, seconds={}, versions={},
            files={},
            generation=Generation(
                mode="hybrid" if hybrid else "kv", context=16, prefill=4 if hybrid else 0, decode=1, layers=2,
                vocabulary=VOCABULARY, cache_bits=16, new=NEW, prompt_tokens=(2, 4), scored=(5, 7),
                tokens={"fp32": tuple(self.chosen), "quantized": tuple(self.chosen)},
            ),
        )  # fmt: skip
        for sample, prompt in enumerate(PROMPTS):
            text = (*prompt, *self.chosen[sample])
            padded(prompt, 4).tofile(self.bundle_folder / f"inputs/input_{sample}_0.raw")
            padded(text, POSITIONS).tofile(self.bundle_folder / f"inputs/input_{sample}_1.raw")
            rows = logits_for(text, len(prompt), sample)
            for index in range(len(outputs)):
                for kind in ("fp32", "quantized"):
                    rows.tofile(self.bundle_folder / f"reference_{kind}/output_{sample}_{index}.raw")
                rows.tofile(self.folder / f"output_{sample}_{index}.raw")
        self.generated = [self._generated(line, tokens) for line, tokens in enumerate(self.chosen)]
        self.run_seconds = 1.0

    def _generated(self, line: int, tokens: tuple[int, ...]) -> dict[str, Any]:
        prompt = len(PROMPTS[line])
        return {
            "line": line, "prompt_tokens": prompt, "tokens": list(tokens), "prefill_ns": [MS] * prompt,
            "steps_ns": [2 * MS] * (len(tokens) - 1), "first_token_ns": prompt * MS,
            "total_ns": prompt * MS + 2 * MS * (len(tokens) - 1), "ended": "new",
        }  # fmt: skip

    def again(self, line: int, tokens: tuple[int, ...], ended: str = "new") -> None:
        """Add the tokens of a later round."""
        self.generated.append(self._generated(line, tokens) | {"ended": ended})

    def output(self, sample: int, index: int = 0) -> np.ndarray:
        return np.fromfile(self.folder / f"output_{sample}_{index}.raw", np.float32).reshape(POSITIONS, VOCABULARY)

    def set_output(self, sample: int, rows: np.ndarray, index: int = 0) -> None:
        rows.astype(np.float32).tofile(self.folder / f"output_{sample}_{index}.raw")

    def judge(self) -> Attempt:
        spec = self.manifest.outputs[0]
        written = {"shape": list(spec.shape), "dtype": spec.dtype, "nbytes": spec.nbytes}
        report = {
            "schema": 1, "ok": True, "exit_code": 0, "error": None, "method": "kv_forward", "load_ns": 9 * MS,
            "verification_ns": MS, "inputs": [], "outputs": [written] * len(self.manifest.outputs),
            "inferences": [
                {"line": line, "iterations_ns": one["steps_ns"]} for line, one in enumerate(self.generated[:2])
            ],
            "generated": self.generated, "method_loads_ns": {"kv_forward": 8 * MS},
        }  # fmt: skip
        (self.folder / "result.json").write_text(json.dumps(report))
        tolerances = {"16a8w": self.tolerance} if self.tolerance else {}
        case = Case("llm", "tiny", "", (), samples=2, tolerances=tolerances, expect=self.expect, generate=Generate())
        job = Job(case, Target("SM8650", "htp", "16a8w"))
        raw = RawResult(
            job_id=job.id, serial="emulator-5554", workspace=PurePosixPath("/device"), folder=self.folder, started_ms=1,
            exit_code=0, run_seconds=self.run_seconds,
        )  # fmt: skip
        return judge(job, Bundle(self.bundle_folder, self.manifest), raw)


def measured(attempt: Attempt) -> dict[str, tuple[float, ...]]:
    return {measurement.metric: measurement.samples for measurement in attempt.measurements}


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text(tmp_path)


@pytest.fixture
def hybrid(tmp_path: Path) -> Text:
    return Text(tmp_path, hybrid=True)


def test_text_as_its_references_have_it_passes_with_everything_measured(text: Text) -> None:
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


def test_one_position_that_is_wrong_breaks_a_limit_that_the_whole_keeps(text: Text) -> None:
    text.tolerance = Tolerance(quantized=Limits(sqnr_db=20.0, worst_position_db=30.0))
    rows = text.output(1)
    rows[2] *= 1.1
    text.set_output(1, rows)
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage, attempt.cause) == ("failed", "numerics", Cause.NUMERICS)
    assert attempt.reason == "output 0 against quantized: worst_position 20 dB < 30 dB"
    assert measured(attempt)["worst_position_quantized[0]"] == pytest.approx((math.inf, 20.0), abs=1e-4)


def test_what_a_case_of_text_is_judged_by_without_a_word_in_its_manifest(text: Text) -> None:
    text.set_output(0, text.output(0) * 1.01)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert "against quantized: sqnr 40 dB < " in attempt.reason


@pytest.mark.parametrize(
    ("limits", "text_of_it"),
    [
        (Tolerance(fp32=Limits(sqnr_db=0.0, kl=1e-3)), "output 0 against fp32: kl "),
        (Tolerance(fp32=Limits(sqnr_db=0.0, perplexity_ratio=1.05)), "output 0 against fp32: perplexity_ratio "),
    ],
)
def test_probabilities_have_limits_of_their_own(text: Text, limits: Tolerance, text_of_it: str) -> None:
    text.tolerance = limits
    text.set_output(0, text.output(0) * 0.5)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason.startswith(text_of_it)


def test_a_token_that_differs_is_a_note_and_decides_nothing(text: Text) -> None:
    # The device's own logits prefer this token: in FP32 the two are close together.
    text.tolerance = Tolerance(fp32=Limits(sqnr_db=10.0))
    text.generated[0]["tokens"] = [2, 3, 1]
    rows = text.output(0)
    rows[2, 3] = 5.1
    text.set_output(0, rows)
    reference = text.bundle_folder / "reference_fp32/output_0_0.raw"
    rows[2, 3] = 4.9
    rows.tofile(reference)
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


def test_a_chosen_token_that_fp32_finds_improbable_breaks_a_margin(text: Text) -> None:
    text.tolerance = Tolerance(fp32=Limits(sqnr_db=0.0, margin=0.5))
    text.generated[0]["tokens"] = [2, 3, 1]
    rows = text.output(0)
    rows[2, 3] = 5.1
    text.set_output(0, rows)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason.startswith("output 0 against fp32: margin 0.0")


def test_a_token_that_its_own_logits_do_not_ask_for_fails(text: Text) -> None:
    text.generated[1]["tokens"] = [0, 2, 5]
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage) == ("failed", "numerics")
    assert attempt.reason.startswith("prompt 1: token 2 that was generated is 2, and its own logits for the same text")


def test_rounds_that_repeat_the_first_pass_and_one_that_does_not_fails(text: Text) -> None:
    text.again(0, text.chosen[0])
    text.again(1, text.chosen[1][:2], "seconds")
    assert text.judge().verdict == "passed"
    text.generated[2]["tokens"] = [2, 2, 4]
    attempt = text.judge()
    assert attempt.reason == "prompt 0: round 2 gave 4 as token 3, the first round 1"


def test_tokens_that_are_expected_of_a_ready_program_decide(text: Text) -> None:
    assert text.manifest.generation is not None
    expected = (text.chosen[0], (0, 1, 4))
    generation = msgspec.structs.replace(text.manifest.generation, tokens={"expected": expected})
    text.manifest = msgspec.structs.replace(text.manifest, generation=generation)
    attempt = text.judge()
    assert (attempt.verdict, attempt.reason) == ("failed", "prompt 1: token 3 is 5, expected 4")


def test_prefill_is_compared_with_decode(hybrid: Text) -> None:
    for one in hybrid.generated:
        one["prefill_ns"] = [MS]
    attempt = hybrid.judge()
    assert (attempt.verdict, measured(attempt)["prefill_quantized[0]"]) == ("passed", (math.inf, math.inf))
    hybrid.tolerance = Tolerance(quantized=Limits(sqnr_db=10.0, prefill_db=45.0))
    rows = hybrid.output(1)
    rows[:4] *= 1.01
    hybrid.set_output(1, rows)
    attempt = hybrid.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason == "output 0 against quantized: prefill 40 dB < 45 dB"


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        (Limits(sqnr_db=-60.0, kl=1e-3), "kl "),
        (Limits(sqnr_db=-60.0, worst_position_db=20.0), "worst_position "),
        (Limits(sqnr_db=-60.0, perplexity_ratio=1.01), "perplexity_ratio "),
    ],
)
def test_tokens_that_both_sides_rule_out_hide_no_other_difference(text: Text, limits: Limits, broken: str) -> None:
    for sample in range(2):
        rows = text.output(sample)
        rows[:, 3] = -math.inf
        for kind in ("fp32", "quantized"):
            rows.tofile(text.bundle_folder / f"reference_{kind}/output_{sample}_0.raw")
        text.set_output(sample, rows)
    text.chosen[1] = (0, 1, 5)
    text.tolerance = Tolerance(quantized=limits)
    equal = measured(text.judge())
    assert equal["kl_fp32[0]"] == (0.0, 0.0)
    assert equal["worst_position_quantized[0]"] == (math.inf, math.inf)
    assert equal["perplexity[0]"][0] > 1.0
    text.set_output(0, text.output(0) * 0.3)
    attempt = text.judge()
    assert attempt.verdict == "failed"
    assert attempt.reason.startswith(f"output 0 against quantized: {broken}")


def test_a_token_of_the_text_that_is_ruled_out_breaks_its_perplexity(text: Text) -> None:
    text.manifest = msgspec.structs.replace(text.manifest, references=(), delegated_ops=None)
    text.expect = (Expectation(most_perplexity=1000.0),)
    for ruled_out, reason in (
        (PROMPTS[1][1], "perplexity is 1.0142e+304, expected 1000 or less"),
        (slice(None), "perplexity was not measured, expected 1000 or less"),
    ):
        rows = text.output(1)
        rows[0, ruled_out] = -math.inf
        text.set_output(1, rows)
        attempt = text.judge()
        assert (attempt.verdict, attempt.stage, attempt.reason) == ("failed", "numerics", reason)


def test_logits_of_a_ready_program_have_to_be_numbers(text: Text) -> None:
    text.manifest = msgspec.structs.replace(text.manifest, references=(), delegated_ops=None)
    text.expect = (Expectation(most_perplexity=1000.0),)
    assert text.judge().verdict == "passed"
    for odd in (math.nan, math.inf):
        rows = text.output(1)
        rows[0, 2] = odd
        text.set_output(1, rows)
        attempt = text.judge()
        assert (attempt.verdict, attempt.stage, attempt.cause) == ("failed", "numerics", Cause.NUMERICS)
        assert attempt.reason == "output 0 of prompt 1 has NaN or infinity among its numbers"


REFUSALS = {
    "too few prompts": ({}, "it has tokens of 1 of 2 prompts"),
    "line": ({"line": 0}, "generated[1] is of prompt 0, expected 1"),
    "prompt": ({"prompt_tokens": 3}, "generated[1] has a prompt of 3 tokens, expected 4"),
    "id": ({"tokens": [0, 6, 5]}, "generated[1] has token 6, the vocabulary has 6"),
    "too many": ({"tokens": [0, 1, 5, 5]}, "generated[1] has 4 tokens, 3 were asked for"),
    "too few": ({"tokens": [0, 1]}, "generated[1] ended by 'new' with 2 tokens"),
    "cut": ({"tokens": [0, 1], "ended": "seconds"}, "generated[1] ended by 'seconds' with 2 tokens"),
    "stop": ({"tokens": [0, 1], "ended": "stop"}, "generated[1] ended by 'stop' with 2 tokens"),
    "context": ({"tokens": [0, 1], "ended": "context"}, "generated[1] ended by 'context' with 2 tokens"),
    "calls": ({"prefill_ns": [1] * 5}, "generated[1] has 5 calls for a prompt of 4 tokens"),
    "steps": ({"steps_ns": [1]}, "generated[1] has 1 steps for 2 tokens after the first"),
    "times": ({"total_ns": None}, "generated[1] does not say how long it took"),
    "order": ({"first_token_ns": 99 * MS}, "generated[1] has a first token before its prompt, or after its end"),
    "sum": ({"total_ns": 5 * MS}, "generated[1] has steps that took longer than all of it"),
    "others": ({"steps_ns": [MS, MS]}, "inferences[1] has other durations than the steps of its prompt"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_report_that_contradicts_what_was_asked_is_refused(text: Text, what: str) -> None:
    changes, problem = REFUSALS[what]
    good = json.dumps(text.generated[1]["steps_ns"])
    text.generated[1] |= changes
    if not changes:
        text.generated.pop()
    generated = tuple(msgspec.convert(one, Generated) for one in text.generated)
    inferences = [{"line": 0, "iterations_ns": [2 * MS] * 2}, {"line": 1, "iterations_ns": json.loads(good)}]
    report = msgspec.convert({"schema": 1, "ok": True, "exit_code": 0, "inferences": inferences}, RunnerReport)
    report = msgspec.structs.replace(report, generated=generated)
    assert text.manifest.generation is not None
    assert report_problem(text.manifest.generation, report) == problem


def test_a_refused_report_is_no_ones_fault_but_the_farms(text: Text) -> None:
    text.generated[0]["tokens"] = [2, 2, 77]
    attempt = text.judge()
    assert (attempt.verdict, attempt.stage) == ("infra", "pull")
    assert attempt.reason == "result.json is refused: generated[0] has token 77, the vocabulary has 6"
    assert attempt.measurements == ()


def test_durations_beyond_the_wall_time_are_refused(text: Text) -> None:
    for _ in range(100):
        for line, tokens in enumerate(text.chosen):
            text.again(line, tokens)
    text.run_seconds = 0.1
    attempt = text.judge()
    assert attempt.verdict == "infra"
    assert "it claims 1." in attempt.reason


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
