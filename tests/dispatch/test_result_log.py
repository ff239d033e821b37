"""Results that are not recorded yet outlive each end of their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farm.base.errors import FarmError
from farm.dispatch.recorder import Recorder
from farm.dispatch.result_log import ResultLog, open_result_log
from farm.dispatch.run.run import replay_results, result_log
from farm.results.attempt import Attempt, Comparison, Stage, Verdict
from farm.store.cluster.records import ShardResult
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target


def result(number: int) -> ShardResult:
    same = Comparison(0, "fp32", float("inf"), 1.0, 0.0, None)
    attempt = Attempt(f"job-{number}", Verdict.PASSED, Stage.DONE, "", device="phone", comparisons=(same,))
    return ShardResult(7, "phone", 3, attempt.job_id, (attempt,))


def test_what_was_not_recorded_is_there_at_the_next_start(tmp_path: Path) -> None:
    first = ResultLog(tmp_path / "log")
    for number in range(3):
        assert first.append(result(number))
    # Killed: it is not closed.
    second = ResultLog(tmp_path / "log")
    assert second.left() == [result(number) for number in range(3)]
    assert not second.left()


def test_an_agent_records_the_log_that_farm_0_2_0_left(tmp_path: Path) -> None:
    assert ResultLog(tmp_path / "spool").append(result(1))
    assert open_result_log(tmp_path).left() == [result(1)]
    assert open_result_log(tmp_path).left() == [result(1)]


def test_what_is_found_out_while_the_database_is_away_is_in_the_log_at_once(tmp_path: Path) -> None:
    is_asked, is_back = threading.Event(), threading.Event()

    class AwayStore:
        def record(self, *_: object) -> dict[int, FarmError]:
            is_asked.set()
            is_back.wait(60)
            return {}

    store: Any = AwayStore()
    log = ResultLog(tmp_path / "log")
    recorder = Recorder(store, log, None)
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


def test_what_was_recorded_is_not_offered_again(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    for number in range(3):
        log.append(result(number))
    log.mark_recorded(3)
    log.close()
    assert not ResultLog(tmp_path / "log").left()


def test_what_is_recorded_takes_no_room_for_ever(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    for number in range(20_000):
        log.append(result(number))
        log.mark_recorded(1)
    assert (tmp_path / "log").stat().st_size < 2 << 20


def test_a_result_that_was_cut_short_takes_none_before_it_along(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ResultLog(path)
    log.append(result(0))
    whole = path.stat().st_size
    log.append(result(1))
    os.truncate(path, path.stat().st_size - 5)
    again = ResultLog(path)
    assert again.left() == [result(0)]
    # The cut result damages no later result either.
    assert path.stat().st_size == whole
    again.append(result(2))
    assert ResultLog(path).left() == [result(0), result(2)]


def test_a_damaged_result_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ResultLog(path)
    log.append(result(0))
    log.append(result(1))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert ResultLog(path).left() == [result(0)]


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    # A process of its own, whose files cannot grow for a while.
    script = textwrap.dedent(f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_result_log import ResultLog, result
        path = Path({str(tmp_path)!r}, "log")
        log = ResultLog(path)
        assert log.append(result(0))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        assert not log.append(result(1))
        assert not log.append(result(2))
        assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert log.append(result(3))
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert [one.job_id for one in ResultLog(tmp_path / "log").left()] == ["job-0", "job-1", "job-2", "job-3"]


def test_a_killed_process_loses_nothing_that_it_has_appended(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import itertools, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_result_log import ResultLog, result
        log = ResultLog(Path({str(tmp_path)!r}, "log"))
        for number in itertools.count():
            log.append(result(number))
            print(number, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines(keepends=True)
    process.wait()
    last = max(int(line) for line in lines if line.endswith("\n"))
    left = [one.job_id for one in ResultLog(tmp_path / "log").left()]
    assert left[: last + 1] == [f"job-{number}" for number in range(last + 1)]
    assert len(left) <= last + 2


def test_results_that_a_killed_run_left_are_recorded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case("mine", "add", "torch.nn:ReLU", (InputSpec((1,)),))
    job = Job(case, Target("SM8650", "htp", "8a8w"))
    with open_store(tmp_path / "farm.db") as store:
        run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
        store.plan_jobs(run_id, [job])
        attempt = Attempt(job.id, Verdict.PASSED, Stage.DONE, "", device="virtual-SM8650-0", started_ms=1)
        log = ResultLog(result_log(tmp_path))
        log.append(ShardResult(1, attempt.device, 0, job.id, (attempt,)))
        # Killed: neither recorded nor closed.
        for _ in range(2):
            replay_results(run_id, tmp_path, store)
            [recorded] = store.runs.view(run_id).jobs[0].attempts
            assert recorded.verdict is Verdict.PASSED
        # Under a lease that another process has by now nothing is recorded.
        log = ResultLog(result_log(tmp_path))
        log.append(ShardResult(2, attempt.device, 7, job.id, (msgspec.structs.replace(attempt, started_ms=2),)))
        replay_results(run_id, tmp_path, store)
        assert len(store.runs.view(run_id).jobs[0].attempts) == 1
        assert "is not recorded" in caplog.text
