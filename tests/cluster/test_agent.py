"""`farm lab agent` on real parts: PostgreSQL, virtual devices, slots and agents as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_hosts import SMOKE, AgentHosts, agent_hosts

from farm.results.attempt import Verdict
from farm.store.protocol import PROTOCOL

pytestmark = pytest.mark.whole


@pytest.fixture
def hosts(new_store: Callable[[str], str], compiled: Path, toolchain: Path, tmp_path: Path) -> Iterator[AgentHosts]:
    """Yield the host `left`, whose agent runs."""
    with agent_hosts(tmp_path, new_store("agent"), toolchain, compiled) as hosts:
        hosts.host("left")
        hosts.registered("left")
        yield hosts


def held_leases(hosts: AgentHosts) -> list[tuple[str, ...]]:
    return hosts.rows("select device from lease where token <> ''")


def test_an_agent_runs_what_is_submitted_and_ends_when_it_is_told_to(hosts: AgentHosts) -> None:
    done = hosts.you(*SMOKE, "-k", "add or gelu", code=0)
    assert "2 passed, 0 failed" in done.stdout
    assert "virtual-left-0" in hosts.you("lab", "agent", "list").stdout
    # A cancelled run, whose jobs would take minutes, is broken off.
    run_id = hosts.detached("--iterations", "100000")
    hosts.until(lambda: hosts.sessions("left"), "the job runs")
    hosts.you("runs", "cancel", run_id, code=0)
    hosts.until(lambda: not held_leases(hosts), "the device is free")
    count = "select count(*) from attempt join run_job on run_job.id = run_job_id where run_id = %s"
    assert hosts.rows(count, run_id) == [(0,)]
    assert hosts.stop_agents() == {"left": 0}
    # Nothing of ours is left on the device, nor in the farm.
    assert not hosts.sessions("left")
    assert held_leases(hosts) == []
    assert "no agent" in hosts.you("lab", "agent", "list").stdout


def test_a_host_that_is_drained_finishes_its_job_and_leaves_the_rest_to_others(hosts: AgentHosts) -> None:
    hosts.you("lab", "agent", "drain", "nobody", code=2)
    run_id = hosts.detached("--iterations", "300")
    verdicts = "select run_job_id, verdict from attempt join run_job on run_job.id = run_job_id where run_id = %s"
    hosts.until(lambda: hosts.rows(verdicts, run_id), "the first result")
    hosts.you("lab", "agent", "drain", "left", code=0)
    assert hosts.agents["left"].wait(30) == 0
    assert held_leases(hosts) == []
    [(left,)] = hosts.rows("select sum(remaining) from shard where state = 'waiting'")
    assert left > 0
    hosts.host("right")
    hosts.until(lambda: hosts.rows("select 1 from run where id = %s and exit_code = 0", run_id), "its end", 90)
    found = hosts.rows(verdicts, run_id)
    assert len(found) == len(dict(found)) == 8
    assert set(dict(found).values()) == {Verdict.PASSED}


def test_a_second_agent_of_a_host_is_refused_and_one_of_another_version(hosts: AgentHosts) -> None:
    again = hosts.farm("left", "lab", "agent", "--name", "left", code=11)
    assert "runs on this host already" in again.stderr
    hosts.attach("right", ["SM8650"])
    changed = "update agent set facts = replace(facts, %s, %s) returning name"
    assert hosts.rows(changed, f'"protocol":{PROTOCOL}', f'"protocol":{PROTOCOL + 1}') == [("left",)]
    newer = hosts.farm("right", "lab", "agent", "--name", "right", code=11)
    assert "update farm on this host" in newer.stderr
