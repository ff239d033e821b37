"""One device of an agent: in which order its slot, the store and the claims hear of what. All of them are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farm.cluster.agent.device_work import DeviceWork
from farm.cluster.agent.office import Prepared
from farm.cluster.slots.slot_protocol import (
    LOOKED,
    Back,
    Begin,
    Break,
    Broken,
    Died,
    Ended,
    FromSlot,
    LookNow,
    RunJob,
    SetGrant,
    ToSlot,
)
from farm.device_run.canary import canary_job
from farm.devices.device import AdbAddress, Device
from farm.errors import ArtifactsError, FarmError
from farm.request.plan import PlannedJob, RunPlan
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import HeldShard, ShardJob, ShardResult
from farm.store.leases.rules import Lease, Priority
from farm.suites.suite import Case, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.store.leases.registry import HealthEvent

PHONE = Device("R5CT1", "SM8650", "hardware", "build", AdbAddress(5037), "phone")


def job(name: str) -> Job:
    of = canary_job("SM8650", "htp")
    case: Case = msgspec.structs.replace(of.case, name=name)
    return msgspec.structs.replace(of, case=case)


def lease(fence: int, user: str = "ada") -> Lease:
    return Lease(PHONE.id, fence, "token", user, "host", 1, "farm run", Priority.PERSON, 0, 10)


def shard(number: int, names: str, *, run: str = "run", fence: int = 1, others: tuple[str, ...] = ()) -> HeldShard:
    jobs = tuple(ShardJob(job(name), f"key-{name}") for name in names.split())
    return HeldShard(number, run, "ada", jobs, lease(fence), b"", others=others)


class StubSlot:
    """Keeps what it is sent; what it answers is up to the test."""

    def __init__(self) -> None:
        self.sent: list[ToSlot] = []
        self.is_killed = False
        self.answer: Callable[[FromSlot], None] = lambda _: None

    def start(self, answer: Callable[[FromSlot], None]) -> None:
        self.answer = answer

    def send(self, *messages: ToSlot) -> None:
        self.sent += messages

    def close(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True
        self.answer(Died("signal 9"))

    def take(self) -> list[ToSlot]:
        """Return what came since."""
        taken, self.sent = self.sent, []
        return taken


class StubOffice:
    """Does what is asked of it at once, and keeps it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.slots: list[StubSlot] = []
        self.wanted: list[Lease | None] = []
        self.results: list[ShardResult] = []
        self.back: list[tuple[int, list[str]]] = []
        self.released: list[int] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.notes: list[str] = []
        self.holds_preparing = False
        self.preparing: list[Callable[[], None]] = []
        self.problem: FarmError | None = None
        self.done: list[Callable[[], None]] = []
        self.holds_releases = False

    def want(self, device: str, keep: Lease | None) -> None:
        assert device == PHONE.id
        self.wanted.append(keep)

    def unwant(self, device: str) -> None:
        assert device == PHONE.id
        self.wanted.clear()

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        plan = RunPlan(
            run_id=held.run_id,
            folder=self._folder / held.run_id,
            cache_root=self._folder,
            jobs=(),
            devices=(device,),
            runtimes={},
            iterations=1,
            warm_up=0,
            timeout_s=1.0,
            artifact_root=self._folder,
        )
        ready = Prepared(plan, [PlannedJob(one.job, one.key, cached=True) for one in held.jobs])
        answer = self.problem or ready
        self.preparing.append(lambda: done(answer))
        if not self.holds_preparing:
            self.prepared()

    def prepared(self) -> None:
        waiting, self.preparing = self.preparing, []
        for done in waiting:
            done()

    def result(self, result: ShardResult) -> None:
        self.results.append(result)

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        assert why
        self.back.append((held.id, [one.job.case.name for one in jobs]))

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        self.released.append(lease.fence)
        self.done.append(done)
        if not self.holds_releases:
            self.end_leases()

    def end_leases(self) -> None:
        waiting, self.done = self.done, []
        for done in waiting:
            done()

    def health(self, event: HealthEvent) -> None:
        raise AssertionError(event)

    def slot(self, device: Device) -> StubSlot:
        assert device == PHONE
        self.slots.append(StubSlot())
        return self.slots[-1]

    def post(self, action: Callable[[], None]) -> None:
        action()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.append((seconds, action))

    def ring(self) -> None:
        """Let all the time pass that something waits for."""
        waiting, self.timers = self.timers, []
        for _, action in waiting:
            action()

    def changed(self) -> None:
        pass

    def note(self, line: str) -> None:
        self.notes.append(line)


class Bench:
    """A device, and what stands around it."""

    def __init__(self, folder: Path) -> None:
        self.office = StubOffice(folder)
        # A device without work is let go of as soon as the timer rings.
        self.work = DeviceWork(PHONE, self.office, linger_s=-1.0)
        self.work.open()

    @property
    def slot(self) -> StubSlot:
        return self.office.slots[-1]

    def claimed(self, held: HeldShard) -> None:
        self.work.claimed(held, 1e12)

    def ended(self, run: RunJob, verdict: Verdict = Verdict.PASSED) -> None:
        self.slot.answer(Ended(run.number, (Attempt(run.planned.job.id, verdict, Stage.DONE, ""),)))

    def runs(self) -> list[RunJob]:
        """Return the jobs that the slot got since."""
        return [one for one in self.slot.take() if isinstance(one, RunJob)]

    @property
    def recorded(self) -> list[str]:
        return [one.job_id.partition("/")[2].partition("[")[0] for one in self.office.results]


@pytest.fixture(name="bench")
def _bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(runs: Sequence[RunJob]) -> list[str]:
    return [one.planned.job.case.name for one in runs]


def last_grant(sent: Sequence[ToSlot]) -> Any:
    return next(one.grant for one in reversed(sent) if isinstance(one, SetGrant))


def test_a_slot_has_one_job_that_runs_and_two_that_follow(bench: Bench) -> None:
    assert bench.office.wanted == [None]
    bench.claimed(shard(1, "a b c d e"))
    sent = bench.slot.take()
    assert [type(one) for one in sent] == [SetGrant, Begin, RunJob, RunJob, RunJob]
    assert last_grant(sent).go
    runs = [one for one in sent if isinstance(one, RunJob)]
    assert names(runs) == ["a", "b", "c"]
    # The first waits for the second, so that this one is staged meanwhile.
    assert [one.more for one in runs] == [True, True, False]
    bench.ended(runs[0])
    assert names(bench.runs()) == ["d"]
    assert bench.recorded == ["a"]


def test_the_next_shard_is_claimed_before_the_last_job_begins_and_goes_on_in_the_same_session(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c"))
    runs = bench.runs()
    bench.office.wanted.clear()
    bench.ended(runs[0])
    assert bench.office.wanted == [lease(1)]
    bench.claimed(shard(2, "d e"))
    sent = bench.slot.take()
    assert [type(one) for one in sent] == [RunJob]
    bench.ended(runs[1])
    bench.ended(runs[2])
    assert names([*sent, *bench.runs()]) == ["d", "e"]
    assert [one.shard for one in bench.office.results] == [1, 1, 1]
    assert not bench.office.released


def test_who_runs_a_job_knows_of_the_other_devices_also_after_a_time_without_a_shard(bench: Bench) -> None:
    bench.claimed(shard(1, "a", others=("other",)))
    sent = bench.slot.take()
    assert last_grant(sent).others == ("other",)
    bench.ended(next(one for one in sent if isinstance(one, RunJob)))
    # The heartbeat comes between two shards of the run.
    bench.work.renewed(2e12)
    bench.claimed(shard(2, "b", others=("other", "third")))
    sent = bench.slot.take()
    assert isinstance(sent[-1], RunJob)
    assert last_grant(sent).others == ("other", "third")


def test_another_run_begins_when_the_slot_has_nothing_of_the_first(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [first] = bench.runs()
    bench.claimed(shard(2, "b", run="another"))
    assert not bench.slot.take()
    bench.ended(first)
    assert [type(one) for one in bench.slot.take()] == [SetGrant, Begin, RunJob]


def test_without_more_work_the_slot_lets_go_before_the_lease_ends(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [first] = bench.runs()
    bench.ended(first)
    assert not bench.office.released
    bench.office.ring()
    sent = bench.slot.take()
    assert not last_grant(sent).go
    assert isinstance(sent[-1], LookNow)
    assert not bench.office.released
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.office.released == [1]
    assert bench.work.is_free
    assert bench.office.wanted == [None]


def test_until_its_lease_has_ended_a_device_is_not_claimed_for(bench: Bench) -> None:
    bench.office.holds_releases = True
    bench.claimed(shard(1, "a"))
    bench.ended(*bench.runs())
    bench.office.ring()
    bench.slot.answer(Back(LOOKED, off=True))
    assert not bench.office.wanted
    assert not bench.work.is_free
    bench.office.end_leases()
    assert bench.office.wanted == [None]


def test_who_is_waited_for_finishes_the_job_that_runs_and_gives_back_the_rest(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d e"))
    runs = bench.runs()
    bench.work.wanted("bob")
    assert not last_grant(bench.slot.take()).go
    bench.ended(runs[0])
    bench.slot.answer(Back(runs[1].number, off=True))
    bench.slot.answer(Back(runs[2].number, off=True))
    assert not bench.office.released
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.recorded == ["a"]
    assert bench.office.back == [(1, ["b", "c", "d", "e"])]
    assert bench.office.released == [1]


def test_a_shard_that_was_claimed_while_the_device_was_handed_over_is_given_back(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    runs = bench.runs()
    bench.work.wanted("bob")
    bench.claimed(shard(2, "b c"))
    bench.ended(*runs)
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.office.back == [(2, ["b", "c"])]
    assert bench.office.released == [1]


def test_a_cancelled_run_is_broken_off(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.work.cancelled("another")
    assert not bench.slot.take()
    bench.work.cancelled("run")
    assert [type(one) for one in bench.slot.take()] == [SetGrant, Break, LookNow]
    for run in runs:
        bench.slot.answer(Back(run.number, off=True))
    bench.slot.answer(Back(LOOKED, off=True))
    assert not bench.office.results
    assert bench.office.released == [1]
    # The next run of the same name gets a worker of its own.
    bench.claimed(shard(2, "c", fence=2))
    assert any(isinstance(one, Begin) for one in bench.slot.take())


def test_a_slot_that_does_not_break_off_is_killed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.work._times = bench.work._times._replace(break_s=-1.0)
    bench.claimed(shard(1, "a b"))
    bench.work.cancelled("run")
    bench.office.ring()
    assert bench.slot.is_killed
    assert bench.office.released == [1]


def test_a_lost_lease_stops_the_work_and_releases_nothing(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.work.lost()
    assert any(isinstance(one, Break) for one in bench.slot.take())
    for run in runs:
        bench.slot.answer(Back(run.number, off=True))
    bench.slot.answer(Back(LOOKED, off=True))
    assert not bench.office.results
    assert not bench.office.released
    assert bench.work.is_free


def test_a_lease_that_was_over_for_the_slot_goes_on_when_it_is_renewed(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    for run in runs:
        bench.slot.answer(Back(run.number, off=True))
    assert not bench.slot.take()
    bench.work.renewed(2e12)
    sent = bench.slot.take()
    assert last_grant(sent).until_s == 2e12
    assert names([one for one in sent if isinstance(one, RunJob)]) == ["a", "b"]


def test_a_job_whose_slot_died_is_tried_once_more_then_farm_is_to_blame(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    bench.slot.answer(Died("signal 9"))
    assert len(bench.office.slots) == 2
    sent = bench.slot.take()
    assert [type(one) for one in sent] == [SetGrant, Begin, RunJob, RunJob]
    assert not bench.office.results
    bench.slot.answer(Died("signal 9"))
    assert len(bench.office.slots) == 3
    [result] = bench.office.results
    assert result.attempts[0].verdict is Verdict.INFRA
    assert result.attempts[0].cause is Cause.WORKER
    assert "died twice" in result.attempts[0].reason
    assert names(bench.runs()) == ["b"]


def test_a_device_whose_slots_keep_dying_rests(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d e f g"))
    for _ in range(5):
        bench.slot.answer(Died("signal 9"))
    assert "died 5 times" in bench.work.resting
    assert bench.office.released == [1]
    assert bench.office.back[0][0] == 1
    assert not bench.office.wanted
    bench.office.ring()
    assert not bench.work.resting
    assert bench.office.wanted == [None]


def test_a_device_that_is_unfit_is_brought_back_while_others_do_its_jobs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.slot.answer(Back(runs[0].number, unfit="no answer"))
    bench.slot.answer(Back(runs[1].number, off=True))
    bench.slot.answer(Back(runs[2].number, off=True))
    assert bench.office.back == [(1, ["a", "b", "c", "d"])]
    sent = bench.slot.take()
    assert last_grant(sent).recover
    assert not last_grant(sent).go
    assert not bench.office.released
    bench.slot.answer(Back(LOOKED, recovered=True))
    assert bench.office.wanted == [lease(1)]
    bench.claimed(shard(2, "e"))
    assert names(bench.runs()) == ["e"]


def test_a_device_that_does_not_come_back_rests(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    bench.slot.answer(Back(bench.runs()[0].number, unfit="no answer"))
    bench.slot.answer(Back(LOOKED, given_up="it could not be brought back"))
    assert bench.work.resting == "it could not be brought back"
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.office.released == [1]


def test_a_device_that_was_outvoted_shows_that_it_works(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.work.outvoted(1)
    assert not last_grant(bench.slot.take()).go
    bench.ended(runs[0])
    bench.slot.answer(Back(runs[1].number, off=True))
    bench.slot.answer(Back(runs[2].number, off=True))
    grant = last_grant(bench.slot.take())
    assert (grant.recover, grant.outvoted) == (True, 1)
    assert bench.office.back == [(1, ["b", "c", "d"])]
    # The answer to the first Look says nothing about the second.
    bench.slot.answer(Back(LOOKED, off=True))
    assert not bench.office.wanted
    bench.slot.answer(Back(LOOKED, recovered=True))
    assert bench.office.wanted == [lease(1)]


def test_a_shard_that_cannot_be_prepared_is_given_back_and_what_runs_goes_on(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.office.problem = ArtifactsError("the artifacts' store is away")
    bench.claimed(shard(2, "c"))
    assert bench.office.back == [(2, ["c"])]
    assert "away" in bench.work.resting
    bench.ended(runs[0])
    bench.slot.answer(Back(runs[1].number, off=True))
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.office.back == [(2, ["c"]), (1, ["b"])]
    assert bench.recorded == ["a"]


def test_what_comes_too_late_to_be_prepared_is_not_run(bench: Bench) -> None:
    bench.office.holds_preparing = True
    bench.claimed(shard(1, "a"))
    bench.work.shut("its agent takes no more work")
    assert bench.office.back == [(1, ["a"])]
    assert bench.office.released == [1]
    bench.office.prepared()
    assert not bench.runs()
    assert bench.work.is_free


def test_farms_own_fault_is_recorded_and_the_next_job_runs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.slot.answer(Broken(runs[0].number, "Traceback\nKeyError: 'x'\n"))
    bench.ended(runs[1])
    assert bench.recorded == ["a", "b"]
    assert bench.office.results[0].attempts[0].reason.endswith("KeyError: 'x'")


def test_a_drained_device_finishes_what_runs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.work.shut("its agent takes no more work")
    bench.ended(runs[0])
    for run in runs[1:]:
        bench.slot.answer(Back(run.number, off=True))
    bench.slot.answer(Back(LOOKED, off=True))
    assert bench.recorded == ["a"]
    assert bench.office.back == [(1, ["b", "c", "d"])]
    assert bench.work.is_free
    assert not bench.office.wanted
    bench.work.open()
    assert bench.office.wanted == [None]


def test_a_slot_that_dies_while_the_lease_ends_changes_nothing(bench: Bench) -> None:
    bench.office.holds_releases = True
    bench.claimed(shard(1, "a"))
    bench.ended(*bench.runs())
    bench.office.ring()
    bench.slot.answer(Back(LOOKED, off=True))
    bench.slot.answer(Died("signal 9"))
    assert bench.office.released == [1]
    assert not bench.work.is_free
    assert not bench.office.wanted
    bench.office.end_leases()
    assert bench.office.wanted == [None]
    # What is told twice is nothing new.
    bench.claimed(shard(2, "b", fence=2))
    bench.office.end_leases()
    assert names(bench.runs()) == ["b"]
