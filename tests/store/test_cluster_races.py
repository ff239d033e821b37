"""Many processes at once on one shared farm: no device twice, no shard twice, every job once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from shared_rows import SOC, TTL_S, agent, facts, job, key, result, shards, shards_of, submit
from sqlalchemy import Connection, select, text
from waiting import until

from farm.base.errors import AgentRefusedError, LeaseLostError, RowRefusedError, StoreError
from farm.policy.retries import tried
from farm.policy.situation import Priority
from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.cluster import orders, recovery
from farm.store.cluster.records import Build, NewBuild, Recovered
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import KnownSoc
from farm.store.store import Store, open_store

_TESTS = str(Path(__file__).parents[1])

# Each holder of a device makes a file that must not exist yet: a proof of exclusive use, independent of leases.
_COMMON = """
import os, random, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from farm.base.errors import LeaseLostError
from farm.store.store import open_store
from farm.store.cluster.records import AgentId
from farm.policy.situation import Priority
from shared_rows import SOC, result
store, used = open_store(sys.argv[2]), Path(sys.argv[3])
def begin(device):
    os.close(os.open(used / device, os.O_CREAT | os.O_EXCL))
def end(device):
    os.unlink(used / device)
"""
# Two of these are one agent.
_AGENT = (
    _COMMON
    + """
me, devices = AgentId(*sys.argv[4:6]), sys.argv[6:]
while store.cluster.queue().orders:
    held = store.cluster.claim(me, SOC, devices, ttl_s=5)
    for one in held:
        begin(one.lease.device)
    time.sleep(random.uniform(0, 0.02))
    for one in held:
        half = random.random() < 0.2
        done = one.jobs[:1] if half else one.jobs
        refused = store.cluster.record(me, [result(one, each) for each in done], ttl_s=5)
        assert not refused, refused
        end(one.lease.device)
        if half and len(one.jobs) > 1:
            store.cluster.put_back(me, one.id, one.lease.fence, why="somebody else's turn")
        store.cluster.release(me, [one.lease])
        store.cluster.end_if_over(one.run_id)
    if not held:
        time.sleep(0.02)
"""
)
_PERSON = (
    _COMMON
    + """
while store.cluster.queue().orders:
    of = dict(count=1, user="eve", host="here", pid=os.getpid(), purpose="farm shell", priority=Priority.PERSON)
    token = store.leases.request(sys.argv[4:], ttl_s=5, **of)
    while store.cluster.queue().orders:
        if taken := store.leases.poll(token, ttl_s=5):
            begin(taken[0].device)
            time.sleep(random.uniform(0, 0.05))
            end(taken[0].device)
            store.leases.release(taken)
            break
        time.sleep(0.02)
    store.leases.withdraw(token)
"""
)


@pytest.fixture
def address(shared_address: str) -> str:
    return shared_address


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.whole)])
def test_processes_that_claim_and_wait_at_once_have_nothing_twice(
    store: Store, address: str, tmp_path: Path, count: int
) -> None:
    runs = [
        submit(store, shards(count), "ada"),
        submit(store, shards(count, jobs=1), "bob"),
        submit(store, shards(count), "ci", Priority.NIGHTLY),
    ]
    agents = {host: agent(store, host, devices=2, ttl_s=60) for host in ("h1", "h2", "h3")}
    devices = [f"{host}-{n}" for host in agents for n in range(2)]
    common = [sys.executable, "-c"]
    argv = [
        [*common, _AGENT, _TESTS, address, str(tmp_path), one.name, one.token, f"{host}-0", f"{host}-1"]
        for host, one in agents.items()
        for _ in range(2)
    ]
    argv += [[*common, _PERSON, _TESTS, address, str(tmp_path), *devices] for _ in range(2)]
    processes = [subprocess.Popen(one, stderr=subprocess.PIPE, text=True) for one in argv]
    try:
        output = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [(process.returncode, words) for process, words in zip(processes, output, strict=True)] == [(0, "")] * 8

    assert list(tmp_path.iterdir()) == []
    for run_id in runs:
        assert {len(one.attempts) for one in store.runs.view(run_id).jobs} == {1}
        assert {one.state for one in shards_of(store, run_id)} == {"ended"}
    assert store.leases.all() == []


def let_leases_expire(connection: Connection) -> None:
    """Set the end of every agent's and device's lease back by its time to live."""
    for table in (schema.agent, schema.lease):
        connection.execute(table.update().values(expires_ms=table.c.expires_ms - round(TTL_S * 1000)))


def test_what_was_put_back_and_is_held_elsewhere_is_not_taken_up_again(store: Store) -> None:
    submit(store, shards(1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    # Stopped, as by SIGSTOP: it is dead for the others.
    store._database.write(let_leases_expire)
    two = agent(store, "h2")

    recovered = store.cluster.recover(ttl_s=0.1)
    [again] = store.cluster.claim(two, SOC, ["h2-0"], ttl_s=TTL_S)

    assert recovered.lines == ("agent h1 is not heard of: 1 of its shards wait again",)
    assert again.id == held.id
    reply = store.cluster.heartbeat(one, None, TTL_S, [held.lease])
    assert reply.lost == ("h1-0",)
    assert list(store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)) == [0]
    assert store.leases.renew([held.lease], ttl_s=TTL_S, heartbeat_s=TTL_S / 3).lost == (held.lease,)
    with pytest.raises(LeaseLostError):
        store.cluster.put_back(one, held.id, held.lease.fence, why="late")
    assert store.cluster.record(two, [result(again, each) for each in again.jobs], ttl_s=TTL_S) == {}


def test_a_result_log_that_comes_late_renews_its_lease_with_what_it_records(store: Store) -> None:
    run_id = submit(store, shards(1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    store._database.write(let_leases_expire)
    assert store.leases.all() == []

    # Device and shard are still free.
    assert store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S) == {}

    assert [lease.fence for lease in store.leases.all()] == [held.lease.fence]
    assert [len(each.attempts) for each in store.runs.view(run_id).jobs] == [1, 0]


def test_a_result_after_somebody_else_had_the_device_is_refused(store: Store) -> None:
    submit(store, shards(1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    store.leases.release([held.lease])  # farm devices release --force
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ("h1-0",)

    refused = store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)

    assert refused == {0: f"the lease {held.lease.fence} of h1-0 is over"}
    assert "waits again" in store.cluster.recover(ttl_s=0).lines[0]
    [again] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert (again.id, again.lease.fence) == (held.id, held.lease.fence + 1)
    assert list(store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)) == [0]


def test_a_claim_whose_answer_was_lost_is_taken_back_by_the_next_heartbeat(store: Store) -> None:
    run_id = submit(store, shards(3))
    one = agent(store, devices=2)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    # A new lease, and a second shard under the lease that the device has: the agent heard of neither.
    store.cluster.claim(one, SOC, ["h1-1"], ttl_s=TTL_S)
    store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S, keep={"h1-0": held.lease})
    known = frozenset({(held.id, held.lease.fence)})

    reply = store.cluster.heartbeat(one, None, TTL_S, [held.lease], known)

    assert (reply.lost, reply.claimed) == ((), known)
    assert [(lease.device, lease.fence) for lease in store.leases.all()] == [("h1-0", held.lease.fence)]
    assert [(each.id == held.id, each.state) for each in shards_of(store, run_id)] == [
        (True, "held"), (False, "waiting"), (False, "waiting"),
    ]  # fmt: skip
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease], known).claimable == (SOC,)
    assert store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S) == {}


def test_two_agents_of_one_name_are_told_apart(store: Store) -> None:
    one = agent(store)
    with pytest.raises(AgentRefusedError, match="lives on h1"):
        agent(store)
    submit(store, shards(1))
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)

    two = store.cluster.register("h1", facts("h1"), TTL_S, user="farm", replaces=one.token)

    assert store.cluster.heartbeat(one, None, TTL_S).replaced
    assert list(store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)) == [0]
    # The new agent records the results that the former one left on disk.
    assert store.cluster.record(two, [result(held, held.jobs[0])], ttl_s=TTL_S) == {}
    store.cluster.begun(two)
    [again] = store.cluster.claim(two, SOC, ["h1-0"], ttl_s=TTL_S)
    assert [each.job for each in again.jobs] == [job(1)]


def test_a_silent_agent_whose_name_was_taken_records_nothing(store: Store) -> None:
    one = agent(store)
    run_id = submit(store, shards(1))
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    # The agent runs its job, but the machine is too busy for its heartbeats.
    store._database.write(let_leases_expire)

    two = store.cluster.register("h1", facts("h1"), TTL_S, user="farm")

    assert list(store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)) == [0]
    store.cluster.begun(two)
    [again] = store.cluster.claim(two, SOC, ["h1-0"], ttl_s=TTL_S)
    assert list(store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)) == [0]
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).replaced
    assert store.cluster.record(two, [result(again, again.jobs[0])], ttl_s=TTL_S) == {}
    assert sum(len(each.attempts) for each in store.runs.view(run_id).jobs) == 1


def test_nobody_is_dead_before_the_database_has_been_up_for_a_time_to_live(store: Store) -> None:
    submit(store, shards(1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    store._database.write(let_leases_expire)

    # The case of a server started a moment ago: the time to live is longer than its uptime.
    assert store.cluster.recover(ttl_s=1e6).lines == ()
    # The case of a caller that stood still meanwhile.
    assert store.cluster.recover(ttl_s=0, is_stable=lambda: False).lines == ()
    with pytest.raises(AgentRefusedError):
        store.cluster.register("h1", facts("h1"), 1e6, user="farm")
    wish = {"count": 1, "user": "eve", "host": "x", "pid": 1, "purpose": "shell", "priority": Priority.PERSON}
    token = store.leases.request(["h1-0"], **wish, ttl_s=1e6)  # type: ignore[arg-type]
    assert store.leases.poll(token, ttl_s=1e6) == ()
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ()
    assert store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S) == {}


def test_an_expired_lease_is_left_by_who_knows_that_it_could_not_be_renewed(store: Store) -> None:
    one = agent(store)
    wish = {"count": 1, "user": "eve", "host": "x", "pid": 1, "purpose": "shell", "priority": Priority.PERSON}
    token = store.leases.request(["h1-0"], **wish, ttl_s=TTL_S)  # type: ignore[arg-type]
    assert store.leases.poll(token, ttl_s=TTL_S)
    submit(store, shards(1))
    store._database.write(let_leases_expire)
    store.cluster.heartbeat(one, None, TTL_S)
    # The tests' server is up for longer than this lease would last.
    assert store.cluster.claim(one, SOC, ["h1-0"], ttl_s=0.1, is_stable=lambda: False) == []
    assert len(store.cluster.claim(one, SOC, ["h1-0"], ttl_s=0.1)) == 1


def test_a_device_that_came_a_moment_ago_is_one_that_could_try_what_fails(store: Store) -> None:
    one = agent(store)
    assert store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S) == []
    agent(store, "h2")
    submit(store, shards(1))
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert held.others == ("h2-0",)


def test_a_device_counts_of_whose_agent_the_database_could_not_hear(store: Store) -> None:
    one = agent(store)
    agent(store, "h2")
    submit(store, shards(2))
    store._database.write(let_leases_expire)
    store.cluster.heartbeat(one, None, TTL_S)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert held.others == ()
    store.cluster.put_back(one, held.id, held.lease.fence, why="again")
    store.cluster.release(one, [held.lease])
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S, is_stable=lambda: False)
    assert held.others == ("h2-0",)


def test_the_clock_of_a_host_decides_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000_000_000_000)
    run_id = submit(store, shards(1), budget_s=3600.0)
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ()
    assert store.cluster.record(one, [result(held, each) for each in held.jobs], ttl_s=TTL_S) == {}
    assert store.cluster.recover(ttl_s=0).lines == ()
    order = store.cluster.order(run_id)
    assert order is not None
    assert not order.is_late


def test_a_run_that_is_cancelled_meanwhile_begins_nothing(store: Store) -> None:
    run_id = submit(store, shards(3))
    one = agent(store, devices=2)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)

    assert not store.cluster.cancel(run_id, "bob")
    assert store.cluster.cancel(run_id, "ada")
    assert not store.cluster.cancel(run_id, "ada")

    assert store.cluster.heartbeat(one, None, TTL_S).cancelled == (run_id,)
    assert store.cluster.claim(one, SOC, ["h1-1"], ttl_s=TTL_S) == []
    assert not store.cluster.end_if_over(run_id)
    store.cluster.put_back(one, held.id, held.lease.fence, why="cancelled")
    ended = [store.cluster.end_if_over(run_id) for _ in range(2)]
    assert ended == [True, False]
    assert {each.why for each in shards_of(store, run_id)} == {"cancelled by ada", "cancelled"}


def test_a_person_goes_before_a_nightly_run_and_the_second_user_gets_his_part(store: Store) -> None:
    submit(store, shards(8), "ci", Priority.NIGHTLY)
    one = agent(store, devices=3)
    held = store.cluster.claim(one, SOC, ["h1-0", "h1-1", "h1-2"], ttl_s=TTL_S)
    assert len(held) == 3
    person = submit(store, shards(1), "ada")

    assert store.cluster.claim(one, SOC, [], ttl_s=TTL_S) == []
    wanted = store.cluster.heartbeat(one, None, TTL_S).wanted

    [device] = wanted
    assert wanted == {device: "ada"}
    [night] = [each for each in held if each.lease.device == device]
    # The device goes on under the same lease, for another user.
    [mine] = store.cluster.claim(one, SOC, [device], ttl_s=TTL_S, keep={device: night.lease})
    assert (mine.run_id, mine.lease.fence, mine.lease.user) == (person, night.lease.fence, "ada")
    assert store.cluster.heartbeat(one, None, TTL_S).wanted == {}
    recorded = store.cluster.record(one, [result(night, night.jobs[0]), result(mine, mine.jobs[0])], ttl_s=TTL_S)
    assert recorded == {}


def test_a_hand_over_ends_when_who_waited_has_something_else(store: Store) -> None:
    submit(store, shards(8), "ci", Priority.NIGHTLY)
    one = agent(store)
    store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    submit(store, shards(1), "ada")
    store.cluster.recover(ttl_s=0)
    assert store.cluster.heartbeat(one, None, TTL_S).wanted == {"h1-0": "ada"}
    two = agent(store, "h2")
    assert store.cluster.claim(two, SOC, ["h2-0"], ttl_s=TTL_S)[0].lease.user == "ada"
    store.cluster.recover(ttl_s=0)
    assert store.cluster.heartbeat(one, None, TTL_S).wanted == {}


def test_a_job_that_agents_die_of_is_run_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests' server may be younger than a lease: then no silent agent counts as dead.
    monkeypatch.setattr(lease_rows, "_UP_MS", "SELECT 3600000")
    run_id = submit(store, shards(1))
    for _ in range(3):
        one = agent(store)
        [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
        store._database.write(let_leases_expire)
        lines = store.cluster.recover(ttl_s=0).lines
    assert "is not run any more" in lines[1]
    one = store.cluster.register("h1", facts("h1"), TTL_S, user="farm", replaces=one.token)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert [each.job for each in held.jobs] == [job(1)]
    [attempt] = store.runs.view(run_id).jobs[0].attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, "worker")


REFUSE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'a bad row' USING ERRCODE = 'check_violation'; END $$
"""


def refuse(connection: Connection, table: str, condition: str) -> None:
    """Let the database refuse every update of the rows of `table` that fit."""
    connection.execute(text("DROP FUNCTION IF EXISTS refuse() CASCADE"))
    connection.execute(text(REFUSE))
    trigger = (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()"
    )
    connection.execute(text(trigger))


def test_a_row_that_cannot_be_repaired_stops_no_other(store: Store) -> None:
    for number in (1, 2):
        submit(store, shards(1))
        store.cluster.claim(agent(store, f"h{number}"), SOC, [f"h{number}-0"], ttl_s=TTL_S)
    store._database.write(let_leases_expire)
    with store._database._writer() as connection, connection.begin():
        refuse(connection, "shard", "OLD.agent = 'h1'")

    lines = store.cluster.recover(ttl_s=0).lines

    assert "agent h1 is not repaired" in lines[0]
    assert "a bad row" in lines[0]
    assert "agent h2 is not heard of: 1 of its shards wait again" in lines


def test_a_shard_that_cannot_be_put_back_keeps_no_other_of_its_agent(store: Store) -> None:
    submit(store, shards(2))
    held = store.cluster.claim(agent(store, "h1", 2), SOC, ["h1-0", "h1-1"], ttl_s=TTL_S)
    assert len(held) == 2
    store._database.write(let_leases_expire)
    with store._database._writer() as connection, connection.begin():
        refuse(connection, "shard", f"OLD.id = {held[0].id}")

    lines = store.cluster.recover(ttl_s=0).lines

    assert any(f"shard {held[0].id} of agent h1 is not repaired" in line for line in lines), lines
    assert f"agent h1 is not heard of: shard {held[1].id} waits again" in lines
    with store._database.reading() as connection:
        states = dict(connection.execute(select(schema.shard.c.id, schema.shard.c.state)).all())
        assert states == {held[0].id: "held", held[1].id: "waiting"}
    assert store.leases.all() == [], "devices of a dead agent are free"


def test_of_two_passes_at_once_one_repairs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(store, shards(1))
    real, beside = recovery.AbandonedWork._recover_rows, []

    def recover_rows(work: recovery.AbandonedWork, *arguments: Any, **named: Any) -> list[str]:
        monkeypatch.setattr(recovery.AbandonedWork, "_recover_rows", real)
        beside.extend(one.cluster.recover(ttl_s=0) for one in (other, store))
        return real(work, *arguments, **named)

    with open_store(store._database._url.render_as_string(hide_password=False)) as other:
        monkeypatch.setattr(recovery.AbandonedWork, "_recover_rows", recover_rows)
        assert store.cluster.recover(ttl_s=0).is_busy
        assert beside == [Recovered(), Recovered()]
        # A pass that fails leaves the next one free.
        monkeypatch.setattr(recovery.AbandonedWork, "_recover_rows", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.cluster.recover(ttl_s=0)
        monkeypatch.setattr(recovery.AbandonedWork, "_recover_rows", real)
        assert other.cluster.recover(ttl_s=0).is_busy
        assert store.cluster.recover(ttl_s=0).is_busy


def test_a_soc_that_cannot_be_repaired_stops_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for soc in ("SM8550", "SM8650"):
        submit(store, shards(1, soc=soc))
    real = recovery.mark_wanted
    marked = []

    def mark_wanted(connection: Connection, known: KnownSoc) -> None:
        marked.append(known)
        if len(marked) == 1:
            raise RowRefusedError("a bad row")
        real(connection, known)

    monkeypatch.setattr(recovery, "mark_wanted", mark_wanted)
    recovered = store.cluster.recover(ttl_s=0)
    assert recovered.lines == ("the work for SM8550 is not repaired: a bad row",)
    assert len(marked) == 2


def test_who_waits_for_a_device_and_gives_one_back_wakes_agents(store: Store) -> None:
    import psycopg

    agent(store)
    wish = {"count": 1, "user": "eve", "host": "x", "pid": 1, "purpose": "shell", "priority": Priority.PERSON}
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        connection.execute("LISTEN farm")
        token = store.leases.request(["h1-0"], **wish, ttl_s=5)  # type: ignore[arg-type]
        store.leases.release(store.leases.poll(token, ttl_s=5))
        heard = [one.payload for one in connection.notifies(timeout=5, stop_after=2)]
    assert heard == [f"work {SOC}"] * 2


def test_retries_without_another_device_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = submit(store, shards(1, jobs=1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    failed = result(held, held.jobs[0], Verdict.INFRA)
    failed = result(held, held.jobs[0], Verdict.INFRA, repeat=(tried(failed.attempts[0]),))
    store.cluster.record(one, [failed], ttl_s=TTL_S)
    store.cluster.release(one, [held.lease])
    assert store.cluster.recover(ttl_s=0).lines == ()

    monkeypatch.setattr("farm.store.cluster.recovery._ABANDONED_MS", -1)
    assert "no other device" in store.cluster.recover(ttl_s=0).lines[0]
    assert store.cluster.end_if_over(run_id)
    order = store.cluster.order(run_id)
    assert order is not None
    assert order.state == "ended"


@pytest.mark.parametrize("is_back", [True, False])
def test_a_device_tries_a_job_again_that_it_lost_if_it_comes_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    run_id = submit(store, shards(1, jobs=1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    lost = result(held, held.jobs[0], Verdict.INFRA)
    again = replace(tried(lost.attempts[0]), again=True)
    store.cluster.record(one, [replace(lost, repeat=(again,))], ttl_s=TTL_S)
    store.cluster.release(one, [held.lease])
    assert not store.cluster.end_if_over(run_id)
    if not is_back:
        store.cluster.drain("h1")
    monkeypatch.setattr("farm.store.cluster.recovery._ABANDONED_MS", -1)
    store.cluster.recover(ttl_s=0)
    found = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert [one.jobs[0].history for one in found] == [(again,)] * is_back
    for held in found:
        store.cluster.record(one, [result(held, held.jobs[0], Verdict.PASSED)], ttl_s=TTL_S)
    assert store.cluster.end_if_over(run_id)


def test_bundles_are_made_once_and_a_shard_begins_when_it_lacks_none(store: Store) -> None:
    builds = [NewBuild(key(n), "tool", job(n), {}, position=n) for n in range(4)]
    parts = shards(2)
    first = submit(store, parts, builds=builds)
    second = submit(store, parts, "bob", builds=builds)
    device = agent(store)
    assert store.cluster.claim(device, SOC, ["h1-0"], ttl_s=TTL_S) == []
    claimed: list[list[str]] = [[], []]

    def make(number: int) -> None:
        with open_store(store._database._url.render_as_string(hide_password=False)) as own:
            worker = own.cluster.begin_worker()
            while held := own.cluster.take_build(worker, "b1", ["tool"]):
                claimed[number].append(held.task.key)
                own.cluster.built(held, Build(held.task.key, "built", "a" * 64, 10))

    threads = [threading.Thread(target=make, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(claimed[0] + claimed[1]) == [key(n) for n in range(4)]
    held = [store.cluster.claim(device, SOC, ["h1-0"], ttl_s=TTL_S)[0]]
    assert {build.archive for build in held[0].builds.values()} == {"a" * 64}
    for run_id in (first, second):
        progress = store.cluster.progress(run_id, 0)
        assert (progress.built, progress.to_build, progress.order.lacking) == (4, 4, 0)
    # A third run finds them there.
    third = submit(store, parts, "eve", builds=builds)
    assert store.cluster.progress(third, 0).to_build == 0


def test_a_build_of_a_dead_worker_is_put_back_and_its_result_is_refused(store: Store) -> None:
    submit(store, shards(1, jobs=1), builds=[NewBuild(key(0), "tools", job(0), {})])
    dead, other = store.cluster.begin_worker(), store.cluster.begin_worker()
    lost = store.cluster.take_build(dead, "b1", ["tools"])
    assert lost is not None
    assert store.cluster.take_build(other, "b2", ["tools"]) is None
    silent = text("UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour'")
    store._database.write(lambda connection: connection.execute(silent))
    store.cluster.keep_workers([other], [])
    assert store.messages.retry(0.01, lambda: False) == 0, "the database did not answer all the while"
    store.cluster.keep_workers([other], [])
    until(lambda: store.messages.retry(5.0))
    again = store.cluster.take_build(other, "b2", ["tools"])
    assert again is not None
    assert again.task == lost.task
    with pytest.raises(LeaseLostError):
        store.cluster.failed(lost, Build(key(0), "failed"))
    submit(store, shards(1, jobs=1, first=1), builds=[NewBuild(key(1), "tools", job(1), {})])
    with pytest.raises(StoreError):
        store.cluster.take_build(dead, "b1", ["tools"])
    store.cluster.built(again, Build(key(0), "built", "a" * 64, 10))
    assert store.cluster.build_of([key(0)])[key(0)].state == "built"


def test_a_build_has_its_job_with_its_run_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(store, shards(1, jobs=1), builds=[NewBuild(key(0), "tools", job(0), {})])
    jobs = text("SELECT queueing_lock FROM procrastinate_jobs")
    with monkeypatch.context() as patch:
        patch.setattr(orders, "insert_shards", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            submit(store, shards(1, jobs=1, first=1), builds=[NewBuild(key(1), "tools", job(1), {})])
    assert store._database.write(lambda connection: connection.scalars(jobs).all()) == [f"build:{key(0)}"]
    store._database.write(lambda connection: connection.execute(text("DELETE FROM procrastinate_jobs")))
    store.messages.retry(TTL_S)
    held = store.cluster.take_build(store.cluster.begin_worker(), "b1", ["tools"])
    assert held is not None
    assert held.task.key == key(0)


def test_a_build_that_failed_fails_for_who_asked_and_is_tried_again_for_who_asks_anew(store: Store) -> None:
    builds = [NewBuild(key(0), "tool", job(0), {})]
    submit(store, shards(1, jobs=1), builds=builds)
    device, worker = agent(store), store.cluster.begin_worker()
    made = store.cluster.take_build(worker, "b1", ["tool"])
    assert made is not None
    store.cluster.failed(made, Build(made.task.key, "failed", log="no such operator"))
    with pytest.raises(LeaseLostError):
        store.cluster.built(made, Build(made.task.key, "built"))

    submit(store, shards(1, jobs=1), "bob", builds=builds)
    [held] = store.cluster.claim(device, SOC, ["h1-0"], ttl_s=TTL_S)

    assert held.lease.user == "ada"
    assert (held.builds[key(0)].state, held.builds[key(0)].log) == ("failed", "no such operator")
    again = store.cluster.take_build(worker, "b1", ["tool"])
    assert again is not None
    assert again.task == made.task


def test_builds_that_nobody_wants_any_more_are_not_made(store: Store) -> None:
    builds = [NewBuild(key(n), "tool", job(n), {}, position=n) for n in range(2)]
    run_id = submit(store, shards(1), builds=builds)
    worker = store.cluster.begin_worker()
    made = store.cluster.take_build(worker, "b1", ["tool"])
    assert made is not None
    assert store.cluster.keep_workers([worker], [made.task.key]) == ()
    store.cluster.cancel(run_id, "ada")

    assert store.cluster.keep_workers([worker], [made.task.key]) == (made.task.key,)
    assert store.cluster.end_if_over(run_id)
    assert store.cluster.take_build(worker, "b1", ["tool"]) is None
    store.cluster.put_back_build(made, "b1", why="cancelled", tried=False)
    assert store.cluster.take_build(worker, "b1", ["tool"]) is None


def test_a_host_that_cannot_make_a_bundle_leaves_it_to_others_until_none_is_left(store: Store) -> None:
    submit(store, shards(1, jobs=1), builds=[NewBuild(key(0), "tool", job(0), {})])
    for name in ("b1", "b2"):
        store.cluster.register(name, facts(name, 0, toolchains=("tool",)), TTL_S, user="farm")
    worker = store.cluster.begin_worker()
    for n, host in enumerate(("b1", "b2")):
        made = store.cluster.take_build(worker, host, ["tool"])
        assert made is not None
        store.cluster.put_back_build(made, host, why=f"no room {n}")
        assert store.cluster.take_build(worker, host, ["tool"]) is None
    found = store.cluster.build_of([key(0)])[key(0)]
    assert found.state == "failed"
    assert found.reply is not None
    assert (found.reply.infra, found.reply.reason) == (True, "b1: no room 0; b2: no room 1")


def test_a_bundle_fails_once_the_last_host_that_has_not_tried_it_is_dead(store: Store) -> None:
    submit(store, shards(1, jobs=1), builds=[NewBuild(key(0), "tool", job(0), {})])
    dying, _ = (
        store.cluster.register(name, facts(name, 0, toolchains=("tool",)), TTL_S, user="farm") for name in ("b1", "b2")
    )
    worker = store.cluster.begin_worker()
    made = store.cluster.take_build(worker, "b2", ["tool"])
    assert made is not None
    store.cluster.put_back_build(made, "b2", why="no room")
    assert store.cluster.take_build(worker, "b2", ["tool"]) is None
    assert store.cluster.build_of([key(0)])[key(0)].state == "waiting", "b1 may make it"

    store.cluster.leave(dying)

    assert store.cluster.take_build(worker, "b2", ["tool"]) is None
    found = store.cluster.build_of([key(0)])[key(0)]
    assert found.reply is not None
    assert (found.state, found.reply.infra, found.reply.reason) == ("failed", True, "b2: no room")
