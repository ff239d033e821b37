"""Failure classification, over all results that up to three devices can have for a job."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from farm.policy.retries import (
    MOST_DEVICES,
    Classification,
    Tried,
    as_recorded,
    avoided,
    classify,
    damaged,
    tried,
    unfit,
)
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict

JOB = "s/c[SM8650-htp-8a8w]"
# Causes by verdict, as judge combines them.
FAILED = {Cause.COMPILE, Cause.NUMERICS, Cause.REFUSED, Cause.UNSUPPORTED, Cause.CRASH, Cause.HANG}
AT_ONCE = (Cause.COMPILE, Cause.UNSUPPORTED)
OPEN = (Cause.CRASH, Cause.HANG, Cause.NUMERICS, Cause.REFUSED)
# Causes that another device would not change.
ALONE = (Cause.BUILDER, Cause.DISK, Cause.LOCAL, Cause.REQUEST, Cause.INFEASIBLE)
FARMS = (
    Cause.NONE,
    Cause.CONNECTION,
    Cause.GONE,
    Cause.ADB_SERVER,
    Cause.SPACE,
    Cause.DAMAGE,
    Cause.DEVICE,
    Cause.RUNTIME,
    Cause.SESSION,
    Cause.LEASE,
    Cause.WORKER,
)
REPEATED = (*OPEN, *FARMS)
# Causes after which recovery may bring back the device.
LOST = (Cause.NONE, Cause.CONNECTION, Cause.GONE, Cause.SPACE, Cause.DAMAGE, Cause.DEVICE)


def attempt(cause: Cause | None, device: str = "a") -> Attempt:
    """Return the judged attempt of an execution; None stands for passed."""
    if cause is None:
        return Attempt(JOB, Verdict.PASSED, Stage.DONE, "", device=device)
    verdict = Verdict.FAILED if cause in FAILED else Verdict.INFRA
    measured = Measurement("pte_size", "bytes", Direction.LOWER, (1.0,), exact=True)
    return Attempt(JOB, verdict, Stage.EXECUTE, f"{cause} it was", device=device, cause=cause, measurements=(measured,))


def history(*causes: Cause | None) -> list[Tried]:
    return [tried(attempt(cause, device)) for cause, device in zip(causes, "abcdef", strict=False)]


def settled(*causes: Cause | None, others: int) -> Attempt:
    decision = classify(history(*causes), others=others)
    return as_recorded(attempt(causes[-1], "abcdef"[len(causes) - 1]), history(*causes), decision)


def histories() -> list[tuple[Cause | None, ...]]:
    """Return all histories of causes: every attempt before the last has a cause that is repeated elsewhere."""
    last = (None, *Cause)
    return [
        (*before, end) for length in range(MOST_DEVICES) for before in product(REPEATED, repeat=length) for end in last
    ]


@pytest.mark.parametrize("others", [0, 1, 5])
def test_whatever_happened_the_rules_hold(others: int) -> None:
    for causes in histories():
        decision = classify(history(*causes), others=others)
        last = causes[-1]
        opened = [cause for cause in causes if cause in OPEN]
        if last is None:
            assert decision.classification is Classification.NONE, causes
        elif last in AT_ONCE:
            assert decision.classification is Classification.CODE, causes
        elif last in OPEN:
            assert (decision.classification is Classification.CODE) == (
                len(opened) > 1 or (len(causes) == 1 and not others)
            ), causes
        else:
            assert decision.classification in {Classification.FARM, Classification.UNDECIDED}, causes
        if decision.repeat:
            assert others, "there has to be a device that it can be repeated on"
            assert len(causes) < MOST_DEVICES, causes
            assert decision.classification in {Classification.FARM, Classification.UNDECIDED}, causes
        final = settled(*causes, others=others)
        infra = decision.classification in {Classification.FARM, Classification.UNDECIDED}
        assert (final.verdict is Verdict.INFRA) == infra, causes
        assert final.verdict is not Verdict.FAILED or decision.classification is Classification.CODE, causes
        assert final.cause is (last or Cause.NONE), causes
        assert "\n" not in "".join((final.reason, *final.notes)), causes


def test_the_order_in_which_devices_say_it_decides_nothing_about_the_code() -> None:
    for causes in histories():
        if len(causes) > 1 and all(cause in REPEATED for cause in causes):
            found = {
                classify(history(*order), others=0).classification is Classification.CODE
                for order in (causes, causes[::-1])
            }
            # A second device with the same result ends the search, so that no third device is tried.
            assert len(found) == 1 or len([cause for cause in causes if cause in OPEN]) > 1, causes


@pytest.mark.parametrize("cause", AT_ONCE)
def test_what_any_device_would_say_is_the_codes_fault_at_once(cause: Cause) -> None:
    final = settled(cause, others=5)
    assert (final.verdict, final.notes, final.reason) == (Verdict.FAILED, (), f"{cause} it was")


@pytest.mark.parametrize("cause", OPEN)
def test_what_one_device_alone_says_may_be_the_devices(cause: Cause) -> None:
    assert classify(history(cause), others=1).repeat
    final = settled(cause, others=1)
    assert final.verdict is Verdict.INFRA
    assert final.measurements == ()
    assert "on a: another device has to tell whether it is the job or the device" in final.notes[0]


@pytest.mark.parametrize(
    ("causes", "evidence"),
    [
        ((Cause.CRASH, Cause.CRASH), "crashed on a and on b"),
        ((Cause.HANG, Cause.HANG), "hung on a and on b"),
        ((Cause.HANG, Cause.CRASH), "hung on a, crashed on b"),
        ((Cause.CRASH, Cause.GONE, Cause.CRASH), "crashed on a and on c, device gone on b"),
        ((Cause.NUMERICS, Cause.NUMERICS), "wrong numbers on a and on b"),
        ((Cause.NUMERICS, Cause.CRASH), "wrong numbers on a, crashed on b"),
        ((Cause.REFUSED, Cause.REFUSED), "refused on a and on b"),
        ((Cause.REFUSED, Cause.SESSION, Cause.REFUSED), "refused on a and on c, DSP restarted on b"),
    ],
)
def test_what_two_devices_say_is_the_codes_fault(causes: tuple[Cause, ...], evidence: str) -> None:
    final = settled(*causes, others=5)
    assert (final.verdict, final.notes) == (Verdict.FAILED, (evidence,))
    assert not classify(history(*causes), others=5).repeat


@pytest.mark.parametrize("cause", OPEN)
def test_without_another_device_it_is_the_codes_fault_and_says_that_nobody_else_has_tried(cause: Cause) -> None:
    final = settled(cause, others=0)
    assert (final.verdict, final.notes) == (Verdict.FAILED, ("no other device has tried it",))


@pytest.mark.parametrize("causes", [(Cause.CRASH, Cause.GONE), (Cause.GONE, Cause.CRASH), (Cause.NUMERICS, Cause.GONE)])
def test_it_stays_open_when_the_other_device_could_not_say(causes: tuple[Cause, ...]) -> None:
    decision = classify(history(*causes), others=0)
    assert (decision.classification, decision.repeat) == (Classification.UNDECIDED, False)
    assert decision.evidence.endswith("it stays open whether it is the job or the device")


@pytest.mark.parametrize("cause", FARMS)
def test_what_the_farm_did_is_repeated_elsewhere_on_three_devices_at_most(cause: Cause) -> None:
    repeats = [classify(history(*[cause] * count), others=9).repeat for count in (1, 2, 3)]
    assert repeats == ([True, False, False] if cause is Cause.GONE else [True, True, False])
    assert not classify(history(cause), others=0).repeat
    assert settled(cause, others=9).verdict is Verdict.INFRA


@pytest.mark.parametrize("cause", ALONE)
def test_another_device_does_not_help_a_builder_that_died_or_a_full_disk_here(cause: Cause) -> None:
    decision = classify(history(cause), others=9)
    assert (decision.classification, decision.repeat) == (Classification.FARM, False)


@pytest.mark.parametrize("cause", [Cause.NUMERICS, Cause.REFUSED])
def test_wrong_numbers_and_refusals_that_are_no_news_need_no_second_device(cause: Cause) -> None:
    decision = classify(history(cause), others=9, failed_before=True)
    assert (decision.classification, decision.repeat) == (Classification.CODE, False)
    assert classify(history(Cause.CRASH), others=9, failed_before=True).repeat, "another run may have been unlucky"


def test_wrong_numbers_of_a_device_whose_health_check_fails_as_well_say_nothing_about_the_job() -> None:
    spoilt = unfit(attempt(Cause.NUMERICS), "the health check did not pass: sqnr 2 dB < 20 dB")
    assert (spoilt.verdict, spoilt.cause, spoilt.measurements) == (Verdict.INFRA, Cause.DEVICE, ())
    assert "fails its health check as well (the health check did not pass: sqnr 2 dB < 20 dB)" in spoilt.reason
    assert classify([tried(spoilt)], others=1) == classify(history(Cause.DEVICE), others=1)


def test_a_job_that_kills_devices_is_stopped_and_named() -> None:
    causes = (Cause.GONE, Cause.GONE)
    assert classify(history(*causes), others=9) == (classify(history(*causes), others=0)), (
        "it is not to meet a third device"
    )
    assert settled(*causes, others=9).reason == (
        "the job may be killing devices: a and b went away while they ran it; gone it was"
    )
    assert classify(history(Cause.GONE, Cause.CONNECTION), others=9).repeat
    same = [tried(attempt(Cause.GONE, "a")), tried(attempt(Cause.GONE, "a"))]
    assert "killing" not in classify(same, others=0).evidence


@pytest.mark.parametrize(
    ("causes", "note"),
    [
        ((Cause.HANG, None), "before, on other devices: hung on a"),
        ((Cause.CRASH, Cause.SPACE, None), "before, on other devices: crashed on a, no space on b"),
        ((Cause.GONE, Cause.UNSUPPORTED), "before, on other devices: device gone on a"),
        ((Cause.REFUSED, None), "before, on other devices: refused on a"),
        (
            (Cause.RUNTIME, Cause.DEVICE, None),
            "before, on other devices: runtime does not fit on a, device failed on b",
        ),
        ((Cause.NUMERICS, None), "before, on other devices: wrong numbers on a"),
    ],
)
def test_a_verdict_says_what_other_devices_said_before(causes: tuple[Cause | None, ...], note: str) -> None:
    final = settled(*causes, others=1)
    assert final.notes == (note,)
    assert final.verdict is (Verdict.PASSED if causes[-1] is None else Verdict.FAILED)


def test_a_plain_pass_is_left_as_it_is() -> None:
    assert settled(None, others=3) == attempt(None)


def test_a_known_issue_covers_nothing_that_is_not_the_codes_fault() -> None:
    known = msgspec.structs.replace(attempt(Cause.CRASH), known_issue="it crashes")
    output = [tried(known)]
    assert as_recorded(known, output, classify(output, others=1)).known_issue == ""
    assert as_recorded(known, output, classify(output, others=0)).known_issue == "it crashes"


def test_numbers_from_damaged_files_are_nobodys_failure() -> None:
    wrong = attempt(Cause.NUMERICS)
    assert damaged(wrong, "output_0_0.raw is not what the device has").verdict is Verdict.INFRA
    spoilt = damaged(wrong, "output_0_0.raw is not what the device has")
    assert (spoilt.cause, spoilt.measurements) == (Cause.DAMAGE, ())
    assert spoilt.reason.startswith("output_0_0.raw is not what the device has: its numbers mean nothing")
    assert classify([tried(spoilt)], others=1).repeat


@pytest.mark.parametrize("cause", LOST)
def test_a_lost_job_is_tried_once_more_on_its_device_if_there_is_no_other(cause: Cause) -> None:
    assert [classify(history(cause), others=others).again for others in (0, 1)] == [True, False]
    first, second = (tried(attempt(one, "a")) for one in (cause, Cause.CRASH))
    lost = msgspec.structs.replace(first, again=True)
    assert avoided([lost], "a") == ()
    assert avoided([first], "a") == avoided([lost, second], "a") == ("a",)
    assert not classify([lost, first], others=0).again
    alone = classify([lost, second], others=0)
    assert (alone.classification, alone.evidence) == (Classification.CODE, "no other device has tried it")


@pytest.mark.parametrize("cause", [cause for cause in FARMS if cause not in LOST])
def test_what_recovery_does_not_mend_is_not_tried_again_on_the_same_device(cause: Cause) -> None:
    assert not classify(history(cause), others=0).again


def test_a_history_that_does_not_end_with_the_attempt_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="the last of the history has to be the attempt itself, on b"):
        as_recorded(attempt(Cause.CRASH, "b"), history(Cause.CRASH), classify(history(Cause.CRASH), others=1))
