"""Results that were not recorded yet outlive their agent, whatever ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

from farm.cluster.agent.ledger import Ledger
from farm.cluster.agent.recorder import Recorder
from farm.cluster.agent.spool import Spool
from farm.results.attempt import Attempt, Comparison, Stage, Verdict
from farm.store.cluster.records import AgentId, ShardResult


def result(number: int) -> ShardResult:
    same = Comparison(0, "fp32", float("inf"), 1.0, 0.0, None)
    attempt = Attempt(f"job-{number}", Verdict.PASSED, Stage.DONE, "", device="phone", comparisons=(same,))
    return ShardResult(7, "phone", 3, attempt.job_id, (attempt,))


def test_what_was_not_recorded_is_there_at_the_next_start(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool")
    for number in range(3):
        assert first.append(result(number))
    # Killed: it is not closed.
    second = Spool(tmp_path / "spool")
    assert second.left() == [result(number) for number in range(3)]
    assert not second.left()


def test_what_is_found_out_while_the_database_is_away_is_in_the_spool_at_once(tmp_path: Path) -> None:
    is_asked, is_back = threading.Event(), threading.Event()

    class AwayStore:
        @property
        def cluster(self) -> AwayStore:
            return self

        def record(self, *_: object, **__: object) -> dict[int, str]:
            is_asked.set()
            is_back.wait(60)
            return {}

    store: Any = AwayStore()
    spool = Spool(tmp_path / "spool")
    recorder = Recorder(store, spool, Ledger(), None, print, 10.0)
    recorder.begin(AgentId("h1", "token"))
    try:
        recorder.result(result(0))
        assert is_asked.wait(30)
        recorder.result(result(1))
        recorder.result(result(2))
        # As the next life of an agent that was killed at this moment.
        assert Spool(tmp_path / "spool").left() == [result(number) for number in range(3)]
    finally:
        is_back.set()
        assert recorder.close(30)
    spool.close()
    assert not Spool(tmp_path / "spool").left()


def test_what_was_recorded_is_not_offered_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for number in range(3):
        spool.append(result(number))
    spool.settle(3)
    spool.close()
    assert not Spool(tmp_path / "spool").left()


def test_what_is_recorded_takes_no_room_for_ever(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for number in range(20_000):
        spool.append(result(number))
        spool.settle(1)
    assert (tmp_path / "spool").stat().st_size < 2 << 20


def test_a_result_that_was_cut_short_takes_none_before_it_along(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    spool.append(result(0))
    whole = path.stat().st_size
    spool.append(result(1))
    os.truncate(path, path.stat().st_size - 5)
    again = Spool(path)
    assert again.left() == [result(0)]
    # Nor what comes after it.
    assert path.stat().st_size == whole
    again.append(result(2))
    assert Spool(path).left() == [result(0), result(2)]


def test_a_damaged_result_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    spool.append(result(0))
    spool.append(result(1))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert Spool(path).left() == [result(0)]


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    # A process of its own, whose files cannot grow for a while.
    script = textwrap.dedent(f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_spool import Spool, result
        path = Path({str(tmp_path)!r}, "spool")
        spool = Spool(path)
        assert spool.append(result(0))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        assert not spool.append(result(1))
        assert not spool.append(result(2))
        assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert spool.append(result(3))
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert [one.job_id for one in Spool(tmp_path / "spool").left()] == ["job-0", "job-1", "job-2", "job-3"]


def test_a_killed_process_loses_nothing_that_it_has_appended(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import itertools, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_spool import Spool, result
        spool = Spool(Path({str(tmp_path)!r}, "spool"))
        for number in itertools.count():
            spool.append(result(number))
            print(number, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines(keepends=True)
    process.wait()
    last = max(int(line) for line in lines if line.endswith("\n"))
    left = [one.job_id for one in Spool(tmp_path / "spool").left()]
    assert left[: last + 1] == [f"job-{number}" for number in range(last + 1)]
    assert len(left) <= last + 2
