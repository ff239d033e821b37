"""Failure classification, over all results that up to three devices can have for a job, and the second run alone."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from farm.policy.retries import (
    MOST_DEVICES,
    Classification,
    Tried,
    after_rerun,
    as_recorded,
    avoided,
    classify,
    damaged,
    tried,
    unfit,
)
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict

# Failure classification, over all results that up to three devices can have for a job.


FAILED = {Cause.COMPILE, Cause.NUMERICS, Cause.REFUSED, Cause.UNSUPPORTED, Cause.CRASH, Cause.HANG}
AT_ONCE = (Cause.COMPILE, Cause.UNSUPPORTED)
OPEN = (Cause.CRASH, Cause.HANG, Cause.NUMERICS, Cause.REFUSED)
# Causes that another device would not change.
ALONE = (Cause.BUILDER, Cause.DISK, Cause.LOCAL, Cause.REQUEST, Cause.INFEASIBLE)
# Causes after which recovery may bring back the device.
LOST = (Cause.NONE, Cause.CONNECTION, Cause.GONE, Cause.SPACE, Cause.DAMAGE, Cause.DEVICE)
FARMS = (*LOST, Cause.ADB_SERVER, Cause.RUNTIME, Cause.SESSION, Cause.LEASE, Cause.WORKER)
REPEATED = (*OPEN, *FARMS)


def attempt(cause: Cause | None, device: str = "a") -> Attempt:
    """Return the judged attempt of an execution; None stands for passed."""
    if cause is None:
        return Attempt("job", Verdict.PASSED, Stage.DONE, "", device=device)
    verdict = Verdict.FAILED if cause in FAILED else Verdict.INFRA
    measured = Measurement("pte_size", "bytes", Direction.LOWER, (1.0,), exact=True)
    reason = f"{cause} it was"
    return Attempt("job", verdict, Stage.EXECUTE, reason, device=device, cause=cause, measurements=(measured,))


def history(*causes: Cause | None) -> list[Tried]:
    return [tried(attempt(cause, device)) for cause, device in zip(causes, "abcdef", strict=False)]


def settled(*causes: Cause | None, others: int) -> Attempt:
    decision = classify(history(*causes), others=others)
    return as_recorded(attempt(causes[-1], "abcdef"[len(causes) - 1]), history(*causes), decision)


def histories() -> list[tuple[Cause | None, ...]]:
    """Return all histories of causes: every attempt before the last has a cause that is repeated elsewhere."""
    before = [one for length in range(MOST_DEVICES) for one in product(REPEATED, repeat=length)]
    return [(*one, end) for one in before for end in (None, *Cause)]


@pytest.mark.parametrize("others", [0, 1])
def test_rules_hold_for_every_history(others: int) -> None:
    for causes in histories():
        decision = classify(history(*causes), others=others)
        last = causes[-1]
        opened = [cause for cause in causes if cause in OPEN]
        is_open_alone = len(causes) == 1 and not others
        is_infra = decision.classification in {Classification.FARM, Classification.UNDECIDED}
        if last is None:
            assert decision.classification is Classification.NONE, causes
        elif last in AT_ONCE:
            assert decision.classification is Classification.CODE, causes
        elif last in OPEN:
            assert (decision.classification is Classification.CODE) == (len(opened) > 1 or is_open_alone), causes
        else:
            assert is_infra, causes
        if decision.repeat:
            assert others, "there has to be a device that it can be repeated on"
            assert len(causes) < MOST_DEVICES, causes
            assert is_infra, causes
        final = settled(*causes, others=others)
        assert (final.verdict is Verdict.INFRA) == is_infra, causes
        assert final.verdict is not Verdict.FAILED or decision.classification is Classification.CODE, causes
        assert final.cause is (last or Cause.NONE), causes
        assert "\n" not in "".join((final.reason, *final.notes)), causes


def test_order_of_devices_decides_nothing_about_the_code() -> None:
    for causes in histories():
        if len(causes) > 1 and all(cause in REPEATED for cause in causes):
            orders = (causes, causes[::-1])
            found = {classify(history(*order), others=0).classification is Classification.CODE for order in orders}
            # A second device with the same result ends the search, so that no third device is tried.
            assert len(found) == 1 or len([cause for cause in causes if cause in OPEN]) > 1, causes


@pytest.mark.parametrize(
    ("causes", "others", "notes"),
    [
        *(((cause,), 5, ()) for cause in AT_ONCE),
        *(((cause,), 0, ("no other device has tried it",)) for cause in OPEN),
        ((None,), 3, ()),
        ((Cause.CRASH, Cause.CRASH), 5, ("crashed on a and on b",)),
        ((Cause.HANG, Cause.CRASH), 5, ("hung on a, crashed on b",)),
        ((Cause.CRASH, Cause.GONE, Cause.CRASH), 5, ("crashed on a and on c, device gone on b",)),
        ((Cause.NUMERICS, Cause.CRASH), 5, ("wrong numbers on a, crashed on b",)),
        ((Cause.REFUSED, Cause.SESSION, Cause.REFUSED), 5, ("refused on a and on c, DSP restarted on b",)),
        ((Cause.CRASH, Cause.SPACE, None), 1, ("before, on other devices: crashed on a, no space on b",)),
        ((Cause.GONE, Cause.UNSUPPORTED), 1, ("before, on other devices: device gone on a",)),
        (
            (Cause.RUNTIME, Cause.DEVICE, None),
            1,
            ("before, on other devices: runtime does not fit on a, device failed on b",),
        ),
    ],
)
def test_verdict_about_the_code_names_what_each_device_found(
    causes: tuple[Cause | None, ...], others: int, notes: tuple[str, ...]
) -> None:
    final = settled(*causes, others=others)
    assert final.verdict is (Verdict.PASSED if causes[-1] is None else Verdict.FAILED)
    assert final.notes == notes
    assert final.reason == attempt(causes[-1]).reason
    assert not classify(history(*causes), others=others).repeat


@pytest.mark.parametrize("cause", OPEN)
def test_result_of_one_device_alone_is_undecided(cause: Cause) -> None:
    assert classify(history(cause), others=1).repeat
    final = settled(cause, others=1)
    assert (final.verdict, final.measurements) == (Verdict.INFRA, ())
    assert "on a: another device has to decide between a fault of the job and of the device" in final.notes[0]
    # Another run may have been unlucky with a crash or hang, but not with the same numbers or refusal.
    known = classify(history(cause), others=9, failed_before=True)
    assert known.repeat == (cause in (Cause.CRASH, Cause.HANG))
    assert (known.classification is Classification.CODE) == (not known.repeat)


@pytest.mark.parametrize("causes", [(Cause.CRASH, Cause.GONE), (Cause.GONE, Cause.CRASH), (Cause.NUMERICS, Cause.GONE)])
def test_it_stays_open_when_the_other_device_could_not_say(causes: tuple[Cause, ...]) -> None:
    decision = classify(history(*causes), others=0)
    assert (decision.classification, decision.repeat) == (Classification.UNDECIDED, False)
    assert decision.evidence.endswith("it stays open whether it is the job or the device")


@pytest.mark.parametrize("cause", [*FARMS, *ALONE])
def test_trouble_is_repeated_on_three_devices_at_most_and_once_on_its_own(cause: Cause) -> None:
    repeats = [classify(history(*[cause] * count), others=9).repeat for count in (1, 2, 3)]
    assert repeats == [cause not in ALONE, cause not in (*ALONE, Cause.GONE), False]
    again = [classify(history(cause), others=others).again for others in (0, 1)]
    assert again == [cause in LOST, False]
    if cause in LOST:
        first, second = (tried(attempt(one, "a")) for one in (cause, Cause.CRASH))
        lost = msgspec.structs.replace(first, again=True)
        assert avoided([lost], "a") == ()
        assert avoided([first], "a") == avoided([lost, second], "a") == ("a",)
        assert not classify([lost, first], others=0).again
        alone = classify([lost, second], others=0)
        assert (alone.classification, alone.evidence) == (Classification.CODE, "no other device has tried it")


def test_a_job_that_kills_devices_is_stopped_and_named() -> None:
    causes = (Cause.GONE, Cause.GONE)
    assert classify(history(*causes), others=9) == classify(history(*causes), others=0)
    assert settled(*causes, others=9).reason == (
        "the job may be killing devices: a and b went away while they ran it; gone it was"
    )
    assert classify(history(Cause.GONE, Cause.CONNECTION), others=9).repeat
    same = [tried(attempt(Cause.GONE, "a")), tried(attempt(Cause.GONE, "a"))]
    assert "killing" not in classify(same, others=0).evidence


def test_a_known_issue_covers_only_faults_of_the_code() -> None:
    known = msgspec.structs.replace(attempt(Cause.CRASH), known_issue="it crashes")
    output = [tried(known)]
    assert as_recorded(known, output, classify(output, others=1)).known_issue == ""
    assert as_recorded(known, output, classify(output, others=0)).known_issue == "it crashes"


def test_numbers_of_an_unfit_device_or_of_damaged_files_are_no_failure() -> None:
    wrong = attempt(Cause.NUMERICS)
    sick, spoilt = unfit(wrong, "sqnr 2 dB < 20 dB"), damaged(wrong, "output_0_0.raw differs")
    for found, cause, words in (
        (sick, Cause.DEVICE, "fails its health check as well (sqnr 2 dB < 20 dB)"),
        (spoilt, Cause.DAMAGE, "output_0_0.raw differs: its numbers mean nothing"),
    ):
        assert (found.verdict, found.cause, found.measurements) == (Verdict.INFRA, cause, ())
        assert words in found.reason
        assert classify([tried(found)], others=1) == classify(history(cause), others=1)


# Records of a job that ended the runner, and of its second run alone.


CRASHED = Attempt("job", Verdict.FAILED, Stage.EXECUTE, "the runner ended with signal 11 (SIGSEGV)")
REFUSED = Attempt("job", Verdict.FAILED, Stage.LOAD, "load: Error 0x12 loading forward", cause=Cause.REFUSED)
LOST_RUNNER = Attempt("job", Verdict.INFRA, Stage.EXECUTE, "the DSP was restarted (SSR)", cause=Cause.SESSION)
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
        (LOST_RUNNER, PASSED, True, "", ""),
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
    _, alone = after_rerun(LOST_RUNNER, LOST_RUNNER, ended_again=True, refused=True)
    assert (alone.verdict, alone.cause) == (Verdict.FAILED, Cause.CRASH)
