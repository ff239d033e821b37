"""Symptom of a bad commit, and the answers that comparisons with other commits give about it."""

from __future__ import annotations

import math

import pytest
from compare.made import broken, job, moved, passed, side

from farm.base.errors import FarmError, InfraError, UnknownNameError, UsageError
from farm.numbers.compare.symptom import CommitAnswer, answer_of, require_compared, symptom_of
from farm.report.model.compare import ComparedJob

GOOD, BAD, SKIP = CommitAnswer

FAILS = job(passed("p"), side("q", "failed", "sqnr 2 dB < 30 dB"))
BREAKS = job(passed("p"), broken("ValueError: no input"))
SLOWER = job(passed("p"), passed("q"), moved(change=0.3, low=0.28, high=0.32))
ON_THE_CPU = job(passed("p"), passed("q", fallback_ops={"aten.relu": 2}), moved(change=0.3))
LESS_EXACT = job(passed("p"), passed("q"), moved("sqnr_fp32[0]", -math.inf, pairs=1, low=-math.inf, high=math.inf))


@pytest.mark.parametrize(
    ("bad", "metric", "text", "needs_device"),
    [
        (FAILS, "", "numerics: sqnr 2 dB < 30 dB", True),
        (BREAKS, "", "build: ValueError: no input", False),
        (ON_THE_CPU, "", "aten.relu 0 -> 2 on the CPU", False),
        (SLOWER, "", "htp_cycles", True),
        (LESS_EXACT, "", "sqnr_fp32[0]", True),
        (job(passed("p"), passed("q", pte_bytes=900)), "pte_size", "pte_size 1000 -> 900", False),
        (
            job(passed("p"), passed("q"), moved("latency", 0.3, low=0.28, high=0.32, decides=False)),
            "latency",
            "latency",
            True,
        ),
    ],
)
def test_a_difference_of_the_bad_commit_is_its_symptom(
    bad: ComparedJob, metric: str, text: str, needs_device: bool
) -> None:
    symptom = symptom_of(bad, metric)
    assert symptom is not None
    assert text in symptom.text
    assert symptom.needs_device is needs_device
    require_compared(bad)
    assert answer_of(bad, symptom)[0] is BAD


def test_values_of_a_program_are_compared_whatever_its_case_expects() -> None:
    refused = job(side("p", "failed", "1 partition, expected 2", stage="build"), side("q", pte_bytes=900))
    require_compared(refused, executed=False)
    with pytest.raises(UsageError, match="does not pass at the good commit"):
        require_compared(refused)
    with pytest.raises(UsageError, match="does not pass at the good commit"):
        require_compared(job(broken(), side("q")), executed=False)


@pytest.mark.parametrize(
    ("bad", "metric"),
    [
        (job(side("p"), side("p")), ""),
        (job(side("p"), side("p")), "latency"),
        (job(passed("p"), passed("q", pte_bytes=900)), ""),
        (job(passed("p"), passed("q", pte_bytes=900)), "partitions"),
        (job(passed("p"), passed("q"), moved("latency", 0.3, decides=False)), ""),
        (job(passed("p"), passed("q"), moved(change=-0.3, answer="better")), "htp_cycles"),
    ],
)
def test_a_commit_that_is_not_worse_has_no_symptom(bad: ComparedJob, metric: str) -> None:
    assert symptom_of(bad, metric) is None


def test_a_metric_that_the_job_does_not_have_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'htp_cycles'"):
        symptom_of(SLOWER, "htp_cycle")


@pytest.mark.parametrize(
    ("bad", "between", "answer"),
    [
        (FAILS, job(passed("p"), side("r", "failed", "sqnr 9 dB < 30 dB")), BAD),
        (FAILS, job(passed("p"), side("r", "failed", "no output", stage="execute")), SKIP),
        (FAILS, job(passed("p"), broken("KeyError: 'x'")), SKIP),
        (FAILS, job(passed("p"), passed("r"), moved(change=0.3)), GOOD),
        (FAILS, job(side("p"), side("p")), GOOD),
        (FAILS, job(passed("p"), side("r", "failed", "sqnr 9 dB", known_issue="#1")), SKIP),
        (BREAKS, job(side("p"), broken("ValueError: another line")), BAD),
        (BREAKS, job(side("p"), broken("ImportError: no_such_helper")), SKIP),
        (BREAKS, job(side("p"), side("r")), GOOD),
        (ON_THE_CPU, job(side("p"), side("r", fallback_ops={"aten.relu": 2})), BAD),
        (ON_THE_CPU, job(side("p"), side("r")), GOOD),
        (ON_THE_CPU, job(side("p"), broken()), SKIP),
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.25, low=0.2, high=0.3)), BAD),
        # A smaller loss than half of that at the bad end is another one, confirmed or not.
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.05, low=0.04, high=0.06)), GOOD),
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.14, low=0.1, high=0.2, answer="unknown")), SKIP),
        (SLOWER, job(side("p"), side("p")), GOOD),
        (SLOWER, job(passed("p"), passed("r")), SKIP),
        (SLOWER, job(passed("p"), side("r", "failed", "sqnr 2 dB < 30 dB"), moved()), SKIP),
        (LESS_EXACT, job(passed("p"), passed("r"), moved("sqnr_fp32[0]", 0.0, pairs=1)), GOOD),
    ],
)
def test_a_commit_is_bad_with_the_same_symptom_only(
    bad: ComparedJob, between: ComparedJob, answer: CommitAnswer
) -> None:
    symptom = symptom_of(bad)
    assert symptom is not None
    require_compared(between)
    assert answer_of(between, symptom)[0] is answer


@pytest.mark.parametrize(
    ("tried", "error", "text"),
    [
        (job(side("p"), side("q"), left_out="no device was left"), InfraError, "no device was left"),
        (job(side("p"), side(None, "infra", "disk full", stage="build")), InfraError, "disk full"),
        (job(broken(), broken()), UsageError, "nor does the other"),
        (job(broken(), passed("q")), UsageError, "and the other does"),
    ],
)
def test_trouble_of_the_farm_or_of_the_good_commit_is_no_answer(
    tried: ComparedJob, error: type[FarmError], text: str
) -> None:
    with pytest.raises(error, match=text):
        require_compared(tried)
