"""Records of a job that ended the runner, and of its second run alone."""

from __future__ import annotations

import msgspec
import pytest

from farm.policy.retries import after_rerun
from farm.results.attempt import Attempt, Cause, Stage, Verdict

CRASHED = Attempt("job", Verdict.FAILED, Stage.EXECUTE, "the runner ended with signal 11 (SIGSEGV)")
REFUSED = Attempt("job", Verdict.FAILED, Stage.LOAD, "load: Error 0x12 loading forward", cause=Cause.REFUSED)
LOST = Attempt("job", Verdict.INFRA, Stage.EXECUTE, "the DSP was restarted (SSR)", cause=Cause.SESSION)
PASSED = Attempt("job", Verdict.PASSED, Stage.DONE, "")
GONE = Attempt("job", Verdict.INFRA, Stage.EXECUTE, "device offline")
WRONG = Attempt("job", Verdict.FAILED, Stage.NUMERICS, "sqnr 3 dB < 20 dB")


@pytest.mark.parametrize(
    ("first", "second", "refused", "reason", "note"),
    [
        (
            CRASHED,
            CRASHED,
            False,
            "and again in a process of its own",
            "in a session and again in a process of its own",
        ),
        (CRASHED, PASSED, False, "not in a process of its own", "SIGSEGV"),
        (CRASHED, GONE, False, "and could not be tried in a process of its own", ""),
        (CRASHED, WRONG, False, "SIGSEGV", ""),
        (REFUSED, PASSED, True, "was refused in a session, not in a process", "after it was refused in a session"),
        (REFUSED, REFUSED, True, "", "was refused in a session and again in a process of its own"),
        (LOST, PASSED, True, "", ""),
    ],
)
def test_the_run_alone_decides_and_the_first_run_is_trouble(
    first: Attempt, second: Attempt, refused: bool, reason: str, note: str
) -> None:
    known = msgspec.structs.replace(first, known_issue="it crashes")
    before, alone = after_rerun(known, second, ended_again=first is second, refused=refused)
    assert (before.verdict, before.known_issue) == (Verdict.INFRA, "")
    assert reason in before.reason
    assert (alone.verdict, alone.stage, alone.cause, alone.reason) == (
        second.verdict, second.stage, second.cause, second.reason,
    )  # fmt: skip
    assert note in "".join(alone.notes)


def test_a_job_that_restarts_the_dsp_each_time_counts_as_a_crash() -> None:
    _, alone = after_rerun(LOST, LOST, ended_again=True, refused=True)
    assert (alone.verdict, alone.cause) == (Verdict.FAILED, Cause.CRASH)
