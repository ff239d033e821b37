"""The policy for shards and for processes that wait: quotas, order, and the same reason for the same wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from log_lines import LogLines
from shared_rows import SOC, agent, shards, submit
from sqlalchemy import event
from waiting import until

from farm.base.config.settings import LeaseConfig
from farm.cli.cluster.queue import command as queue_command
from farm.devices.device import AdbAddress, Device
from farm.dispatch.cluster.queue import queued
from farm.dispatch.pool.device_pool import DevicePool
from farm.dispatch.pool.lease_keeper import LeaseTerms
from farm.policy.situation import Priority
from farm.store.leases import rows as lease_rows
from farm.store.leases.registry import Seen
from farm.store.store import Store, open_store

# Longer than a test takes on the slowest machine.
TTL_S = 600.0


@pytest.fixture
def shared(shared_address: str) -> Iterator[Store]:
    """A store on PostgreSQL, which agents share."""
    with open_store(shared_address) as opened:
        yield opened


def ask(store: Store, *devices: str, user: str = "ada", count: int = 1) -> str:
    return store.leases.request(
        devices, count=count, user=user, host="desk", pid=7, purpose="farm lease", priority=Priority.PERSON, ttl_s=TTL_S
    )


def phone(number: int, labels: tuple[str, ...] = ()) -> Device:
    return Device(serial=f"R{number}", soc=SOC, kind="hardware", build="b", address=AdbAddress(1), product="p",
                  host="desk", labels=labels)  # fmt: skip


def why(store: Store) -> list[str]:
    return [one.why for one in store.leases.waiting()]


def test_a_quota_binds_every_process_of_a_user(store: Store) -> None:
    store.quotas.set("user:ada", 1, "root")
    token = ask(store, "d1", "d2", count=2)
    [lease] = store.leases.poll(token, ttl_s=TTL_S)
    assert store.leases.poll(token, ttl_s=TTL_S) == ()
    assert why(store) == [store.leases.why(token)] == ["quota of ada: 1 device"]
    # The device is free for another user.
    assert [one.device for one in store.leases.poll(ask(store, "d2", user="bob"), ttl_s=TTL_S)] == ["d2"]
    store.leases.release([lease])
    assert [one.device for one in store.leases.poll(token, ttl_s=TTL_S)] == [lease.device]


def test_a_quota_of_a_label_binds_every_process_of_a_user(store: Store) -> None:
    devices = [phone(1, ("camera",)), phone(2, ("camera",)), phone(3)]
    store.devices.see([Seen(device, "device", None) for device in devices])
    store.quotas.set("label:camera", 1, "root")
    token = ask(store, devices[0].id, devices[1].id, count=2)
    assert len(store.leases.poll(token, ttl_s=TTL_S)) == 1
    assert store.leases.poll(token, ttl_s=TTL_S) == ()
    assert why(store) == ["quota of camera: 1 device a user"]
    assert len(store.leases.poll(ask(store, devices[2].id), ttl_s=TTL_S)) == 1


def test_the_devices_of_a_command_wait_for_its_quota(store: Store) -> None:
    """`farm run`, `farm exec` and the other commands wait in a pool."""
    notes, devices = LogLines(), [phone(1)]
    store.devices.see([Seen(device, "device", None) for device in devices])
    store.quotas.set(f"user:{store.user}", 0, "root")
    terms = LeaseTerms(times=LeaseConfig(), priority=Priority.PERSON, purpose="farm run", most=None)
    pool = DevicePool(devices, store, terms)
    try:
        pool.look()
        assert pool.held() == []
        assert pool.leases.holders([SOC]) == f"quota of {store.user}: 0 devices"
        store.quotas.set(f"user:{store.user}", None, "root")
        pool.look()
        assert pool.held() == devices
    finally:
        pool.close()
    assert notes == []


def test_a_look_at_several_socs_reads_the_requests_once(store: Store) -> None:
    devices = [phone(1), msgspec.structs.replace(phone(2), soc="SM8750")]
    store.devices.see([Seen(device, "device", None) for device in devices])
    ids = [device.id for device in devices]
    leases = store.leases.poll(ask(store, *ids, count=2), ttl_s=TTL_S)
    token = ask(store, *ids, user="bob", count=2)
    read, engine = list[str](), store._database._engine
    event.listen(engine, "before_cursor_execute", lambda *call: read.append(call[2]))

    def reads(look: Callable[[], object]) -> int:
        read.clear()
        look()
        return sum("FROM waiter" in statement for statement in read)

    assert reads(store.leases.waiting) == 1
    assert reads(lambda: store.leases.why(token)) == 1
    assert reads(lambda: store.leases.renew(leases, ttl_s=TTL_S, heartbeat_s=TTL_S / 3)) == 1


def test_a_process_takes_no_device_that_an_older_run_should_get(shared: Store) -> None:
    run_id = submit(shared, shards(1), "ada")
    one = agent(shared, ttl_s=TTL_S)
    token = ask(shared, "h1-0", user="bob")
    assert shared.leases.poll(token, ttl_s=TTL_S) == ()
    assert why(shared) == ["ada first"]
    assert [held.run_id for held in shared.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)] == [run_id]
    assert why(shared) == ["h1.0 is busy"]


def test_a_younger_run_leaves_a_device_to_the_process_that_waits(shared: Store) -> None:
    one = agent(shared, ttl_s=TTL_S)
    token = ask(shared, "h1-0", user="bob")
    submit(shared, shards(1), "ada")
    assert shared.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S) == []
    assert [lease.device for lease in shared.leases.poll(token, ttl_s=TTL_S)] == ["h1-0"]


def test_a_process_may_use_a_device_of_a_host_whose_agent_takes_no_more(shared: Store) -> None:
    one = agent(shared, ttl_s=TTL_S)
    submit(shared, shards(1), "ada")
    assert shared.cluster.drain(one.name)
    token = ask(shared, "h1-0", user="bob")
    assert [lease.device for lease in shared.leases.poll(token, ttl_s=TTL_S)] == ["h1-0"]


def test_a_process_takes_an_expired_lease_after_one_lease_duration_of_answers(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_rows, "_UP_MS", "SELECT 3600000")
    time_s = [1000.0]
    monkeypatch.setattr("farm.store.answers.now_s", lambda: time_s[0])
    held = shared.leases.poll(ask(shared, "d1", user="eve"), ttl_s=0.3)
    token = ask(shared, "d1", user="bob")
    until(lambda: not shared.leases.all())

    def after(seconds: float) -> list[str]:
        time_s[0] += seconds
        return [lease.device for lease in shared.leases.poll(token, ttl_s=TTL_S)]

    assert len(held) == 1
    assert after(0.5) == []
    silent = "d1: its holder is silent, and counts as dead after one lease duration"
    assert why(shared) == [shared.leases.why(token)] == [silent]
    # The database did not answer for more than half of a lease.
    assert after(TTL_S) == []
    assert [after(TTL_S * 0.4) for _ in range(2)] == [[], []]
    assert after(TTL_S * 0.4) == ["d1"]


def test_the_queue_lists_processes_that_wait_with_the_reason_of_the_devices(
    shared: Store, shared_address: str, tmp_path: Path
) -> None:
    file = tmp_path / "farm.toml"
    file.write_text(f'store = "{shared_address}"\nartifacts = "file://{tmp_path}"\n')

    def show(*options: str) -> str:
        return CliRunner().invoke(queue_command, ["--config", str(file), *options], catch_exceptions=False).output

    assert show() == "nothing waits and nothing runs\n"
    agent(shared, ttl_s=TTL_S)
    shared.quotas.set("user:ada", 0, "root")
    ask(shared, "h1-0")
    run_id = submit(shared, shards(1), "bob")
    run, waiting = show().split("WAITING: 1\n")
    assert run_id in run
    assert waiting.split()[0] == "ada"
    assert waiting.endswith("  quota of ada: 0 devices  farm lease\n")
    answer = json.loads(show("--json"))
    assert [one["why"] for one in answer["waiting"]] == why(shared) == ["quota of ada: 0 devices"]
    assert [one["run_id"] for one in answer["runs"]] == [run_id]


def test_the_queue_and_the_devices_explain_a_wait_with_the_same_sentence(shared: Store) -> None:
    submit(shared, shards(1), "ada")
    agent(shared, ttl_s=TTL_S)
    ask(shared, "h1-0")
    shared.quotas.set("user:ada", 0, "root")
    [run] = queued(shared.cluster.queue())
    assert [*run.why] == why(shared) == ["quota of ada: 0 devices"]
    shared.quotas.set("user:ada", None, "root")
    shared.leases.poll(ask(shared, "h1-0", user="eve"), ttl_s=TTL_S)
    shared.leases.reserve("h1-0", "bob", 3600)
    [run] = queued(shared.cluster.queue())
    assert {*run.why} == {*why(shared)}
    assert run.why[0].startswith("reserved for bob until ")
