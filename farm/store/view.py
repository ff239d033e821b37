"""Plain data of a run, the common source of HTML, JSON, JUnit and the web page."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from farm.results.attempt import Attempt


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
