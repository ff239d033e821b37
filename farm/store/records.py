"""Plain data of the store: records to write, views of runs, and records read back for histories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from farm.results.attempt import Attempt, OperatorProfile

# Version of the rows that hosts exchange.


PROTOCOL = 4
"""Version of orders, shards and agents: agents refuse agents of another protocol, and run no orders of it."""


# Plain data of a run, the common source of HTML, JSON, JUnit and the web page.


class Purpose(StrEnum):
    """Purpose of a run."""

    NIGHTLY = "nightly"
    """Nightly run: continues the series of its branch, with baselines, status mails and alerts."""
    LOCAL = "local"
    """Local run: compared with the branch, and no part of it."""
    MANUAL = "manual"
    """Run of an older farm without a purpose: started by hand, and part of its branch."""


class DeviceView(msgspec.Struct, frozen=True):
    """Device that took part in a run."""

    serial: str
    soc: str
    kind: str
    """`virtual` or `hardware`."""
    build: str
    """Fingerprint of the device's system."""
    jobs: int = 0
    busy_seconds: float = 0.0
    runtime: dict[str, str] = {}
    """Parts of the runtime, name to version or hash; empty if unknown."""


class CaseResult(msgspec.Struct, frozen=True):
    """Newest result of a case on one target, from any run."""

    job_id: str
    soc: str
    backend: str
    precision: str
    run_id: str
    run_started_ms: int
    """Epoch, milliseconds."""
    kind: str
    """Kind of the device: `virtual` or `hardware`; empty without a device."""
    attempt: Attempt
    """Deciding attempt, without log, measurements and profile."""
    case_version: str = ""
    """Hash of the definition of the case: results with different hashes are of different tests."""

    @property
    def time_ms(self) -> int:
        """Start of the attempt, or of its run if unknown; epoch, milliseconds."""
        return self.attempt.started_ms or self.run_started_ms


class SkipReason(msgspec.Struct, frozen=True):
    """Reason to skip a planned job of a run, with its last result at that time."""

    reason: str
    last_ms: int = 0
    """Time of the last verdict on this kind of device; epoch, milliseconds, 0 for never."""
    last_outcome: str = ""
    """Last result: `passed`, `failed` or `known issue`."""
    last_run_id: str = ""


class RunCommit(msgspec.Struct, frozen=True):
    """Commit with its subject, for people."""

    hash: str
    subject: str
    """First line of the commit's message."""


class RunToolchain(msgspec.Struct, frozen=True, omit_defaults=True):
    """Toolchain of a run, for people and for the history: fixed when the run is recorded."""

    name: str = ""
    """Name given by users; empty for the default."""
    branch: str = ""
    """Branch that the run belongs to, or that a local run is compared with; empty for the default."""
    private: bool = False
    """True for a local run: compared with the branch, but no part of its baseline, flakiness or status."""
    commit: str = ""
    """Full hash; empty without git."""
    dirty: bool = False
    """True if a file that takes part differs from the commit."""
    git_branch: str = ""
    """Branch of git; empty without git."""
    subject: str = ""
    """First line of the commit's message."""
    committed_ms: int = 0
    """Epoch, milliseconds."""
    before: str = ""
    """Commit of the branch's previous run, if it differs."""
    since: tuple[RunCommit, ...] = ()
    """Commits after `before` up to `commit`, newest first; the newest of many, and none without an answer of git."""
    more: int = 0
    """Number of further commits."""
    commit_url: str = ""
    """Address of a commit's page, with `{commit}` in it; untrusted text."""

    @property
    def is_named(self) -> bool:
        """True for a toolchain with facts beyond the default one."""
        return bool(self.name or self.branch or self.commit or self.dirty)


class JobView(msgspec.Struct, frozen=True):
    """Job of a run with its attempts, oldest first; an empty tuple before the first attempt."""

    id: str
    suite: str
    case: str
    soc: str
    backend: str
    precision: str
    attempts: tuple[Attempt, ...]
    build_seconds: float = 0.0
    cached: bool = False
    """True for a bundle from the cache."""
    fallback_ops: dict[str, int] = {}
    case_module: str = ""
    options: dict[str, str] = {}
    """Options of the backend, name to value."""
    case_version: str = ""
    """Hash of the definition of the case."""
    elsewhere: tuple[CaseResult, ...] = ()
    """For a failed job: results of the case in this precision on other SoCs, and in other precisions on this SoC."""
    skipped: SkipReason | None = None
    """Reason for a job skipped for lack of time; meaningful only without an attempt."""
    program: str | msgspec.UnsetType = msgspec.UNSET
    """Hash of the program without the timestamps of QNN; unset if unknown."""
    decisive_attempt: int = 0
    """Number of the deciding attempt, from 1, as `run_job.decisive_attempt_id` of the store; 0 without attempts."""

    @property
    def decisive(self) -> Attempt | None:
        """Deciding attempt, None without attempts."""
        return self.attempts[self.decisive_attempt - 1] if self.decisive_attempt else None


class RunView(msgspec.Struct, frozen=True):
    """Run with its jobs and devices."""

    id: str
    command: str
    started_ms: int
    finished_ms: int | None
    """End of the run; None for a running or killed run."""
    exit_code: int | None
    user: str
    host: str
    fingerprint: dict[str, str]
    """All conditions of the numbers, name to value: executorch, qnn, runner hash, device kind, ..."""
    devices: tuple[DeviceView, ...]
    jobs: tuple[JobView, ...]
    schema: int = 3
    """Version of this layout, for readers of the JSON."""
    priority: str = "person"
    """Priority of the run: `person` or `nightly`."""
    toolchain: RunToolchain | msgspec.UnsetType = msgspec.UNSET
    """Toolchain of the run; unset for the default one without further facts."""
    name: str = ""
    """Name given by the user, or NIGHTLY/CELL; empty without a name."""
    purpose: str = Purpose.MANUAL
    """Value of `Purpose`."""


# Records written to the store and read back for histories, as plain data.


class RunKind(StrEnum):
    """Kind of a run, by its command."""

    SUITE = "suite"
    """`farm run`, and each cell of a nightly run."""
    TESTS = "tests"
    """`farm pytest`."""
    EXEC = "exec"
    REPRO = "repro"
    DEBUG = "debug"
    """Run whose programs wrote every layer: its numbers are in no history."""

    @classmethod
    def of(cls, command: str, facts: Mapping[str, str]) -> RunKind:
        """Return the kind of a run with this command and fingerprint."""
        if "debug" in facts:
            return cls.DEBUG
        kinds = {"farm exec": cls.EXEC, "farm jobs rerun": cls.REPRO, "farm pytest": cls.TESTS}
        return next((kind for name, kind in kinds.items() if f"{command} ".startswith(f"{name} ")), cls.SUITE)


class RunRecord(msgspec.Struct, frozen=True):
    """New run."""

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
    """Toolchain of its programs, and the branch that the run belongs to or is compared with."""
    name: str = ""
    """Name given by the user, or NIGHTLY/CELL."""
    nightly_run: str = ""
    """Id of the nightly run of which this run is a cell."""


class BuildRecord(msgspec.Struct, frozen=True):
    """Build of a planned job's bundle."""

    job_id: str
    seconds: float
    """Wall time."""
    cached: bool
    """True for a bundle that the cache had."""
    bundle_key: str
    fallback_ops: Mapping[str, int] | None = None
    """Number of operators left to the CPU, by name; None if unknown."""
    operators: Mapping[str, int] | None = None
    """Number of operators built by the backend, by name; None if unknown."""
    program: str = ""
    """Hash of the program by its manifest; empty without one."""


class ArtifactRecord(msgspec.Struct, frozen=True):
    """Artifact: file of an attempt in the artifact store."""

    sha256: str
    size: int
    """Bytes."""
    kind: str
    """For example `etdump` or `output`."""


class JobFile(ArtifactRecord, frozen=True):
    """Artifact with the number of its attempt."""

    attempt: int = 1
    """Number of the attempt within its job in the run, from 1."""


class HistoryPoint(msgspec.Struct, frozen=True):
    """Metric of an attempt; in an attempt without the metric `n` is 0 and `value` None."""

    job_id: str
    run_id: str
    time_ms: int
    """Start of the attempt; epoch, milliseconds."""
    fingerprint: str
    """Hash of the run's fingerprint: points with equal hashes have the same toolchain."""
    case_version: str
    """Hash of the definition of the case: points with different hashes are numbers of different tests."""
    device: str
    device_kind: str
    """`virtual` or `hardware`, always separate series. Empty without a device in a run of both kinds or none."""
    verdict: str
    known_issue: str
    metric: str
    unit: str
    direction: str
    exact: bool
    value: float | None
    """Value of the attempt in its series: deciding sample of a figure of outputs, else the median; an int if exact."""
    n: int
    """Number of samples."""
    device_facts: dict[str, str] = {}
    """Further conditions of the numbers: build of the device's system, versions of its runtime."""
    commit: str | msgspec.UnsetType = msgspec.UNSET
    """Commit of the run's toolchain; unset if unknown."""
    dirty: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a toolchain with changes after the commit; unset without changes or if unknown."""
    local: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a local run, which is only compared with the branch; unset for a run of the branch."""


class ProfileRecord(msgspec.Struct, frozen=True):
    """Profile of an attempt: rows, files, or both."""

    job_id: str
    backend: str
    run_id: str
    time_ms: int
    """Start of the attempt; epoch, milliseconds."""
    facts: dict[str, str]
    """Fingerprint of the run: name to value."""
    case_version: str
    """Hash of the definition of the case: profiles with different hashes are of different tests."""
    device: str
    device_kind: str
    """`virtual` or `hardware`, never compared with each other. Empty without a device."""
    verdict: str
    operators: tuple[OperatorProfile, ...]
    """Operators in the order of execution."""
    artifacts: tuple[ArtifactRecord, ...]
    """All artifacts of the attempt, oldest first."""


class JobResult(msgspec.Struct, frozen=True):
    """Newest result of a job, with facts about its validity."""

    suite: str
    case: str
    module: str
    """Module of the case: `package.module:Class`."""
    options: dict[str, str]
    result: CaseResult
    fingerprint: str
    """Hash of the run's fingerprint."""
    operators: dict[str, int] | None
    """Count of each operator of the program that the backend built; None if unknown."""
    newer_run: str = ""
    """Id of a newer run that planned the job too and has no attempt of it; empty without such a run."""


class ListedJob(msgspec.Struct, frozen=True):
    """Job with the facts that are equal in all its runs."""

    job_id: str
    module: str
    """Module of the case: `package.module:Class`."""
    case: str
    precision: str


class LastVerdict(msgspec.Struct, frozen=True):
    """Newest verdict about the code of a job."""

    run_id: str
    time_ms: int
    """Time of the record; epoch, milliseconds."""
    outcome: str
    """`passed`, `failed` or `known issue`."""
    bundle_key: str
    """Key of the judged bundle; empty if unknown."""
    judged_by: str
    """Hash of the limits applied then (`farm.store.values.judged_by`); empty in runs of older farms."""


class ExpectedJob(msgspec.Struct, frozen=True):
    """Medians of the recent runs of a job on one kind of device, and its newest verdict."""

    last: LastVerdict
    build_seconds: float | None
    """Time of compiling; None if every bundle came from the cache."""
    run_seconds: float
    """Time on the device."""
    total_seconds: float
    """Time of both, with 0 for a bundle from the cache."""


class Before(msgspec.Struct, frozen=True):
    """Newest verdict about a job's code before a given run."""

    run_id: str
    time_ms: int
    """Time of the record; epoch, milliseconds."""
    verdict: str
    known_issue: str


class JobStatus(msgspec.Struct, frozen=True):
    """End of a job of a run, without its numbers."""

    job_id: str
    verdict: str
    """Verdict of the deciding attempt; empty without attempts."""
    known_issue: str
    stage: str
    reason: str
    """Reason in one line; of a skipped job the reason for that."""
    skipped: bool = False
    before: Before | None = None
    """Earlier verdict on this kind of device; None for a job without one."""


class RunStatus(msgspec.Struct, frozen=True):
    """Run without its numbers."""

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
    """Toolchain of the run; unset for the default one without further facts."""
    name: str = ""
    purpose: str = Purpose.MANUAL
    """Value of `Purpose`."""
    began: bool = True
    """False for a run that ended before its first execution."""


class UnfinishedRun(msgspec.Struct, frozen=True):
    """Run without a recorded end."""

    run_id: str
    user: str
    host: str
    command: str
    started_ms: int


class TrendPoint(msgspec.Struct, frozen=True):
    """Metric of a job in a run."""

    run_id: str
    time_ms: int
    """Start of the run; epoch, milliseconds."""
    fingerprint: str
    """Hash of the run's fingerprint."""
    case: str
    """Version of the case: points with different versions are numbers of different tests."""
    value: float | None
    """Median of the samples, or the deciding sample of a figure of outputs; None for NaN."""


class TrendSeries(msgspec.Struct, frozen=True):
    """Metric of a job over its newest runs on one kind of device, oldest first."""

    metric: str
    unit: str
    direction: str
    points: tuple[TrendPoint, ...]


class Background(msgspec.Struct, frozen=True):
    """History and files that a report shows beside a run."""

    trends: dict[str, tuple[TrendSeries, ...]] = {}
    """Trends by job id."""
    facts: dict[str, dict[str, str]] = {}
    """Fingerprints of the runs in the trends, name to value, by their hash."""
    artifacts: dict[str, tuple[JobFile, ...]] = {}
    """Artifacts of the run, by job id, oldest first."""


class AlertState(StrEnum):
    """State of an alert."""

    SUSPECTED = "suspected"
    """Suspected change against the runs before, not measured again yet."""
    EXACT = "exact"
    """Changed value of a deterministic metric."""
    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNKNOWN = "unknown"
    """Suspected change that measured pairs neither confirm nor refute."""
    ACCEPTED = "accepted"
    """Change whose new level a user accepted."""


STEPS = (AlertState.CONFIRMED, AlertState.EXACT, AlertState.ACCEPTED)
"""States of established changes of a level."""


class RemarkState(StrEnum):
    """Decision of a user about an alert or a job."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    """Alert with an owner who works on it."""
    ACCEPTED = "accepted"
    FIXED = "fixed"


class Remark(msgspec.Struct, frozen=True):
    """Remark of a user on an alert or a job."""

    state: str
    """Value of `RemarkState`."""
    user: str
    owner: str
    """User who works on it; empty without an owner."""
    note: str
    time_ms: int = 0
    """Epoch, milliseconds; 0 is now."""
    until_ms: int | None = None
    """End of validity; None for a permanent remark."""


class NewAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Alert to record, or its new state. Changes are on the scale of the series, NaN without a change."""

    series_id: int
    device_kind: str
    finding: str
    """Value of `farm.results.analysis.suspected.Finding`."""
    state: str
    """Value of `AlertState`."""
    last_good: str
    first_bad: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p_value: float = math.nan
    reason: str
    likely_cause: str = msgspec.field(default="", name="guilt")


class AlertRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded alert with its state, cause and newest remark."""

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
    """Run with the suspected change."""
    finding: str
    """`regression`, `improvement` or `changed`."""
    state: str
    """Value of `AlertState`; `accepted` also by a remark."""
    last_good: str
    """Last run before the change."""
    first_bad: str
    change: float
    """Change on the scale of the series, like its interval, for `farm.results.analysis.statistics.change_text`."""
    low: float
    high: float
    p_value: float
    reason: str
    """Reason in one line."""
    likely_cause: str = msgspec.field(name="guilt")
    """Factor behind the change, in one line; empty if unknown."""
    device: str
    """Device of the measured pairs; empty without pairs."""
    found_ms: int
    remark: Remark | None = None
    """Newest remark."""
    branch: str | msgspec.UnsetType = msgspec.UNSET
    """Branch of the run; unset for the default one."""
    private: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a local run, which only its own user has to look at."""
    newest: int | msgspec.UnsetType = msgspec.UNSET
    """Id of the newest step of an open alert that grew after its first one."""

    @property
    def owner(self) -> str:
        """Return the user who works on the alert; empty without one."""
        return self.remark.owner if self.remark else ""

    @property
    def note(self) -> str:
        """Return the newest note on the alert."""
        return self.remark.note if self.remark else ""
