"""Many processes at once on one shared farm: no device twice, no shard twice, every job once."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from made_runs import ask
from msgspec.structs import replace
from shared_rows import (
    SOC,
    TTL_S,
    agent,
    claim,
    facts,
    holding,
    job,
    key,
    record,
    result,
    shards,
    shards_of,
    submit,
    take_build,
)
from sqlalchemy import Connection, select, text
from stores import Fork, run_forks
from waiting import until

from farm.base.errors import AgentRefusedError, LeaseLostError, RowRefusedError, StoreError
from farm.policy.retries import tried
from farm.policy.situation import Priority
from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.cluster import agents as recovery
from farm.store.cluster import orders
from farm.store.cluster.records import Build, NewBuild, Recovered
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import KnownSoc
from farm.store.store import Store, open_store

# Each holder of a device makes a file that must not exist yet: a proof of exclusive use, independent of leases.
# Two agents' processes are one agent; `eve` is a person.
_HOLDER = """
import os, random, time
from pathlib import Path
from farm.store.cluster.records import AgentId
from farm.policy.situation import Priority
from shared_rows import SOC, result
address, folder, name, token, *devices = argv
store, used = open_store(address), Path(folder)
me = AgentId(name, token)

def begin(device):
    os.close(os.open(used / device, os.O_CREAT | os.O_EXCL))

def end(device):
    os.unlink(used / device)

def work():
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

def wait():
    of = dict(count=1, user="eve", host="here", pid=os.getpid(), purpose="farm shell", priority=Priority.PERSON)
    waiter = store.leases.request(devices, ttl_s=5, **of)
    while store.cluster.queue().orders:
        if taken := store.leases.poll(waiter, ttl_s=5):
            begin(taken[0].device)
            time.sleep(random.uniform(0, 0.05))
            end(taken[0].device)
            store.leases.release(taken)
            break
        time.sleep(0.02)
    store.leases.withdraw(waiter)

while store.cluster.queue().orders:
    wait() if name == "eve" else work()
"""


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
    agents = [agent(store, host, devices=2, ttl_s=60) for host in ("h1", "h2", "h3")]
    devices = {one.name: [f"{one.name}-0", f"{one.name}-1"] for one in agents}
    calls = [[address, tmp_path, one.name, one.token, *devices[one.name]] for one in agents * 2]
    calls += [[address, tmp_path, "eve", "", *itertools.chain(*devices.values())]] * 2

    assert run_forks(_HOLDER, calls) == [Fork(0, "")] * 8

    assert list(tmp_path.iterdir()) == []
    for run_id in runs:
        assert {len(one.attempts) for one in store.runs.view(run_id).jobs} == {1}
        assert {one.state for one in shards_of(store, run_id)} == {"ended"}
    assert store.leases.all() == []


def expire_leases(store: Store) -> None:
    """Set the end of every agent's and device's lease back by its time to live, as if the processes had stopped."""
    # No agent counts as dead before the server has been up for so long.
    until(lambda: store._database.write(lambda connection: lease_rows.is_stable(connection, round(TTL_S * 1000))))

    def expire(connection: Connection) -> None:
        for table in (schema.agent, schema.lease):
            connection.execute(table.update().values(expires_ms=table.c.expires_ms - round(TTL_S * 1000)))

    store._database.write(expire)


def request(store: Store, ttl_s: float = TTL_S) -> str:
    """Let a person wait for the device `h1-0`."""
    return ask(store.leases, "h1-0", user="eve", ttl_s=ttl_s)


def test_a_shard_that_is_held_elsewhere_is_not_taken_up_again(store: Store) -> None:
    _, one, held = holding(store)
    expire_leases(store)
    two = agent(store, "h2")

    recovered = store.cluster.recover(ttl_s=0.1)
    [again] = claim(store, two, "h2-0")

    assert recovered.lines == ("agent h1 is not heard of: 1 of its shards wait again",)
    assert again.id == held.id
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ("h1-0",)
    assert record(store, one, held, 0) == [0]
    assert store.leases.renew([held.lease], ttl_s=TTL_S, heartbeat_s=TTL_S / 3).lost == (held.lease,)
    with pytest.raises(LeaseLostError):
        store.cluster.put_back(one, held.id, held.lease.fence, why="late")
    assert record(store, two, again) == []


def test_late_results_renew_the_lease_unless_somebody_else_had_the_device(store: Store) -> None:
    run_id, one, held = holding(store)
    expire_leases(store)
    assert store.leases.all() == []
    # Device and shard are still free.
    assert record(store, one, held, 0) == []
    assert [lease.fence for lease in store.leases.all()] == [held.lease.fence]
    assert [len(each.attempts) for each in store.runs.view(run_id).jobs] == [1, 0]

    store.leases.release([held.lease])  # farm devices release --force
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ("h1-0",)
    refused = store.cluster.record(one, [result(held, held.jobs[1])], ttl_s=TTL_S)
    assert refused == {0: f"the lease {held.lease.fence} of h1-0 is over"}
    assert "waits again" in store.cluster.recover(ttl_s=0).lines[0]
    [again] = claim(store, one)
    assert (again.id, again.lease.fence) == (held.id, held.lease.fence + 1)
    assert record(store, one, held, 1) == [0]


def test_a_claim_whose_answer_was_lost_is_taken_back_by_the_next_heartbeat(store: Store) -> None:
    run_id = submit(store, shards(3))
    one = agent(store, devices=2)
    [held] = claim(store, one)
    # A new lease, and a second shard under the lease that the device has: the agent heard of neither.
    claim(store, one, "h1-1")
    claim(store, one, keep={"h1-0": held.lease})
    known = frozenset({(held.id, held.lease.fence)})

    reply = store.cluster.heartbeat(one, None, TTL_S, [held.lease], known)

    assert (reply.lost, reply.claimed) == ((), known)
    assert [(lease.device, lease.fence) for lease in store.leases.all()] == [("h1-0", held.lease.fence)]
    assert [(each.id == held.id, each.state) for each in shards_of(store, run_id)] == [
        (True, "held"), (False, "waiting"), (False, "waiting"),
    ]  # fmt: skip
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease], known).claimable == (SOC,)
    assert record(store, one, held, 0) == []


@pytest.mark.parametrize("is_silent", [True, False])
def test_two_agents_of_one_name_are_told_apart(store: Store, is_silent: bool) -> None:
    run_id, one, held = holding(store)
    if is_silent:
        # The agent runs its job, but the machine is too busy for its heartbeats.
        expire_leases(store)
        two = store.cluster.register("h1", facts("h1"), TTL_S, user="farm")
    else:
        with pytest.raises(AgentRefusedError, match="lives on h1"):
            agent(store)
        two = store.cluster.register("h1", facts("h1"), TTL_S, user="farm", replaces=one.token)

    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).replaced
    assert record(store, one, held, 0) == [0]
    if not is_silent:
        # The new agent records the results that the former one left on disk.
        assert record(store, two, held, 0) == []
    store.cluster.begun(two)
    [again] = claim(store, two)
    assert [each.job for each in again.jobs] == [job(0), job(1)][not is_silent :]
    assert record(store, one, held, 0) == [0]
    assert record(store, two, again, 0) == []
    assert sum(len(each.attempts) for each in store.runs.view(run_id).jobs) == 2 - is_silent


def test_nobody_is_dead_before_the_database_has_been_up_for_a_time_to_live(store: Store) -> None:
    _, one, held = holding(store)
    expire_leases(store)
    # The case of a server started a moment ago: the time to live is longer than its uptime.
    assert store.cluster.recover(ttl_s=1e6).lines == ()
    # The case of a caller that stood still meanwhile.
    assert store.cluster.recover(ttl_s=0, is_stable=lambda: False).lines == ()
    with pytest.raises(AgentRefusedError):
        store.cluster.register("h1", facts("h1"), 1e6, user="farm")
    assert store.leases.poll(request(store, 1e6), ttl_s=1e6) == ()
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ()
    assert record(store, one, held, 0) == []


def test_a_caller_that_stood_still_takes_no_expired_lease_and_counts_silent_devices(store: Store) -> None:
    one = agent(store)
    assert claim(store, one) == []
    assert store.leases.poll(request(store), ttl_s=TTL_S)
    agent(store, "h2")
    submit(store, shards(1))
    expire_leases(store)
    store.cluster.heartbeat(one, None, TTL_S)
    # The tests' server is up for longer than this lease would last.
    assert claim(store, one, ttl_s=0.1, is_stable=lambda: False) == []
    [held] = claim(store, one, ttl_s=0.1)
    assert held.others == ()
    store.cluster.put_back(one, held.id, held.lease.fence, why="again")
    store.cluster.release(one, [held.lease])
    [held] = claim(store, one, is_stable=lambda: False)
    assert held.others == ("h2-0",)


def test_the_clock_of_a_host_decides_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000_000_000_000)
    run_id, one, held = holding(store, budget_s=3600.0)
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).lost == ()
    assert record(store, one, held) == []
    assert store.cluster.recover(ttl_s=0).lines == ()
    order = store.cluster.order(run_id)
    assert order is not None
    assert not order.is_late


def test_a_run_that_is_cancelled_meanwhile_begins_nothing(store: Store) -> None:
    run_id, one, held = holding(store, 3)
    assert not store.cluster.cancel(run_id, "bob")
    assert store.cluster.cancel(run_id, "ada")
    assert not store.cluster.cancel(run_id, "ada")

    assert store.cluster.heartbeat(one, None, TTL_S).cancelled == (run_id,)
    assert claim(store, agent(store, "h2"), "h2-0") == []
    assert not store.cluster.end_if_over(run_id)
    store.cluster.put_back(one, held.id, held.lease.fence, why="cancelled")
    assert [store.cluster.end_if_over(run_id) for _ in range(2)] == [True, False]
    assert {each.why for each in shards_of(store, run_id)} == {"cancelled by ada", "cancelled"}


def test_a_nightly_run_hands_a_device_over_to_a_person_who_waits(store: Store) -> None:
    submit(store, shards(8), "ci", Priority.NIGHTLY)
    one = agent(store, devices=3)
    held = {each.lease.device: each for each in claim(store, one, "h1-0", "h1-1", "h1-2")}
    assert len(held) == 3
    person = submit(store, shards(1), "ada")
    store.cluster.recover(ttl_s=0)

    [device] = wanted = store.cluster.heartbeat(one, None, TTL_S).wanted
    assert wanted == {device: "ada"}
    # The device goes on under the same lease, for another user.
    [mine] = claim(store, one, device, keep={device: held[device].lease})
    assert (mine.run_id, mine.lease.fence, mine.lease.user) == (person, held[device].lease.fence, "ada")
    assert store.cluster.heartbeat(one, None, TTL_S).wanted == {}
    assert record(store, one, held[device], 0) == record(store, one, mine, 0) == []

    # The hand-over ends when the person has something else.
    submit(store, shards(1, first=50), "bob")
    store.cluster.recover(ttl_s=0)
    assert list(store.cluster.heartbeat(one, None, TTL_S).wanted.values()) == ["bob"]
    assert claim(store, agent(store, "h2"), "h2-0")[0].lease.user == "bob"
    store.cluster.recover(ttl_s=0)
    assert store.cluster.heartbeat(one, None, TTL_S).wanted == {}


def test_a_job_that_agents_die_of_is_run_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests' server may be younger than a lease: then no silent agent counts as dead.
    monkeypatch.setattr(lease_rows, "_UP_MS", "SELECT 3600000")
    run_id = submit(store, shards(1))
    for _ in range(3):
        one = agent(store)
        assert claim(store, one)
        expire_leases(store)
        lines = store.cluster.recover(ttl_s=0).lines
    assert "is not tried again" in lines[1]
    one = store.cluster.register("h1", facts("h1"), TTL_S, user="farm", replaces=one.token)
    [held] = claim(store, one)
    assert [each.job for each in held.jobs] == [job(1)]
    [attempt] = store.runs.view(run_id).jobs[0].attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, "worker")


def test_deaths_before_a_result_are_no_fault_of_the_job_after_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_rows, "_UP_MS", "SELECT 3600000")
    run_id = submit(store, shards(1))
    for death in range(4):
        one = agent(store)
        [held] = claim(store, one)
        if death == 2:
            assert record(store, one, held, 0) == []
        expire_leases(store)
        lines = store.cluster.recover(ttl_s=0).lines
        assert not any("is not tried again" in line for line in lines), death
    assert [len(each.attempts) for each in store.runs.view(run_id).jobs] == [1, 0]


def refuse_updates(store: Store, condition: str) -> None:
    """Let the database refuse every update of the shards that fit."""
    body = "BEGIN RAISE EXCEPTION 'a bad row' USING ERRCODE = 'check_violation'; END"
    with store._database._writer() as connection, connection.begin():
        connection.execute(text(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"))
        trigger = f"CREATE TRIGGER refuse BEFORE UPDATE ON shard FOR EACH ROW WHEN ({condition})"
        connection.execute(text(f"{trigger} EXECUTE FUNCTION refuse()"))


@pytest.fixture
def _no_refusal(store: Store) -> Any:
    yield
    store._database.write(lambda connection: connection.execute(text("DROP FUNCTION IF EXISTS refuse() CASCADE")))


@pytest.mark.usefixtures("_no_refusal")
def test_a_shard_that_cannot_be_put_back_stops_no_other(store: Store) -> None:
    submit(store, shards(3))
    held = claim(store, agent(store, "h1", 2), "h1-0", "h1-1")
    claim(store, agent(store, "h2"), "h2-0")
    expire_leases(store)
    refuse_updates(store, f"OLD.id = {held[0].id}")

    lines = store.cluster.recover(ttl_s=0).lines

    assert any(f"shard {held[0].id} of agent h1 is not repaired" in line for line in lines), lines
    assert f"agent h1 is not heard of: shard {held[1].id} waits again" in lines
    assert "agent h2 is not heard of: 1 of its shards wait again" in lines
    with store._database.reading() as connection:
        states = dict(connection.execute(select(schema.shard.c.id, schema.shard.c.state)).all())
        assert (states[held[0].id], states[held[1].id]) == ("held", "waiting")
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


def test_a_soc_that_cannot_be_repaired_stops_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for soc in ("SM8550", "SM8650"):
        submit(store, shards(1, soc=soc))
    real, marked = recovery.mark_wanted, []

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
    agent(store)
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        connection.execute("LISTEN farm")
        store.leases.release(store.leases.poll(request(store), ttl_s=TTL_S))
        heard = [one.payload for one in connection.notifies(timeout=5, stop_after=2)]
    assert heard == [f"work {SOC}"] * 2


@pytest.mark.parametrize("device", ["another", "the same", "gone"])
def test_a_retry_without_another_device_goes_back_to_the_same_one_or_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    run_id, one, held = holding(store, jobs=1)
    lost = result(held, held.jobs[0], Verdict.INFRA)
    history = replace(tried(lost.attempts[0]), again=device != "another")
    store.cluster.record(one, [replace(lost, repeat=(history,))], ttl_s=TTL_S)
    store.cluster.release(one, [held.lease])
    assert store.cluster.recover(ttl_s=0).lines == ()
    assert not store.cluster.end_if_over(run_id)
    if device == "gone":
        store.cluster.drain("h1")

    monkeypatch.setattr(recovery, "_ABANDONED_MS", -1)
    lines = store.cluster.recover(ttl_s=0).lines
    found = claim(store, one)
    assert [again.jobs[0].history for again in found] == [(history,)] * (device == "the same")
    for again in found:
        record(store, one, again)
    assert device != "another" or "no other device" in lines[0]
    assert store.cluster.end_if_over(run_id)


def test_bundles_are_made_once_and_a_shard_begins_when_it_lacks_none(store: Store) -> None:
    builds = [NewBuild(key(n), "tool", job(n), {}, position=n) for n in range(4)]
    parts = shards(2)
    runs = [submit(store, parts, builds=builds), submit(store, parts, "bob", builds=builds)]
    device = agent(store)
    assert claim(store, device) == []
    made: list[str] = []

    def make() -> None:
        with open_store(store._database._url.render_as_string(hide_password=False)) as own:
            worker = own.cluster.begin_worker()
            while held := own.cluster.take_build(worker, "b1", ["tool"]):
                made.append(held.task.key)
                own.cluster.record_build(held, Build(held.task.key, "built", "a" * 64, 10))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(made) == [key(n) for n in range(4)]
    [held] = claim(store, device)
    assert {build.archive for build in held.builds.values()} == {"a" * 64}
    for run_id in runs:
        progress = store.cluster.progress(run_id, 0)
        assert (progress.built, progress.to_build, progress.order.lacking) == (4, 4, 0)
    # A third run finds them there.
    assert store.cluster.progress(submit(store, parts, "eve", builds=builds), 0).to_build == 0


def submit_build(store: Store, number: int = 0, user: str = "ada") -> str:
    """Submit a run of one job, whose bundle is to be made."""
    build = NewBuild(key(number), "tool", job(number), {})
    return submit(store, shards(1, jobs=1, first=number), user, builds=[build])


def test_a_build_of_a_dead_worker_is_put_back_and_its_result_is_refused(store: Store) -> None:
    submit_build(store)
    dead, other = store.cluster.begin_worker(), store.cluster.begin_worker()
    lost = take_build(store, dead)
    assert store.cluster.take_build(other, "b2", ["tool"]) is None
    silent = text("UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour'")
    store._database.write(lambda connection: connection.execute(silent))
    store.cluster.keep_workers([other], [])
    assert store.messages.retry(0.01, lambda: False) == 0, "the database did not answer all the while"
    store.cluster.keep_workers([other], [])
    until(lambda: store.messages.retry(5.0))
    again = take_build(store, other, "b2")
    assert again.task == lost.task
    with pytest.raises(LeaseLostError):
        store.cluster.record_build(lost, Build(key(0), "failed"))
    submit_build(store, 1)
    with pytest.raises(StoreError):
        store.cluster.take_build(dead, "b1", ["tool"])
    store.cluster.record_build(again, Build(key(0), "built", "a" * 64, 10))
    assert store.cluster.build_of([key(0)])[key(0)].state == "built"


def test_a_build_has_its_job_with_its_run_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    submit_build(store)
    jobs = text("SELECT queueing_lock FROM procrastinate_jobs")
    with monkeypatch.context() as patch:
        patch.setattr(orders, "insert_shards", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            submit_build(store, 1)
    assert store._database.write(lambda connection: connection.scalars(jobs).all()) == [f"build:{key(0)}"]
    store._database.write(lambda connection: connection.execute(text("DELETE FROM procrastinate_jobs")))
    store.messages.retry(TTL_S)
    assert take_build(store, store.cluster.begin_worker()).task.key == key(0)


def test_a_build_that_failed_fails_for_its_run_and_is_tried_again_for_the_next(store: Store) -> None:
    submit_build(store)
    device, worker = agent(store), store.cluster.begin_worker()
    made = take_build(store, worker)
    store.cluster.record_build(made, Build(made.task.key, "failed", log="no such operator"))
    with pytest.raises(LeaseLostError):
        store.cluster.record_build(made, Build(made.task.key, "built"))
    submit_build(store, user="bob")
    [held] = claim(store, device)
    assert held.lease.user == "ada"
    assert (held.builds[key(0)].state, held.builds[key(0)].log) == ("failed", "no such operator")
    assert take_build(store, worker).task == made.task


def test_builds_of_a_cancelled_run_are_not_made(store: Store) -> None:
    builds = [NewBuild(key(n), "tool", job(n), {}, position=n) for n in range(2)]
    run_id = submit(store, shards(1), builds=builds)
    worker = store.cluster.begin_worker()
    made = take_build(store, worker)
    assert store.cluster.keep_workers([worker], [made.task.key]) == ()
    store.cluster.cancel(run_id, "ada")

    assert store.cluster.keep_workers([worker], [made.task.key]) == (made.task.key,)
    assert store.cluster.end_if_over(run_id)
    assert store.cluster.take_build(worker, "b1", ["tool"]) is None
    store.cluster.put_back_build(made, "b1", why="cancelled", tried=False)
    assert store.cluster.take_build(worker, "b1", ["tool"]) is None


@pytest.mark.parametrize("last", ["tries it", "dies"])
def test_a_bundle_fails_when_no_living_host_is_left_that_has_not_tried_it(store: Store, last: str) -> None:
    submit_build(store)
    agents = [store.cluster.register(h, facts(h, 0, toolchains=("tool",)), TTL_S, user="farm") for h in ("b1", "b2")]
    worker = store.cluster.begin_worker()
    store.cluster.put_back_build(take_build(store, worker), "b1", why="no room 0")
    assert store.cluster.take_build(worker, "b1", ["tool"]) is None
    assert store.cluster.build_of([key(0)])[key(0)].state == "waiting", "b2 may make it"
    if last == "dies":
        store.cluster.leave(agents[1])
        assert store.cluster.take_build(worker, "b1", ["tool"]) is None
    else:
        store.cluster.put_back_build(take_build(store, worker, "b2"), "b2", why="no room 1")
    found = store.cluster.build_of([key(0)])[key(0)]
    assert found.reply is not None
    reasons = "b1: no room 0" + "; b2: no room 1" * (last == "tries it")
    assert (found.state, found.reply.infra, found.reply.reason) == ("failed", True, reasons)
