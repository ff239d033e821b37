"""Assignment of devices to runs and processes: equal to rules spelled out, and properties that always hold."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import (
    Lease,
    LivingDevice,
    OpenOrder,
    Priority,
    Request,
    Retry,
    Share,
    Situation,
    usable,
)
from farm.policy.waits import why_waiting

NOW = 1_000_000
NIGHTLY, PERSON = Priority.NIGHTLY, Priority.PERSON
# The rules spelled out try every way to give devices away: FARM_TEST_EXAMPLES=3000 takes some minutes.
EXAMPLES = int(os.environ.get("FARM_TEST_EXAMPLES", "80"))
change = msgspec.structs.replace


def held(device: str, user: str, priority: Priority = PERSON, *, expires_ms: int = NOW + 1) -> Lease:
    return Lease(device, 1, f"{user} on {device}", user, "host", 1, "run", priority, NOW - 9, expires_ms)


def reserved(device: str, user: str, lease: Lease | None = None) -> Lease:
    lease = lease or Lease(device, 0, "", "", "", 0, "", NIGHTLY, 0, 0)
    return change(lease, reserved_for=user, reserved_until_ms=NOW + 1)


def devices(count: int, **labels: tuple[str, ...]) -> list[LivingDevice]:
    return [LivingDevice(f"d{n}", labels.get(f"d{n}", ())) for n in range(1, count + 1)]


def order(number: int, user: str, ready: int = 1, priority: Priority = PERSON, **more: object) -> OpenOrder:
    return OpenOrder(f"run{number}", user, priority, NOW - 100 + number, ready, **more)  # type: ignore[arg-type]


def situation(there: Sequence[LivingDevice], orders: Sequence[OpenOrder], **more: object) -> Situation:
    return Situation(soc="SM8650", now_ms=NOW, devices=there, orders=orders, **{"leases": [], **more})  # type: ignore[arg-type]


def lines_of(world: Situation) -> list[Request]:
    """Return the orders as requests of processes: a request for each retry of a run, and for its ready shards."""
    lines = list(world.requests)
    for one in world.orders:
        may = usable(one, world.devices)
        # Between requests of one run the id decides: retries go first.
        for n, retry in enumerate(one.retries):
            left = tuple(device for device in may if device not in retry.avoid)
            lines.append(Request(f"{one.run_id} {n:02}", left, 1, one.user, one.priority, one.since_ms))
        lines.append(Request(f"{one.run_id} ready", tuple(may), one.ready, one.user, one.priority, one.since_ms))
    return lines


def line_of(world: Situation, share: Share) -> str:
    if share.request:
        return share.request
    if share.shard is None:
        return f"{share.run_id} ready"
    retries = next(one.retries for one in world.orders if one.run_id == share.run_id)
    return f"{share.run_id} {[retry.shard for retry in retries].index(share.shard):02}"


def leases_of(world: Situation) -> list[Lease]:
    """Return all leases that count among equals: of this SoC."""
    return [*world.leases, *(held(f"{user} {n}", user) for user, count in world.here.items() for n in range(count))]


def reference_fill(world: Situation) -> Counter[str]:
    """Return the number of devices per request by the rules, written out simply, with quotas and bounds of runs."""
    lines = lines_of(world)
    run_of = {line.id: line.id.rsplit(" ", 1)[0] if line.id.startswith("run") else "" for line in lines}
    left = {one.run_id: one.most_devices - one.held for one in world.orders if one.most_devices is not None}
    leases = leases_of(world)
    live = {lease.device: lease for lease in leases if lease.is_held(NOW)}
    owners = {lease.device: lease.reserved_by(NOW) for lease in leases if lease.reserved_by(NOW)}
    holdings = Counter(lease.user for lease in live.values())
    used = holdings + Counter(world.elsewhere)
    holdings += Counter(owner for device, owner in owners.items() if device not in live)
    ids = [device.id for device in world.devices if device.id not in live]

    def fits(placed: Sequence[Request]) -> bool:
        return any(
            all(
                name in line.devices and owners.get(name, line.user) == line.user
                for line, name in zip(placed, names, strict=True)
            )
            for names in itertools.permutations(ids, len(placed))
        )

    waiting, placed, served = list(lines), list[Request](), Counter[str]()
    while waiting:
        first = min(waiting, key=lambda line: (-line.priority, holdings[line.user], line.since_ms, line.id))
        may = (
            served[first.id] < first.count
            and left.get(run_of[first.id], 1) > 0
            and used[first.user] < world.quotas.get(f"user:{first.user}", 99)
            and fits([*placed, first])
        )
        if not may:
            waiting.remove(first)
            continue
        placed.append(first)
        served[first.id] += 1
        holdings[first.user] += 1
        used[first.user] += 1
        if run_of[first.id] in left:
            left[run_of[first.id]] -= 1
    return +served


@st.composite
def worlds(draw: st.DrawFn, *, bounded: bool) -> Situation:
    users = st.sampled_from("abc")
    some = st.sampled_from(Priority)
    there = [
        LivingDevice(f"d{n}", ("camera",) * draw(st.integers(0, 1)), (f"phone{n}",), draw(st.sampled_from(["x", "y"])))
        for n in range(draw(st.integers(1, 5)))
    ]
    names = [device.id for device in there]
    subset = st.lists(st.sampled_from(names), unique=True, min_size=1).map(tuple)
    orders = [
        OpenOrder(
            f"run{n}",
            draw(users),
            draw(some),
            draw(st.integers(0, 1)),
            draw(st.integers(0, 3)),
            tuple(Retry(10 * n + k, draw(subset)) for k in range(draw(st.integers(0, 2)))),
            devices=draw(st.sampled_from([(), ("d0",), ("phone0", "phone1", "gone")])),
            labels=draw(st.sampled_from([(), (), ("camera",)])),
            kinds=draw(st.sampled_from([(), (), ("x",)])),
            most_devices=draw(st.sampled_from([None, 1, 2])) if bounded else None,
            held=draw(st.integers(0, 1)) if bounded else 0,
        )
        for n in range(draw(st.integers(0, 3)))
    ]
    requests = [
        Request(f"w{n}", draw(subset), draw(st.integers(0, 2)), draw(users), draw(some), 0)
        for n in range(draw(st.integers(0, 3)))
    ]
    leases = []
    for name in [*names, "other"]:
        user = draw(users)
        lease = held(name, user, draw(some), expires_ms=NOW + draw(st.integers(-1, 3)))
        leases += [[], [lease], [reserved(name, user)], [reserved(name, user, lease)]][draw(st.integers(0, 3))]
    return situation(
        there,
        orders,
        leases=leases,
        requests=requests,
        asking=draw(st.lists(st.sampled_from(names))),
        here={"b": draw(st.integers(0, 2))},
        elsewhere={"c": draw(st.integers(0, 2))},
        quotas={f"user:{draw(users)}": draw(st.integers(0, 3))} if bounded else {},
        running=names,
    )


def check_allowed(world: Situation, shares: Mapping[str, Share]) -> None:
    lines = {line.id: line for line in lines_of(world)}
    leases = {lease.device: lease for lease in world.leases}
    for device, share in shares.items():
        line = lines[line_of(world, share)]
        assert device in line.devices
        assert line.user == share.user
        if device in leases:
            assert not leases[device].is_held(NOW)
            assert leases[device].reserved_by(NOW) in ("", share.user)


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=False))
def test_devices_are_handed_over_to_lines_of_higher_priority_or_with_fewer_devices(world: Situation) -> None:
    leases, served = leases_of(world), reference_fill(world)
    live = {lease.device: lease for lease in leases if lease.is_held(NOW)}
    owners = {lease.device: lease.reserved_by(NOW) for lease in leases if lease.reserved_by(NOW)}
    unserved = {line.id: line for line in lines_of(world) if served[line.id] < line.count}
    holdings = Counter([lease.user for lease in live.values()])
    holdings += Counter(owner for device, owner in owners.items() if device not in live)
    holdings += Counter(line.user for line in lines_of(world) for _ in range(served[line.id]))
    claims = set()
    for line, (device, lease) in itertools.product(unserved.values(), live.items()):
        lower = lease.priority < line.priority
        richer = lease.priority == line.priority and holdings[lease.user] >= holdings[line.user] + 2
        if device in line.devices and owners.get(device, line.user) == line.user and (lower or richer):
            claims.add(device)
    handed = hand_over(world)
    assert handed.keys() <= claims
    assert len(handed) <= sum(line.count - served[line.id] for line in unserved.values())
    # A line with a claim does not wait for ever.
    assert bool(handed) == bool(claims)


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=True), st.randoms())
def test_devices_go_to_the_lines_that_the_spelled_out_rules_name(world: Situation, random: object) -> None:
    shares = share_out(world)
    check_allowed(world, shares)
    assert Counter(line_of(world, share) for share in shares.values()) == reference_fill(world)
    # No user is promised more devices than the quota allows.
    wanted = Counter(hand_over(world).values()) + Counter(share.user for share in shares.values())
    used = Counter(lease.user for lease in leases_of(world) if lease.is_held(NOW)) + Counter(world.elsewhere)
    for subject, most in world.quotas.items():
        user = subject.removeprefix("user:")
        assert wanted[user] <= max(0, most - used[user])
    # The order of rows does not matter.
    rows = {name: list(getattr(world, name)) for name in ("devices", "leases", "orders", "requests", "asking")}
    for each in rows.values():
        random.shuffle(each)  # type: ignore[attr-defined]
    assert share_out(change(world, **rows)) == shares
    assert hand_over(change(world, **rows)) == hand_over(world)


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=True), st.integers(0, 2), st.booleans())
def test_nobody_has_more_devices_of_a_label_than_its_quota(world: Situation, most: int, also_far: bool) -> None:
    far = {("a", "camera"): 1} if also_far else {}
    world = change(world, quotas={"label:camera": most}, elsewhere_labelled=far)
    camera = {device.id for device in world.devices if "camera" in device.labels}
    shares = share_out(world)
    check_allowed(world, shares)
    had = Counter(lease.user for lease in world.leases if lease.is_held(NOW) and lease.device in camera)
    had["a"] += also_far
    gets = Counter(share.user for device, share in shares.items() if device in camera)
    asks = Counter(user for device, user in hand_over(world).items() if device in camera)
    for user in "abc":
        assert gets[user] + asks[user] <= max(0, most - had[user])


def take(world: Situation, shares: Mapping[str, Share]) -> Situation:
    """Return the world in which requests have taken devices."""
    leases = {lease.device: lease for lease in world.leases}
    counts = Counter({one.id: one.count for one in world.requests})
    priorities = {one.id: one.priority for one in world.requests}
    for device, share in shares.items():
        owner = leases[device].reserved_by(NOW) if device in leases else ""
        lease = held(device, share.user, priorities[share.request])
        leases[device] = reserved(device, owner, lease) if owner else lease
        counts[share.request] -= 1
    requests = [change(one, count=counts[one.id]) for one in world.requests]
    return change(world, leases=list(leases.values()), requests=requests)


def after_hand_over(world: Situation) -> tuple[Situation, Situation]:
    """Return the world after holders handed over and wait again, and the same without their new requests."""
    leases, back = [], list[Request]()
    for lease in world.leases:
        if lease.device in hand_over(world):
            name = f"{lease.token} again {len(world.requests)}"
            back.append(Request(name, (lease.device,), 1, lease.user, lease.priority, NOW))
            leases += [reserved(lease.device, owner)] if (owner := lease.reserved_by(NOW)) else []
        else:
            leases.append(lease)
    after = take(change(world, leases=leases, requests=[*world.requests, *back]), share_out(world))
    shares = share_out(after)
    assert not {share.request for share in shares.values()} & {one.id for one in back}
    after = take(after, shares)
    return after, change(after, requests=after.requests[: len(world.requests)])


@settings(deadline=None, max_examples=3 * EXAMPLES)
@given(worlds(bounded=False))
def test_no_process_claims_back_a_device_that_it_handed_over(world: Situation) -> None:
    world = change(world, orders=[], here={}, elsewhere={}, running=(), asking=())
    for _ in range(len(world.devices) + 1):
        if not hand_over(world):
            return
        after, without = after_hand_over(world)
        assert hand_over(after).keys() & hand_over(world).keys() <= hand_over(without).keys()
        world = after
    assert not hand_over(world)


def test_device_of_a_run_or_a_process() -> None:
    asks = situation(devices(8), [order(1, "ada")], asking=["d5"])
    assert share_out(asks) == {"d5": Share("ada", "run1")}, "a device whose agent asks goes first"
    again = order(1, "ada", 5, retries=(Retry(7, ("d1",)),))
    assert share_out(situation(devices(2), [again])) == {"d1": Share("ada", "run1"), "d2": Share("ada", "run1", 7)}
    busy = situation(devices(2), [change(again, ready=0)], leases=[held("d2", "bob")])
    assert share_out(busy) == {}, "a device that tried a shard does not try it again"
    # The best device first, unless that leaves another request without one.
    one, two = Request("r1", ("d2", "d1"), 1, "a", PERSON, NOW), Request("r2", ("d2",), 1, "b", PERSON, NOW)
    for requests, found in (([one], {"d2": "r1"}), ([one, two], {"d1": "r1", "d2": "r2"})):
        shares = share_out(situation(devices(2), [], requests=requests))
        assert {device: share.request for device, share in shares.items()} == found


NIGHT = [held(f"d{n}", "ci", NIGHTLY) for n in range(1, 5)]
ADAS = [held("d1", "ada"), held("d2", "ada")]


@pytest.mark.parametrize(
    ("orders", "leases", "handed"),
    [
        ([order(1, "ada")], NIGHT[:2], {"d2": "ada"}),
        ([order(1, "bob")], ADAS, {"d1": "bob"}),
        ([order(1, "bob")], ADAS[:1], {}),
        ([order(1, "ada")], [held("d1", "ada", NIGHTLY)], {"d1": "ada"}),
        ([order(1, "ada", 9, most_devices=2, held=1)], NIGHT, {"d2": "ada"}),
    ],
)
def test_devices_to_hand_over(orders: list[OpenOrder], leases: list[Lease], handed: dict[str, str]) -> None:
    there = devices(len(leases))
    # Devices that run shards are handed over before devices of processes, which may not look.
    running = ["d2"] if leases[0].priority is NIGHTLY else ["d1", "d2"]
    world = situation(there, orders, leases=leases, running=running)
    assert hand_over(world) == handed
    assert hand_over(change(world, quotas={f"user:{orders[0].user}": 0})) == {}
    if len(leases) > 1:
        assert hand_over(change(world, leases=leases[1:])) == {}, "something free suits"


EIGHT = devices(8, d1=("camera",), d2=("camera",))
BUSY = [held(f"d{n}", "bob") for n in range(1, 9)]
ONE = order(1, "ada", 3)
CAMERA = change(ONE, labels=("camera",))
SILENT = [held(f"d{n}", "bob", expires_ms=NOW - 9) for n in (1, 2)]
AGAIN = change(ONE, ready=0, retries=(Retry(1, ("d1",)),))
ADA_HAS_ONE = [held("d1", "ada"), *BUSY[1:]]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (situation(EIGHT, [ONE], leases=BUSY), "all 8 SM8650 are busy"),
        (situation(EIGHT, [ONE]), "begins now"),
        (situation(EIGHT, [order(2, "eve"), CAMERA], leases=BUSY), "all 2 SM8650 with camera are busy"),
        (situation(EIGHT, [change(ONE, devices=("d3",))], leases=BUSY), "d3 is busy"),
        (situation(EIGHT, [change(ONE, devices=("left",))]), "no living host has left"),
        (situation(EIGHT, [change(ONE, labels=("lidar",))]), "no living host has SM8650 with lidar"),
        (situation([], [ONE]), "no living host has SM8650"),
        (situation(EIGHT, [change(ONE, ready=0, lacking=12)]), "bundles are being compiled: 12 left"),
        (situation(EIGHT, [change(ONE, most_devices=2, held=2)]), "has its 2 devices"),
        (situation(EIGHT, [ONE], quotas={"user:ada": 4}, elsewhere={"ada": 4}), "quota of ada: 4 devices"),
        (situation(EIGHT, [CAMERA], quotas={"label:camera": 0}), "quota of camera: 0 devices a user"),
        (
            situation(EIGHT, [CAMERA], leases=ADA_HAS_ONE, quotas={"label:camera": 2, "user:ada": 9}),
            "all 2 SM8650 with camera are busy",
        ),
        (
            situation(EIGHT, [CAMERA], leases=ADA_HAS_ONE, quotas={"label:camera": 1, "user:ada": 9}),
            "quota of camera: 1 device a user",
        ),
        (situation(devices(1), [ONE], leases=[reserved("d1", "bob")]), "reserved for bob until "),
        (situation(devices(1), [AGAIN]), "no device is left that has not tried it"),
        (situation(devices(2), [AGAIN], leases=[held("d2", "bob")]), "all 2 SM8650 are busy"),
        (
            situation(devices(1), [ONE], leases=SILENT[:1]),
            "d1: its holder is silent, and counts as dead after one lease duration",
        ),
        (
            situation(devices(2), [order(1, "ada", 2)], leases=SILENT),
            "2 devices: their holders are silent, and count as dead after one lease duration",
        ),
        (situation(devices(2), [ONE], leases=SILENT[1:]), "begins now"),
        (situation(devices(1), [ONE], leases=[change(SILENT[0], token="", expires_ms=0)]), "begins now"),
    ],
)
def test_reason_why_a_run_waits(world: Situation, reason: str) -> None:
    assert why_waiting(world)["run1"].startswith(reason)


def test_runs_without_work_wait_for_nothing_and_processes_have_the_same_reasons() -> None:
    assert why_waiting(situation(EIGHT, [change(ONE, ready=0, held=3)])) == {}
    process = Request("r1", ("d1",), 1, "ada", PERSON, NOW - 1)
    why = why_waiting(situation(devices(1), [], leases=SILENT[:1], requests=[process]))
    assert why["r1"].startswith("d1: its holder is silent")
