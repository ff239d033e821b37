"""Plain data of one run, which HTML, JSON, JUnit and the web page all render."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from farm.results.attempt import Attempt


class Purpose(StrEnum):
    """Why a run was made."""

    NIGHTLY = "nightly"
    """It goes on with the series of its line: what is compared with, told in the morning and alarmed about."""
    TRIAL = "trial"
    """Somebody tries something: it is compared with the line, and is no part of it."""
    MANUAL = "manual"
    """Of an older farm, which did not ask: by hand, and part of its line."""


class DeviceView(msgspec.Struct, frozen=True):
    """One device that took part."""

    serial: str
    soc: str
    kind: str
    """`virtual` or `hardware`."""
    build: str
    """Fingerprint of the device's system."""
    jobs: int = 0
    busy_seconds: float = 0.0
    runtime: dict[str, str] = {}
    """What it ran programs with, name to version or hash; empty where it is not known."""


class CaseResult(msgspec.Struct, frozen=True):
    """The newest result of a case on one target, whichever run it is of."""

    job_id: str
    soc: str
    backend: str
    precision: str
    run_id: str
    run_started_ms: int
    """Epoch, milliseconds."""
    kind: str
    """Of the device: `virtual` or `hardware`; empty where none had a part."""
    attempt: Attempt
    """The one that decides, without log, measurements and profile."""
    case_version: str = ""
    """Hash of what the case is: results of another one are of another test."""

    @property
    def time_ms(self) -> int:
        """When it was found out; epoch, milliseconds."""
        return self.attempt.started_ms or self.run_started_ms


class Stale(msgspec.Struct, frozen=True):
    """Why a job was left out of a run that has it, and what was known of it then."""

    reason: str
    last_ms: int = 0
    """When it was last judged on this kind of device; epoch, milliseconds, 0 for never."""
    last_outcome: str = ""
    """How that ended: `passed`, `failed` or `known issue`."""
    last_run_id: str = ""


class RunCommit(msgspec.Struct, frozen=True):
    """One commit, as people name it."""

    hash: str
    subject: str
    """First line of its message."""


class RunToolchain(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run compiled with, for people and for the history: decided when the run is recorded."""

    name: str = ""
    """As users call it; empty for the default."""
    line: str = ""
    """The series that the run belongs to or, where it is private, that it is compared with; empty for the default."""
    private: bool = False
    """It is compared with the line, and is no part of its baseline, flakiness or status."""
    commit: str = ""
    """Full hash; empty where there is no git."""
    dirty: bool = False
    """Something that takes part is not as in the commit."""
    branch: str = ""
    subject: str = ""
    """First line of the commit's message."""
    committed_ms: int = 0
    """Epoch, milliseconds."""
    before: str = ""
    """The commit of the line's run before, where it is another one."""
    since: tuple[RunCommit, ...] = ()
    """Commits after it up to this one, newest first; not all, where there are many, and none where git cannot tell."""
    more: int = 0
    """How many more there are."""
    commit_url: str = ""
    """Address of a commit, with `{commit}` in it; anybody may have written it."""

    @property
    def is_told(self) -> bool:
        """Whether there is more to tell of it than that it is the default one."""
        return bool(self.name or self.line or self.commit or self.dirty)


class JobView(msgspec.Struct, frozen=True):
    """One job of the run and all its attempts, oldest first; no attempt yet is an empty tuple."""

    id: str
    suite: str
    case: str
    soc: str
    backend: str
    precision: str
    attempts: tuple[Attempt, ...]
    build_seconds: float = 0.0
    cached: bool = False
    """The bundle was there already."""
    fallback_ops: dict[str, int] = {}
    case_module: str = ""
    options: dict[str, str] = {}
    """Options of the backend, name to value."""
    case_version: str = ""
    """Hash of what the case is."""
    elsewhere: tuple[CaseResult, ...] = ()
    """Of a job that failed: the same case in the same precision on other SoCs, and in others on this SoC."""
    stale: Stale | None = None
    """Left out, while the run had no time for it; means something only without an attempt."""
    program: str | msgspec.UnsetType = msgspec.UNSET
    """Hash of what the program is, without what QNN writes by time; not there where it is not known."""
    decisive_attempt: int = 0
    """Number of the attempt that decides, from 1, as `run_job.decisive_attempt_id` of the store; 0 without attempts."""

    @property
    def decisive(self) -> Attempt | None:
        """The attempt that decides, None without attempts."""
        return self.attempts[self.decisive_attempt - 1] if self.decisive_attempt else None


class RunView(msgspec.Struct, frozen=True):
    """One run."""

    id: str
    command: str
    started_ms: int
    finished_ms: int | None
    """None while it runs, or when it was killed."""
    exit_code: int | None
    user: str
    host: str
    fingerprint: dict[str, str]
    """Everything the numbers depend on, name to value: executorch, qnn, runner hash, device kind, ..."""
    devices: tuple[DeviceView, ...]
    jobs: tuple[JobView, ...]
    schema: int = 1
    """Version of this layout, for readers of the JSON."""
    priority: str = "person"
    """How urgent it was: `person` or `nightly`."""
    toolchain: RunToolchain | msgspec.UnsetType = msgspec.UNSET
    """Not there where nothing is known but that it is the default one."""
    name: str = ""
    """As its user calls it, or NIGHT/CELL; empty where it has none."""
    purpose: str = Purpose.MANUAL
    """One of `Purpose`."""
