"""`farm perf bisect --commits`: `git bisect` chooses commits and keeps the answers, a comparison gives each answer.

git's state is in a bare repository of farm's own, which borrows the objects of the user's checkout: nothing is written
there. `git bisect run` is not used: its steps are shell commands, and outlive a killed farm with their lease.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, NativeBuildError, UsageError
from farm.base.git import git
from farm.base.interrupts import InterruptHandler
from farm.base.publish import published
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.commits import Checkout, make_borrowing
from farm.builds.toolchains.select import toolchain_of
from farm.builds.toolchains.worktrees import toolchain_at
from farm.dispatch.request.pruning import BISECTS
from farm.dispatch.request.resume import in_progress
from farm.numbers.compare.compare import compare_sides
from farm.numbers.compare.request import SideRequest
from farm.numbers.compare.symptom import (
    COMPILED_METRICS,
    CommitAnswer,
    Symptom,
    answer_of,
    require_compared,
    symptom_of,
)
from farm.store.values import judged_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.commits import Commit
    from farm.numbers.compare.request import ComparisonRequest
    from farm.report.model.compare import ComparedJob, CompareReport
    from farm.store.store import Store

    Compare = Callable[[Commit, Commit, bool], CompareReport]
    """Comparison of one job at two commits; True: on a device."""

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
