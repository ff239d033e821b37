"""`farm lab agent` on real parts: PostgreSQL, virtual devices, slots and agents as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import SMOKE, AgentHosts, agent_hosts
from chaos_store import PostgresStore, postgres_cluster
from farm_home import FarmHome
from waiting import until

from farm.devices.virtual.faults import Fault, FaultKind
from farm.results.attempt import Verdict
from farm.store.protocol import PROTOCOL

_ALL, _SOME = 8, 4
_LONG = ("--iterations", "300")
"""Jobs that take long enough to do something between the first and the last of them."""
_FEW = "conv2d or gelu or softmax or matmul"


@pytest.fixture(name="compiled", scope="module")
def _compiled(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    FarmHome(farm_cache, folder / "state", folder).farm(
        "run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", timeout_s=300, code=0
    )
    return farm_cache


@pytest.fixture(name="store", scope="module")
def _store() -> Iterator[PostgresStore]:
    with postgres_cluster() as cluster:
        if isinstance(cluster, str):
            pytest.skip(cluster)
        yield PostgresStore(cluster, "farm")


@pytest.fixture(name="hosts")
def _hosts(
    store: PostgresStore, compiled: Path, toolchain: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[AgentHosts]:
    # A database for each test: runs and agents of others are no matter.
    name = f"agent_{abs(hash(request.node.name)) % 10**9}"
    with agent_hosts(tmp_path, PostgresStore(store._cluster, name).url, toolchain, compiled) as hosts:
        yield hosts


@pytest.fixture(name="left", scope="module")
def _left(
    store: PostgresStore, compiled: Path, toolchain: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentHosts]:
    """Yield one host for all tests that leave its agent running and its device free."""
    url = PostgresStore(store._cluster, "agent_left").url
    with agent_hosts(tmp_path_factory.mktemp("left"), url, toolchain, compiled) as hosts:
        hosts.host("left")
        hosts.registered("left")
        yield hosts


def begun(hosts: AgentHosts, *chosen: str) -> str:
    """Submit a run of long jobs, and return its id once the first of them has a result."""
    run_id = hosts.detached(*_LONG, *chosen)
    first = "select 1 from attempt join run_job on run_job.id = run_job_id where run_id = %s limit 1"
    hosts.until(lambda: hosts.rows(first, run_id), "the first result")
    return run_id


def once_each(hosts: AgentHosts, run_id: str, count: int) -> None:
    """Every job has exactly one verdict about the code."""
    rows = hosts.rows(
        "select run_job_id, count(*) from attempt join run_job on run_job.id = run_job_id "
        "where run_id = %s and verdict in ('passed', 'failed') group by run_job_id",
        run_id,
    )
    assert len(rows) == count
    assert {count for _, count in rows} == {1}


@pytest.mark.whole
def test_an_agent_runs_what_is_submitted_and_ends_when_it_is_told_to(hosts: AgentHosts) -> None:
    hosts.host("left")
    hosts.registered("left")
    done = hosts.you(*SMOKE, "-k", "add or gelu", code=0)
    assert "2 passed, 0 failed" in done.stdout
    assert "virtual-left-0" in hosts.you("lab", "agent", "list").stdout
    # The run ends with its last result; the agent releases the device after that.
    hosts.until(lambda: "free" in hosts.you("lab", "agent", "list").stdout, "a free device")
    assert hosts.stop_agents() == {"left": 0}
    # Nothing of ours is left on the device, nor in the farm.
    assert not hosts.sessions("left")
    assert hosts.rows("select 1 from lease where token <> ''") == []
    assert "no agent" in hosts.you("lab", "agent", "list").stdout


@pytest.mark.whole
def test_what_one_device_computes_wrong_another_of_another_host_decides(hosts: AgentHosts) -> None:
    for name in ("left", "right"):
        hosts.host(name)
    hosts.registered("left", "right")
    # The health check's output is smaller.
    hosts.break_device("left", Fault(FaultKind.WRONG_NUMBERS, after_bytes=1000, times=0))
    run_id = hosts.detached(*_LONG)
    view = hosts.finished(run_id)
    wrong = [job for job in view.jobs if any(attempt.device == "virtual-left-0" for attempt in job.attempts)]
    assert wrong
    assert [job.decisive.verdict for job in view.jobs] == [Verdict.PASSED] * _ALL
    repeated = [job for job in wrong if len(job.attempts) > 1]
    assert repeated
    assert all(job.decisive.device == "virtual-right-0" for job in repeated)
    # A device whose result differs from the others has to pass a health check.
    assert ("outvoted",) in hosts.rows("select event from health_event where device like 'virtual-left-0%%'")


@pytest.mark.whole
def test_a_host_that_is_drained_finishes_its_job_and_leaves_the_rest_to_others(hosts: AgentHosts) -> None:
    hosts.host("left")
    hosts.registered("left")
    assert hosts.you("lab", "agent", "drain", "nobody").returncode == 2
    run_id = begun(hosts)
    assert hosts.you("lab", "agent", "drain", "left").returncode == 0
    assert hosts.agents["left"].wait(30) == 0
    assert hosts.rows("select 1 from lease where token <> ''") == []
    left = hosts.rows("select sum(remaining) from shard where state = 'waiting'")
    assert left[0][0] > 0
    hosts.host("right")
    view = hosts.finished(run_id)
    assert [job.decisive.verdict for job in view.jobs] == [Verdict.PASSED] * _ALL
    once_each(hosts, run_id, _ALL)
    assert {attempt.verdict for job in view.jobs for attempt in job.attempts} == {Verdict.PASSED}


@pytest.mark.whole
def test_a_cancelled_run_is_broken_off_and_the_device_is_free(left: AgentHosts) -> None:
    # With so many iterations the jobs would take minutes.
    run_id = left.detached("--iterations", "100000")
    left.until(lambda: left.rows("select 1 from shard where state = 'held'"), "a shard is held")
    left.until(lambda: left.sessions("left"), "the job runs")
    assert left.you("runs", "cancel", run_id).returncode == 0
    left.until(lambda: not left.rows("select 1 from lease where token <> ''"), "the device is free")
    assert left.you(*SMOKE, "-k", "gelu").returncode == 0
    once = left.rows("select count(*) from attempt join run_job on run_job.id = run_job_id where run_id = %s", run_id)
    assert once == [(0,)]


@pytest.mark.whole
def test_a_device_whose_lease_others_took_is_stopped_and_its_results_are_refused(left: AgentHosts) -> None:
    taken = (
        "update lease set fence = fence + 1, token = 'stolen', user_name = 'eve', "
        "expires_ms = (extract(epoch from clock_timestamp()) * 1000)::bigint + 3000 where token <> '' "
        "and exists (select 1 from shard where run_id = %s and state = 'held' and remaining > 0) returning device"
    )

    def robbed() -> str | None:
        """Return the run whose device was taken; None where it was over by then."""
        run_id = begun(left, "-k", _FEW)
        return run_id if left.rows(taken, run_id) else None

    printed_before = len(left.printed("left"))
    run_id = until(robbed, "a run that is robbed of its device")
    # The next heartbeat stops the device, unless its jobs end before: their results are refused then.
    noticed = ("its lease was lost", "is not recorded: the lease")
    left.until(lambda: any(words in left.printed("left")[printed_before:] for words in noticed), "the agent notices")
    view = left.finished(run_id)
    assert [job.decisive.verdict for job in view.jobs] == [Verdict.PASSED] * _SOME
    once_each(left, run_id, _SOME)


@pytest.mark.whole
def test_a_second_agent_of_a_name_is_refused_and_one_of_another_version(left: AgentHosts) -> None:
    # On the same host, then on another.
    again = left.farm("left", "lab", "agent", "--name", "left", code=11)
    assert "runs on this host already" in again.stderr
    left.attach("right", ["SM8650"])
    # An agent waits twice its own time to live for the end of another of its name.
    with (left.folder / "right" / "farm.toml").open("a") as file:
        file.write("[leases]\nttl_s = 3\nheartbeat_s = 0.5\n")
    elsewhere = left.farm("right", "lab", "agent", "--name", "left", code=11)
    assert "--name" in elsewhere.stderr
    ours, theirs = f'"protocol":{PROTOCOL}', f'"protocol":{PROTOCOL + 1}'
    changed = "update agent set facts = replace(facts, %s, %s) where position(%s in facts) > 0 returning name"
    newer_rows = left.rows(changed, ours, theirs, ours)
    assert newer_rows == [("left",)]
    newer = left.farm("right", "lab", "agent", "--name", "right")
    assert left.rows(changed, theirs, ours, theirs) == [("left",)]
    assert newer.returncode == 11
    assert "update farm on this host" in newer.stderr
