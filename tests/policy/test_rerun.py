"""Records of a job that ended the runner, and of its second run alone."""

from __future__ import annotations

from farm.policy.retries import after_rerun
from farm.results.attempt import Attempt, Cause, Stage, Verdict

CRASHED = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.EXECUTE, "the runner ended with signal 11 (SIGSEGV)")


def test_what_crashes_again_alone_is_at_fault() -> None:
    first, alone = after_rerun(CRASHED, CRASHED, ended_again=True)
    assert [first.verdict, alone.verdict] == [Verdict.INFRA, Verdict.FAILED]
    assert "and again in a process of its own" in first.reason
    assert alone.notes == ("ended the runner in a session and again in a process of its own",)
    assert alone.reason == CRASHED.reason


def test_what_runs_alone_is_no_failure_of_the_job_but_not_forgotten() -> None:
    passed = Attempt(CRASHED.job_id, Verdict.PASSED, Stage.DONE, "")
    first, alone = after_rerun(CRASHED, passed, ended_again=False)
    assert first.verdict is Verdict.INFRA
    assert "SIGSEGV" in first.reason
    assert "not in a process of its own" in first.reason
    assert alone.verdict is Verdict.PASSED
    assert "SIGSEGV" in alone.notes[0]


def test_what_could_not_be_tried_alone_is_said_so() -> None:
    gone = Attempt(CRASHED.job_id, Verdict.INFRA, Stage.EXECUTE, "device offline")
    first, alone = after_rerun(CRASHED, gone, ended_again=False)
    assert "and could not be tried in a process of its own" in first.reason
    assert (first.verdict, alone.verdict) == (Verdict.INFRA, Verdict.INFRA)


def test_a_known_issue_does_not_cover_what_only_happens_in_company() -> None:
    known = Attempt(CRASHED.job_id, Verdict.FAILED, Stage.EXECUTE, CRASHED.reason, known_issue="it crashes")
    wrong = Attempt(CRASHED.job_id, Verdict.FAILED, Stage.NUMERICS, "sqnr 3 dB < 20 dB")
    first, alone = after_rerun(known, wrong, ended_again=False)
    assert first.known_issue == ""
    assert (alone.verdict, alone.stage) == (Verdict.FAILED, Stage.NUMERICS)


REFUSED = Attempt(CRASHED.job_id, Verdict.FAILED, Stage.LOAD, "load: Error 0x12 loading forward", cause=Cause.REFUSED)


def test_a_refusal_that_a_new_session_does_not_meet_is_no_failure_of_the_job() -> None:
    passed = Attempt(CRASHED.job_id, Verdict.PASSED, Stage.DONE, "")
    first, alone = after_rerun(REFUSED, passed, ended_again=False, refused=True)
    assert first.verdict is Verdict.INFRA
    assert first.reason.startswith("was refused in a session, not in a process of its own: load: Error 0x12")
    assert alone.verdict is Verdict.PASSED
    assert "after it was refused in a session" in alone.notes[0]


def test_a_refusal_in_a_new_session_as_well_decides() -> None:
    first, alone = after_rerun(REFUSED, REFUSED, ended_again=True, refused=True)
    assert [first.verdict, alone.verdict, alone.cause] == [Verdict.INFRA, Verdict.FAILED, Cause.REFUSED]
    assert alone.notes == ("was refused in a session and again in a process of its own",)


def test_a_job_that_restarts_the_dsp_each_time_is_one_that_crashes() -> None:
    lost = Attempt(CRASHED.job_id, Verdict.INFRA, Stage.EXECUTE, "the DSP was restarted (SSR)", cause=Cause.SESSION)
    _, alone = after_rerun(lost, lost, ended_again=True, refused=True)
    assert (alone.verdict, alone.cause) == (Verdict.FAILED, Cause.CRASH)
    passed = Attempt(CRASHED.job_id, Verdict.PASSED, Stage.DONE, "")
    assert after_rerun(lost, passed, ended_again=False, refused=True)[1].verdict is Verdict.PASSED
