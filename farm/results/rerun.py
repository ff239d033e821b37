"""A job that ended the runner, and the same once more in a process of its own -> what is recorded of both."""

from __future__ import annotations

import msgspec

from farm.results.attempt import Attempt, Verdict
from farm.results.text import one_line


def after_rerun(first: Attempt, alone: Attempt, *, ended_again: bool) -> tuple[Attempt, Attempt]:
    """Return both attempts as they are recorded. Pure.

    What ends the runner again although nothing ran before it is to blame. What does not was a victim of its company or
    of the device. Either way the second decides, and the first counts against the farm: a job has one verdict.
    """
    company, note = "not in a process of its own", ""
    if ended_again:
        company = "and again in a process of its own"
        note = "ended the runner in a session and again in a process of its own"
    elif alone.verdict is Verdict.INFRA:
        company = "and could not be tried in a process of its own"
    reason = f"ended the runner in a session, {company}: {first.reason}"
    blameless = msgspec.structs.replace(first, verdict=Verdict.INFRA, reason=one_line(reason), known_issue="")
    note = note or f"in a process of its own, after it ended the session's runner: {first.reason}"
    return blameless, _with_note(alone, note)


def _with_note(attempt: Attempt, note: str) -> Attempt:
    return msgspec.structs.replace(attempt, notes=(*attempt.notes, one_line(note)))
