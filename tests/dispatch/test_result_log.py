"""Results that are not recorded yet outlive each end of their process."""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made import job
from waiting import until

from farm.base.errors import FarmError, LeaseLostError, StoreError
from farm.dispatch.recorder import Recorder, ResultLog, open_result_log
from farm.dispatch.run.run import LocalRecords, replay_results, result_log
from farm.results.attempt import Attempt, Comparison, Stage, Verdict
from farm.store.cluster.records import ShardResult
from farm.store.records import RunRecord
from farm.store.store import Store, open_store

FORK = multiprocessing.get_context("fork")


def result(number: int) -> ShardResult:
    same = Comparison(0, "fp32", float("inf"), 1.0, 0.0, None)
    attempt = Attempt(f"job-{number}", Verdict.PASSED, Stage.DONE, "", device="phone", comparisons=(same,))
    return ShardResult(7, "phone", 3, attempt.job_id, (attempt,))


def test_results_that_were_not_recorded_are_there_at_the_next_start(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    for number in range(3):
        assert log.append(result(number))
    # Killed: it is not closed.
    log = ResultLog(tmp_path / "log")
    assert log.left() == [result(number) for number in range(3)]
    assert not log.left()
    # Recorded results take no room.
    for number in range(3):
        log.append(result(number))
        log.mark_recorded(4 if not number else 1)
        assert (tmp_path / "log").stat().st_size == 0
    log.close()
    assert not ResultLog(tmp_path / "log").left()


def test_an_agent_records_the_log_that_farm_0_2_0_left(tmp_path: Path) -> None:
    assert ResultLog(tmp_path / "spool").append(result(1))
    assert open_result_log(tmp_path).left() == [result(1)]
    assert open_result_log(tmp_path).left() == [result(1)]


def test_what_is_found_out_while_the_database_is_away_is_in_the_log_at_once(tmp_path: Path) -> None:
    is_asked, is_back = threading.Event(), threading.Event()

    def record(_: object) -> dict[int, FarmError]:
        is_asked.set()
        is_back.wait(60)
        return {}

    log = ResultLog(tmp_path / "log")
    recorder = Recorder(record, log, None)
    recorder.begin()
    try:
        recorder.result(result(0))
        assert is_asked.wait(30)
        recorder.result(result(1))
        recorder.result(result(2))
        # The result log after a restart of an agent that was killed at this moment.
        assert ResultLog(tmp_path / "log").left() == [result(number) for number in range(3)]
    finally:
        is_back.set()
        assert recorder.close(30)
    log.close()
    assert not ResultLog(tmp_path / "log").left()


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_result_takes_none_before_it_along_and_damages_no_later_one(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log"
    log = ResultLog(path)
    log.append(result(0))
    whole = path.stat().st_size
    log.append(result(1))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(path.read_bytes()[:-5] if damage == "cut" else content)
    again = ResultLog(path)
    assert again.left() == [result(0)]
    assert path.stat().st_size == whole
    again.append(result(2))
    assert ResultLog(path).left() == [result(0), result(2)]


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def work() -> None:
        log = ResultLog(path)
        assert log.append(result(0))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        assert not log.append(result(1))
        assert not log.append(result(2))
        assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert log.append(result(3))

    # A process of its own, whose files cannot grow for a while.
    process = FORK.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert ResultLog(path).left() == [result(number) for number in range(4)]


def test_a_killed_process_loses_nothing_that_it_has_appended(tmp_path: Path) -> None:
    appended = FORK.Value("i", lock=False)

    def work() -> None:
        log = ResultLog(tmp_path / "log")
        for number in itertools.count():
            log.append(result(number))
            appended.value = number + 1

    process = FORK.Process(target=work)
    process.start()
    until(lambda: appended.value > 200, "some results")
    process.kill()
    process.join()
    left = ResultLog(tmp_path / "log").left()
    assert left == [result(number) for number in range(len(left))]
    assert appended.value <= len(left) <= appended.value + 1


def test_results_that_a_killed_run_left_are_recorded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add = job("add")
    with open_store(tmp_path / "farm.db") as store:
        run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
        store.plan_jobs(run_id, [add])
        attempt = Attempt(add.id, Verdict.PASSED, Stage.DONE, "", device="virtual-SM8650-0", started_ms=1)
        log = ResultLog(result_log(tmp_path))
        log.append(ShardResult(1, attempt.device, 0, add.id, (attempt,)))
        # Killed: neither recorded nor closed.
        for _ in range(2):
            replay_results(run_id, tmp_path, store)
            [recorded] = store.runs.view(run_id).jobs[0].attempts
            assert recorded.verdict is Verdict.PASSED
        # Under a lease that another process has by now nothing is recorded.
        log = ResultLog(result_log(tmp_path))
        log.append(ShardResult(2, attempt.device, 7, add.id, (msgspec.structs.replace(attempt, started_ms=2),)))
        replay_results(run_id, tmp_path, store)
        assert len(store.runs.view(run_id).jobs[0].attempts) == 1
        assert "is not recorded" in caplog.text


def test_a_refused_result_takes_no_other_of_its_batch_along_and_a_lost_batch_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(name) for name in ("add", "relu", "gelu")]
    with open_store(tmp_path / "farm.db") as store:
        run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
        store.plan_jobs(run_id, jobs)
        # Attempts without a start time have no digest, so that the store would insert a repeated one twice.
        attempts = [Attempt(one.id, Verdict.PASSED, Stage.DONE, "") for one in jobs]
        results = [
            ShardResult(n, "phone", 7 * (n == 1), one.job_id, (one, one) if n == 2 else (one,))
            for n, one in enumerate(attempts)
        ]
        records = LocalRecords(run_id, store)
        record, calls = Store.record_attempts, []

        def cut_off(*args: Any, **words: Any) -> None:
            calls.append(args)
            # The whole batch is refused, then each result is recorded alone: the store is lost before the last.
            if len(calls) == 4:
                raise StoreError("cut off")
            record(*args, **words)

        monkeypatch.setattr(Store, "record_attempts", cut_off)
        with pytest.raises(StoreError):
            records.record(results)
        refused = records.record(results)
        assert [type(refused[1])] == [LeaseLostError]
        assert len(refused) == 1
        assert [len(one.attempts) for one in store.runs.view(run_id).jobs] == [1, 0, 2]
