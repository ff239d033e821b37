"""Assignment of jobs to devices, and the end of a run: real job source, device runners and pool, stub processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import device
from msgspec.structs import replace
from stub_dispatch import (
    Bench,
    attempt_of,
    exits,
    fails,
    fails_here,
    fails_while_others,
    given_up,
    once,
    only_on,
    passes,
    unfit,
    verdicts,
)

from farm.base.errors import LeaseLostError, RowRefusedError, StoreError
from farm.devices.device import Device
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.messages import FromDevice, JobEnded, JobReturned, RunJob
from farm.dispatch.run.run import LocalRun
from farm.results.attempt import Cause, Verdict

A, B, C = (device(serial) for serial in "ABC")
OTHER = device("X", "SM8550")
Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a run of jobs called SOC:NAME."""

    def made(jobs: Sequence[str] | int, devices: Sequence[Device], most_failures: int = 0) -> Bench:
        names = [f"SM8650:{number}" for number in range(jobs)] if isinstance(jobs, int) else jobs
        return Bench(tmp_path, names, devices, most_failures=most_failures)

    return made


def test_every_job_runs_once_on_a_device_of_its_soc_in_their_order(make: Make) -> None:
    jobs = [f"SM8650:a{n}" for n in range(7)] + [f"SM8550:b{n}" for n in range(3)]
    bench = make(jobs, [A, B, OTHER])
    bench.run()
    assert sorted(bench.began) == sorted(bench.names)
    assert all(bench.jobs_of(number) == sorted(bench.jobs_of(number)) for number in range(3))
    assert all(name.startswith("b" if serial == "X" else "a") for serial, name in bench.ran)
    assert bench.ended == dict.fromkeys(bench.names, "passed")
    assert verdicts(bench.recorder.done) == {name: ["passed"] for name in bench.names}
    assert not any(one.has_session for one in bench.processes)
    assert bench.notes == []


def test_a_short_list_is_spread_over_all_devices_which_begin_at_once(make: Make) -> None:
    bench = make(2, [A, B])
    bench.begin()
    bench.let_begin()
    assert sorted(bench.ran) == [("A", "0"), ("B", "1")]
    assert bench.front.shown[-1] == {A.called: bench.plan.jobs[0].job.id, B.called: bench.plan.jobs[1].job.id}


def test_a_device_is_left_when_no_job_of_its_soc_is_left_or_may_come_back(make: Make) -> None:
    bench = make(["SM8650:a", "SM8550:b"], [A, B, OTHER])
    bench.begin()
    bench.let_begin()
    bench.let_end(2)
    assert [bench.pool.is_retired(one.id) for one in bench.plan.devices] == [False, False, True]
    assert not bench.of(2).has_session
    bench.finish()
    assert bench.notes == []


# Device processes that exit.


@pytest.mark.parametrize("devices", [[A], [A, B]])
def test_the_job_of_an_exited_process_is_tried_once_more(make: Make, devices: list[Device]) -> None:
    bench = make(4, devices)
    bench.acts["0"] = once(exits)
    bench.run()
    assert sorted(bench.began) == ["0", "0", "1", "2", "3"]
    assert bench.ended == dict.fromkeys("0123", "passed")
    assert (len(bench.recorder.done), len(bench.processes)) == (4, len(devices) + 1)


def test_a_process_that_exits_without_a_job_is_no_jobs_fault(make: Make) -> None:
    bench = make(["SM8650:0", "SM8650:1"], [A, B])
    bench.begin()
    bench.let_begin()
    bench.let_end(1)
    for _ in range(3):
        bench.of(1).end("signal 9")
        bench.decide()
    bench.finish()
    assert bench.ended == dict.fromkeys("01", "passed")


def test_a_job_under_which_two_processes_exited_is_farms_fault(make: Make) -> None:
    bench = make(2, [A, B])
    bench.acts["0"] = exits
    bench.run()
    [result] = [one for one in bench.recorder.done if one.job_id == bench.plan.jobs[0].job.id]
    [attempt] = result.attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, Cause.WORKER)
    assert "signal 11" in attempt.reason
    assert bench.ended == {"0": "infra", "1": "passed"}
    assert bench.began.count("0") == 2


def test_a_job_that_began_after_a_fault_was_returned_is_another_devices_by_then(make: Make) -> None:
    bench = make(4, [A, B])
    bench.acts["0"] = once(unfit)
    bench.begin()
    bench.let_begin()
    first = bench.of(0)
    first.step()
    # A renewal of the lease that was sent before the fault is heard.
    first.send(first.grant)
    first.step()
    assert first.running is not None
    bench.finish()
    assert bench.ended == dict.fromkeys("0123", "passed")
    assert len(bench.recorder.done) == 4
    assert not any(one.has_session for one in bench.processes)


# Jobs that another device is to try.


@pytest.mark.parametrize("count", [1, 7])
def test_a_job_that_fails_last_of_all_is_tried_by_another_device(make: Make, count: int) -> None:
    bench = make(count, [A, B])
    last = bench.names[-1]
    bench.acts[last] = once(fails_here)
    bench.run()
    assert sorted(serial for serial, name in bench.ran if name == last) == ["A", "B"]
    assert sorted(bench.began) == sorted([*bench.names, last])
    assert [str(one["verdict"]) for one in bench.front.repeated] == ["failed"]
    assert bench.ended == dict.fromkeys(bench.names, "passed")


def test_the_second_device_gets_the_history_and_the_names_of_the_others_in_one_form(make: Make) -> None:
    heard: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    bench = make(1, [A, B, C])

    def note(process: Any, run: RunJob) -> FromDevice:
        heard.append((tuple(one.device for one in run.planned.history), process.grant.others))
        return fails_while_others(process, run)

    bench.acts["0"] = note
    bench.run()
    a, b, c = (one.id for one in (A, B, C))
    assert heard == [((), (b, c)), ((a,), (a, c)), ((a, b), (a, b))]
    assert bench.ended == {"0": "failed"}


def test_an_outvoted_device_is_recovered_before_its_next_job(make: Make) -> None:
    bench = make(6, [A, B])
    bench.acts["0"] = only_on("B", otherwise=fails_here)
    recovered: list[tuple[str, int]] = []
    settle = bench.settle

    def note(process: Any) -> JobReturned:
        if process.grant.recover:
            recovered.append((process.device.serial, process.grant.outvoted))
        return settle(process)

    bench.settle = note  # type: ignore[method-assign]
    bench.run()
    assert recovered == [("A", 1)]
    assert bench.ended == dict.fromkeys(bench.names, "passed")
    job_id = bench.plan.jobs[0].job.id
    assert f"{A.called}: {job_id} failed on it and passed on another device" in bench.notes


# Devices that are unfit or given up.


def test_a_device_that_is_recovered_gets_no_job_until_it_is_back(make: Make) -> None:
    bench = make(6, [A, B])
    bench.acts["0"] = once(unfit)
    bench.begin()
    bench.let_begin()
    while not bench.of(0).grant.recover:
        assert bench.step()
    # The stub process answers ApplyGrant when it is stepped.
    while len(bench.front.ended) < 6:
        bench.decide()
        assert bench.of(1).step()
        bench.decide()
    assert bench.jobs_of(0) == ["0"]
    bench.finish()
    assert bench.ended == dict.fromkeys(bench.names, "passed")


def test_jobs_wait_for_the_only_device_while_it_is_recovered(make: Make) -> None:
    bench = make(4, [A])
    bench.acts["1"] = once(unfit)
    bench.run()
    assert bench.began[:2] == ["0", "1"]
    assert sorted(bench.began[2:]) == ["1", "2", "3"]
    assert bench.ended == dict.fromkeys(bench.names, "passed")
    assert bench.notes == [f"{A.called} is being brought back: its health check fails", f"{A.called} is back"]


@pytest.mark.parametrize("act", [given_up, unfit])
def test_a_device_that_is_given_up_leaves_its_jobs_to_others(make: Make, act: Any) -> None:
    bench = make(5, [A, B])
    bench.acts["0"] = once(act)
    bench.settles["A"] = [JobReturned(given_up="it does not answer")]
    bench.run()
    assert bench.ended == dict.fromkeys(bench.names, "passed")
    assert set(bench.jobs_of(1)) == set(bench.names)
    assert bench.pool.is_retired(bench.plan.devices[0].id)
    assert bench.notes[-1] == f"{A.called} is no longer used: it does not answer"


def test_without_any_device_left_the_run_ends(make: Make) -> None:
    bench = make(["SM8650:0", "SM8650:1", "SM8650:2", "SM8550:x"], [A, OTHER])
    bench.acts["1"] = given_up
    bench.run()
    assert bench.abandoned == ["1", "2"]
    assert bench.ended == {"0": "passed", "x": "passed"}


# Ends of a run.


def test_a_run_that_is_stopped_before_it_begins_begins_nothing(make: Make) -> None:
    bench = make(3, [A, B])
    bench.post(bench.jobs.finish_running)
    bench.run()
    assert bench.ran == []
    assert bench.abandoned == []


def test_ctrl_c_does_not_wait_until_devices_are_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, are_left = make(1, [A, B]), threading.Event()
    monkeypatch.setattr(DeviceRunner, "close", lambda _: are_left.wait(60))
    nothing: Any = None
    run = LocalRun(bench.plan, bench.pool, nothing, bench.front, forks=nothing)
    # Before it would be over.
    ending = threading.Timer(5, are_left.set)
    ending.start()
    kept = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run._close()
        assert not are_left.is_set()
    finally:
        signal.signal(signal.SIGALRM, kept)
        ending.cancel()
        are_left.set()


def test_after_a_stop_running_jobs_are_finished_and_nothing_else_begins(make: Make) -> None:
    bench = make(6, [A, B])
    bench.acts["0"] = fails_here
    bench.begin()
    bench.let_begin()
    bench.jobs.finish_running()
    bench.finish()
    assert sorted(bench.began) == ["0", "1"]
    assert bench.ended == {"0": "failed", "1": "passed"}
    assert bench.front.repeated == []
    assert not any(one.has_session for one in bench.processes)


def breaks(process: Any, run: RunJob) -> FromDevice:
    return JobEnded((attempt_of(process, run, Verdict.INFRA, Cause.WORKER),), number=run.number)


@pytest.mark.parametrize("act", [fails, breaks])
def test_after_the_first_failure_nothing_begins(make: Make, act: Any) -> None:
    bench = make(4, [A], most_failures=1)
    bench.acts["1"] = act
    bench.begin()
    # Recording takes some time: the device begins no other job meanwhile.
    while len(bench.recorder.done) < 1:
        bench.step()
    bench.recorder.is_held = True
    while bench.step():
        pass
    bench.recorder.let_go()
    bench.finish()
    assert bench.began == ["0", "1"]


def test_after_so_many_failures_nothing_begins_on_any_device(make: Make) -> None:
    bench = make(20, [A, B], most_failures=2)
    bench.acts = dict.fromkeys(bench.names, fails)
    bench.run()
    # The other device may run one job at that moment.
    assert 2 <= len(bench.began) <= 3
    assert len(bench.ended) == len(bench.began)


def test_known_issues_and_failures_for_another_device_are_no_failures_of_the_run(make: Make) -> None:
    bench = make(6, [A, B], most_failures=1)

    def is_known(process: Any, run: RunJob) -> FromDevice:
        attempt = replace(attempt_of(process, run, Verdict.FAILED, Cause.NUMERICS), known_issue="understood")
        return JobEnded((attempt,), number=run.number)

    bench.acts["0"] = is_known
    bench.acts["1"] = once(fails_here)
    bench.run()
    assert bench.ended == {"0": "failed"} | dict.fromkeys("12345", "passed")


def test_a_silent_store_stops_the_run_and_every_device_is_left(make: Make) -> None:
    bench = make(6, [A, B])
    bench.begin()
    bench.let_begin()
    bench.recorder.is_held = True
    bench.jobs.store_failing(StoreError("no answer"), bench.plan.health.store_wait_s)
    bench.decide()
    assert not any("the run stops" in note for note in bench.notes)
    bench.jobs.store_failing(StoreError("no answer"), bench.plan.health.store_wait_s + 1)
    bench.finish()
    # Neither results nor leases reach the store, and the run ends nevertheless.
    assert sorted(bench.began) == ["0", "1"]
    assert bench.notes[-1].startswith("the run stops: the store: no answer; ")
    assert not any(one.has_session for one in bench.processes)


# The store refuses.


def test_a_result_that_the_store_refuses_is_recorded_as_farms_fault(make: Make) -> None:
    bench = make(3, [A])
    bench.recorder.refused["0"] = RowRefusedError("a value is out of range")
    bench.run()
    assert bench.ended == {"0": "infra", "1": "passed", "2": "passed"}
    [attempt] = bench.recorder.done[0].attempts
    assert attempt.reason == "not recorded: a value is out of range"


def test_a_fault_that_the_store_refuses_as_well_ends_the_job(make: Make) -> None:
    bench = make(3, [A])
    bench.recorder.refused = SimpleNamespace(pop=lambda name, _: RowRefusedError("no") if name == "0" else None)
    bench.run()
    assert bench.began == ["0", "1", "2"]
    assert bench.ended == {"1": "passed", "2": "passed"}


def test_a_result_under_a_lost_lease_does_not_count_and_the_job_runs_again(make: Make) -> None:
    bench = make(3, [A, B])
    bench.recorder.refused["0"] = LeaseLostError("the lease 1 is over")
    bench.run()
    assert bench.began.count("0") == 2
    assert bench.ended == dict.fromkeys(bench.names, "passed")


# Everything at once.


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_job_ends_or_is_abandoned(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    fleet = [A, B, OTHER, device("Y", "SM8550")]
    devices = data.draw(st.lists(st.sampled_from(fleet), min_size=1, max_size=4, unique_by=lambda one: one.serial))
    socs = st.sampled_from([one.soc for one in devices])
    names = [f"{data.draw(socs)}:{n}" for n in range(data.draw(st.integers(1, 8)))]
    bench = Bench(tmp_path_factory.mktemp("run"), names, devices)
    troubles = st.sampled_from([passes, passes, passes, fails, fails_here, fails_while_others, unfit, exits])
    for name in bench.names:
        acts = [data.draw(troubles) for _ in range(3)]
        bench.acts[name] = lambda process, run, acts=acts: (acts.pop() if acts else passes)(process, run)
    gone = JobReturned(given_up="it does not answer")
    for one in devices:
        if data.draw(st.booleans()):
            bench.settles[one.serial] = [JobReturned(recovered=True), gone]
    for name in data.draw(st.lists(st.sampled_from(bench.names), max_size=2)):
        bench.recorder.refused[name] = data.draw(st.sampled_from([LeaseLostError("lost"), RowRefusedError("no")]))
    bench.begin()
    for action in data.draw(st.lists(st.sampled_from(["step", "step", "exit", "hold", "let go"]), max_size=30)):
        process = data.draw(st.sampled_from(bench.processes))
        if action == "step":
            process.step()
        elif action == "exit":
            process.end("signal 9")
        elif action == "hold":
            bench.recorder.is_held = True
        else:
            bench.recorder.let_go()
        if data.draw(st.booleans()):
            bench.decide()
    bench.recorder.let_go()
    bench.finish()
    tried = set(verdicts(bench.recorder.done))
    assert set(bench.ended) | set(bench.abandoned) == set(bench.names)
    # A job ends as shown where a device has tried it, and silently where none was left.
    assert set(bench.names) - set(bench.ended) <= set(bench.abandoned) - tried
    assert all(runner.is_free for runner in bench.runners)
    assert not any(one.has_session for one in bench.processes if one.is_alive)
