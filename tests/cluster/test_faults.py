"""Deaths of parts of a shared farm: docs/guides/three_hosts.md has a row for each of these.

Three agents or more, each a process, with stub devices; a real PostgreSQL. After each fault every job has exactly one
verdict that was accepted, and no device ran two jobs at once (`require_right`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_store import Cluster
from networks import Relay
from s3_server import KEYS, S3Server
from shared_rows import defer_finish, execute
from sqlalchemy import Connection
from stub_farm import FINE, SOC
from stub_hosts import QUICK_TO_NOTICE, TTL_S, Farm, farm_of_hosts, farm_server, sleep_ttl
from waiting import all_the_time

from farm.base.processes import Supervisor
from farm.store.leases.rows import lock_soc
from farm.store.store import open_store

_HOSTS, _DEVICES = 3, 2
# In peace 2.5 s on six devices.
_JOBS = 150


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Cluster, int]]:
    with farm_server() as made:
        yield made


@pytest.fixture
def farm(server: tuple[Cluster, int], tmp_path: Path) -> Iterator[Farm]:
    """A farm whose hosts are still to be started."""
    with farm_of_hosts(*server, tmp_path) as made:
        yield made


@pytest.fixture
def running(farm: Farm) -> tuple[Farm, str]:
    """A farm that is in the midst of a run, and the run."""
    farm.begin(_HOSTS, _DEVICES)
    return farm, _in_midst(farm)


def _in_midst(farm: Farm, jobs: int = _JOBS) -> str:
    run_id = farm.submit("ada", jobs)
    farm.await_ran(run_id, jobs // 5)
    return run_id


def _require_ended_once(farm: Farm, run_id: str) -> None:
    """Check that no agent ended, and no job twice: result logs keep finished jobs, only broken off ones run again."""
    assert all(process.poll() is None for process in farm.hosts.processes.values())
    ended = [ran for ran in farm.hosts.ran(run_id) if ran.ended_s and ran.ended_s - ran.began_s > 0.09]
    assert len(ended) == len({ran.job for ran in ended})


def _recorded(farm: Farm, run_id: str) -> set[str]:
    return {job.id for job in farm.store.runs.view(run_id).jobs if job.attempts}


def test_a_host_dies(running: tuple[Farm, str]) -> None:
    farm, run_id = running
    farm.hosts.die("host-1")
    recorded = _recorded(farm, run_id)
    farm.end_right()
    assert not recorded & set(farm.executed_again(run_id)), "what was recorded is not run again"
    assert {ran.job for ran in farm.ran_on(run_id, "host-1")} - recorded <= set(farm.executed_again(run_id))


@pytest.mark.whole
def test_an_agent_is_killed_and_started_again(running: tuple[Farm, str]) -> None:
    farm, run_id = running
    farm.hosts.kill("host-1")
    farm.hosts.start("host-1", _DEVICES)
    farm.end_right()
    # On each device: the running job, and a job whose answer was on its way to the result log.
    assert len(farm.executed_again(run_id)) <= 2 * _DEVICES
    assert farm.is_of_use("host-1")


@pytest.mark.whole
def test_an_agent_that_stood_still_is_refused(running: tuple[Farm, str]) -> None:
    farm, _ = running
    agent = farm.hosts.processes["host-1"].pid
    os.kill(agent, signal.SIGSTOP)
    try:
        farm.await_end()
    finally:
        os.kill(agent, signal.SIGCONT)
    again = farm.submit("bob", 30)
    farm.await_end(again)
    farm.require_right()
    assert farm.is_of_use("host-1")
    farm.require_right()


@pytest.mark.whole
def test_who_stands_still_within_a_transaction_keeps_nobody_waiting(farm: Farm) -> None:
    """Stopped, or cut off, with the locks of an SoC: the server ends the transaction."""
    farm.begin(_HOSTS, _DEVICES)
    tries: list[int] = []
    is_locked, may_go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        def action(connection: Connection) -> None:
            lock_soc(connection, SOC)
            tries.append(len(tries))
            is_locked.set()
            may_go_on.wait(120)
            lock_soc(connection, SOC)

        with open_store(farm.hosts.url) as store:
            store._database.write(action)

    thread = threading.Thread(target=stand_still)
    thread.start()
    assert is_locked.wait(20)
    try:
        farm.submit("ada", 12)
        farm.end_right()
    finally:
        may_go_on.set()
        thread.join()
    assert tries == [0, 1], "its transaction was over, and was made again"


@pytest.mark.whole
def test_the_database_is_away(running: tuple[Farm, str]) -> None:
    farm, run_id = running
    # The database restarts at first.
    farm.server.stop()
    farm.server.start()
    farm.await_ran(run_id, _JOBS // 2)
    assert farm.executed_again(run_id) == [], "nothing that ran was disturbed"
    farm.server.stop()
    # Longer than a heartbeat is valid.
    time.sleep(1.5 * TTL_S)
    farm.server.start()
    farm.end_right()
    _require_ended_once(farm, run_id)


@pytest.mark.whole
def test_nobody_is_dead_of_whom_a_database_heard_nothing_that_stood_still(farm: Farm) -> None:
    farm.begin(_HOSTS, _DEVICES)
    # Agents that would take others for dead.
    sleep_ttl()
    run_id = _in_midst(farm)
    agent = farm.hosts.processes["host-1"].pid
    farm.server.freeze()
    os.kill(agent, signal.SIGSTOP)
    try:
        time.sleep(1.5 * TTL_S)
        farm.server.thaw()
        # The other agents are back at once, and repair the farm meanwhile.
        time.sleep(0.5 * TTL_S)
    finally:
        farm.server.thaw()
        os.kill(agent, signal.SIGCONT)
    farm.end_right()
    assert "is not heard of" not in "".join(map(farm.hosts.log, farm.hosts.processes))
    _require_ended_once(farm, run_id)


@pytest.mark.whole
def test_the_artifacts_store_is_away(farm: Farm, tmp_path: Path) -> None:
    farm.begin(_HOSTS, _DEVICES)
    known = _in_midst(farm)
    folder, aside = tmp_path / "artifacts", tmp_path / "aside"
    farm.hosts.use_bundle(f"{FINE} 2")
    folder.rename(aside)
    try:
        fresh = farm.submit("bob", 30)
        farm.await_end(known)
        assert len(farm.hosts.ran(known)) == _JOBS, "what needs nothing new goes on"
        assert not farm.hosts.ran(fresh)
    finally:
        aside.rename(folder)
    farm.end_right()


@pytest.mark.whole
def test_the_network_is_cut_to_the_artifacts(
    server: tuple[Cluster, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with Supervisor() as supervisor:
        s3 = S3Server(supervisor, tmp_path).start()
        s3fs.S3FileSystem(endpoint_url=s3.url, skip_instance_cache=True).mkdir("lab")
        address = s3.address("lab")
        with (
            contextlib.closing(Relay(s3.port)) as line,
            farm_of_hosts(*server, tmp_path / "farm", artifacts=address, env=KEYS) as farm,
        ):
            farm.hosts.rest_s, farm.hosts.fetch_s = 2.0, 3.0
            farm.hosts.artifacts_at["host-1"] = address.replace(f":{s3.port}", f":{line.port}")
            farm.begin(_HOSTS, _DEVICES)
            known = _in_midst(farm)
            farm.hosts.use_bundle(f"{FINE} 2")
            line.cut()
            fresh = farm.submit("bob", 24)
            farm.await_end(timeout_s=120)
            assert len(farm.hosts.ran(known)) == _JOBS, "what needs nothing new goes on"
            assert farm.ran_on(known, "host-1")
            assert not farm.ran_on(fresh, "host-1")
            line.restore()
            # Devices of the host rest after they could not begin.
            assert farm.is_of_use("host-1")
            farm.require_right()


@pytest.mark.whole
def test_the_network_is_cut_to_the_database(farm: Farm) -> None:
    """Connections stay open and nothing arrives."""
    with contextlib.closing(Relay(farm.port)) as line:
        farm.hosts.urls["host-1"] = f"{farm.url_at('127.0.0.1', line.port)}&{QUICK_TO_NOTICE}"
        farm.begin(_HOSTS, _DEVICES)
        run_id = _in_midst(farm)
        line.cut()
        farm.await_end(run_id)
        sleep_ttl()
        count = len(farm.ran_on(run_id, "host-1"))
        assert all_the_time(lambda: len(farm.ran_on(run_id, "host-1")) == count, 1.0), "without a lease nothing begins"
        line.restore()
        farm.until(lambda: sum(agent.alive for agent in farm.store.cluster.agents()) == _HOSTS, "the host is back")
        assert farm.is_of_use("host-1")
        farm.require_right()


@pytest.mark.whole
def test_a_slow_and_lossy_network(farm: Farm) -> None:
    """Every line of a host takes 20 ms and is reset now and then."""
    with contextlib.closing(Relay(farm.port, delay_s=0.02, breaks=0.003)) as line:
        farm.hosts.urls["host-1"] = farm.url_at("127.0.0.1", line.port)
        farm.hosts.restarts = True
        farm.begin(_HOSTS, _DEVICES)
        _in_midst(farm)
        farm.end_right()
        assert line.broken


@pytest.mark.whole
def test_messages_come_twice_late_and_for_nothing(running: tuple[Farm, str]) -> None:
    farm, run_id = running
    # Late messages: waiting ones are deleted, until an agent finds the waiting work.
    execute(farm.store, "DELETE FROM procrastinate_jobs WHERE status = 'todo'")
    hints = "SELECT pg_notify('farm', hint) FROM unnest(ARRAY['work SM8650', 'work SM8750', 'build none']) AS hint"
    for _ in range(5):
        execute(farm.store, hints)
    defer_finish(farm.store, run_id)
    farm.await_end()
    # For nothing: the run is over.
    execute(farm.store, hints)
    defer_finish(farm.store, run_id)
    assert all_the_time(lambda: farm.executed_again(run_id) == [], 1.0)
    farm.require_right()


@pytest.mark.whole
def test_a_clock_is_wrong_by_an_hour(farm: Farm, tmp_path: Path) -> None:
    library, source = tmp_path / "shifted_clock.so", Path(__file__).with_name("shifted_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    for name, shift_s in (("host-1", 3600), ("host-2", -3600)):
        farm.hosts.env[name] = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK_S": str(shift_s)}
    command = [sys.executable, "-c", "import time; print(time.time())"]
    seen = subprocess.run(command, env=farm.hosts.env_of("host-1"), capture_output=True, check=True)
    assert abs(float(seen.stdout) - time.time() - 3600) < 60
    farm.begin(_HOSTS, _DEVICES)
    run_id = _in_midst(farm)
    assert all(agent.alive for agent in farm.store.cluster.agents())
    farm.end_right()
    assert farm.executed_again(run_id) == []
    assert all(farm.ran_on(run_id, f"host-{number}") for number in range(_HOSTS))


@pytest.mark.whole
def test_two_agents_of_one_name(running: tuple[Farm, str]) -> None:
    farm, run_id = running
    farm.hosts.start("host-9", 1, agent_name="host-1")
    second = farm.hosts.processes.pop("host-9")
    assert second.wait(30) == 11
    output = farm.hosts.log("host-9")
    assert "host-1" in output
    assert "Traceback" not in output
    farm.end_right()
    assert farm.executed_again(run_id) == [], "the first goes on"
    assert farm.ran_on(run_id, "host-1")
    farm.hosts.kill("host-1")
    farm.hosts.start("host-9", 1, agent_name="host-1")
    assert farm.is_of_use("host-9"), "the successor has the name"
    farm.require_right()


def test_evidence_sees_what_it_is_for(tmp_path: Path) -> None:
    """The checks of these tests find the faults that they look for."""
    from stub_farm import Evidence, executions, overlaps

    one, other = Evidence(tmp_path, "a"), Evidence(tmp_path, "a")
    with one.running("x", "run"), other.running("y", "run"):
        pass
    with one.running("z", "run"):
        pass
    found = executions(tmp_path)
    assert [ran.job for ran in found] == ["x", "y", "z"]
    assert [(first.job, second.job) for first, second in overlaps(found)] == [("x", "y")]
