"""The first bad commit of some jobs: few commits between a good and a bad one are compiled and run.

What compiles and runs is handed over (`CommitLab`), so that what is decided here needs neither.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from farm.analysis.commit_search import CommitAnswer, next_commit, shared_choice
from farm.analysis.confirmation import Answer
from farm.analysis.scale import GATES, Series, change_text, scaled
from farm.errors import UnknownNameError
from farm.regressions.commit_records import (
    BuildState,
    CommitBuild,
    CommitRun,
    CommitsState,
    Question,
    QuestionKind,
    ends_problem,
)
from farm.regressions.look_back import TIMES
from farm.results.attempt import Direction, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.analysis.confirmation import Confirmation
    from farm.results.attempt import Measurement
    from farm.suites.suite import Job
    from farm.toolchains.commits import Commit

# Whether a graph is delegated as it was says more than a time, and needs no device.
_FALLBACK = "fallback_ops"
_SIZE = "pte_size"


class CommitLab(Protocol):
    """What compiles jobs at commits and runs what comes of it."""

    def build(self, commit: Commit, jobs: Sequence[Job]) -> Mapping[str, CommitBuild]:
        """Return what each job compiles to at a commit, by id. Raises InfraError."""

    def has(self, build: CommitBuild) -> bool:
        """Return whether what was compiled is still there."""

    def warnings(self, commit: Commit) -> tuple[str, ...]:
        """Return what was not as the commit has it, of one that was built."""

    def run(self, job: Job, build: CommitBuild, commit: Commit) -> CommitRun:
        """Run a program and judge it. Raises InfraError."""

    def pairs(
        self,
        job: Job,
        good: tuple[CommitBuild, Commit],
        new: tuple[CommitBuild, Commit],
        series: Series,
        gate: float | None,
    ) -> Confirmation:
        """Measure in turns whether the new program is worse than the good one. Raises InfraError."""  # fmt: skip


class CommitBisection:
    """Bisections of some jobs over the same commits, which share what is built of them."""

    def __init__(
        self,
        state: CommitsState,
        jobs: Sequence[Job],
        lab: CommitLab,
        save: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """`save` is called after each step, with all that is known in `state`."""
        self.state, self._lab, self._save_state, self._note = state, lab, save, note
        self._jobs = {job.id: job for job in jobs}
        self._last = len(state.commits) - 1
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Look at commits until no other could decide anything. Raises InfraError, UnknownNameError for a metric."""
        asked = [job_id for job_id, search in self.state.searches.items() if search.question is None]
        for index in (0, self._last) if asked else ():
            self._build(index, asked)
        for job_id in asked:
            question = self._ask(job_id)
            self.state.searches[job_id].question = question
            if question.is_open:
                self._settle(job_id, 0, CommitAnswer.GOOD, "the good end")
                self._settle(job_id, self._last, CommitAnswer.BAD, question.reason)
            self._note(f"{job_id}: {question.reason}")
            self._save()
        while wishes := self._wishes():
            self._look_at(shared_choice(wishes.values()))
        self.state.is_finished = True
        self._save()

    def _wishes(self) -> dict[str, int]:
        """Return which commit each job that is not decided wants to be looked at."""
        state, found = self.state, {}
        built = {index for search in state.searches.values() for index, one in search.trials.items() if one.build}
        for job_id, search in state.searches.items():
            if search.question is not None and search.question.is_open:
                index = next_commit(state.content, search.answers, built)
                if index is not None:
                    found[job_id] = index
        return found

    def _look_at(self, index: int) -> None:
        """Compile a commit for all jobs that it may decide something of, and answer."""
        state, commit = self.state, self.state.commits[index]
        jobs = [job_id for job_id in self._wishes() if index in state.range_of(job_id).open]
        ranges = {state.range_of(job_id).bad - state.range_of(job_id).good - 1 for job_id in jobs}
        self._note(f"{commit.short} {commit.subject} ({max(ranges)} left)")
        self._build(index, jobs)
        for job_id in jobs:
            answer, reason = self._answer(job_id, index)
            self._settle(job_id, index, answer, reason)
            self._note(f"{commit.short} {answer}: {job_id}: {reason}")

    def _build(self, index: int, job_ids: Sequence[str]) -> None:
        """Compile what is not known of a commit yet, and keep it."""
        state, commit = self.state, self.state.commits[index]
        lacking = []
        for job_id in job_ids:
            build = state.searches[job_id].trial(index).build
            if build is None or (build.state is BuildState.COMPILED and not self._lab.has(build)):
                lacking.append(self._jobs[job_id])
        if not lacking:
            return
        builds = self._lab.build(commit, lacking)
        for job_id, build in builds.items():
            state.searches[job_id].trial(index).build = build
        if warnings := self._lab.warnings(commit):
            state.warnings[index] = warnings
        tried = any(not one.cached and one.state is not BuildState.NOT_BUILT for one in builds.values())
        if tried and index not in state.compiled:
            state.compiled.append(index)
        self._save()

    def _ask(self, job_id: str) -> Question:
        """Return what tells the ends of a job apart."""
        good, bad = (self.state.searches[job_id].trial(index).build for index in (0, self._last))
        assert good is not None  # noqa: S101 - for the type: both were just built
        assert bad is not None  # noqa: S101
        if good.state is not BuildState.COMPILED:
            return _refused(f"the good commit {self.state.commits[0].short} {good.state}: {good.reason}")
        if bad.state is not BuildState.COMPILED:
            return _of_build(bad)
        if good.program == bad.program and good.runner == bad.runner:
            return _none("both ends have the same program")
        numbers = _worse(good.measurements, bad.measurements, self.state.request.metric)
        if self.state.request.metric in {one.metric for one in bad.measurements}:
            return numbers.get(self.state.request.metric) or _none(_not_worse(bad, self.state.request.metric))
        return self._ask_the_device(job_id, numbers)

    def _ask_the_device(self, job_id: str, numbers: dict[str, Question]) -> Question:
        """Return the same where both ends have a program; `numbers` are the questions that compiling gave."""
        was, now = self._run(job_id, 0), self._run(job_id, self._last)
        good, bad = self.state.commits[0], self.state.commits[self._last]
        if problem := ends_problem(good.short, was, bad.short, now):
            return _refused(problem)
        if now.verdict is not Verdict.PASSED:
            reason = f"{now.stage}: {now.reason}"
            return Question(kind=QuestionKind.VERDICT, reason=reason, error=now.stage)
        numbers |= _worse(was.measurements, now.measurements, self.state.request.metric)
        if metric := self.state.request.metric:
            return self._of_metric(job_id, metric, numbers, was, now)
        return self._of_worst(job_id, numbers, was, now)

    def _of_metric(
        self, job_id: str, metric: str, numbers: Mapping[str, Question], was: CommitRun, now: CommitRun
    ) -> Question:
        one, other = _measured(metric, was), _measured(metric, now)
        if one is None or other is None:
            known = {one.metric for one in was.measurements} & {one.metric for one in now.measurements}
            built = self.state.searches[job_id].trial(0).build
            known |= {one.metric for one in built.measurements} if built else set()
            raise UnknownNameError("metric", metric, known, f"of {job_id}")
        if one.exact:
            return numbers.get(metric) or _none(_not_worse(now, metric))
        return self._of_pairs(job_id, one) or _none(self._pairs_reason(job_id, metric))

    def _of_worst(self, job_id: str, numbers: dict[str, Question], was: CommitRun, now: CommitRun) -> Question:
        """Return the question of what says most: what is delegated, the time, then outputs and size."""
        found = [numbers.pop(_FALLBACK)] if _FALLBACK in numbers else []
        time_of = next((name for name in TIMES if _measured(name, was) and _measured(name, now)), "")
        if not found and time_of and (measured := _measured(time_of, was)):
            question = self._of_pairs(job_id, measured)
            found += [question] if question else []
        size = [numbers.pop(_SIZE)] if _SIZE in numbers else []
        found += [*numbers.values(), *size]
        if not found:
            because = f", and {self._pairs_reason(job_id, time_of)}" if time_of else ""
            return _none(f"the bad commit passes, and no number of it is worse{because}")
        also = tuple(one.reason for one in found[1:])
        return msgspec.structs.replace(found[0], also=also)

    def _pairs_reason(self, job_id: str, metric: str) -> str:
        pairs = self.state.searches[job_id].trial(self._last).pairs
        return f"{metric} {pairs.reason}" if pairs else f"{metric} was not measured"

    def _of_pairs(self, job_id: str, measured: Measurement) -> Question | None:
        """Return the question of a number that is measured in pairs, None where the ends do not differ by it."""
        self._note(f"{job_id}: measuring {measured.metric} of both ends in turns")
        confirmation = self._pairs(job_id, self._last, _series(job_id, measured), None)
        if confirmation.answer is not Answer.CONFIRMED:
            return None
        reason = f"{measured.metric} {confirmation.reason}"
        return Question(kind=QuestionKind.PAIRS, reason=reason, metric=measured.metric, change=confirmation.change)

    def _answer(self, job_id: str, index: int) -> tuple[CommitAnswer, str]:
        """Return what a commit that was built is for a job, and why."""
        search = self.state.searches[job_id]
        question, build = search.question, search.trial(index).build
        assert question is not None  # noqa: S101 - for the type: it was asked, and the commit was built, before
        assert build is not None  # noqa: S101
        if build.state is not BuildState.COMPILED:
            return _answer_of_failure(question, build)
        if question.kind in (QuestionKind.IMPORT, QuestionKind.COMPILE):
            return CommitAnswer.GOOD, f"it {question.kind}s"
        if (known := self._same_program(job_id, index)) is not None:
            answer = search.trials[known].answer
            return answer or CommitAnswer.SKIP, f"the same program as {self.state.commits[known].short}"
        return self._answer_of_program(job_id, index, question, build)

    def _answer_of_program(
        self, job_id: str, index: int, question: Question, build: CommitBuild
    ) -> tuple[CommitAnswer, str]:
        numbers = {one.metric: one for one in build.measurements}
        if question.kind is QuestionKind.EXACT and question.metric in numbers:
            return _answer_of_number(question, numbers[question.metric])
        if question.kind is QuestionKind.PAIRS:
            return self._answer_of_pairs(job_id, index, question)
        return self._answer_of_run(job_id, index, question)

    def _answer_of_run(self, job_id: str, index: int, question: Question) -> tuple[CommitAnswer, str]:
        run = self._run(job_id, index)
        if question.kind is QuestionKind.VERDICT:
            if run.verdict is Verdict.PASSED:
                return CommitAnswer.GOOD, "passed"
            if run.verdict is Verdict.FAILED and run.stage == question.error:
                return CommitAnswer.BAD, f"{run.stage}: {run.reason}"
            return CommitAnswer.SKIP, f"it fails otherwise: {run.stage}: {run.reason}"
        measured = _measured(question.metric, run)
        if measured is None:
            return CommitAnswer.SKIP, f"it has no {question.metric}: {run.stage}: {run.reason or run.verdict}"
        return _answer_of_number(question, measured)

    def _answer_of_pairs(self, job_id: str, index: int, question: Question) -> tuple[CommitAnswer, str]:
        run = self._run(job_id, index)
        if run.verdict is not Verdict.PASSED:
            return CommitAnswer.SKIP, f"it fails: {run.stage}: {run.reason}"
        measured = _measured(question.metric, run)
        if measured is None:
            return CommitAnswer.SKIP, f"it has no {question.metric}"
        series = _series(job_id, measured)
        # What is nearer to the bad end is bad.
        gate = abs(question.change) / 2.0 if math.isfinite(question.change) else GATES[series.scale].confirmed
        confirmation = self._pairs(job_id, index, series, gate)
        answer = {Answer.CONFIRMED: CommitAnswer.BAD, Answer.REFUTED: CommitAnswer.GOOD}.get(confirmation.answer)
        return answer or CommitAnswer.SKIP, f"{question.metric} {confirmation.reason}"

    def _same_program(self, job_id: str, index: int) -> int | None:
        """Return an answered commit that has the same program."""
        trials = self.state.searches[job_id].trials
        build = trials[index].build
        for other, trial in sorted(trials.items()):
            if (
                other != index
                and build is not None
                and trial.build is not None
                and trial.answer in (CommitAnswer.GOOD, CommitAnswer.BAD)
                and (trial.build.program, trial.build.runner) == (build.program, build.runner)
                and build.program
            ):
                return other
        return None

    def _run(self, job_id: str, index: int) -> CommitRun:
        trial = self.state.searches[job_id].trial(index)
        if trial.run is None:
            assert trial.build is not None  # noqa: S101 - for the type: what runs was built
            trial.run = self._lab.run(self._jobs[job_id], trial.build, self.state.commits[index])
            self._save()
        return trial.run

    def _pairs(self, job_id: str, index: int, series: Series, gate: float | None) -> Confirmation:
        search = self.state.searches[job_id]
        trial, good = search.trial(index), search.trial(0)
        if trial.pairs is None:
            assert trial.build is not None  # noqa: S101 - for the type: what runs was built
            assert good.build is not None  # noqa: S101
            sides = ((good.build, self.state.commits[0]), (trial.build, self.state.commits[index]))
            trial.pairs = self._lab.pairs(self._jobs[job_id], *sides, series, gate)
            self._save()
        return trial.pairs

    def _settle(self, job_id: str, index: int, answer: CommitAnswer, reason: str) -> None:
        trial = self.state.searches[job_id].trial(index)
        trial.answer, trial.reason = answer, reason
        self._save()

    def _save(self) -> None:
        now_s = time.monotonic()
        self.state.seconds += now_s - self._began_s
        self._began_s = now_s
        self._save_state()


def _refused(reason: str) -> Question:
    return Question(kind=QuestionKind.REFUSED, reason=reason)


def _none(reason: str) -> Question:
    return Question(kind=QuestionKind.NONE, reason=reason)


def _of_build(bad: CommitBuild) -> Question:
    """Return the question where the bad end has no program."""
    kinds = {BuildState.NOT_IMPORTED: QuestionKind.IMPORT, BuildState.NOT_COMPILED: QuestionKind.COMPILE}
    if bad.state not in kinds:
        return _refused(f"the bad commit {bad.state}: {bad.reason}")
    return Question(kind=kinds[bad.state], reason=f"it {bad.state}: {bad.reason}", error=_error_of(bad.reason))


def _answer_of_failure(question: Question, build: CommitBuild) -> tuple[CommitAnswer, str]:
    """Return what a commit is that has no program."""
    reason = f"{build.state}: {build.reason}"
    wanted = {QuestionKind.IMPORT: BuildState.NOT_IMPORTED, QuestionKind.COMPILE: BuildState.NOT_COMPILED}
    if wanted.get(question.kind) is build.state and _error_of(build.reason) == question.error:
        return CommitAnswer.BAD, reason
    if question.kind is QuestionKind.IMPORT and build.state is BuildState.NOT_COMPILED:
        return CommitAnswer.GOOD, f"it imports, and {reason}"
    return CommitAnswer.SKIP, f"it fails otherwise: {reason}" if question.kind in wanted else reason


def _error_of(reason: str) -> str:
    """Return the kind of an error: `ValueError` of `ValueError: expected 3`."""
    return reason.partition(":")[0]


def _not_worse(bad: CommitBuild | CommitRun, metric: str) -> str:
    directions = {one.metric: one.direction for one in bad.measurements}
    return f"{metric} did not {'change' if directions[metric] is Direction.NONE else 'get worse'}"


def _worse(was: Sequence[Measurement], now: Sequence[Measurement], asked: str) -> dict[str, Question]:
    """Return the questions of exact numbers that are worse by more than what matters, by metric.

    Of a number of which neither way is better any change is one, where it is the one that was `asked` for.
    """
    before = {one.metric: one for one in was if one.exact}
    found = {}
    for new in now:
        old = before.get(new.metric)
        if old is None or not new.exact or old.value is None or new.value is None:
            continue
        series = _series("", new)
        good, bad = old.value, new.value
        if good == bad or (new.direction is Direction.NONE and new.metric != asked):
            continue
        sign = {Direction.HIGHER: -1.0, Direction.LOWER: 1.0}.get(new.direction, math.copysign(1.0, bad - good))
        with_scale = scaled(series.scale, (good, bad))
        change = float(with_scale[1] - with_scale[0])
        # A count is worse by any difference.
        least = 0.0 if new.unit == "count" else GATES[series.scale].change
        if sign * (bad - good) > 0 and (not math.isfinite(change) or sign * change > least):
            text = change_text(series.scale, change) if math.isfinite(change) and new.unit != "count" else ""
            reason = f"{new.metric} {good:g} -> {bad:g}{f' ({text})' if text else ''}"
            found[new.metric] = Question(kind=QuestionKind.EXACT, reason=reason, metric=new.metric, good=good, bad=bad)
    return found


def _answer_of_number(question: Question, measured: Measurement) -> tuple[CommitAnswer, str]:
    """Return whether an exact number is nearer to that of the bad end."""
    value = measured.value
    if value is None or math.isnan(value):
        return CommitAnswer.SKIP, f"it has no {question.metric}"
    numbers = scaled(_series("", measured).scale, (question.good, value, question.bad))
    good, here, bad = (float(one) for one in numbers)
    if not math.isfinite(good) or not math.isfinite(bad):
        good, here, bad = question.good, value, question.bad
    is_bad = abs(here - bad) < abs(here - good)
    return (CommitAnswer.BAD if is_bad else CommitAnswer.GOOD), f"{question.metric} {value:g}"


def _measured(metric: str, run: CommitRun) -> Measurement | None:
    return next((one for one in run.measurements if one.metric == metric and one.samples), None)


def _series(job_id: str, one: Measurement) -> Series:
    return Series(job_id, one.metric, one.unit, one.direction, one.exact)
