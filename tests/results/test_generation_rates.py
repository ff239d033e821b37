"""Rates and times of a generation, from what its runner reports."""

from __future__ import annotations

from typing import Any

import pytest

from farm.builds.bundles.bundle import Generation
from farm.results.attempt import Measurement
from farm.results.measurements import WINDOWS, rate_measurements, stretch
from farm.results.runner_report import Generated, RunnerReport
from farm.suites.figures import Direction

MS = 1_000_000


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


def measured(*rounds: Generated, context: int = 128, prompts: int = 0, **report: Any) -> dict[str, Measurement]:
    one_round = tuple(one.prompt_tokens for one in rounds[: prompts or len(rounds)])
    generation = Generation("kv", context, 0, 1, 2, 256, 16, 16, prompt_tokens=one_round)
    whole = RunnerReport(1, True, 0, generated=rounds, **report)
    return {one.metric: one for one in rate_measurements(generation, whole)}


def test_times_to_the_first_token_are_told_apart_by_the_length_of_the_prompt() -> None:
    found = measured(generated(0, 8, [2, 2]), generated(1, 32, [4, 4]), generated(2, 8, [2], first_token_ns=9 * MS))
    assert found["first_token_time[8]"].samples == (8 * MS, 9 * MS)
    assert found["first_token_time[32]"].samples == (32 * MS,)
    assert found["prefill_rate"].samples == pytest.approx((1000, 1000, 8 / 0.009))
    assert found["decode_rate"].samples[:2] == pytest.approx((500, 250))
    assert {(one.unit, one.direction) for name, one in found.items() if "rate" in name} == {
        ("tokens/s", Direction.HIGHER)
    }


def test_a_rate_has_what_the_runner_does_between_two_steps_in_it() -> None:
    one = generated(0, 8, [2, 2], total_ns=(8 + 4 + 4) * MS)
    assert measured(one)["decode_rate"].samples == pytest.approx((250,))


def test_the_curve_is_over_positions_of_the_context_and_the_same_for_every_prompt() -> None:
    assert [stretch(context) for context in (1, 8, 9, 128, 129, 4096)] == [1, 1, 2, 16, 32, 512]
    found = measured(generated(0, 14, [1, 1, 5]), generated(1, 40, [9]))
    assert {name: one.samples for name, one in found.items() if "step" in name} == {
        "step_time[0-15]": (MS, MS),
        "step_time[16-31]": (5 * MS,),
        "step_time[32-47]": (9 * MS,),
    }
    lookahead = measured(generated(0, 0, [1, 1], tokens=(7,) * 33))
    assert list(lookahead)[-2:] == ["step_time[0-15]", "step_time[16-31]"], "a step gives many tokens"


def test_a_fall_shows_under_sustained_load_and_only_there() -> None:
    first = generated(0, 8, [2] * 20)
    assert not [name for name in measured(first) if name.startswith("sustained")]
    rounds = [first, *(generated(0, 8, [2 + number // 5] * 20) for number in range(10))]
    found = measured(*rounds, prompts=1)
    rates = found["sustained_rate"].samples
    assert len(rates) == WINDOWS
    assert rates[0] == pytest.approx(500), "of decoding alone, whatever the prompts take"
    assert rates[-1] == pytest.approx(1000 / 3)
    assert found["sustained_fall"].samples == pytest.approx((1 / 3,))
    assert len(found["decode_rate"].samples) == 1, "of the first round"
    steady = measured(*[first] * 30, prompts=1)
    assert steady["sustained_fall"].samples == pytest.approx((0.0,), abs=1e-9)


def test_what_is_not_known_is_left_out() -> None:
    crashed = generated(0, 8, [2, 2], total_ns=None)
    assert set(measured(crashed)) == {"first_token_time[8]", "prefill_rate", "step_time[0-15]"}
    assert set(measured(generated(0, 8, []))) == {"first_token_time[8]", "prefill_rate"}
    assert measured(Generated(0, 8)) == {}
    few = [generated(0, 8, [2]) for _ in range(4)]
    assert "sustained_fall" not in measured(*few, prompts=1)


def test_loads_and_memory_are_of_the_process() -> None:
    loads = {"prefill_forward": 2 * MS, "kv_forward": MS, "x" * 200: MS}
    found = measured(generated(0, 8, [2]), method_loads_ns=loads, peak_memory_bytes=5_000)
    assert [name for name in found if "load" in name] == [
        "method_load_time[kv_forward]", "method_load_time[prefill_forward]",
    ]  # fmt: skip
    assert (found["peak_memory"].samples, found["peak_memory"].unit) == ((5_000,), "bytes")
