"""`farm perf bisect --commits`: `git bisect` chooses commits, a comparison about the symptom gives each answer."""

from __future__ import annotations

import hashlib
import logging
import math
import shlex
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import FarmError, InfraError, NativeBuildError, UnknownNameError, UsageError
from farm.base.files import published
from farm.base.git import git
from farm.base.interrupts import InterruptHandler
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.selection import toolchain_of
from farm.builds.toolchains.worktrees import Checkout, Commit, make_borrowing, toolchain_at
from farm.dispatch.request.pruning import BISECTS
from farm.dispatch.request.records import in_progress
from farm.numbers.compare.compare import compare_sides
from farm.numbers.compare.sides import ComparisonRequest, SideRequest
from farm.report.model.compare import ComparedJob, CompareGroup, CompareReport, CompiledFacts, JobState
from farm.results.analysis.statistics import GATES
from farm.store.store import Store
from farm.store.values import judged_by

Compare = Callable[[Commit, Commit, bool], CompareReport]
"""Comparison of one job at two commits; True: on a device."""


# Symptom of a bad commit, and the answer of a comparison about another commit. Pure.


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
    return (
        dict(zip(COMPILED_METRICS, zip(*map(_values, job.compiled), strict=True), strict=True)) if job.compiled else {}
    )


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


# `farm perf bisect --commits`: `git bisect` chooses commits and keeps the answers, a comparison gives each answer.
#
# git's state is in a bare repository of farm's own, which borrows the objects of the user's checkout: nothing is
# written there. `git bisect run` is not used: its steps are shell commands, and outlive a killed farm with their
# lease.


logger = logging.getLogger(__name__)

_STATE, _SYMPTOM, _REPOSITORY = "search", "symptom.json", "repository"
# `git bisect` ends with 2 where nothing but skipped commits is left.
_MARKED = (0, 2)


class BisectOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a search."""

    report: CompareReport
    """Comparison of the last good with the first bad commit; of both ends without a symptom."""
    symptom: Symptom | None = None
    """None where the bad commit is not worse."""
    last_good: Commit | None = None
    first_bad: Commit | None = None
    skipped: tuple[Commit, ...] = ()
    """Commits between both, which gave no answer: each may be the first bad one."""
    changed_files: tuple[str, ...] = ()
    """Status and path of the files that the first bad commit changes."""
    log: str = ""
    """Output of `git bisect log`."""

    @property
    def job(self) -> ComparedJob:
        """The job on both sides."""
        return self.report.jobs[0]


class GitBisect:
    """`git bisect` over a line of commits, in a bare repository with the objects of a checkout."""

    def __init__(self, folder: Path, commits: Sequence[Commit]) -> None:
        """`commits` begin with the good one and end with the bad one, as `Checkout.between` has them."""
        self.folder, self._commits = folder, commits

    def start(self, checkout: Checkout) -> None:
        """Make the repository, and begin."""
        bad, good = self._commits[-1].sha, self._commits[0].sha
        make_borrowing(self.folder, self.folder, checkout, "--bare")
        self._git("update-ref", "--no-deref", "HEAD", bad)
        self._git("bisect", "start", "--no-checkout", "--first-parent", bad, good)

    def range(self) -> tuple[Commit, list[Commit], list[Commit]]:
        """Return the last good commit, its successors up to the first bad commit, and the successors left to test."""
        marks: dict[str, str] = {}
        for line in self._git("for-each-ref", "--format=%(objectname) %(refname:lstrip=2)", "refs/bisect").splitlines():
            sha, _, mark = line.partition(" ")
            # In the order of names: an answer comes before a skip of the same commit.
            marks.setdefault(sha, mark.partition("-")[0])
        words = [marks.get(commit.sha, "") for commit in self._commits]
        bad = words.index(CommitAnswer.BAD)
        good = max(index for index, word in enumerate(words[:bad]) if word == CommitAnswer.GOOD)
        left = [index for index in range(good + 1, bad) if not words[index]]
        return self._commits[good], list(self._commits[good + 1 : bad + 1]), [self._commits[index] for index in left]

    def next(self, left: Sequence[Commit]) -> Commit:
        """Return the commit of `left` that git has chosen."""
        if found := self._chosen(left):
            return found
        # A kill came between an answer and the next choice.
        self._git("bisect", "next")
        return self._chosen(left) or left[len(left) // 2]

    def mark(self, commit: Commit, answer: CommitAnswer) -> None:
        """Keep the answer about a commit."""
        self._git("bisect", str(answer), commit.sha, okay=_MARKED)

    def log(self) -> str:
        """Return the answers so far, as `git bisect replay` takes them."""
        return self._git("bisect", "log")

    def _chosen(self, left: Sequence[Commit]) -> Commit | None:
        head = self._git("rev-parse", "BISECT_HEAD").strip()
        return next((commit for commit in left if commit.sha == head), None)

    def _git(self, *arguments: str, okay: tuple[int, ...] = (0,)) -> str:
        return git(self.folder, *arguments, own=True, okay=okay)


class _Kept(msgspec.Struct):
    """State of a search beside git's."""

    symptom: Symptom
    facts: dict[str, str]
    """Versions and content of the good commit's toolchain."""


def bisect_commits(
    checkout: Checkout, commits: Sequence[Commit], folder: Path, compare: Compare, metric: str = ""
) -> BisectOutcome:
    """Return the first bad commit of `commits`, which begin with a good one; continue a search kept in `folder`.

    Raises UsageError where the good commit does not pass or the toolchain changed meanwhile, UnknownNameError for
    `metric`, InfraError where a commit could not be compared: the same call goes on from there, as after Ctrl-C.
    """
    good, bad = commits[0], commits[-1]
    with InterruptHandler(), in_progress(folder):
        state = folder / _STATE
        if state.is_dir():
            logger.info("continuing the search in %s; remove that folder to begin anew", folder)
        else:
            logger.info("comparing both ends of %s commits", len(commits) - 1)
            try:
                report = _compared(compare, good, bad, needs_device=metric not in COMPILED_METRICS)
            except NativeBuildError as error:
                raise UsageError(str(error)) from None
            symptom = symptom_of(report.jobs[0], metric)
            if symptom is None:
                return BisectOutcome(report=report)
            logger.info("%s bad: %s", bad.short, symptom.text)
            kept = _Kept(symptom, report.sides[0].facts)

            def fill(partial: Path) -> None:
                (partial / _SYMPTOM).write_bytes(msgspec.json.encode(kept))
                GitBisect(partial / _REPOSITORY, commits).start(checkout)

            published(state, fill)
        return _search(checkout, commits, state, compare)


def _search(checkout: Checkout, commits: Sequence[Commit], state: Path, compare: Compare) -> BisectOutcome:
    """Test commits until none is left, and compare the last good with the first bad one."""
    kept = msgspec.json.decode((state / _SYMPTOM).read_bytes(), type=_Kept)
    symptom, bisect = kept.symptom, GitBisect(state / _REPOSITORY, commits)
    last_good, suspects, left = bisect.range()
    while left:
        commit = bisect.next(left)
        logger.info("%s %s (%s left)", commit.short, commit.subject, len(left))
        try:
            report = _compared(compare, commits[0], commit, needs_device=symptom.needs_device)
        except NativeBuildError as error:
            answer, reason = CommitAnswer.SKIP, str(error)
        except FarmError:
            leave_out = shlex.join(["git", "-C", str(bisect.folder), "bisect", "skip", commit.sha])
            logger.info(
                "no answer about %s: repeat the command to try again, or leave it out with %s", commit.short, leave_out
            )
            raise
        else:
            _require_same(kept, report, state.parent)
            answer, reason = answer_of(report.jobs[0], symptom)
        bisect.mark(commit, answer)
        logger.info("%s %s: %s", commit.short, answer, reason)
        last_good, suspects, left = bisect.range()
    *skipped, first_bad = suspects
    return BisectOutcome(
        report=compare(last_good, first_bad, symptom.needs_device),
        symptom=symptom,
        last_good=last_good,
        first_bad=first_bad,
        skipped=tuple(skipped),
        changed_files=tuple(checkout.changed_files(first_bad)),
        log=bisect.log(),
    )


def _require_same(kept: _Kept, report: CompareReport, folder: Path) -> None:
    """Raise UsageError where programs compiled now are not comparable with those at the start of the search."""
    now = report.sides[0].facts
    changed = [name for name in sorted(now.keys() | kept.facts) if now.get(name) != kept.facts.get(name)]
    if changed:
        raise UsageError(f"{', '.join(changed)} changed since this search began: remove {folder} to begin anew")


def _compared(compare: Compare, good: Commit, commit: Commit, *, needs_device: bool) -> CompareReport:
    report = compare(good, commit, needs_device)
    require_compared(report.jobs[0], executed=needs_device)
    return report


def comparing(config: Config, store: Store, request: ComparisonRequest, checkout: Checkout) -> Compare:
    """Return the comparison of two commits of `checkout` as `request` asks for it, with sides of its own."""

    def compare(good: Commit, commit: Commit, needs_device: bool) -> CompareReport:
        a, b = (SideRequest(toolchain=str(checkout.folder), base=one.sha) for one in (good, commit))
        asked = msgspec.structs.replace(request, sides=(a, b), execute=needs_device)
        report = compare_sides(config, store, asked).report
        if report.interrupted:
            raise KeyboardInterrupt
        return report

    return compare


def search_folder(config: Config, commits: Sequence[Commit], request: ComparisonRequest, metric: str) -> Path:
    """Return the folder of a search: the same for the same request, and another where a case was edited."""
    toolchain, [job] = config.toolchain, request.jobs
    asked = (
        *(
            toolchain.checkout,
            toolchain.python,
            toolchain.qnn,
            toolchain.build,
            commits[0].sha,
            commits[-1].sha,
            metric,
        ),
        *(bundle_key(job, {}), judged_by(job), request.virtual, request.choice, request.pairs),
    )
    return config.state_dir / BISECTS / hashlib.sha256(msgspec.json.encode(asked, enc_hook=str)).hexdigest()


def bisected_toolchain(
    config: Config, folder: Path | None, ref: str, build: tuple[str, ...]
) -> tuple[Config, Checkout]:
    """Return the checkout, and `config` with the toolchain that compiles its commits.

    The toolchain is `ref`, else the table of farm.toml with this checkout; `build` replaces its build command.
    Raises UsageError for a release, and for a toolchain of another checkout.
    """
    named = toolchain_of(config, ref) if ref else None
    if named is not None and named.version:
        raise UsageError(
            f"--toolchain {ref} is release {named.version} of ExecuTorch, which is no commit: name one with python, or "
            "leave it out"
        )
    folder = folder or (named.checkout if named is not None else None)
    if folder is None:
        raise UsageError("name the source tree of ExecuTorch with --checkout DIR")
    checkout = Checkout(folder)
    base = toolchain_at(config, checkout.folder) if named is None else named
    if base.checkout is None:
        base = msgspec.structs.replace(base, named=False, checkout=checkout.folder)
    elif base.checkout.resolve() != checkout.folder:
        raise UsageError(
            f"--toolchain {ref} is of {base.checkout}, not of {checkout.folder}: leave --checkout or --toolchain out"
        )
    base = msgspec.structs.replace(base, build=build or base.build)
    return msgspec.structs.replace(config, toolchain=base), checkout


def commits_of(checkout: Checkout, span: str) -> list[Commit]:
    """Return the commits of `GOOD..BAD`, both included; HEAD stands for an empty BAD. Raises UsageError for none."""
    good, dots, bad = span.partition("..")
    if not dots or not good or bad.startswith("."):
        raise UsageError(f"--commits {span}: expected GOOD..BAD, such as v1.5.0..main")
    first = checkout.commit(good)
    return [first, *checkout.between(first, checkout.commit(bad or "HEAD"))]
