"""Devices of a run that others use as well: real store, leases, recorder and result log, stub device processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from made import device
from made_runs import ask
from stub_dispatch import Bench, fails_here, given_up, unfit
from waiting import until

from farm.base.config.settings import LeaseConfig
from farm.base.errors import NoDeviceError, StoreError
from farm.devices.device import Device, HealthEvent
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
from farm.dispatch.recorder import Recorder, ResultLog
from farm.dispatch.run.run import LocalRecords, replay_results, result_log
from farm.policy.situation import Lease, Priority
from farm.store.leases.leasing import Leases
from farm.store.leases.registry import Seen
from farm.store.records import RunRecord
from farm.store.store import Store

FIRST, SECOND = device("A"), device("B")
OTHER = device("X", "SM8550")


class Shared(Bench):
    """A run with leases and a store."""

    def __init__(
        self, folder: Path, store: Store, jobs: Sequence[str], devices: Sequence[Device], terms: LeaseTerms
    ) -> None:
        super().__init__(folder, jobs, devices)
        run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
        assert self.plan.run_id == "run"
        self.run_id = run_id
        store.plan_jobs(run_id, [planned.job for planned in self.plan.jobs])
        for one in devices:
            store.record_device(run_id, one)
        self.store = store
        self.pool = DevicePool(devices, store, terms)
        self.jobs._pool = self.pool
        self.log = ResultLog(result_log(self.plan.folder))
        record = LocalRecords(run_id, store).record
        self.recorder = Recorder(record, self.log, None, recorded=self.jobs.recorded, failing=self.jobs.store_failing)

    def begin(self) -> None:
        self.pool.acquire()
        self.recorder.begin()
        self.pool.begin(self.jobs.pool_changed)
        super().begin()

    def close(self) -> None:
        self.recorder.close(1)
        self.pool.close()

    def finish(self) -> None:
        def is_over() -> bool:
            self.step()
            return self.jobs.is_over

        until(is_over, lambda: f"the end of the run; {self.notes}", 20)

    def holds(self, *numbers: int) -> bool:
        """Return whether exactly these devices are leased by the run."""
        held = {lease.device for lease in self.store.leases.all() if lease.purpose == "run"}
        return held == {self.plan.devices[number].id for number in numbers}

    def recorded(self) -> dict[str, list[str]]:
        """Return the serials of the devices of all attempts, by name of the job."""
        jobs = self.store.runs.view(self.run_id).jobs
        return {job.case: [attempt.device for attempt in job.attempts] for job in jobs}


class User:
    """Another user of the devices."""

    def __init__(self, bench: Shared, wanted: Device) -> None:
        """Ask for a device."""
        self._leases, self._held = bench.store.leases, list[Lease]()
        self._token = ask(self._leases, wanted.id, user="other", purpose="theirs", ttl_s=60)

    def has_it(self) -> bool:
        """Take the device if it is free; return whether this user has it."""
        self._held = self._held or list(self._leases.poll(self._token, ttl_s=60))
        return bool(self._held)

    def give_back(self) -> None:
        self._leases.release(self._held)


Make = Callable[..., Shared]


@pytest.fixture
def make(tmp_path: Path, store: Store) -> Iterator[Make]:
    """Return a function that makes a run on FIRST and SECOND, which ends with the test."""
    with contextlib.ExitStack() as ending:

        def made(
            jobs: Sequence[str] | int = 1,
            devices: Sequence[Device] = (FIRST, SECOND),
            *,
            most: int | None = None,
            ttl_s: float = 30.0,
            priority: Priority = Priority.PERSON,
        ) -> Shared:
            names = [f"SM8650:{number}" for number in range(jobs)] if isinstance(jobs, int) else jobs
            terms = LeaseTerms(times=LeaseConfig(ttl_s, ttl_s / 3), priority=priority, purpose="run", most=most)
            bench = Shared(tmp_path, store, names, devices, terms)
            ending.callback(bench.close)
            return bench

        yield made


@pytest.fixture
def nightly(make: Make) -> Make:
    """Return a function that makes a run to whose devices people have a better right."""
    return lambda *arguments, **named: make(*arguments, priority=Priority.NIGHTLY, **named)


def begin_on_both(bench: Shared) -> None:
    bench.begin()
    bench.until(lambda: bench.pool.is_ours(FIRST.id) and bench.pool.is_ours(SECOND.id), "both devices")
    bench.let_begin()


def _cut_off(*_: object, **__: object) -> None:
    raise StoreError("cut off")


# Devices that others wait for.


def test_a_wanted_device_is_handed_over_after_its_job_is_recorded(
    nightly: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = nightly(5)
    begin_on_both(bench)
    user = User(bench, FIRST)
    bench.until(lambda: not bench.of(0).grant.go, "the end of the grant")
    assert bench.of(0).running is not None
    assert not user.has_it()
    monkeypatch.setattr(Store, "record_attempts", _cut_off)
    bench.let_end(0)
    assert not bench.of(0).has_session
    # The device is left, and its result is not recorded yet.
    assert bench.stays(lambda: not user.has_it(), 0.6)
    monkeypatch.undo()
    bench.until(user.has_it, "the device")
    assert bench.recorded()["0"] == ["A"]
    assert [note for note in bench.notes if "waits for it" in note]
    bench.finish()
    assert bench.ended == dict.fromkeys(bench.names, "passed")
    assert (bench.jobs_of(0), set(bench.jobs_of(1))) == (["0"], {"1", "2", "3", "4"})


def test_a_device_that_was_handed_over_takes_part_again_later(nightly: Make) -> None:
    bench = nightly(3, (FIRST,))
    bench.begin()
    bench.let_begin()
    user = User(bench, FIRST)
    bench.until(lambda: not bench.of(0).grant.go, "the end of the grant")
    bench.let_end(0)
    bench.until(user.has_it, "the device")
    bench.until(lambda: any("waiting for a SM8650" in note for note in bench.notes), "a note")
    user.give_back()
    bench.finish()
    assert bench.ended == dict.fromkeys("012", "passed")


def test_a_freed_device_takes_part_and_all_are_given_back(make: Make) -> None:
    bench = make(4)
    user = User(bench, SECOND)
    assert user.has_it()
    bench.begin()
    bench.let_begin()
    assert bench.ran == [("A", "0")]
    assert bench.notes == [f"once they are free, these take part as well: {SECOND.called} is with other (theirs)"]
    user.give_back()
    bench.until(lambda: bench.pool.is_ours(SECOND.id), "the second device")
    bench.let_begin()
    assert len(bench.jobs_of(1)) == 1
    bench.finish()
    assert {name: len(devices) for name, devices in bench.recorded().items()} == dict.fromkeys("0123", 1)
    assert bench.holds()
    # After a kill at this moment the log has results that are in the store.
    notes, before = list(bench.notes), bench.recorded()
    replay_results(bench.run_id, bench.plan.folder, bench.store)
    assert (bench.notes, bench.recorded()) == (notes, before)


# Leases that are lost.


def lose_first(bench: Shared) -> None:
    """Let another user have the first device, whose lease is over."""
    bench.store.leases.release(lease for lease in bench.store.leases.all() if lease.device == FIRST.id)
    assert User(bench, FIRST).has_it()


def test_the_job_of_a_lost_lease_is_broken_off_and_another_device_runs_it(make: Make) -> None:
    bench = make(2)
    begin_on_both(bench)
    lose_first(bench)
    bench.until(lambda: not bench.of(0).grant.go, "the end of the grant")
    bench.let_end(0)
    bench.finish()
    assert bench.recorded() == {"0": ["B"], "1": ["B"]}
    assert [note for note in bench.notes if "lease was lost" in note] == [f"{FIRST.called}: its lease was lost"]
    # The lease of the other user is left alone.
    assert [lease.user for lease in bench.store.leases.all()] == ["other"]


def test_a_result_after_its_lease_is_refused_and_the_job_runs_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(2)
    begin_on_both(bench)
    # The pool does not notice the loss before the result arrives.
    monkeypatch.setattr(Leases, "renew", _cut_off)
    lose_first(bench)
    bench.let_end(0)
    bench.until(lambda: any("is not recorded" in note for note in bench.notes), "a note")
    monkeypatch.undo()
    bench.finish()
    assert bench.recorded() == {"0": ["B"], "1": ["B"]}
    assert bench.ended == {"0": "passed", "1": "passed"}


def test_without_a_store_a_grant_ends_with_its_lease(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(3, (FIRST,), ttl_s=2.0)
    bench.begin()
    bench.let_begin()
    assert bench.of(0).may_go
    monkeypatch.setattr(Leases, "renew", _cut_off)
    bench.until(lambda: not bench.of(0).may_go, "the end of the lease")
    # The process knows that without a message.
    assert bench.of(0).grant.go
    assert [note for note in bench.notes if "cut off" in note] == ["device pool: leases: cut off"]
    monkeypatch.undo()
    bench.finish()
    assert bench.ended == dict.fromkeys("012", "passed")


# Jobs that another device is to try.


def test_a_job_is_not_kept_for_a_device_that_the_run_cannot_have(make: Make) -> None:
    bench = make(1, most=1)
    bench.begin()
    bench.let_begin()
    [(serial, _)] = bench.ran
    assert bench.of("AB".index(serial)).grant.others == ()
    bench.acts["0"] = fails_here
    bench.finish()
    assert bench.abandoned == ["0"]
    assert bench.ended == {"0": "failed"}


def test_a_job_is_kept_for_another_device_until_that_is_given_away(nightly: Make) -> None:
    bench = nightly(2)
    begin_on_both(bench)
    assert bench.of(0).grant.others == (SECOND.id,)
    bench.acts["0"] = fails_here
    bench.acts["1"] = unfit
    # The second device is recovered, which takes some time: its process is not stepped.
    bench.of(1).step()
    bench.decide()
    bench.let_end(0)
    bench.until(lambda: "0" in bench.recorded() and bench.recorded()["0"], "the result")
    assert bench.stays(lambda: not bench.abandoned, 0.6)
    user = User(bench, SECOND)
    bench.until(lambda: bench.abandoned == ["0"], "the end of the job")
    assert bench.ended == {"0": "failed"}
    bench.acts.clear()
    bench.finish()
    assert user.has_it()
    assert bench.ended == {"0": "failed", "1": "passed"}


# Retired devices.


def test_a_device_that_is_given_up_is_free_for_others_while_the_run_goes_on(make: Make) -> None:
    bench = make(4)
    begin_on_both(bench)
    bench.acts["0"] = given_up
    bench.let_end(0)
    bench.until(lambda: bench.holds(1), "the end of the lease")
    assert bench.stays(lambda: bench.holds(1), 0.6)
    bench.acts.clear()
    bench.finish()
    assert bench.ended == dict.fromkeys("0123", "passed")


def test_devices_with_nothing_left_to_do_are_given_back_without_a_word(make: Make) -> None:
    jobless = device("Z", "SM8450")
    bench = make(["SM8650:a", "SM8550:x"], (FIRST, SECOND, OTHER, jobless))
    bench.begin()
    bench.until(lambda: bench.holds(0, 1, 2), "all devices of the jobs")
    bench.let_begin()
    assert sorted(bench.ran) == [("A", "a"), ("X", "x")]
    bench.let_end(0)
    # The second never had a job.
    bench.until(lambda: [bench.holds(2), bench.of(0).step()][0], "the leases of two devices to end", 5)
    assert bench.notes == []
    bench.finish()


def test_devices_that_are_out_of_service_are_not_waited_for(make: Make, store: Store) -> None:
    see(store)
    bench = make()
    for wanted, note in ((FIRST, "its screen is broken"), (SECOND, "")):
        assert User(bench, wanted).has_it()
        store.devices.set_service(wanted.id, False, note, "ann")
    with pytest.raises(NoDeviceError, match=r"no SM8650 is left to wait for: A: .*its screen is broken; B: "):
        bench.pool.acquire()


def test_the_note_of_a_quarantined_device_names_the_next_step(make: Make, store: Store) -> None:
    see(store)
    bench = make()
    store.devices.record_health(HealthEvent(FIRST.id, "gave_up", "quarantined", "it was gone"))
    bench.pool.retire(FIRST.id, "it was gone")
    assert bench.notes == [
        f"{FIRST.called} is quarantined: it was gone; 'farm devices unquarantine {FIRST.called}' when it is repaired"
    ]


def see(store: Store) -> None:
    store.devices.see([Seen(one, "device", None) for one in (FIRST, SECOND)])


# The pool's thread.


def test_leases_survive_a_fault_and_an_old_goodbye(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    bench.begin()
    monkeypatch.setattr(Leases, "renew", lambda *_, **__: 1 / 0)
    bench.until(lambda: any("division by zero" in note for note in bench.notes), "a note")
    monkeypatch.undo()
    fence = bench.pool.fence(FIRST.id)
    bench.pool.let_go(FIRST.id, fence)
    bench.until(lambda: bench.pool.fence(FIRST.id) > fence, "the device again")
    again = bench.pool.fence(FIRST.id)
    bench.pool.let_go(FIRST.id, fence)
    assert (bench.pool.fence(FIRST.id), bench.pool.is_ours(FIRST.id)) == (again, True)


def test_a_request_that_was_forgotten_is_made_again(make: Make, store: Store) -> None:
    bench = make()
    user = User(bench, FIRST)
    assert user.has_it()
    bench.begin()
    bench.until(lambda: bench.pool._requests, "a request")
    for token in list(bench.pool._requests.values()):
        store.leases.withdraw(token)
    user.give_back()
    bench.until(lambda: bench.pool.is_ours(FIRST.id), "the device")


# Ends.


def test_a_run_that_is_stopped_asks_for_no_other_device(make: Make) -> None:
    bench = make(4)
    user = User(bench, SECOND)
    assert user.has_it()
    bench.begin()
    bench.let_begin()
    bench.until(lambda: bench.pool._requests, "a request")
    bench.jobs.finish_running()
    bench.until(lambda: not bench.pool._requests, "the end of the request")
    user.give_back()
    bench.finish()
    assert bench.began == ["0"]
    assert bench.holds()


def test_results_of_a_run_that_lost_its_store_are_recorded_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(4)
    begin_on_both(bench)
    monkeypatch.setattr(Store, "record_attempts", _cut_off)
    bench.let_end(0)
    bench.until(lambda: any("cut off" in note for note in bench.notes), "a note")
    bench.jobs.store_failing(StoreError("cut off"), bench.plan.health.store_wait_s + 1)
    bench.finish()
    assert any(note.startswith("the run stops: the store: cut off; ") for note in bench.notes)
    began = set(bench.began)
    assert len(began) <= 4
    bench.recorder.close(0.5)
    monkeypatch.undo()
    # As `farm run --resume` does in another process, while the leases are valid.
    replay_results(bench.run_id, bench.plan.folder, bench.store)
    assert {name for name, devices in bench.recorded().items() if devices} == began
