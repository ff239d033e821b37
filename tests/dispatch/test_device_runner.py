"""Device of a dispatcher: the order of messages to its process, the store and the claims, which are all stubs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made import device, job

from farm.base.errors import ArtifactsError, FarmError
from farm.devices.device import Device
from farm.dispatch import messages
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.dispatcher import Prepared
from farm.dispatch.request.request import RunPlan
from farm.policy.situation import Lease, Priority
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult

PHONE = device("R5CT1")


def lease(fence: int) -> Lease:
    return Lease(PHONE.id, fence, "token", "ada", "host", 1, "farm run", Priority.PERSON, 0, 10)


def shard(number: int, names: str, *, run: str = "run", others: tuple[str, ...] = ()) -> HeldShard:
    jobs = tuple(PlannedJob(job(name), f"key-{name}") for name in names.split())
    return HeldShard(number, run, jobs, lease(1), b"", others=others)


class StubProcess:
    """Stub that keeps its messages; its answers are up to the test."""

    def __init__(self) -> None:
        self.sent: list[messages.ToDevice] = []
        self.is_killed = self.is_stopped = False
        self.answer: Callable[[messages.FromDevice], None] = lambda _: None

    def start(self, answer: Callable[[messages.FromDevice], None]) -> None:
        self.answer = answer

    def send(self, *sent: messages.ToDevice) -> None:
        self.sent += sent

    def close(self) -> None: ...

    def kill(self) -> None:
        self.is_killed = True
        self.answer(messages.ProcessEnded("signal 9"))


class Bench:
    """Device with its job source and its host, both of which are this stub: it keeps requests and fulfils them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[StubProcess] = []
        self.requests: list[Lease | None] = []
        self.results: list[ShardResult] = []
        self.back: list[tuple[int, list[str]]] = []
        self.released: list[int] = []
        self.preparing: list[Callable[[], None]] = []
        self.ending: list[Callable[[], None]] = []
        self.problem: FarmError | None = None
        self.holds = False
        """Preparations and releases wait for `let_go`."""
        # A device without work is let go of, and a resting one used again, at the next look.
        self.runner = DeviceRunner(PHONE, self, self, linger_s=-1.0, rest_s=-1.0)  # type: ignore[arg-type]
        self.runner.open()

    # Job source.

    def request(self, _device: str, keep: Lease | None) -> None:
        self.requests.append(keep)

    def cancel_request(self, _device: str) -> None:
        self.requests.clear()

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        plan = RunPlan(held.run_id, self._folder / held.run_id, self._folder, (), (device,), {}, self._folder)
        ready = Prepared(plan, [msgspec.structs.replace(one, cached=True) for one in held.jobs])
        answer = self.problem or ready
        self._put(self.preparing, lambda: done(answer))

    def result(self, result: ShardResult) -> None:
        self.results.append(result)

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        assert why
        self.back.append((held.id, [one.job.case.name for one in jobs]))

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        self.released.append(lease.fence)
        self._put(self.ending, done)

    def others(self, held: HeldShard) -> tuple[str, ...]:
        return held.others

    def resting(self, *_: object, **__: object) -> None: ...

    def _put(self, waiting: list[Callable[[], None]], action: Callable[[], None]) -> None:
        waiting.append(action)
        if not self.holds:
            self.let_go(waiting)

    def let_go(self, waiting: list[Callable[[], None]]) -> None:
        """Call what waits."""
        actions = list(waiting)
        waiting.clear()
        for action in actions:
            action()

    # Host.

    def process(self, _device: Device) -> StubProcess:
        self.processes.append(StubProcess())
        return self.processes[-1]

    def post(self, action: Callable[[], None]) -> None:
        action()

    # Steps of a test.

    def claimed(self, held: HeldShard) -> None:
        self.runner.claimed(held, 1e12)

    def hear(self, *answers: messages.FromDevice) -> None:
        for answer in answers:
            self.processes[-1].answer(answer)

    def ended(self, *runs: messages.RunJob) -> None:
        for run in runs:
            self.hear(
                messages.JobEnded((Attempt(run.planned.job.id, Verdict.PASSED, Stage.DONE, ""),), number=run.number)
            )

    def returned(self, *runs: messages.RunJob) -> None:
        """Let the process return jobs that it has not begun, and then leave the device."""
        self.hear(*(messages.JobReturned(number=run.number) for run in runs), messages.JobReturned())

    def take(self) -> list[messages.ToDevice]:
        """Return the messages to the newest process since the last call."""
        taken, self.processes[-1].sent = self.processes[-1].sent, []
        return taken

    def runs(self) -> list[messages.RunJob]:
        return [one for one in self.take() if isinstance(one, messages.RunJob)]

    @property
    def recorded(self) -> list[str]:
        return [one.job_id.partition("/")[2].partition("[")[0] for one in self.results]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(sent: Sequence[messages.ToDevice]) -> list[str]:
    return [one.planned.job.case.name for one in sent if isinstance(one, messages.RunJob)]


def last_grant(sent: Sequence[messages.ToDevice]) -> Any:
    return next(one for one in reversed(sent) if isinstance(one, messages.Grant))


def test_a_device_has_a_job_that_runs_and_two_that_follow_and_the_next_shard_is_claimed_in_time(bench: Bench) -> None:
    assert bench.requests == [None]
    bench.claimed(shard(1, "a b c d"))
    sent = bench.take()
    assert [type(one) for one in sent] == [
        messages.Grant,
        messages.Begin,
        messages.RunJob,
        messages.RunJob,
        messages.RunJob,
    ]
    assert last_grant(sent).go
    runs = [one for one in sent if isinstance(one, messages.RunJob)]
    # The first job has `more`, so that the second is staged meanwhile.
    assert [(name, one.more) for name, one in zip(names(runs), runs, strict=True)] == [
        ("a", True), ("b", True), ("c", False),
    ]  # fmt: skip
    bench.requests.clear()
    bench.ended(runs[0])
    runs = [*runs[1:], *bench.runs()]
    assert names(runs) == ["b", "c", "d"]
    bench.ended(runs[0])
    assert bench.requests == [lease(1)]
    # The next shard goes on in the same session.
    bench.claimed(shard(2, "e f"))
    sent = bench.take()
    assert [type(one) for one in sent] == [messages.RunJob]
    bench.ended(*runs[1:])
    assert names([*sent, *bench.runs()]) == ["e", "f"]
    assert (bench.recorded, {one.shard for one in bench.results}, bench.released) == (["a", "b", "c", "d"], {1}, [])


def test_a_job_has_the_names_of_the_other_devices_also_after_a_time_without_a_shard(bench: Bench) -> None:
    for number, others in ((1, ("other",)), (2, ("other", "third"))):
        bench.claimed(shard(number, "a", others=others))
        sent = bench.take()
        assert last_grant(sent).others == others
        bench.ended(*(one for one in sent if isinstance(one, messages.RunJob)))
        # The heartbeat comes between two shards of the run.
        bench.runner.renewed(2e12)


def test_another_run_begins_when_nothing_of_the_first_is_left(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    [first] = bench.runs()
    bench.claimed(shard(2, "b", run="another"))
    assert not bench.take()
    bench.ended(first)
    assert [type(one) for one in bench.take()] == [messages.Grant, messages.Begin, messages.RunJob]


def test_without_more_work_the_device_is_left_before_its_lease_ends_and_claimed_for_after(bench: Bench) -> None:
    bench.claimed(shard(1, "a"))
    bench.ended(*bench.runs())
    bench.holds = True
    bench.runner.tick()
    sent = bench.take()
    assert not last_grant(sent).go
    assert (type(sent[-1]), bench.released) == (messages.ApplyGrant, [])
    # The end of the process while the lease ends changes nothing.
    for answer in (messages.JobReturned(), messages.ProcessEnded("signal 9")):
        bench.hear(answer)
        assert (bench.released, bench.runner.is_free, bench.requests) == ([1], False, [])
    bench.let_go(bench.ending)
    assert (bench.runner.is_free, bench.requests) == (True, [None])


@pytest.mark.parametrize("stop", ["wanted", "drain"])
def test_a_device_that_is_to_be_given_up_finishes_its_job_and_gives_back_the_rest(bench: Bench, stop: str) -> None:
    bench.claimed(shard(1, "a b c d e"))
    runs = bench.runs()
    getattr(bench.runner, stop)("bob")
    assert not last_grant(bench.take()).go
    # A shard that was claimed at the same time.
    bench.claimed(shard(2, "f"))
    bench.ended(runs[0])
    assert not bench.released
    bench.returned(*runs[1:])
    assert bench.recorded == ["a"]
    assert sorted(bench.back) == [(1, ["b", "c", "d", "e"]), (2, ["f"])]
    assert bench.released == [1]
    bench.runner.open()
    assert bench.requests == [None]


@pytest.mark.parametrize(
    ("stop", "released"),
    [(lambda runner: runner.cancelled("run"), [1]), (lambda runner: runner.lease_lost(), [])],
    ids=["cancelled", "lease lost"],
)
def test_jobs_of_a_cancelled_run_or_a_lost_lease_are_broken_off(
    bench: Bench, stop: Callable[[DeviceRunner], None], released: list[int]
) -> None:
    bench.claimed(shard(1, "a b"))
    runs = bench.runs()
    bench.runner.cancelled("another")
    assert not bench.take()
    stop(bench.runner)
    assert [type(one) for one in bench.take()] == [messages.Grant, messages.Abort, messages.ApplyGrant]
    bench.returned(*runs)
    assert (bench.results, bench.released, bench.runner.is_free) == ([], released, True)
    # The next run of the same name gets a worker of its own.
    bench.claimed(shard(2, "c"))
    assert any(isinstance(one, messages.Begin) for one in bench.take())


def test_a_process_that_does_not_break_off_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.dispatch.device_runner.ABORT_SECONDS", -1.0)
    bench.claimed(shard(1, "a b"))
    bench.runner.cancelled("run")
    bench.runner.tick()
    assert (bench.processes[0].is_killed, bench.released) == (True, [1])


def test_a_process_that_is_killed_as_it_does_not_break_off_is_no_jobs_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.dispatch.device_runner.ABORT_SECONDS", -1.0)
    bench.claimed(shard(1, "a"))
    [run] = bench.runs()
    bench.hear(messages.JobBegun(run.number))
    bench.runner.lease_lost()
    bench.runner.tick()
    assert bench.processes[0].is_killed
    # The same shard is claimed again, and one process exits under its job.
    bench.claimed(shard(1, "a"))
    [run] = bench.runs()
    bench.hear(messages.JobBegun(run.number))
    bench.processes[-1].kill()
    assert (bench.results, names(bench.take())) == ([], ["a"])


def test_a_lease_that_was_over_for_the_process_goes_on_when_it_is_renewed(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    bench.hear(*(messages.JobReturned(number=run.number) for run in bench.runs()))
    assert not bench.take()
    bench.runner.renewed(2e12)
    sent = bench.take()
    assert (last_grant(sent).until_s, names(sent)) == (2e12, ["a", "b"])


def test_a_device_whose_processes_keep_exiting_rests(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    for _ in range(5):
        bench.hear(messages.ProcessEnded("signal 9"))
    assert "exited 5 times" in bench.runner.resting
    assert (bench.released, bench.back, bench.requests) == ([1], [(1, ["a", "b"])], [])
    bench.runner.tick()
    assert (bench.runner.resting, bench.requests) == ("", [None])


def test_an_unfit_device_is_brought_back_under_its_lease_while_others_do_its_jobs(bench: Bench) -> None:
    bench.claimed(shard(1, "a b c d"))
    first, *rest = bench.runs()
    bench.hear(messages.JobReturned(unfit="no answer", number=first.number))
    bench.hear(*(messages.JobReturned(number=run.number) for run in rest))
    assert bench.back == [(1, ["a", "b", "c", "d"])]
    for until_s in (1e12, 2e12):
        bench.runner.renewed(until_s)
        grant = last_grant(bench.take())
        assert (grant.recover, grant.go, grant.until_s) == (True, False, until_s)
    assert not bench.released
    bench.hear(messages.JobReturned(recovered=True))
    assert bench.requests == [lease(1)]
    bench.claimed(shard(2, "e"))
    assert names(bench.take()) == ["e"]


def test_a_process_that_stays_stopped_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    bench.claimed(shard(1, "a"))
    [process] = bench.processes
    # The process goes on once meanwhile.
    for passed_s, is_stopped in ((0, True), (59, True), (0, False), (0, True), (59, True)):
        now_s += passed_s
        process.is_stopped = is_stopped
        bench.runner.tick()
        assert not process.is_killed
    now_s += 2
    bench.runner.tick()
    assert process.is_killed


def test_a_shard_that_cannot_be_prepared_is_given_back_and_the_running_job_goes_on(bench: Bench) -> None:
    bench.claimed(shard(1, "a b"))
    first, second = bench.runs()
    bench.problem = ArtifactsError("the artifacts' store is away")
    bench.claimed(shard(2, "c"))
    assert bench.back == [(2, ["c"])]
    assert "away" in bench.runner.resting
    bench.ended(first)
    bench.returned(second)
    assert (bench.back, bench.recorded) == ([(2, ["c"]), (1, ["b"])], ["a"])


def test_a_shard_that_is_prepared_too_late_is_not_run(bench: Bench) -> None:
    bench.holds = True
    bench.claimed(shard(1, "a"))
    bench.runner.drain("its agent takes no further work")
    assert (bench.back, bench.released) == ([(1, ["a"])], [1])
    bench.let_go(bench.preparing)
    bench.let_go(bench.ending)
    assert (bench.runs(), bench.runner.is_free) == ([], True)
