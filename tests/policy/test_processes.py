"""Assignment of devices to processes: all small worlds, larger ones at random, and properties that always hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting_requests import Grant, grant, to_yield

from farm.policy.situation import Lease, Priority, Request

NOW = 1_000_000
NIGHTLY, PERSON = Priority.NIGHTLY, Priority.PERSON


def held(device: str, user: str, priority: Priority = PERSON, *, expires_ms: int = NOW + 1) -> Lease:
    return Lease(device, 1, f"{user} on {device}", user, "host", 1, "run", priority, NOW - 9, expires_ms)


def reserved(device: str, user: str, lease: Lease | None = None, until_ms: int = NOW + 1) -> Lease:
    lease = lease or Lease(device, 0, "", "", "", 0, "", NIGHTLY, 0, 0)
    return msgspec.structs.replace(lease, reserved_for=user, reserved_until_ms=until_ms)


def request(number: int, user: str, *devices: str, priority: Priority = PERSON, count: int = 1) -> Request:
    return Request(f"r{number}", devices, count, user, priority, NOW - 100 + number)


class World:
    """Small world with its rules, written out in the simplest way."""

    def __init__(self, requests: Sequence[Request], devices: Sequence[str], leases: Sequence[Lease]) -> None:
        self.requests, self.devices, self.leases = requests, devices, leases
        self.lease = {lease.device: lease for lease in leases}
        self.live = {lease.device: lease for lease in leases if lease.is_held(NOW)}
        self.granted = grant(requests, devices, leases, NOW)
        self.yielded = to_yield(requests, devices, leases, NOW)
        self.served = Counter(granted.request for granted in self.granted)

    def __repr__(self) -> str:
        return f"World({self.requests}, {self.devices}, {self.leases}) -> {self.granted}, {self.yielded}"

    def may_have(self, wanted: Request, device: str) -> bool:
        owner = self.lease[device].reserved_by(NOW) if device in self.lease else ""
        return device in wanted.devices and device in self.devices and owner in ("", wanted.user)

    def can_get(self, wanted: Request, device: str) -> bool:
        return self.may_have(wanted, device) and device not in self.live

    def holdings(self) -> Counter[str]:
        users = [lease.user for lease in self.live.values()]
        kept = [lease.reserved_by(NOW) for lease in self.leases if lease.device not in self.live]
        return Counter([*users, *filter(None, kept)])

    def can_all_get(self, wanted: Sequence[Request]) -> bool:
        return any(
            all(self.can_get(one, device) for one, device in zip(wanted, devices, strict=True))
            for devices in itertools.permutations(self.devices, len(wanted))
        )

    def should_be_served(self) -> Counter[str]:
        holdings, waiting, placed = self.holdings(), list(self.requests), []
        served: Counter[str] = Counter()
        while waiting:
            first = min(waiting, key=lambda r: (-r.priority, holdings[r.user], r.since_ms, r.id))
            if served[first.id] < first.count and self.can_all_get([*placed, first]):
                placed.append(first)
                served[first.id] += 1
                holdings[first.user] += 1
            else:
                waiting.remove(first)
        return +served

    def check_grants(self) -> None:
        by_id = {one.id: one for one in self.requests}
        assert len({granted.device for granted in self.granted}) == len(self.granted), self
        for granted in self.granted:
            assert self.can_get(by_id[granted.request], granted.device), self
        assert self.served == self.should_be_served(), self
        left = set(self.devices) - {granted.device for granted in self.granted}
        for one in self.requests:
            if self.served[one.id] < one.count:
                assert not any(self.can_get(one, device) for device in left), self

    def check_yields(self) -> None:
        holdings = self.holdings() + Counter(one.user for one in self.requests for _ in range(self.served[one.id]))
        unserved = [one for one in self.requests if self.served[one.id] < one.count]
        claims = set()
        for one, (device, lease) in itertools.product(unserved, self.live.items()):
            lower = lease.priority < one.priority
            richer = lease.priority == one.priority and holdings[lease.user] >= holdings[one.user] + 2
            if self.may_have(one, device) and (lower or richer):
                claims.add(device)
        assert self.yielded <= claims, self
        assert len(self.yielded) <= sum(one.count - self.served[one.id] for one in unserved), self
        # A process with a claim does not wait for ever.
        assert bool(self.yielded) == bool(claims), self

    def followed(self) -> tuple[World, World]:
        """Return the world after the holders handed over and wait again, and all grants were taken.

        The second world is the same without the former holders' new requests.
        """
        leases = [lease for lease in self.leases if lease.device not in self.yielded]
        leases += [reserved(device, owner) for device in self.yielded if (owner := self.lease[device].reserved_by(NOW))]
        back = [
            Request(f"{self.live[device].token} again {len(self.requests)}", (device,), 1, user, priority, NOW)
            for device in sorted(self.yielded)
            for user, priority in [(self.live[device].user, self.live[device].priority)]
        ]
        requests = [*self.requests, *back]
        for granted in self.granted:
            requests, leases = took(requests, leases, granted)
        for granted in grant(requests, self.devices, leases, NOW):
            assert granted.request not in {one.id for one in back}, (self, granted)
            requests, leases = took(requests, leases, granted)
        others = [one for one in requests if one.id not in {one.id for one in back}]
        return World(requests, self.devices, leases), World(others, self.devices, leases)

    def check_all(self) -> None:
        self.check_grants()
        self.check_yields()
        world = self
        for _ in range(len(self.devices) + 1):
            if not world.yielded:
                return
            after, without = world.followed()
            # No process claims back a device that it handed over.
            assert after.yielded & world.yielded <= without.yielded, (self, world, after)
            world = after
        assert not world.yielded, (self, world)


def took(requests: Sequence[Request], leases: Sequence[Lease], granted: Grant) -> tuple[list[Request], list[Lease]]:
    taker = next(one for one in requests if one.id == granted.request)
    before = next((lease for lease in leases if lease.device == granted.device), None)
    lease = held(granted.device, taker.user, taker.priority)
    if before is not None and before.reserved_by(NOW):
        lease = reserved(granted.device, before.reserved_for, lease)
    less = msgspec.structs.replace(taker, count=taker.count - 1)
    return (
        [less if one.id == taker.id else one for one in requests],
        [*(other for other in leases if other.device != granted.device), lease],
    )


def states(device: str) -> list[Lease | None]:
    return [
        None,
        held(device, "a", NIGHTLY),
        held(device, "a"),
        held(device, "b"),
        held(device, "c", NIGHTLY),
        held(device, "b", expires_ms=NOW),
        reserved(device, "a"),
        reserved(device, "b", held(device, "b", NIGHTLY)),
        reserved(device, "a", held(device, "c"), until_ms=NOW),
    ]


def wishes(number: int, lists: Sequence[Sequence[str]], counts: Sequence[int]) -> list[Request]:
    # The user of the first request is `a`: other first users give the same worlds under another name.
    users = "a" if number == 0 else "ab"
    return [
        request(number, user, *devices, priority=priority, count=count)
        for user, priority, devices, count in itertools.product(users, Priority, lists, counts)
    ]


def small_worlds(most: int, lists: Sequence[Sequence[str]], counts: Sequence[int]) -> Iterator[World]:
    leases = [[lease for lease in pair if lease is not None] for pair in itertools.product(states("d1"), states("d2"))]
    for requests in itertools.product(*(wishes(number, lists, counts) for number in range(most))):
        for there in leases:
            yield World(requests, ("d1", "d2"), there)


def test_every_world_of_up_to_two_requests() -> None:
    lists = (("d1",), ("d1", "d2"), ("d2", "d1"))
    for most in range(3):
        for world in small_worlds(most, lists, (1, 2)):
            world.check_all()


def test_every_world_of_three_requests() -> None:
    for world in small_worlds(3, (("d1",), ("d1", "d2")), (1,)):
        world.check_all()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = [f"d{number}" for number in range(draw(st.integers(1, 5)))]
    users = st.sampled_from("abc")
    some = st.lists(st.sampled_from(names), unique=True, min_size=1).map(tuple)
    requests = [
        Request(f"r{number}", draw(some), draw(st.integers(0, 3)), draw(users), draw(st.sampled_from(Priority)), 0)
        for number in range(draw(st.integers(0, 4)))
    ]
    leases = []
    for name in names:
        user, priority = draw(users), draw(st.sampled_from(Priority))
        lease = held(name, user, priority, expires_ms=NOW + draw(st.integers(-1, 3)))
        kind = draw(st.integers(0, 3))
        # Reserved devices are leased by no other user.
        leases += [[], [lease], [reserved(name, user)], [reserved(name, user, lease)]][kind]
    usable = draw(st.lists(st.sampled_from(names), unique=True).map(sorted)) if draw(st.booleans()) else names
    return World(requests, usable, leases)


@settings(deadline=None, max_examples=400)
@given(worlds(), st.randoms())
def test_larger_worlds_and_the_order_of_rows_does_not_matter(world: World, random: object) -> None:
    world.check_all()
    requests, leases = list(world.requests), list(world.leases)
    random.shuffle(requests)  # type: ignore[attr-defined]
    random.shuffle(leases)  # type: ignore[attr-defined]
    again = World(requests, world.devices, leases)
    assert (again.granted, again.yielded) == (world.granted, world.yielded)


def test_the_best_device_first_unless_that_leaves_another_without() -> None:
    first, second = request(1, "a", "d2", "d1"), request(2, "b", "d2")
    assert grant([first], ["d1", "d2"], [], NOW) == (Grant("r1", "d2"),)
    assert grant([first, second], ["d1", "d2"], [], NOW) == (Grant("r1", "d1"), Grant("r2", "d2"))


def test_a_person_goes_before_a_nightly_run_that_waits_longer() -> None:
    nightly, person = request(1, "ci", "d1", priority=NIGHTLY), request(2, "a", "d1")
    assert grant([nightly, person], ["d1"], [], NOW) == (Grant("r2", "d1"),)


def test_among_equals_the_one_with_the_fewest_devices_goes_first() -> None:
    requests = [request(1, "a", "d1", "d2", count=2), request(2, "b", "d1", "d2")]
    assert Counter(one.request for one in grant(requests, ["d1", "d2"], [], NOW)) == {"r1": 1, "r2": 1}
    rich = held("d9", "a")
    assert grant(requests, ["d1"], [rich], NOW) == (Grant("r2", "d1"),)


def test_a_device_out_of_service_or_in_quarantine_goes_to_nobody() -> None:
    assert grant([request(1, "a", "d1")], [], [], NOW) == ()
    assert to_yield([request(1, "a", "d1")], [], [held("d1", "ci", NIGHTLY)], NOW) == frozenset()


@pytest.mark.parametrize(("wanted", "expected"), [(1, 1), (2, 2), (9, 4)])
def test_a_nightly_run_hands_over_one_device_for_each_that_a_person_wants(wanted: int, expected: int) -> None:
    names = ["d1", "d2", "d3", "d4"]
    leases = [held(name, "ci", NIGHTLY) for name in names]
    assert len(to_yield([request(1, "a", *names, count=wanted)], names, leases, NOW)) == expected


def test_nobody_hands_over_while_something_free_suits() -> None:
    assert to_yield([request(1, "a", "d1", "d2")], ["d1", "d2"], [held("d1", "ci", NIGHTLY)], NOW) == frozenset()


def test_the_one_with_the_most_devices_hands_over_to_an_equal_and_only_when_it_has_two_more() -> None:
    names = ["d1", "d2", "d3", "d4"]
    leases = [held("d1", "b"), held("d2", "c"), held("d3", "c"), held("d4", "c")]
    waiting = request(1, "a", *names)
    assert to_yield([waiting], names, leases, NOW) <= {"d2", "d3", "d4"}
    assert len(to_yield([waiting], names, leases, NOW)) == 1
    assert to_yield([waiting], names, leases[:2], NOW) == frozenset()
    assert to_yield([request(1, "b", *names)], names, [leases[0], *leases[2:]], NOW) == frozenset()


def test_an_own_nightly_run_hands_over_to_its_own_person() -> None:
    assert to_yield([request(1, "a", "d1")], ["d1"], [held("d1", "a", NIGHTLY)], NOW) == {"d1"}
