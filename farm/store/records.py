"""What goes into the store and what a history is made of, as plain data."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.results.attempt import OperatorProfile
from farm.store.view import CaseResult, Purpose, RunToolchain

if TYPE_CHECKING:
    from collections.abc import Mapping


class RunKind(StrEnum):
    """What a run was for."""

    SUITE = "suite"
    """`farm run`, and each cell of a night."""
    TESTS = "tests"
    """`farm pytest`."""
    EXEC = "exec"
    REPRO = "repro"
    DEBUG = "debug"
    """What ran wrote every layer: its numbers are in no history."""

    @classmethod
    def of(cls, command: str, facts: Mapping[str, str]) -> RunKind:
        """Return the kind of a run with this command and fingerprint."""
        if "debug" in facts:
            return cls.DEBUG
        kinds = {"farm exec": cls.EXEC, "farm jobs rerun": cls.REPRO, "farm pytest": cls.TESTS}
        return next((kind for name, kind in kinds.items() if f"{command} ".startswith(f"{name} ")), cls.SUITE)


class RunRecord(msgspec.Struct, frozen=True):
    """A run that begins."""

    command: str
    user: str
    host: str
    fingerprint: dict[str, str]
    """Everything the numbers depend on, name to value."""
    started_ms: int | None = None
    """Epoch, milliseconds; None is now."""
    priority: str = "person"
    """Name of a `farm.policy.situation.Priority`, in small letters."""
    toolchain: RunToolchain = RunToolchain()
    """What its programs are compiled with, and the line that it belongs to or is compared with."""
    name: str = ""
    """As its user calls it, or NIGHT/CELL."""
    night: str = ""
    """The id of the night that it is a cell of."""


class ArtifactRecord(msgspec.Struct, frozen=True):
    """A file of an attempt that the artifact store holds."""

    sha256: str
    size: int
    """Bytes."""
    kind: str
    """For example `etdump` or `output`."""


class JobFile(ArtifactRecord, frozen=True):
    """A file of one attempt of a job."""

    attempt: int = 1
    """Number of the attempt among those of its job in the run, from 1."""


class HistoryPoint(msgspec.Struct, frozen=True):
    """Metric of an attempt; in an attempt without the metric `n` is 0 and `value` None."""

    job_id: str
    run_id: str
    time_ms: int
    """When the attempt began; epoch, milliseconds."""
    fingerprint: str
    """Hash of the run's fingerprint: points with the same one are of the same toolchain."""
    case_version: str
    """Hash of what the case is: points with another one are numbers of another test."""
    device: str
    device_kind: str
    """`virtual` or `hardware`: never one series. Empty where no device had a part and the run had both or none."""
    verdict: str
    known_issue: str
    metric: str
    unit: str
    direction: str
    exact: bool
    value: float | None
    """Value of the attempt in its series: of a figure of outputs what decides, else the median; an int if exact."""
    n: int
    """Samples."""
    device_facts: dict[str, str] = {}
    """What else numbers depend on: the build of the device's system, and what it ran programs with."""
    commit: str | msgspec.UnsetType = msgspec.UNSET
    """Of the run's toolchain; not there where it is not known."""
    dirty: bool | msgspec.UnsetType = msgspec.UNSET
    """It was not as in the commit; not there where it was, or that is not known."""
    trial: bool | msgspec.UnsetType = msgspec.UNSET
    """The run was only compared with the line; not there where it belongs to it."""


class ProfileRecord(msgspec.Struct, frozen=True):
    """The profile of one attempt: rows, files, or both."""

    job_id: str
    backend: str
    run_id: str
    time_ms: int
    """When the attempt began; epoch, milliseconds."""
    facts: dict[str, str]
    """The run's fingerprint: name to value."""
    case_version: str
    """Hash of what the case is: profiles with another one are of another test."""
    device: str
    device_kind: str
    """`virtual` or `hardware`: never compared. Empty where no device had a part."""
    verdict: str
    operators: tuple[OperatorProfile, ...]
    """In the order of execution."""
    artifacts: tuple[ArtifactRecord, ...]
    """All files that are kept of the attempt, oldest first."""


class JobResult(msgspec.Struct, frozen=True):
    """The newest result of one job, and what else tells what it is worth."""

    suite: str
    case: str
    module: str
    """What the case makes: `package.module:Class`."""
    options: dict[str, str]
    result: CaseResult
    fingerprint: str
    """Hash of the run's fingerprint."""
    operators: dict[str, int] | None
    """Operators that the backend built of the program, and how often; None where it is not known."""
    newer_run: str = ""
    """A newer run that was to do the job as well and has no attempt of it; empty where there is none."""


class ListedJob(msgspec.Struct, frozen=True):
    """A job by what is the same in every run of it."""

    job_id: str
    module: str
    """What its case makes: `package.module:Class`."""
    case: str
    precision: str


class LastVerdict(msgspec.Struct, frozen=True):
    """The newest verdict about the code of a job."""

    run_id: str
    time_ms: int
    """When it was recorded; epoch, milliseconds."""
    outcome: str
    """`passed`, `failed` or `known issue`."""
    bundle_key: str
    """What was judged; empty where it is not known."""
    judged_by: str
    """Hash of its limits then (`farm.store.values.judged_by`); empty in runs of older farms."""


class ExpectedJob(msgspec.Struct, frozen=True):
    """What the recent runs of a job on one kind of device tell: medians, and the newest verdict."""

    last: LastVerdict
    build_seconds: float | None
    """Compiling; None where every bundle came from the cache."""
    run_seconds: float
    """On the device."""
    total_seconds: float
    """Both, compiling as 0 where the bundle came from the cache."""


class Before(msgspec.Struct, frozen=True):
    """The newest verdict about a job's code before some run."""

    run_id: str
    time_ms: int
    """When it was recorded; epoch, milliseconds."""
    verdict: str
    known_issue: str


class JobStatus(msgspec.Struct, frozen=True):
    """How one job of a run ended, without its numbers."""

    job_id: str
    verdict: str
    """Of the attempt that decides; empty where there is none."""
    known_issue: str
    stage: str
    reason: str
    """One line; why it is stale where it is."""
    stale: bool = False
    before: Before | None = None
    """On this kind of device; None for a job that never had a verdict."""


class RunStatus(msgspec.Struct, frozen=True):
    """A run without its numbers."""

    run_id: str
    command: str
    user: str
    priority: str
    device_kind: str
    started_ms: int
    finished_ms: int | None
    exit_code: int | None
    jobs: tuple[JobStatus, ...]
    toolchain: RunToolchain | msgspec.UnsetType = msgspec.UNSET
    """Not there where nothing is known but that it is the default one."""
    name: str = ""
    purpose: str = Purpose.MANUAL
    """One of `Purpose`."""
    began: bool = True
    """Whether anything was executed, or still may be."""


class UnfinishedRun(msgspec.Struct, frozen=True):
    """A run that has no end."""

    run_id: str
    user: str
    host: str
    command: str
    started_ms: int


class TrendPoint(msgspec.Struct, frozen=True):
    """One metric of one job in one run."""

    run_id: str
    time_ms: int
    """When the run began; epoch, milliseconds."""
    fingerprint: str
    """Hash of the run's fingerprint."""
    case: str
    """Which version of the case it is: points with another one are numbers of another test."""
    value: float | None
    """Median of the samples, of a figure of outputs what decides; None where it is no number."""


class TrendSeries(msgspec.Struct, frozen=True):
    """One metric of one job over its newest runs on one kind of device, oldest first."""

    metric: str
    unit: str
    direction: str
    points: tuple[TrendPoint, ...]


class Background(msgspec.Struct, frozen=True):
    """What a report shows beside a run."""

    trends: dict[str, tuple[TrendSeries, ...]] = {}
    """By job id."""
    facts: dict[str, dict[str, str]] = {}
    """Fingerprints of the runs in it, name to value, by their hash."""
    artifacts: dict[str, tuple[JobFile, ...]] = {}
    """Files that are kept of the run, by job id, oldest first."""


class AlertState(StrEnum):
    """What is known of a number that stands out."""

    CANDIDATE = "candidate"
    """It looks different from the runs before; nothing was measured for it yet."""
    EXACT = "exact"
    """Of a deterministic metric: it changed."""
    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNKNOWN = "unknown"
    """Pairs were measured and do not tell."""
    ACCEPTED = "accepted"
    """Somebody says that the new level is right."""


STEPS = (AlertState.CONFIRMED, AlertState.EXACT, AlertState.ACCEPTED)
"""What is known to have moved a level."""


class RemarkState(StrEnum):
    """What somebody says of an alert, or of a job."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    """Somebody sees to it."""
    ACCEPTED = "accepted"
    FIXED = "fixed"


class Remark(msgspec.Struct, frozen=True):
    """What somebody noted."""

    state: str
    """One of `RemarkState`."""
    user: str
    owner: str
    """Who sees to it; empty where nobody."""
    note: str
    time_ms: int = 0
    """Epoch, milliseconds; 0 is now."""
    until_ms: int | None = None
    """Until when it counts; None is for good."""


class NewAlert(msgspec.Struct, frozen=True, kw_only=True):
    """What stands out, or what became of it. Changes are on the scale of the series, NaN where there is none."""

    series_id: int
    device_kind: str
    finding: str
    """One of `farm.results.analysis.candidates.Finding`."""
    state: str
    """One of `AlertState`."""
    last_good: str
    first_bad: str
    change: float
    low: float
    high: float
    p_value: float
    reason: str
    likely_cause: str = msgspec.field(default="", name="guilt")


class AlertRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A number that stands out, and what is known of it."""

    id: int
    series_id: int
    job_id: str
    metric: str
    unit: str
    direction: str
    """`lower`, `higher` or empty."""
    exact: bool
    device_kind: str
    run_id: str
    """The run that it was found in."""
    finding: str
    """`regression`, `improvement` or `changed`."""
    state: str
    """One of `AlertState`; accepted where somebody noted so."""
    last_good: str
    """Run ids between which it came."""
    first_bad: str
    change: float
    """On the scale of the series, as its interval; `farm.results.analysis.scale.change_text` shows it."""
    low: float
    high: float
    p_value: float
    reason: str
    """One line."""
    likely_cause: str = msgspec.field(name="guilt")
    """The factor that the change comes from, one line; empty where it is not known."""
    device: str
    """Where the pairs were measured; empty where none were."""
    found_ms: int
    remark: Remark | None = None
    """The newest."""
    line: str | msgspec.UnsetType = msgspec.UNSET
    """Of the run; not there for the default."""
    private: bool | msgspec.UnsetType = msgspec.UNSET
    """The run was compared with its line: nobody else has to see to it."""

    @property
    def owner(self) -> str:
        """Return who sees to it; empty where nobody."""
        return self.remark.owner if self.remark else ""

    @property
    def note(self) -> str:
        """Return the newest note on it."""
        return self.remark.note if self.remark else ""
