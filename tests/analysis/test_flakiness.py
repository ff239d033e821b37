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


# 10 failures among 20 tries and one: 5 passes have p = 0.039, and 4 have 0.075.
HALF = "pf" * 10
STEADY, FLAKY, NEW, HEALED = Reliability.STEADY, Reliability.FLAKY, Reliability.NEWLY_FLAKY, Reliability.HEALED


@pytest.mark.parametrize(
    ("tried", "reliability", "since"),
    [
        (tries("p" * 40), STEADY, ""),
        (tries("f" * 40), STEADY, ""),
        # A verdict that changes with the code.
        (tries("p" * 10, "good") + tries("f" * 10, "bad", 10) + tries("p" * 10, "fixed", 20), STEADY, ""),
        # Unknown code counts as equal only within a run.
        (tries(HALF, ""), STEADY, ""),
        ([*tries("ppp", ""), Try("run-003", "", False), Try("run-003", "", True)], NEW, "run-003"),
        # A fixed job is not flaky until it fails again.
        (tries("f" * 39 + "p"), STEADY, ""),
        (tries("f" * 30 + "ppf"), NEW, "run-032"),
        (tries("p" * 35 + "fpfpf"), NEW, "run-035"),
        (tries("pf" * 20), FLAKY, "run-001"),
        (tries(HALF + "pppp"), FLAKY, "run-001"),
        (tries(HALF + "ppppp"), HEALED, "run-024"),
        (tries(HALF + "p" * 19), HEALED, "run-024"),
        # Passes of a fixed program count, and a single failure after them makes the job flaky again.
        (tries(HALF) + tries("ppppp", "fixed", 20), HEALED, "run-024"),
        (tries(HALF + "pppppf"), FLAKY, "run-001"),
        # A rare failure needs more passes.
        (tries("p" * 9 + "f" + "p" * 29), FLAKY, "run-009"),
        (tries("pppf" + "p" * 14), HEALED, "run-017"),
    ],
)
def test_reliability_of_a_job(tried: list[Try], reliability: Reliability, since: str) -> None:
    record = record_of(tried)
    assert (record.reliability, record.since) == (reliability, since)


def test_the_rate_is_of_the_newest_runs_alone() -> None:
    assert record_of(tries("f" * 20 + "p" * 18 + "ff")).passed == 18
    assert (record_of(tries("f" * 40)).passed, record_of(tries("f" * 40)).tries) == (0, WINDOW)


def test_a_job_that_stays_flaky_is_seldom_called_healed() -> None:
    draw = random.Random(1)
    for rate in (0.1, 0.3, 0.5):
        found = [
            record_of(tries("".join("f" if draw.random() < rate else "p" for _ in range(LOOKED_AT)))).reliability
            for _ in range(500)
        ]
        assert found.count(Reliability.HEALED) / len(found) < 0.15
