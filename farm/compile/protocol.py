"""What the pool and a builder process say to each other: one JSON line each way for every job."""

from __future__ import annotations

import signal

import msgspec

from farm.suites.suite import Job

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""What a compiler that crashes ends with; anything else that ends a builder comes from outside."""

BEGAN = b"began\n"
"""What a builder says before it compiles a request: how it ends from now on is the compiler's doing."""

_REASON_CHARS = 500


class BuildRequest(msgspec.Struct, frozen=True):
    """Build this."""

    job: Job
    key: str
    versions: dict[str, str]
    log: str
    """File that takes what the compiler prints."""


class BuildReply(msgspec.Struct, frozen=True):
    """How it went."""

    key: str
    ok: bool
    seconds: float
    reason: str = ""
    """One line: the exception; empty when ok."""
    infra: bool = False
    """The machine is at fault (no space, no permission), not the job."""


def exit_reason(code: object) -> str:
    """Return the reason of a compiler that ended its process, or meant to, with an exit code as sys.exit takes it."""
    if code is None or isinstance(code, int):
        return f"the compiler called exit({code or 0})"
    return f"the compiler called exit(1): {' '.join(str(code).split())}"[:_REASON_CHARS]


def reason_of(error: BaseException) -> str:
    """Return what a compiler raised, as the reason of a reply: one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON_CHARS]
