from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.flakiness import LOOKED_AT, WINDOW, Reliability, Try, record_of, wilson


def tries(verdicts: str, code: str = "k", first: int = 0) -> list[Try]:
    """Return one try per run: `p` for passed, `f` for failed."""
    return [Try(f"run-{first + n:03}", code, verdict == "p") for n, verdict in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    # Values of Brown, Cai and DasGupta's formula, by hand; SciPy's binomtest has the same for 5 of 8.
    [
        (5, 8, 0.3057, 0.8632),
        (18, 20, 0.6990, 0.9721),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(passed: int, count: int, low: float, high: float) -> None:
    assert wilson(passed, count) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_holds_the_rate(passed: int, count: int) -> None:
    passed = min(passed, count)
    low, high = wilson(passed, count)
    assert 0 <= low <= passed / count <= high <= 1


def test_a_job_that_always_passes_or_fails_is_steady() -> None:
    assert record_of(tries("p" * 40)).reliability is Reliability.STEADY
    record = record_of(tries("f" * 40))
    assert (record.reliability, record.passed, record.tries, record.since) == (Reliability.STEADY, 0, WINDOW, "")


def test_a_verdict_that_changes_with_the_code_is_steady() -> None:
    broken = tries("p" * 10, "good") + tries("f" * 10, "bad", 10) + tries("p" * 10, "fixed", 20)
    assert record_of(broken).reliability is Reliability.STEADY
    assert record_of(broken).passed == 10


def test_unknown_code_counts_as_equal_only_within_a_run() -> None:
    assert record_of(tries("pf" * 10, "")).reliability is Reliability.STEADY
    retried = [*tries("ppp", ""), Try("run-003", "", False), Try("run-003", "", True)]
    assert record_of(retried).reliability is Reliability.NEWLY_FLAKY
    assert record_of(retried).since == "run-003"


def test_a_fixed_job_is_not_flaky_until_it_fails_again() -> None:
    assert record_of(tries("f" * 39 + "p")).reliability is Reliability.STEADY
    assert record_of(tries("f" * 30 + "ppf")).since == "run-032"


def test_a_job_that_slipped_in_the_earlier_window_is_not_newly_flaky() -> None:
    assert record_of(tries("p" * 35 + "fpfpf")).reliability is Reliability.NEWLY_FLAKY
    assert record_of(tries("p" * 35 + "fpfpf")).since == "run-035"
    assert record_of(tries("pf" * 20)).reliability is Reliability.FLAKY
    assert record_of(tries("pf" * 20)).since == "run-001"
    # The rate is of the newest runs alone.
    assert record_of(tries("f" * 20 + "p" * 18 + "ff")).passed == 18


def test_it_has_healed_when_passes_are_more_than_chance_gives() -> None:
    # 10 failures among 20 tries and one: 5 passes have p = 0.039, and 4 have 0.075.
    half = "pf" * 10
    assert record_of(tries(half + "pppp")).reliability is Reliability.FLAKY
    healed = record_of(tries(half + "ppppp"))
    assert (healed.reliability, healed.since) == (Reliability.HEALED, "run-024")
    assert record_of(tries(half + "p" * 19)).since == "run-024"
    # Passes of a fixed program count, and a single failure after them makes the job flaky again.
    assert record_of(tries(half) + tries("ppppp", "fixed", 20)).reliability is Reliability.HEALED
    assert record_of(tries(half + "pppppf")).reliability is Reliability.FLAKY


def test_a_rare_failure_needs_more_passes() -> None:
    rare = "p" * 9 + "f"
    assert record_of(tries(rare + "p" * 29)).reliability is Reliability.FLAKY
    assert record_of(tries("pppf" + "p" * 14)).reliability is Reliability.HEALED


def test_a_job_that_stays_flaky_is_seldom_called_healed() -> None:
    draw = random.Random(1)
    for rate in (0.1, 0.3, 0.5):
        found = [
            record_of(tries("".join("f" if draw.random() < rate else "p" for _ in range(LOOKED_AT)))).reliability
            for _ in range(500)
        ]
        assert found.count(Reliability.HEALED) / len(found) < 0.15
