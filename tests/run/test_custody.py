"""Which devices a run may use, with a real store and other users; workers are what a scheduler and a grant say."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from waiting import until

from farm.devices.device import AdbAddress, Device
from farm.errors import NoDeviceError, StoreError
from farm.pool.device_pool import DevicePool
from farm.pool.lease_keeper import LeaseTerms
from farm.pool.worker_grant import WorkerGrant, read_grant
from farm.run.scheduler import IDLE, DeviceScheduling
from farm.store.leases.leasing import Leases
from farm.store.leases.registry import HealthEvent, Seen
from farm.store.leases.rules import Lease, Priority
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIRST, SECOND = (
    Device(serial=serial, soc="SM8650", kind="hardware", build="", address=AdbAddress(5037), product="")
    for serial in ("A", "B")
)


class Worker:
    """What xdist knows of a worker."""

    def __init__(self, number: int) -> None:
        self.number, self.shutting_down = number, False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class World:
    """A run on FIRST and SECOND with one job, minded by its pool."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self.notes: list[str] = []
        self.abandoned: list[str] = []
        self.workers = [Worker(0), Worker(1)]
        self.sched: DeviceScheduling

    def begin(self, pool: DevicePool) -> None:
        pool.acquire()
        pool.begin(self.folder)
        nodes: list[Any] = list(self.workers)
        self.sched = DeviceScheduling(
            lambda _: "SM8650", lambda node: node.number, ["SM8650", "SM8650"], self.abandoned.append
        )
        pool.schedule_with(self.sched)
        for node in nodes:
            self.sched.add_node(node)
            self.sched.add_node_collection(node, ["job", IDLE])
        self.sched.schedule()

    def grant(self, number: int) -> WorkerGrant:
        return read_grant(self.folder, number)

    def is_given(self, number: int) -> bool:
        return self.grant(number).go

    def take(self, device: Device, user: str = "other") -> Lease:
        """Let somebody else ask for a device and have it."""
        token = self.store.leases.request(
            [device.id], count=1, user=user, host="h", pid=1, purpose="theirs", priority=Priority.PERSON, ttl_s=60
        )
        taken: list[Lease] = []
        until(lambda: taken or taken.extend(self.store.leases.poll(token, ttl_s=60)) or taken, "a free device")
        return taken[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


@pytest.fixture
def world(tmp_path: Path, store: Store) -> World:
    return World(tmp_path, store)


@pytest.fixture
def make_pool(world: World, store: Store) -> Iterator[Callable[..., DevicePool]]:
    with contextlib.ExitStack() as ending:

        def make(*, most: int | None = None, ttl_s: float = 30.0) -> DevicePool:
            terms = LeaseTerms(ttl_s=ttl_s, priority=Priority.PERSON, purpose="run", most=most)
            made = DevicePool([FIRST, SECOND], store, terms, world.notes.append)
            ending.callback(made.close)
            return made

        yield make


def see(store: Store) -> None:
    store.devices.see([Seen(device, "device", None) for device in (FIRST, SECOND)])


def test_a_worker_that_knows_first_that_a_lease_is_lost_does_not_go_on(
    world: World, make_pool: Callable[..., DevicePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    world.begin(pool)
    until(lambda: world.is_given(0) and world.is_given(1), "both devices")
    fence = world.grant(0).fence
    # It is not told of it before the worker tells.
    monkeypatch.setattr(Leases, "renew", _cut_off)
    world.store.leases.release(lease for lease in world.store.leases.all() if lease.device == FIRST.id)
    world.take(FIRST)
    pool.let_go(0, fence)
    assert not world.is_given(0)
    assert world.is_given(1)
    assert not any("somebody who waits" in note for note in world.notes)


def test_an_old_goodbye_does_not_end_a_new_lease(world: World, make_pool: Callable[..., DevicePool]) -> None:
    pool = make_pool()
    world.begin(pool)
    until(lambda: world.is_given(0), "the device")
    fence = world.grant(0).fence
    pool.let_go(0, fence)
    until(lambda: world.is_given(0) and world.grant(0).fence > fence, "the device again")
    again = world.grant(0)
    pool.let_go(0, fence)
    assert (again.fence, True) == (world.grant(0).fence, world.is_given(0))


def test_a_job_is_not_kept_for_a_device_that_the_run_cannot_have(
    world: World, make_pool: Callable[..., DevicePool]
) -> None:
    world.begin(make_pool(most=1))
    [number] = [number for number in (0, 1) if world.is_given(number)]
    assert world.grant(number).others == ()
    world.sched.repeat("job", [number])
    world.sched.mark_test_complete(world.workers[number], 0)  # type: ignore[arg-type]
    assert world.abandoned == ["job"]
    assert world.sched.tests_finished


def test_a_job_is_kept_for_another_device_until_that_is_given_away(
    world: World, make_pool: Callable[..., DevicePool]
) -> None:
    pool = make_pool()
    world.begin(pool)
    until(lambda: world.is_given(0) and world.is_given(1), "both devices")
    assert world.grant(0).others == (SECOND.serial,)
    pool.suspend(1, "it is being mended")
    world.sched.repeat("job", [0])
    world.sched.mark_test_complete(world.workers[0], 0)  # type: ignore[arg-type]
    assert world.abandoned == []
    pool.let_go(1, world.grant(1).fence)
    assert world.abandoned == ["job"]


def test_devices_that_nobody_is_given_any_more_are_not_waited_for(
    world: World, store: Store, make_pool: Callable[..., DevicePool]
) -> None:
    see(store)
    world.take(FIRST)
    world.take(SECOND)
    store.devices.set_service(FIRST.id, False, "its screen is broken", "ann")
    store.devices.set_service(SECOND.id, False, "", "ann")
    with pytest.raises(NoDeviceError, match=r"no SM8650 is left to wait for: A: .*its screen is broken; B: "):
        make_pool().acquire()


def test_without_a_store_a_grant_ends_with_its_lease(
    world: World, make_pool: Callable[..., DevicePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin(make_pool(ttl_s=2.0))
    assert not world.grant(0).is_over
    monkeypatch.setattr(Leases, "renew", _cut_off)
    until(lambda: world.grant(0).is_over, "the end of the lease")
    assert [note for note in world.notes if "cut off" in note] == ["devices cannot be minded: cut off"]
    monkeypatch.undo()
    until(lambda: not world.grant(0).is_over, "the lease again, or another")


def test_what_goes_wrong_does_not_end_the_minding(
    world: World, make_pool: Callable[..., DevicePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    world.begin(pool)
    monkeypatch.setattr(Leases, "renew", lambda *_, **__: 1 / 0)
    until(lambda: any("division by zero" in note for note in world.notes), "a word")
    monkeypatch.undo()
    pool.let_go(0, world.grant(0).fence)
    until(lambda: world.is_given(0), "the device again")


def test_a_request_that_was_forgotten_is_made_again(
    world: World, store: Store, make_pool: Callable[..., DevicePool]
) -> None:
    theirs = world.take(FIRST)
    pool = make_pool()
    world.begin(pool)
    until(lambda: pool.leases._requests, "a request")
    for token in list(pool.leases._requests.values()):
        store.leases.withdraw(token)
    store.leases.release([theirs])
    until(lambda: world.is_given(0), "the device")


def test_a_device_with_nothing_left_to_do_is_given_back_without_a_word(
    world: World, store: Store, make_pool: Callable[..., DevicePool]
) -> None:
    pool = make_pool()
    world.begin(pool)
    until(lambda: world.is_given(0) and world.is_given(1), "both devices")
    pool.retire(0)
    assert [lease.device for lease in store.leases.all()] == [SECOND.id]
    assert world.notes == []


def test_what_is_just_given_to_it_is_not_with_others(world: World, make_pool: Callable[..., DevicePool]) -> None:
    pool, missed = make_pool(), []
    pool.take_with(lambda _: missed.append(pool.leases.missed()))
    world.begin(pool)
    assert missed == [{}] * len(missed)
    assert missed


def _cut_off(*_: object, **__: object) -> None:
    raise StoreError("cut off")


def test_a_device_in_quarantine_is_said_to_be(world: World, make_pool: Callable[..., DevicePool], store: Store) -> None:
    see(store)
    pool = make_pool()
    store.devices.record_health(HealthEvent(FIRST.id, "gave_up", "quarantined", "it was gone"))
    pool.retire(0, "it was gone")
    pool.retire(1, "its worker died")
    assert world.notes == [
        f"{FIRST.called} is quarantined: it was gone; 'farm device unquarantine {FIRST.called}' when it is mended",
        f"{SECOND.called} is not used any more: its worker died",
    ]
