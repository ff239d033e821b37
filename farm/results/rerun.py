"""A job that ended the runner, and the same once more in a process of its own -> what is recorded of both."""

from __future__ import annotations

import msgspec

from farm.results.attempt import Attempt, Verdict
from farm.results.text import one_line


def after_rerun(first: Attempt, alone: Attempt, *, ended_again: bool) -> tuple[Attempt, Attempt]:
    """Return both attempts as they are recorded. Pure.

    What ends the runner again although nothing ran before it is to blame. What does not was a victim of its company or
    of the device: the first attempt counts against the farm, and the second decides.
    """
    if ended_again:
        return first, _with_note(alone, "ended the runner in a session and again in a process of its own")
    reason = f"ended the runner in a session, not in a process of its own: {first.reason}"
    blameless = msgspec.structs.replace(first, verdict=Verdict.INFRA, reason=one_line(reason), known_issue="")
    return blameless, _with_note(alone, f"in a process of its own, after it ended the session's runner: {first.reason}")


def _with_note(attempt: Attempt, note: str) -> Attempt:
    return msgspec.structs.replace(attempt, notes=(*attempt.notes, one_line(note)))
