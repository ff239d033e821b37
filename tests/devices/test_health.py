"""Transitions of a device's health: to suspect, into quarantine, and out of it."""

from __future__ import annotations

from itertools import product

import pytest

from farm.devices.health import (
    FAILURES_IN_A_ROW,
    NOT_DEVICE_CAUSES,
    OPEN_CAUSES,
    Event,
    Health,
    HealthMark,
    next_health,
)

DONE, OK = HealthMark(Event.JOB_DONE), HealthMark(Event.CHECK_PASSED)
GONE = HealthMark(Event.INFRA, "gone", "device offline")
CRASH = HealthMark(Event.INFRA, "crash")
CHECK_FAILED = HealthMark(Event.CHECK_FAILED, "connection", "no answer")
RECOVERED, GAVE_UP = HealthMark(Event.RECOVERED), HealthMark(Event.GAVE_UP, "", "it does not come back")
RELEASED, OUTVOTED = HealthMark(Event.RELEASED), HealthMark(Event.OUTVOTED, "hang", "s/c passed on b")
EVERYTHING = (DONE, OK, GONE, CRASH, CHECK_FAILED, RECOVERED, GAVE_UP, RELEASED, OUTVOTED)


def after(*marks: HealthMark) -> tuple[Health, str]:
    """Live through all of it, from a healthy device on."""
    state, reason = Health.HEALTHY, ""
    for count, mark in enumerate(marks):
        state, new = next_health(state, marks[:count], mark)
        reason = new or (reason if state is not Health.HEALTHY else "")
    return state, reason


def test_one_failure_makes_suspect_and_a_health_check_clears_it() -> None:
    assert after(GONE) == (Health.SUSPECT, "a job did not come to its end: (gone) device offline")
    assert after(GONE, OK) == (Health.HEALTHY, "")


def test_so_many_failures_in_a_row_are_quarantine_also_when_health_checks_pass_in_between() -> None:
    nearly = (GONE, OK) * (FAILURES_IN_A_ROW - 1)
    state, reason = after(*nearly, GONE)
    assert state is Health.QUARANTINED
    assert reason == (
        f"{FAILURES_IN_A_ROW} failures in a row, no job finished in between; the last: (gone) device offline"
    )
    assert after(*nearly, DONE, GONE)[0] is Health.SUSPECT


@pytest.mark.parametrize("cause", sorted(NOT_DEVICE_CAUSES))
def test_what_is_no_devices_fault_changes_nothing(cause: str) -> None:
    mark = HealthMark(Event.INFRA, cause)
    assert after(*[mark] * 9) == (Health.HEALTHY, "")
    assert after(GONE, GONE, mark)[0] is Health.SUSPECT


@pytest.mark.parametrize(
    ("cause", "reason"), [("space", "its storage is full"), ("runtime", "its runtime does not fit")]
)
def test_what_the_lab_has_to_mend_asks_for_a_health_check_and_never_for_quarantine(cause: str, reason: str) -> None:
    failed, check, gave_up = (
        HealthMark(event, cause, "no room") for event in (Event.INFRA, Event.CHECK_FAILED, Event.GAVE_UP)
    )
    assert after(*[failed] * (FAILURES_IN_A_ROW + 1)) == (Health.SUSPECT, f"{reason}: ({cause}) no room")
    assert after(check, RECOVERED, check, gave_up)[0] is Health.SUSPECT
    assert after(check, gave_up, OK)[0] is Health.HEALTHY
    assert after(*[GONE] * (FAILURES_IN_A_ROW - 1), failed)[0] is Health.SUSPECT, "it brings none nearer to it"


@pytest.mark.parametrize("cause", ["device", "session"])
def test_firmware_and_a_dsp_that_restarts_count_against_the_device(cause: str) -> None:
    mark = HealthMark(Event.INFRA, cause, "s/c")
    assert after(mark)[0] is Health.SUSPECT
    assert after(*[mark] * FAILURES_IN_A_ROW)[0] is Health.QUARANTINED


@pytest.mark.parametrize("cause", sorted(OPEN_CAUSES))
def test_jobs_that_crash_do_not_put_a_device_into_quarantine_but_it_has_to_pass_a_health_check(cause: str) -> None:
    state, reason = after(*[HealthMark(Event.INFRA, cause, "s/c")] * 9)
    assert (state, reason) == (Health.SUSPECT, f"a job that failed here is tried on another device: ({cause}) s/c")


def test_a_device_that_alone_cannot_run_what_others_can_is_put_into_quarantine() -> None:
    assert after(OUTVOTED) == (Health.SUSPECT, "other devices did what failed here: (hang) s/c passed on b")
    assert after(*(OUTVOTED, OK) * FAILURES_IN_A_ROW)[0] is Health.QUARANTINED


def test_a_health_check_that_fails_is_quarantine_only_after_recovery_was_tried() -> None:
    assert after(CHECK_FAILED) == (Health.SUSPECT, "its health check fails: (connection) no answer")
    assert after(CHECK_FAILED, CHECK_FAILED)[0] is Health.SUSPECT
    assert after(CHECK_FAILED, RECOVERED, CHECK_FAILED) == (
        Health.QUARANTINED,
        "its health check fails, also after recovery: (connection) no answer",
    )
    assert after(CHECK_FAILED, RECOVERED, OK, DONE, CHECK_FAILED)[0] is Health.SUSPECT, "that was long ago"


def test_a_device_that_cannot_be_brought_back_is_put_into_quarantine() -> None:
    assert after(GONE, GAVE_UP) == (Health.QUARANTINED, "it could not be brought back: it does not come back")


def test_only_a_person_ends_a_quarantine_and_a_health_check_has_to_agree() -> None:
    for mark in EVERYTHING:
        if mark is not RELEASED:
            assert after(GONE, GAVE_UP, mark)[0] is Health.QUARANTINED, mark
    assert after(GONE, GAVE_UP, RELEASED)[0] is Health.SUSPECT
    assert after(*[GONE] * FAILURES_IN_A_ROW, RELEASED, OK)[0] is Health.HEALTHY
    assert after(*[GONE] * FAILURES_IN_A_ROW, RELEASED, GONE)[0] is Health.SUSPECT, "it begins anew"


def test_whatever_happens_a_state_that_is_not_healthy_has_a_reason_and_jobs_alone_quarantine_nothing() -> None:
    for marks in product(EVERYTHING, repeat=4):
        state, reason = after(*marks)
        assert bool(reason) == (state is not Health.HEALTHY), marks
        if state is Health.QUARANTINED:
            assert any(mark in (GONE, GAVE_UP, CHECK_FAILED, OUTVOTED) for mark in marks), marks


@pytest.mark.parametrize("event", [Event.CHECK_FAILED, Event.GAVE_UP])
@pytest.mark.parametrize("state", [Health.HEALTHY, Health.SUSPECT])
def test_what_nobody_could_reach_for_want_of_its_adb_server_stays_as_it_was(state: Health, event: Event) -> None:
    climbed = [HealthMark(Event.RECOVERED)]
    assert next_health(state, climbed, HealthMark(event, "adb_server", "no adb server listens")) == (state, "")
    assert next_health(state, climbed, HealthMark(event, "", "it does not answer"))[0] is Health.QUARANTINED
