"""What the pool and a builder process say to each other: one JSON line each way for every job."""

from __future__ import annotations

import msgspec

from farm.suites import Job


class Request(msgspec.Struct, frozen=True):
    """Build this."""

    job: Job
    key: str
    versions: dict[str, str]
    log: str
    """File that takes what the compiler prints."""


class Reply(msgspec.Struct, frozen=True):
    """How it went."""

    key: str
    ok: bool
    seconds: float
    reason: str = ""
    """One line: the exception; empty when ok."""
    infra: bool = False
    """The machine is at fault (no space, no permission), not the job."""
