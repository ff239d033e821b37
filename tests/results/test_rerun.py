"""What is recorded of a job that ended the runner, and of its second run alone."""

from __future__ import annotations

from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.blame import after_rerun

CRASHED = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.EXECUTE, "the runner ended with signal 11 (SIGSEGV)")


def test_what_crashes_again_alone_is_to_blame() -> None:
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
