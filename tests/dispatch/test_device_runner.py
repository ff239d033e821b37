"""Device of a dispatcher: the order of messages to its process, the store and the claims, which are all stubs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farm.base.errors import ArtifactsError, FarmError
from farm.devices.device import AdbAddress, Device
from farm.devices.health import HealthEvent
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.job_source import Prepared
from farm.dispatch.messages import (
    Abort,
    ApplyGrant,
    Begin,
    FromDevice,
    JobBegun,
    JobBroken,
    JobEnded,
    JobReturned,
    ProcessEnded,
    RunJob,
    SetGrant,
    ToDevice,
)
from farm.dispatch.request.plan import RunPlan
from farm.policy.situation import Lease, Priority
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult
from farm.suites.suite import Case, Job

PHONE = Device("R5CT1", "SM8650", "hardware", "build", AdbAddress(5037), "phone")


def job(name: str) -> Job:
    of = health_check_job("SM8650", "htp")
    case: Case = msgspec.structs.replace(of.case, name=name)
    return msgspec.structs.replace(of, case=case)


def lease(fence: int, user: str = "ada") -> Lease:
    return Lease(PHONE.id, fence, "token", user, "host", 1, "farm run", Priority.PERSON, 0, 10)


def shard(number: int, names: str, *, run: str = "run", fence: int = 1, others: tuple[str, ...] = ()) -> HeldShard:
    jobs = tuple(PlannedJob(job(name), f"key-{name}") for name in names.split())
    return HeldShard(number, run, jobs, lease(fence), b"", others=others)


class StubProcess:
    """Stub that keeps its messages; its answers are up to the test."""

    def __init__(self) -> None:
        self.sent: list[ToDevice] = []
        self.is_killed = self.is_stopped = False
        self.answer: Callable[[FromDevice], None] = lambda _: None

    def start(self, answer: Callable[[FromDevice], None]) -> None:
        self.answer = answer

    def send(self, *messages: ToDevice) -> None:
        self.sent += messages

    def close(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True
        self.answer(ProcessEnded("signal 9"))

    def take(self) -> list[ToDevice]:
        """Return the messages since the last call."""
        taken, self.sent = self.sent, []
        return taken


class StubSource:
    """Stub that fulfils requests at once, and keeps them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[StubProcess] = []
        self.wanted: list[Lease | None] = []
        self.results: list[ShardResult] = []
        self.back: list[tuple[int, list[str]]] = []
        self.released: list[int] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.holds_preparing = False
        self.preparing: list[Callable[[], None]] = []
        self.problem: FarmError | None = None
        self.done: list[Callable[[], None]] = []
        self.holds_releases = False

    def request(self, device: str, keep: Lease | None) -> None:
        assert device == PHONE.id
        self.wanted.append(keep)

    def cancel_request(self, device: str) -> None:
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
        ready = Prepared(plan, [msgspec.structs.replace(one, cached=True) for one in held.jobs])
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

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
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

    def process(self, device: Device) -> StubProcess:
        assert device == PHONE
        self.processes.append(StubProcess())
        return self.processes[-1]

    def post(self, action: Callable[[], None]) -> None:
        action()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.append((seconds, action))

    def ring(self) -> None:
        """Let all the time pass that something waits for."""
        waiting, self.timers = self.timers, []
        for _, action in waiting:
            action()

    def others(self, held: HeldShard) -> tuple[str, ...]:
        return held.others

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        del why, halts
        assert device == PHONE.id


class Bench:
    """Device with its stubs."""

    def __init__(self, folder: Path) -> None:
        self.source = StubSource(folder)
        # A device without work is let go of as soon as the timer rings.
        self.runner = DeviceRunner(PHONE, self.source, self.source, linger_s=-1.0)
        self.runner.open()

    @property
    def process(self) -> StubProcess:
        return self.source.processes[-1]

    def claimed(self, held: HeldShard) -> None:
        self.runner.claimed(held, 1e12)

    def ended(self, run: RunJob, verdict: Verdict = Verdict.PASSED) -> None:
        self.process.answer(JobEnded((Attempt(run.planned.job.id, verdict, Stage.DONE, ""),), number=run.number))

    def runs(self) -> list[RunJob]:
        """Return the jobs that the slot got since."""
        return [one for one in self.process.take() if isinstance(one, RunJob)]

    @property
    def recorded(self) -> list[str]:
        return [one.job_id.partition("/")[2].partition("[")[0] for one in self.source.results]


@pytest.fixture(name="bench")
def _bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(runs: Sequence[RunJob]) -> list[str]:
    return [one.planned.job.case.name for one in runs]


def last_grant(sent: Sequence[ToDevice]) -> Any:
    return next(one.grant for one in reversed(sent) if isinstance(one, SetGrant))


def test_a_slot_has_one_job_that_runs_and_two_that_follow(bench: Bench) -> None:
    assert bench.source.wanted == [None]
    bench.claimed(shard(1, "a b c d e"))
    sent = bench.process.take()
    assert [type(one) for one in sent] == [SetGrant, Begin, RunJob, RunJob, RunJob]
    assert last_grant(sent).go
    runs = [one for one in sent if isinstance(one, RunJob)]
    assert names(runs) == ["a", "b", "c"]
    # The first job has `more`, so that the second is staged meanwhile.
    assert [one.more for one in runs] == [True, True, False]
    bench.ended(runs[0])
    assert names(bench.runs()) == ["d"]
    assert bench.recorded == ["a"]


def test_the_next_shard_is_claimed_before_the_last_job_begins_and_goes_on_in_the_same_session(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c"))
    runs = bench.runs()
    bench.source.wanted.clear()
    bench.ended(runs[0])
    assert bench.source.wanted == [lease(1)]
    bench.claimed(shard(2, "d e"))
    sent = bench.process.take()
    assert [type(one) for one in sent] == [RunJob]
    bench.ended(runs[1])
    bench.ended(runs[2])
    assert names([*sent, *bench.runs()]) == ["d", "e"]
    assert [one.shard for one in bench.source.results] == [1, 1, 1]
    assert not bench.source.released


def test_who_runs_a_job_knows_of_the_other_devices_also_after_a_time_without_a_shard(bench: Bench) -> None:
    bench.claimed(shard(1, "a", others=("other",)))
    sent = bench.process.take()
    assert last_grant(sent).others == ("other",)
    bench.ended(next(one for one in sent if isinstance(one, RunJob)))
    # The heartbeat comes between two shards of the run.
    bench.runner.renewed(2e12)
    bench.claimed(shard(2, "b", others=("other", "third")))
    sent = bench.process.take()
    assert isinstance(sent[-1], RunJob)
    assert last_grant(sent).others == ("other", "third")


def test_another_run_begins_when_the_slot_has_nothing_of_the_first(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [first] = bench.runs()
    bench.claimed(shard(2, "b", run="another"))
    assert not bench.process.take()
    bench.ended(first)
    assert [type(one) for one in bench.process.take()] == [SetGrant, Begin, RunJob]


def test_without_more_work_the_slot_lets_go_before_the_lease_ends(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [first] = bench.runs()
    bench.ended(first)
    assert not bench.source.released
    bench.source.ring()
    sent = bench.process.take()
    assert not last_grant(sent).go
    assert isinstance(sent[-1], ApplyGrant)
    assert not bench.source.released
    bench.process.answer(JobReturned(off=True))
    assert bench.source.released == [1]
    assert bench.runner.is_free
    assert bench.source.wanted == [None]


def test_until_its_lease_has_ended_a_device_is_not_claimed_for(bench: Bench) -> None:
    bench.source.holds_releases = True
    bench.claimed(shard(1, "a"))
    bench.ended(*bench.runs())
    bench.source.ring()
    bench.process.answer(JobReturned(off=True))
    assert not bench.source.wanted
    assert not bench.runner.is_free
    bench.source.end_leases()
    assert bench.source.wanted == [None]


def test_who_is_waited_for_finishes_the_job_that_runs_and_gives_back_the_rest(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d e"))
    runs = bench.runs()
    bench.runner.wanted("bob")
    assert not last_grant(bench.process.take()).go
    bench.ended(runs[0])
    bench.process.answer(JobReturned(off=True, number=runs[1].number))
    bench.process.answer(JobReturned(off=True, number=runs[2].number))
    assert not bench.source.released
    bench.process.answer(JobReturned(off=True))
    assert bench.recorded == ["a"]
    assert bench.source.back == [(1, ["b", "c", "d", "e"])]
    assert bench.source.released == [1]


def test_a_shard_that_was_claimed_while_the_device_was_handed_over_is_given_back(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    runs = bench.runs()
    bench.runner.wanted("bob")
    bench.claimed(shard(2, "b c"))
    bench.ended(*runs)
    bench.process.answer(JobReturned(off=True))
    assert bench.source.back == [(2, ["b", "c"])]
    assert bench.source.released == [1]


def test_a_cancelled_run_is_broken_off(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.runner.cancelled("another")
    assert not bench.process.take()
    bench.runner.cancelled("run")
    assert [type(one) for one in bench.process.take()] == [SetGrant, Abort, ApplyGrant]
    for run in runs:
        bench.process.answer(JobReturned(off=True, number=run.number))
    bench.process.answer(JobReturned(off=True))
    assert not bench.source.results
    assert bench.source.released == [1]
    # The next run of the same name gets a worker of its own.
    bench.claimed(shard(2, "c", fence=2))
    assert any(isinstance(one, Begin) for one in bench.process.take())


def test_a_slot_that_does_not_break_off_is_killed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.runner._times = bench.runner._times._replace(abort_s=-1.0)
    bench.claimed(shard(1, "a b"))
    bench.runner.cancelled("run")
    bench.source.ring()
    assert bench.process.is_killed
    assert bench.source.released == [1]


def test_a_lost_lease_stops_the_work_and_releases_nothing(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.runner.lease_lost()
    assert any(isinstance(one, Abort) for one in bench.process.take())
    for run in runs:
        bench.process.answer(JobReturned(off=True, number=run.number))
    bench.process.answer(JobReturned(off=True))
    assert not bench.source.results
    assert not bench.source.released
    assert bench.runner.is_free


def test_a_lease_that_was_over_for_the_slot_goes_on_when_it_is_renewed(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    for run in runs:
        bench.process.answer(JobReturned(off=True, number=run.number))
    assert not bench.process.take()
    bench.runner.renewed(2e12)
    sent = bench.process.take()
    assert last_grant(sent).until_s == 2e12
    assert names([one for one in sent if isinstance(one, RunJob)]) == ["a", "b"]


def test_a_job_whose_process_exited_is_tried_once_more_then_farm_is_at_fault(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    bench.process.answer(JobBegun(0))
    bench.process.answer(ProcessEnded("signal 9"))
    assert len(bench.source.processes) == 2
    sent = bench.process.take()
    assert [type(one) for one in sent] == [SetGrant, Begin, RunJob, RunJob]
    assert not bench.source.results
    # An exit before the job has begun does not count against the job.
    bench.process.answer(ProcessEnded("signal 9"))
    assert not bench.source.results
    [begun, *_] = bench.runs()
    bench.process.answer(JobBegun(begun.number))
    bench.process.answer(ProcessEnded("signal 9"))
    assert len(bench.source.processes) == 4
    [result] = bench.source.results
    assert result.attempts[0].verdict is Verdict.INFRA
    assert result.attempts[0].cause is Cause.WORKER
    assert "exited twice" in result.attempts[0].reason
    assert names(bench.runs()) == ["b"]


def test_a_device_whose_processes_keep_exiting_rests(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d e f g"))
    for _ in range(5):
        bench.process.answer(ProcessEnded("signal 9"))
    assert "exited 5 times" in bench.runner.resting
    assert bench.source.released == [1]
    assert bench.source.back[0][0] == 1
    assert not bench.source.wanted
    bench.source.ring()
    assert not bench.runner.resting
    assert bench.source.wanted == [None]


def test_a_device_that_is_unfit_is_brought_back_while_others_do_its_jobs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.process.answer(JobReturned(unfit="no answer", number=runs[0].number))
    bench.process.answer(JobReturned(off=True, number=runs[1].number))
    bench.process.answer(JobReturned(off=True, number=runs[2].number))
    assert bench.source.back == [(1, ["a", "b", "c", "d"])]
    sent = bench.process.take()
    assert last_grant(sent).recover
    assert not last_grant(sent).go
    assert not bench.source.released
    bench.process.answer(JobReturned(recovered=True))
    assert bench.source.wanted == [lease(1)]
    bench.claimed(shard(2, "e"))
    assert names(bench.runs()) == ["e"]


def test_a_device_that_does_not_come_back_rests(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    bench.process.answer(JobReturned(unfit="no answer", number=bench.runs()[0].number))
    bench.process.answer(JobReturned(given_up="it could not be brought back"))
    assert bench.runner.resting == "it could not be brought back"
    bench.process.answer(JobReturned(off=True))
    assert bench.source.released == [1]


def test_a_device_that_was_outvoted_shows_that_it_works(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.runner.outvoted(1)
    assert not last_grant(bench.process.take()).go
    bench.ended(runs[0])
    bench.process.answer(JobReturned(off=True, number=runs[1].number))
    bench.process.answer(JobReturned(off=True, number=runs[2].number))
    grant = last_grant(bench.process.take())
    assert (grant.recover, grant.outvoted) == (True, 1)
    assert bench.source.back == [(1, ["b", "c", "d"])]
    assert not bench.source.wanted
    bench.process.answer(JobReturned(recovered=True))
    assert bench.source.wanted == [lease(1)]


def test_a_device_that_is_being_recovered_keeps_its_permission_while_its_lease_is_renewed(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [run] = bench.runs()
    bench.process.answer(JobReturned(unfit="its health check fails", number=run.number))
    assert last_grant(bench.process.take()).recover
    bench.runner.renewed(2e12)
    grant = last_grant(bench.process.take())
    assert (grant.recover, grant.go, grant.until_s) == (True, False, 2e12)


def test_a_process_that_stays_stopped_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    bench.claimed(shard(1, "a"))
    process = bench.process
    process.is_stopped = True
    for passed_s in (0, 59, 0.5):
        now_s += passed_s
        bench.runner.tick()
    assert not process.is_killed
    process.is_stopped = False
    bench.runner.tick()
    process.is_stopped = True
    now_s += 59
    bench.runner.tick()
    assert not process.is_killed, "it went on meanwhile"
    now_s += 61
    bench.runner.tick()
    assert process.is_killed


def test_a_shard_that_cannot_be_prepared_is_given_back_and_what_runs_goes_on(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.source.problem = ArtifactsError("the artifacts' store is away")
    bench.claimed(shard(2, "c"))
    assert bench.source.back == [(2, ["c"])]
    assert "away" in bench.runner.resting
    bench.ended(runs[0])
    bench.process.answer(JobReturned(off=True, number=runs[1].number))
    bench.process.answer(JobReturned(off=True))
    assert bench.source.back == [(2, ["c"]), (1, ["b"])]
    assert bench.recorded == ["a"]


def test_what_comes_too_late_to_be_prepared_is_not_run(bench: Bench) -> None:
    bench.source.holds_preparing = True
    bench.claimed(shard(1, "a"))
    bench.runner.drain("its agent takes no more work")
    assert bench.source.back == [(1, ["a"])]
    assert bench.source.released == [1]
    bench.source.prepared()
    assert not bench.runs()
    assert bench.runner.is_free


def test_farms_own_fault_is_recorded_and_the_next_job_runs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.process.answer(JobBroken(runs[0].number, "Traceback\nKeyError: 'x'\n"))
    bench.ended(runs[1])
    assert bench.recorded == ["a", "b"]
    assert bench.source.results[0].attempts[0].reason.endswith("KeyError: 'x'")


def test_a_drained_device_finishes_what_runs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    runs = bench.runs()
    bench.runner.drain("its agent takes no more work")
    bench.ended(runs[0])
    for run in runs[1:]:
        bench.process.answer(JobReturned(off=True, number=run.number))
    bench.process.answer(JobReturned(off=True))
    assert bench.recorded == ["a"]
    assert bench.source.back == [(1, ["b", "c", "d"])]
    assert bench.runner.is_free
    assert not bench.source.wanted
    bench.runner.open()
    assert bench.source.wanted == [None]


def test_a_slot_that_dies_while_the_lease_ends_changes_nothing(bench: Bench) -> None:
    bench.source.holds_releases = True
    bench.claimed(shard(1, "a"))
    bench.ended(*bench.runs())
    bench.source.ring()
    bench.process.answer(JobReturned(off=True))
    bench.process.answer(ProcessEnded("signal 9"))
    assert bench.source.released == [1]
    assert not bench.runner.is_free
    assert not bench.source.wanted
    bench.source.end_leases()
    assert bench.source.wanted == [None]
    # A repeated message has no effect.
    bench.claimed(shard(2, "b", fence=2))
    bench.source.end_leases()
    assert names(bench.runs()) == ["b"]
