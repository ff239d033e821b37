"""Leases in the store: random interleavings against a model, on a clock that the test sets, and what users rely on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from made_runs import ask
from sqlalchemy import Connection, delete, func, select, text

from farm.base.errors import LeaseLostError
from farm.devices.device import HealthEvent
from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import Lease, LivingDevice, Priority, Request, Situation
from farm.store import schema
from farm.store.clock import Answers
from farm.store.database import Database
from farm.store.leases import rows as leases_rows
from farm.store.leases.leasing import Leases
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make

DEVICES = ("d1", "d2", "d3")
WISHES = (DEVICES, DEVICES[::-1], *((device,) for device in DEVICES))
TTL_S = 10.0
WAITER_TTL_MS = 6_000
START_MS = 1_790_000_000_000
# Few enough to get into each other's way.
_CROWD = 4


@dataclass
class SetClock:
    now_ms: int = START_MS

    def __call__(self, connection: Connection) -> int:
        del connection
        return self.now_ms


@pytest.fixture(autouse=True)
def _old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server be as old as its clock is set: its real age would decide whose lease is over."""
    monkeypatch.setattr(leases_rows, "_UP_MS", "SELECT 3600000")
    monkeypatch.setattr(Answers, "is_stable", lambda *_: True)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(address: str, clock: SetClock) -> Iterator[Store]:
    with Store(Database(address), clock) as opened:
        yield opened


def get(leases: Leases, device: str, user: str = "ada") -> Lease:
    (lease,) = leases.poll(ask(leases, device, user=user), ttl_s=TTL_S)
    return lease


@dataclass
class Process:
    """Process of the farm, with its own view of its leases."""

    token: str
    user: str
    priority: Priority
    devices: tuple[str, ...]
    wanted: int
    since_ms: int
    heard_ms: int
    alive: bool = True
    waits: bool = True
    held: dict[str, Lease] = field(default_factory=dict)
    ever: list[Lease] = field(default_factory=list)


class Interleavings(RuleBasedStateMachine):
    """Processes that come, wait, work, stop, die and go, in any order."""

    def __init__(self, store: Store, clock: SetClock, make: type[Make]) -> None:
        super().__init__()
        self.store, self.clock, self.make = store, clock, make
        self.leases = store.leases
        self.processes: list[Process] = []
        self.rows: dict[str, Lease] = {}
        self.out: set[str] = set()

    @initialize()
    def begin(self) -> None:
        def clear(connection: Connection) -> None:
            for table in (schema.lease, schema.waiter, schema.health_event, schema.device_state):
                connection.execute(delete(table))

        self.store._database.write(clear)
        self.clock.now_ms = START_MS
        self.job = self.make.job()
        self.run_id = self.make.begin(self.store, self.job)

    # Expected state, from the model.

    def requests(self) -> list[Request]:
        now_ms = self.clock.now_ms
        return [
            Request(one.token, one.devices, one.wanted, one.user, one.priority, one.since_ms)
            for one in self.processes
            if one.waits and one.wanted > 0 and one.heard_ms + WAITER_TTL_MS > now_ms
        ]

    def situation(self) -> Situation:
        there = [LivingDevice(device) for device in DEVICES if device not in self.out]
        rows, requests = list(self.rows.values()), self.requests()
        return Situation(
            soc="SM8650", now_ms=self.clock.now_ms, devices=there, leases=rows, orders=(), requests=requests
        )

    def is_live(self, lease: Lease) -> bool:
        row = self.rows[lease.device]
        return row.fence == lease.fence and row.is_held(self.clock.now_ms)

    def some(self, data: st.DataObject) -> Process:
        return data.draw(st.sampled_from([one for one in self.processes if one.alive][-_CROWD:]))

    def anybody(self) -> bool:
        return any(one.alive for one in self.processes)

    # Events of the model.

    @rule(user=st.sampled_from("abc"), nightly=st.booleans(), devices=st.sampled_from(WISHES), count=st.integers(1, 2))
    def comes(self, user: str, nightly: bool, devices: tuple[str, ...], count: int) -> None:
        # Two requests in the same millisecond would be ordered by token, which differs in every example.
        self.clock.now_ms += 1
        priority = Priority.NIGHTLY if nightly else Priority.PERSON
        token = ask(self.leases, *devices, user=user, count=count, priority=priority)
        now_ms = self.clock.now_ms
        self.processes.append(Process(token, user, priority, devices, count, now_ms, now_ms))
        self.poll(self.processes[-1])

    @precondition(anybody)
    @rule(data=st.data())
    def polls(self, data: st.DataObject) -> None:
        self.poll(self.some(data))

    def poll(self, process: Process) -> None:
        if not process.waits:
            with pytest.raises(LeaseLostError, match="run the command again"):
                self.leases.poll(process.token, ttl_s=TTL_S)
            return
        before_ms, process.heard_ms = process.heard_ms, self.clock.now_ms
        shares = share_out(self.situation())
        expected = {device for device, share in shares.items() if share.request == process.token}
        taken = self.leases.poll(process.token, ttl_s=TTL_S)
        assert {lease.device for lease in taken} == expected
        if not taken and self.clock.now_ms - before_ms < WAITER_TTL_MS / 2:
            # Waiting cost no write, and so no heartbeat either.
            process.heard_ms = before_ms
        process.wanted -= len(taken)
        for lease in taken:
            row = self.rows.get(lease.device)
            assert row is None or (not row.is_held(self.clock.now_ms) and lease.fence > row.fence)
            assert (lease.token, lease.user) == (process.token, process.user)
            self.rows[lease.device] = process.held[lease.device] = lease
            process.ever.append(lease)

    @precondition(anybody)
    @rule(data=st.data())
    def renews(self, data: st.DataObject) -> None:
        process = self.some(data)
        renewal = self.leases.renew(process.held.values(), ttl_s=TTL_S, heartbeat_s=TTL_S / 3)
        rows = {device: self.rows[device] for device in process.held}
        ours = {device for device, row in rows.items() if row.token and row.fence == process.held[device].fence}
        assert {lease.device for lease in renewal.kept} == ours
        assert {lease.device for lease in renewal.lost} == process.held.keys() - ours
        for lease in renewal.kept:
            assert lease.expires_ms - self.clock.now_ms > TTL_S * 1000 * 0.6
            self.rows[lease.device] = lease
        process.held = {lease.device: lease for lease in renewal.kept}
        assert renewal.wanted == hand_over(self.situation()).keys() & ours
        if data.draw(st.booleans(), "yields"):
            self.give_back(process, renewal.wanted)

    @precondition(anybody)
    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        process = self.some(data)
        self.give_back(process, data.draw(st.sets(st.sampled_from(DEVICES))) & process.held.keys())

    def give_back(self, process: Process, devices: frozenset[str] | set[str]) -> None:
        given = [process.held.pop(device) for device in sorted(devices)]
        self.leases.release(given)
        for lease in given:
            row = self.rows[lease.device]
            if row.fence == lease.fence:
                self.rows[lease.device] = msgspec.structs.replace(row, token="", expires_ms=0)

    @precondition(anybody)
    @rule(data=st.data())
    def stops_waiting(self, data: st.DataObject) -> None:
        process = self.some(data)
        self.leases.withdraw(process.token)
        process.waits = False

    @precondition(anybody)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.some(data).alive = False

    @rule(seconds=st.sampled_from([0.001, 2.0, 4.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_ms += round(seconds * 1000)

    @precondition(lambda self: any(one.ever for one in self.processes))
    @rule(data=st.data())
    def somebody_records(self, data: st.DataObject) -> None:
        # A process that slept may use any lease it ever had.
        lease = data.draw(st.sampled_from([lease for one in self.processes for lease in one.ever][-_CROWD:]))
        fence = (lease.device, lease.fence)
        attempt = self.make.attempt(self.job, device="", started_ms=len(self.processes) * 1000 + self.clock.now_ms)
        if self.is_live(lease):
            self.store.record_attempt(self.run_id, attempt, fence=fence)
        else:
            before = self.attempts()
            with pytest.raises(LeaseLostError, match=lease.device):
                self.store.record_attempt(self.run_id, attempt, fence=fence)
            assert self.attempts() == before

    def attempts(self) -> int:
        with self.store._database.reading() as connection:
            return int(connection.execute(select(func.count()).select_from(schema.attempt)).scalar_one())

    @rule(device=st.sampled_from(DEVICES), user=st.sampled_from("ab"), seconds=st.sampled_from([1.0, 20.0]))
    def is_reserved(self, device: str, user: str, seconds: float) -> None:
        now_ms = self.clock.now_ms
        row = self.rows.get(device) or Lease(device, 0, "", "", "", 0, "", Priority.NIGHTLY, 0, 0)
        owner = row.reserved_by(now_ms) or (row.user if row.is_held(now_ms) else user)
        if owner != user:
            with pytest.raises(LeaseLostError, match=f"{device} is {owner}'s"):
                self.leases.reserve(device, user, seconds)
            return
        self.rows[device] = self.leases.reserve(device, user, seconds)
        assert self.rows[device].reserved_until_ms == now_ms + seconds * 1000
        assert self.rows[device].is_held(now_ms) == row.is_held(now_ms)

    @rule(device=st.sampled_from(DEVICES), user=st.sampled_from("ab"))
    def is_not_reserved_any_more(self, device: str, user: str) -> None:
        row = self.rows.get(device)
        was = row is not None and row.reserved_by(self.clock.now_ms) == user
        assert self.leases.cancel(device, user) == was
        if row is not None and was:
            self.rows[device] = msgspec.structs.replace(row, reserved_for="", reserved_until_ms=0)

    @rule(device=st.sampled_from(DEVICES), state=st.sampled_from(["healthy", "suspect", "quarantined"]))
    def gets_well_or_ill(self, device: str, state: str) -> None:
        # Only a person ends a quarantine.
        event = "released" if state == "healthy" else "health_check"
        self.store.devices.record_health(HealthEvent(device, event, state, "because"))
        if state == "quarantined":
            self.out.add(device)
        elif event == "released":
            self.out.discard(device)

    @invariant()
    def nobody_shares(self) -> None:
        now_ms = self.clock.now_ms
        believed = [lease.device for one in self.processes for lease in one.held.values() if lease.expires_ms > now_ms]
        assert len(believed) == len(set(believed))
        expected = {
            row.device: (row.token * row.is_held(now_ms), row.fence, row.expires_ms, row.reserved_by(now_ms))
            for row in self.rows.values()
            if row.is_held(now_ms) or row.reserved_by(now_ms)
        }
        found = {one.device: (one.token, one.fence, one.expires_ms, one.reserved_for) for one in self.leases.all()}
        assert found == expected

    def teardown(self) -> None:
        """Check that every waiter gets its devices in the end."""
        for device in DEVICES:
            self.gets_well_or_ill(device, "healthy")
            for user in "ab":
                self.is_not_reserved_any_more(device, user)
        self.time_passes(TTL_S + 1)
        waiting = [one for one in self.processes if one.alive and one.waits]
        for _ in range(sum(one.wanted for one in waiting) + 1):
            for process in waiting:
                self.poll(process)
            for process in waiting:
                self.give_back(process, set(process.held))
        assert [one for one in waiting if one.wanted > 0] == []


def test_random_interleavings(address: str, make: type[Make]) -> None:
    clock = SetClock()
    examples, steps = (6, 25) if "://" in address else (25, 40)
    few = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with Store(Database(address), clock) as store:
        run_state_machine_as_test(lambda: Interleavings(store, clock, make), settings=few)


def test_a_lease_names_its_holder_and_a_waiter_may_change_its_wish(store: Store, clock: SetClock) -> None:
    lease = get(store.leases, "d1", "bob")
    assert lease == Lease(
        "d1", 1, lease.token, "bob", "bench", 7, "farm run", Priority.PERSON, clock.now_ms, clock.now_ms + 10_000
    )
    assert store.leases.all() == [lease]
    token = ask(store.leases, "d1")
    assert store.leases.poll(token, ttl_s=TTL_S) == ()
    (taken,) = store.leases.poll(token, ttl_s=TTL_S, devices=["d1", "d2"])
    assert taken.device == "d2"
    store.leases.release([lease])
    assert store.leases.poll(token, ttl_s=TTL_S) == ()
    (more,) = store.leases.poll(token, ttl_s=TTL_S, count=1)
    assert more.device == "d1"


def test_a_waiter_counts_for_a_fifth_of_the_configured_lease(sqlite_store: Store) -> None:
    with Store(Database(sqlite_store._database.name), clock := SetClock()) as store:
        ask(store.leases, "d1", ttl_s=60)
        clock.now_ms += 11_999
        assert [one.user for one in store.leases.waiting()] == ["ada"]
        clock.now_ms += 1
        assert store.leases.waiting() == []


def test_an_attempt_is_recorded_with_a_live_lease_only(store: Store, clock: SetClock, make: type[Make]) -> None:
    job = make.job()
    run_id = make.begin(store, job)
    lease = get(store.leases, "d1")
    store.record_attempt(run_id, make.attempt(job, started_ms=1), fence=("d1", lease.fence))
    store.leases.require("d1", lease.fence)
    clock.now_ms += 10_500
    with pytest.raises(LeaseLostError, match=r"d1: the lease 1 expired 0.5 s ago"):
        store.leases.require("d1", lease.fence)

    def refuse(device: str, message: str) -> None:
        with pytest.raises(LeaseLostError, match=message):
            store.record_attempt(run_id, make.attempt(job, started_ms=2), fence=(device, lease.fence))

    refuse("d1", r"d1: the lease 1 expired 0.5 s ago: renew it, or ask anew")
    get(store.leases, "d1", "bob")
    refuse("d1", r"d1: the lease 1 is over; it is bob's now: its results are not recorded")
    refuse("d7", "d7: the lease 1 is over: its results")
    assert [attempt.started_ms for attempt in store.runs.view(run_id).jobs[0].attempts] == [1]


def test_waiting_and_holding_write_only_now_and_then(sqlite_store: Store, tmp_path: Path) -> None:
    leases = sqlite_store.leases
    held = get(leases, "d1")
    token = ask(leases, "d1", user="bob")
    before = (tmp_path / "farm.db-wal").read_bytes()
    for _ in range(20):
        assert leases.poll(token, ttl_s=TTL_S) == ()
        (held,) = leases.renew([held], ttl_s=TTL_S, heartbeat_s=TTL_S / 3).kept
    assert (tmp_path / "farm.db-wal").read_bytes() == before


def test_the_clock_is_the_databases(address: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    with open_store(address) as opened:
        assert before_ms - 1 <= opened.leases.now_ms() <= time.time_ns() // 1_000_000 + 1


def test_a_lease_of_an_unknown_priority_counts_as_nightly(store: Store) -> None:
    get(store.leases, "d1")
    store._database.write(lambda connection: connection.execute(text("UPDATE lease SET priority = 77")))
    assert [lease.priority for lease in store.leases.all()] == [Priority.NIGHTLY]
