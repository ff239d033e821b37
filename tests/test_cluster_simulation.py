"""A simulated farm, decided as a real one: the same seed gives the same nightly run, each job has one verdict."""

from __future__ import annotations

import pytest
from cluster_simulation import Found, Night, Size, what_was_found

from farm.policy.situation import Priority

SIZE = Size(hosts=20, devices=200, socs=3, users=12, jobs=3_000, person_runs=20, deaths=2)


@pytest.fixture(scope="module")
def found() -> Found:
    return Night(SIZE).run()


def test_every_job_has_exactly_one_verdict_although_hosts_die(found: Found) -> None:
    wanted = sum(sum(jobs.values()) for _, jobs in Night(SIZE).submissions)
    assert found.jobs == wanted
    assert found.lost_s > 0


def test_the_same_seed_gives_the_same_night(found: Found) -> None:
    assert what_was_found(Night(SIZE).run(), SIZE) == what_was_found(found, SIZE)


def test_devices_hardly_idle_while_work_waits_and_people_do_not_wait_for_a_night() -> None:
    night = Night(SIZE)
    found = night.run()
    assert found.idle_while_work_waits_s <= 0.01 * SIZE.devices * found.ended_s
    people = sorted(found.waits_s[Priority.PERSON])
    # A job of a nightly run has a median of 6 s.
    assert people[len(people) // 2] < 6.0
    runs = [run for run, _ in night.submissions if run.priority is Priority.PERSON]
    alone = [
        run
        for run in runs
        # Runs of one user go one after the other.
        if not any(one.user == run.user and one.submitted_s < run.submitted_s < one.ended_s for one in runs)
    ]
    assert len(alone) >= 5
    assert all(run.first_s is not None and run.first_s - run.submitted_s < 15.0 for run in alone)
