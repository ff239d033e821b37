"""What a bisection over commits is asked and knows, as it lies in its state file after each step."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.commit_search import CommitAnswer, CommitRange, range_of
from farm.analysis.confirmation import INFERENCES, PAIRS, Confirmation
from farm.errors import UsageError
from farm.results.attempt import Measurement, Verdict
from farm.system.atomic import write_atomically
from farm.toolchains.commits import Commit

if TYPE_CHECKING:
    from pathlib import Path

    from farm.bundles.bundle import Manifest

STATE_FILE = "state.json"


class CommitsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; a bisection that goes on is asked the same."""

    checkout: str
    good: str
    """Full hash."""
    bad: str
    jobs: tuple[str, ...]
    """Ids."""
    metric: str = ""
    """Empty: what is worse is found out from the ends."""
    build: tuple[str, ...] = ()
    toolchain: str = ""
    """As on the command line."""
    virtual: bool = False
    device: str = ""
    pairs: int = PAIRS
    inferences: int = INFERENCES
    least_inferences: int = 0
    """As of `PairsRequest`."""


class BuildState(StrEnum):
    """How far a commit came with a job."""

    COMPILED = "compiled"
    NOT_BUILT = "does not build"
    """Its native parts, or its source tree could not be had."""
    NOT_IMPORTED = "does not import"
    NOT_COMPILED = "does not compile"


class CommitBuild(msgspec.Struct, frozen=True, kw_only=True):
    """What a job compiles to at a commit."""

    state: BuildState
    reason: str = ""
    """One line; empty when it was compiled."""
    bundle: str = ""
    """Key."""
    program: str = ""
    """Hash of program, inputs and references: the same where nothing that runs differs."""
    cached: bool = False
    """Nothing had to be compiled."""
    runner: str = ""
    """Hash of the native runner."""
    delegates: dict[str, int] = {}
    fallback_ops: dict[str, int] = {}
    operators: dict[str, int] = {}
    measurements: tuple[Measurement, ...] = ()
    """Those of compiling, which repeat exactly."""

    @classmethod
    def of(cls, manifest: Manifest, program: str, **facts: object) -> CommitBuild:
        """Return what is known of a bundle."""
        from farm.results.measurements import bundle_measurements

        known = {
            "state": BuildState.COMPILED,
            "bundle": manifest.key,
            "program": program,
            "delegates": manifest.delegates,
            "fallback_ops": manifest.fallback_ops,
            "operators": manifest.operators,
            "measurements": bundle_measurements(manifest),
        }
        return cls(**(known | facts))  # type: ignore[arg-type]


class CommitRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of a commit did on a device."""

    verdict: Verdict
    stage: str
    reason: str = ""
    device: str = ""
    """Serial."""
    measurements: tuple[Measurement, ...] = ()


def ends_problem(good: str, was: CommitRun, bad: str, now: CommitRun) -> str:
    """Return why runs of the commits `good` and `bad` leave nothing to search for; "" where the good one passed."""
    for which, commit, run in (("good", good, was), ("bad", bad, now)):
        if run.verdict is Verdict.SKIPPED:
            return f"the {which} commit {commit} could not be tried: {run.reason}"
    if was.verdict is Verdict.PASSED:
        return ""
    other = "and the bad one does" if now.verdict is Verdict.PASSED else "nor does the bad one"
    return f"the good commit {good} does not pass, {other}: {was.reason}"


class QuestionKind(StrEnum):
    """What tells a bad commit from a good one."""

    IMPORT = "import"
    COMPILE = "compile"
    VERDICT = "verdict"
    EXACT = "exact number"
    PAIRS = "interleaved pairs"
    NONE = "none"
    """There is no step from the good commit to the bad one."""
    REFUSED = "refused"
    """The good commit is not good."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of each commit for one job."""

    kind: QuestionKind
    reason: str
    """What is wrong with the bad end, or why nothing can be asked; one line."""
    metric: str = ""
    good: float = 0.0
    """Of an exact number, at the ends."""
    bad: float = 0.0
    change: float = 0.0
    """Of pairs, on the scale of the series."""
    error: str = ""
    """What a failure begins with: one of another kind is not the one that is looked for."""
    also: tuple[str, ...] = ()
    """What else got worse, as text."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to look for."""
        return self.kind not in (QuestionKind.NONE, QuestionKind.REFUSED)


class CommitTrial(msgspec.Struct, kw_only=True):
    """What is known of one commit for one job."""

    build: CommitBuild | None = None
    run: CommitRun | None = None
    pairs: Confirmation | None = None
    answer: CommitAnswer | None = None
    reason: str = ""
    """Of the answer, one line."""

    @property
    def words(self) -> str:
        """How far the commit came, for people."""
        if self.build is None:
            return "not looked at"
        if self.build.state is not BuildState.COMPILED:
            return str(self.build.state)
        compiled = "from the cache" if self.build.cached else "compiled"
        return f"{compiled}, {self.run.verdict}" if self.run else compiled


class JobSearch(msgspec.Struct, kw_only=True):
    """One job's bisection."""

    definition: str
    """Hash of what decides its bundle and its verdict, apart from the toolchain."""
    question: Question | None = None
    trials: dict[int, CommitTrial] = {}
    """By index of the commit."""

    def trial(self, index: int) -> CommitTrial:
        """Return what is known of a commit, to be added to."""
        return self.trials.setdefault(index, CommitTrial())

    @property
    def answers(self) -> dict[int, CommitAnswer]:
        """Those that were found out."""
        return {index: one.answer for index, one in self.trials.items() if one.answer is not None}


class CommitsState(msgspec.Struct, kw_only=True):
    """All that is known: what goes on after a kill."""

    id: str
    request: CommitsRequest
    identity: dict[str, str]
    """Versions and content of the good commit's toolchain: what is compiled later has to be comparable."""
    commits: tuple[Commit, ...]
    """Oldest first: the first is the good one, the last the bad one."""
    content: tuple[str, ...]
    """Hash of what may take part, by commit."""
    searches: dict[str, JobSearch]
    """By job id."""
    compiled: list[int] = []
    """Commits for which anything was compiled."""
    warnings: dict[int, tuple[str, ...]] = {}
    seconds: float = 0.0
    is_finished: bool = False

    def range_of(self, job_id: str) -> CommitRange:
        """Return where the first bad commit of a job is."""
        return range_of(self.content, self.searches[job_id].answers)

    def known_trial(self, job_id: str, index: int) -> CommitTrial:
        """Return what is known of a commit, or of one with the same content."""
        trials = self.searches[job_id].trials
        same = [one for one in sorted(trials) if self.content[one] == self.content[index] and trials[one].build]
        return trials[index] if index in trials else trials[same[0]] if same else CommitTrial()


def write_state(folder: Path, state: CommitsState) -> None:
    """Keep what is known, whatever happens next."""
    write_atomically(folder / STATE_FILE, msgspec.json.encode(state), mode=0o644, durable=True)


def read_state(folder: Path) -> CommitsState:
    """Return what is known. Raises UsageError for what another farm, or somebody else, wrote."""
    from farm.system.trust import weakness_of_open

    try:
        with (folder / STATE_FILE).open("rb") as file:
            if problem := weakness_of_open(file.fileno()):
                raise UsageError(f"{file.name} says what is executed and is not used: {problem}: start anew")
            return msgspec.json.decode(file.read(), type=CommitsState)
    except FileNotFoundError:
        raise UsageError(f"there is no bisection {folder.name} in {folder.parent}") from None
    except (msgspec.DecodeError, msgspec.ValidationError, OSError) as error:
        raise UsageError(
            f"bisection {folder.name} cannot go on: its state was written by another version of farm ({error}): "
            "give --anew"
        ) from None
