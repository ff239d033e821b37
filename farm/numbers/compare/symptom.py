"""Symptom of a bad commit, and the answer of a comparison about another commit. Pure."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from farm.base.errors import InfraError, UnknownNameError, UsageError
from farm.report.model.compare import ComparedJob, CompareGroup, CompiledFacts, JobState
from farm.results.analysis.scale import GATES

_BUILD, _FALLBACK = "build", "fallback_ops"
COMPILED_METRICS = ("pte_size", "partitions", "delegated_ops", _FALLBACK)
"""Metrics of a compiled program, which repeat exactly and need no device."""


class CommitAnswer(StrEnum):
    """Answer about one commit, in the words of `git bisect`."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"
    """The commit does not build, fails in another way, or its change is not clear."""


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between the good and the bad commit that a search follows."""

    text: str
    """Line for a reader."""
    stage: str = ""
    """Stage at which the job fails newly; empty for a metric."""
    error: str = ""
    """Kind of a build failure: `ValueError` of `ValueError: expected 3`."""
    metric: str = ""
    good: float = 0.0
    """Value at the good commit of a metric in COMPILED_METRICS."""
    bad: float = 0.0
    change: float = 0.0
    """Change of a metric measured in pairs, on its scale."""

    @property
    def needs_device(self) -> bool:
        """True unless compiling alone shows the symptom."""
        return self.stage != _BUILD and self.metric not in COMPILED_METRICS


def require_compared(job: ComparedJob, *, executed: bool = True) -> None:
    """Raise InfraError for a job without a comparison, UsageError for a job that fails at the good commit.

    Unless `executed`, the values of a compiled program are compared although it breaks an expectation of its case.
    """
    if job.group is CompareGroup.NOT_COMPARED:
        raise InfraError(f"{job.name} was not compared: {job.text}")
    if job.a.state is JobState.FAILED and (executed or job.a.compiled is None):
        other = "and the other does" if job.b.state is JobState.PASSED else "nor does the other"
        raise UsageError(f"{job.name} does not pass at the good commit, {other}: {job.a.text}")


def symptom_of(job: ComparedJob, metric: str = "") -> Symptom | None:
    """Return how B is worse than A, or what `metric` shows of it; None without such a difference.

    Without `metric` a failure comes first, then operators left to the CPU, times, and figures of outputs. Raises
    UnknownNameError for a metric that the job does not have.
    """
    values = compiled_values(job)
    if metric in values:
        return _of_values(metric, *values[metric])
    if job.group is CompareGroup.NEWLY_FAILING:
        return Symptom(text=job.b.text, stage=job.b.stage, error=_error(job.b.reason) if job.b.stage == _BUILD else "")
    if not metric and job.leaves_more:
        found = _of_values(_FALLBACK, *values[_FALLBACK])
        return found and msgspec.structs.replace(found, text="; ".join(job.worse))
    if metric and not job.same and metric not in {one.metric for one in job.metrics}:
        raise UnknownNameError("metric", metric, {*values, *(one.metric for one in job.metrics)}, f"of {job.name}")
    for one in job.metrics:
        if one.answer == "worse" and (one.metric == metric if metric else one.decides):
            text = f"{one.metric} {one.values_text}, {one.change_text}" if metric else "; ".join(job.worse)
            return Symptom(text=text, metric=one.metric, change=one.change)
    return None


def answer_of(job: ComparedJob, symptom: Symptom) -> tuple[CommitAnswer, str]:
    """Return whether B of a comparison with the good commit has the symptom, and the reason."""
    if symptom.metric in COMPILED_METRICS:
        return _by_value(job, symptom)
    if symptom.stage:
        return _by_failure(job, symptom)
    return _by_pairs(job, symptom)


def compiled_values(job: ComparedJob) -> dict[str, tuple[float, float]]:
    """Return the metrics of both programs, A and B; empty unless both were compiled."""
    if job.a.compiled is None or job.b.compiled is None:
        return {}
    return dict(zip(COMPILED_METRICS, zip(_values(job.a.compiled), _values(job.b.compiled), strict=True), strict=True))


def _values(facts: CompiledFacts) -> tuple[float, ...]:
    return facts.pte_bytes, facts.partitions, facts.delegated_ops or 0, sum(facts.fallback_ops.values())


def _of_values(metric: str, good: float, bad: float) -> Symptom | None:
    text = f"{metric} {good:g} -> {bad:g}"
    return None if good == bad else Symptom(text=text, metric=metric, good=good, bad=bad)


def _by_value(job: ComparedJob, symptom: Symptom) -> tuple[CommitAnswer, str]:
    values = compiled_values(job)
    if not values:
        return CommitAnswer.SKIP, job.b.text
    _, value = values[symptom.metric]
    is_bad = abs(value - symptom.bad) < abs(value - symptom.good)
    return CommitAnswer.BAD if is_bad else CommitAnswer.GOOD, f"{symptom.metric} {value:g}"


def _by_failure(job: ComparedJob, symptom: Symptom) -> tuple[CommitAnswer, str]:
    state, stage = job.b.state, job.b.stage
    if state is JobState.FAILED:
        is_same = stage == symptom.stage and (stage != _BUILD or _error(job.b.reason) == symptom.error)
        return (CommitAnswer.BAD, job.b.text) if is_same else (CommitAnswer.SKIP, f"another failure: {job.b.text}")
    if state in (JobState.PASSED, JobState.COMPILED, job.a.state):
        return CommitAnswer.GOOD, str(state)
    return CommitAnswer.SKIP, job.b.text


def _by_pairs(job: ComparedJob, symptom: Symptom) -> tuple[CommitAnswer, str]:
    if job.b.state is JobState.FAILED:
        return CommitAnswer.SKIP, f"another failure: {job.b.text}"
    measured = next((one for one in job.metrics if one.metric == symptom.metric), None)
    if measured is None:
        same = CommitAnswer.GOOD, "the program of the good commit"
        return same if job.same else (CommitAnswer.SKIP, f"{symptom.metric} was not measured")
    # A change nearer to the bad end than to the good end is bad; a change from or to infinity has no half.
    finite = math.isfinite(symptom.change)
    least = abs(symptom.change) / 2.0 if finite else GATES[measured.scale].confirmed
    sign = math.copysign(1.0, symptom.change)
    ends = (measured.low, measured.high) if measured.pairs > 1 else (measured.change, measured.change)
    low, high = sorted(sign * end for end in ends)
    answer = CommitAnswer.BAD if low > least else CommitAnswer.GOOD if high < least else CommitAnswer.SKIP
    return answer, f"{symptom.metric} {measured.change_text}"


def _error(reason: str) -> str:
    return reason.partition(":")[0]
