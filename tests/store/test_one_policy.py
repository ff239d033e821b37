"""The policy for shards and for processes that wait: quotas, order, and the same reason for the same wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest
from click.testing import CliRunner
from log_lines import LogLines
from shared_rows import SOC, agent, claim, shards, submit
from waiting import until

from farm.base.config.settings import LeaseConfig
from farm.cli.setup.lab import queue_command
from farm.devices.device import AdbAddress, Device
from farm.dispatch.cluster.queue import queued
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
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


def ask(store: Store, *devices: str, **changes: Any) -> str:
    return made_runs.ask(store.leases, *devices, purpose="farm lease", ttl_s=TTL_S, **changes)


def phone(number: int, labels: tuple[str, ...] = ()) -> Device:
    return Device(serial=f"R{number}", soc=SOC, kind="hardware", build="b", address=AdbAddress(1), product="p",
                  host="desk", labels=labels)  # fmt: skip


def why(store: Store) -> list[str]:
    return [one.why for one in store.leases.waiting()]


def test_a_quota_binds_every_process_of_a_user(store: Store) -> None:
    devices = [phone(1, ("camera",)), phone(2, ("camera",)), phone(3)]
    store.devices.see([Seen(device, "device", None) for device in devices])
    camera, ids = [devices[0].id, devices[1].id], [device.id for device in devices]
    for subject, most, wanted, reason in (
        ("user:ada", 1, ids, "quota of ada: 1 device"),
        ("label:camera", 1, camera, "quota of camera: 1 device a user"),
    ):
        store.quotas.set(subject, most, "root")
        token = ask(store, *wanted, count=2)
        [lease] = store.leases.poll(token, ttl_s=TTL_S)
        assert store.leases.poll(token, ttl_s=TTL_S) == ()
        assert why(store) == [store.leases.why(token)] == [reason]
        # Other devices are free for another user.
        [other] = store.leases.poll(ask(store, *wanted, user="bob"), ttl_s=TTL_S)
        store.leases.release([lease])
        [again] = store.leases.poll(token, ttl_s=TTL_S)
        store.leases.release([other, again])
        store.leases.withdraw(token)
        store.quotas.set(subject, None, "root")


def test_the_devices_of_a_command_wait_for_its_quota(sqlite_store: Store) -> None:
    """`farm run`, `farm exec` and the other commands wait in a pool."""
    store, notes, devices = sqlite_store, LogLines(), [phone(1)]
    store.devices.see([Seen(device, "device", None) for device in devices])
    store.quotas.set(f"user:{store.user}", 0, "root")
    terms = LeaseTerms(times=LeaseConfig(), priority=Priority.PERSON, purpose="farm run", most=None)
    pool = DevicePool(devices, store, terms)
    try:
        pool.look()
        assert pool.held() == []
        assert pool.holders([SOC]) == f"quota of {store.user}: 0 devices"
        store.quotas.set(f"user:{store.user}", None, "root")
        pool.look()
        assert pool.held() == devices
    finally:
        pool.close()
    assert notes == []


def test_devices_go_to_the_older_of_a_run_and_a_process(shared: Store) -> None:
    run_id = submit(shared, shards(1), "ada")
    one = agent(shared, ttl_s=TTL_S)
    token = ask(shared, "h1-0", user="bob")
    assert shared.leases.poll(token, ttl_s=TTL_S) == ()
    assert why(shared) == ["ada first"]
    [held] = claim(shared, one, ttl_s=TTL_S)
    assert held.run_id == run_id
    assert why(shared) == ["h1.0 is busy"]
    shared.cluster.release(one, [held.lease])
    shared.cluster.cancel(run_id, "ada")
    submit(shared, shards(1, first=10), "eve")
    assert claim(shared, one, ttl_s=TTL_S) == []
    [lease] = shared.leases.poll(token, ttl_s=TTL_S)
    shared.leases.release([lease])
    # A drained agent leaves its devices to processes.
    assert shared.cluster.drain(one.name)
    assert len(shared.leases.poll(ask(shared, "h1-0", user="bob"), ttl_s=TTL_S)) == 1


def test_a_process_takes_an_expired_lease_after_one_lease_duration_of_answers(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_rows, "_UP_MS", "SELECT 3600000")
    time_s = [1000.0]
    monkeypatch.setattr("farm.store.clock.now_s", lambda: time_s[0])
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


def test_the_queue_and_the_devices_explain_a_wait_with_the_same_sentence(
    shared: Store, shared_address: str, tmp_path: Path
) -> None:
    file = tmp_path / "farm.toml"
    file.write_text(f'store = "{shared_address}"\nartifacts = "file://{tmp_path}"\n')

    def show(*options: str) -> str:
        return CliRunner().invoke(queue_command, ["--config", str(file), *options], catch_exceptions=False).output

    assert show() == "nothing waits and nothing runs\n"
    run_id = submit(shared, shards(1), "ada")
    agent(shared, ttl_s=TTL_S)
    shared.quotas.set("user:ada", 0, "root")
    ask(shared, "h1-0")
    run, waiting = show().split("WAITING: 1\n")
    assert run_id in run
    assert waiting.split()[0] == "ada"
    assert waiting.endswith("  quota of ada: 0 devices  farm lease\n")
    answer = json.loads(show("--json"))
    [told] = answer["runs"]
    assert told["run_id"] == run_id
    assert [one["why"] for one in answer["waiting"]] == why(shared) == [*told["why"]] == ["quota of ada: 0 devices"]
    shared.quotas.set("user:ada", None, "root")
    shared.leases.poll(ask(shared, "h1-0", user="eve"), ttl_s=TTL_S)
    shared.leases.reserve("h1-0", "bob", 3600)
    [queued_run] = queued(shared.cluster.queue())
    assert {*queued_run.why} == {*why(shared)}
    assert queued_run.why[0].startswith("reserved for bob until ")
