"""Assignment of devices to submitted runs: equal to the slow rules, and properties that always hold with quotas."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_rules import grant, to_yield

from farm.policy.reasons import why_waiting
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

NOW = 1_000_000
NIGHTLY, PERSON = Priority.NIGHTLY, Priority.PERSON
# The rules spelled out try every way to give devices away: FARM_TEST_EXAMPLES=3000 takes some minutes.
EXAMPLES = int(os.environ.get("FARM_TEST_EXAMPLES", "60"))


def held(device: str, user: str, priority: Priority = PERSON, *, expires_ms: int = NOW + 1) -> Lease:
    return Lease(device, 1, f"{user} on {device}", user, "host", 1, "run", priority, NOW - 9, expires_ms)


def reserved(device: str, user: str, lease: Lease | None = None) -> Lease:
    lease = lease or Lease(device, 0, "", "", "", 0, "", NIGHTLY, 0, 0)
    return msgspec.structs.replace(lease, reserved_for=user, reserved_until_ms=NOW + 1)


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


def more(counts: Mapping[str, int], where: str) -> list[Lease]:
    return [held(f"{where} {user} {n}", user) for user, count in counts.items() for n in range(count)]


def leases_of(world: Situation) -> list[Lease]:
    """All that count among equals: of this SoC."""
    return [*world.leases, *more(world.here, "here")]


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
        for n in range(draw(st.integers(0, 2)))
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


def served_of(world: Situation, shares: Mapping[str, Share]) -> Counter[str]:
    return Counter(line_of(world, share) for share in shares.values())


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
def test_devices_go_to_those_that_the_rules_of_processes_name(world: Situation) -> None:
    shares = share_out(world)
    ids = [device.id for device in world.devices]
    leases = leases_of(world)
    check_allowed(world, shares)
    expected = Counter(one.request for one in grant(lines_of(world), ids, leases, NOW))
    assert served_of(world, shares) == expected


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=False))
def test_the_same_devices_are_handed_over_that_the_rules_of_processes_name(world: Situation) -> None:
    ids = [device.id for device in world.devices]
    leases = leases_of(world)
    assert set(hand_over(world)) == to_yield(lines_of(world), ids, leases, NOW)


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=True))
def test_with_quotas_and_bounds_as_the_rules_spelled_out_say(world: Situation) -> None:
    shares = share_out(world)
    check_allowed(world, shares)
    assert served_of(world, shares) == reference_fill(world)
    # No user is promised more devices than the quota allows.
    wanted = Counter(hand_over(world).values()) + Counter(share.user for share in shares.values())
    used = Counter(lease.user for lease in leases_of(world) if lease.is_held(NOW)) + Counter(world.elsewhere)
    for subject, most in world.quotas.items():
        user = subject.removeprefix("user:")
        assert wanted[user] <= max(0, most - used[user])


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=True), st.integers(0, 2), st.booleans())
def test_nobody_has_more_devices_of_a_label_than_its_quota(world: Situation, most: int, also_far: bool) -> None:
    far = {("a", "camera"): 1} if also_far else {}
    world = msgspec.structs.replace(world, quotas={"label:camera": most}, elsewhere_labelled=far)
    camera = {device.id for device in world.devices if "camera" in device.labels}
    shares = share_out(world)
    check_allowed(world, shares)
    had = Counter(lease.user for lease in world.leases if lease.is_held(NOW) and lease.device in camera)
    had["a"] += also_far
    gets = Counter(share.user for device, share in shares.items() if device in camera)
    asks = Counter(user for device, user in hand_over(world).items() if device in camera)
    for user in "abc":
        assert gets[user] + asks[user] <= max(0, most - had[user])


@settings(deadline=None, max_examples=EXAMPLES)
@given(worlds(bounded=True), st.randoms())
def test_the_order_of_rows_does_not_matter(world: Situation, random: object) -> None:
    def shuffled(rows: Sequence[object]) -> list[object]:
        again = list(rows)
        random.shuffle(again)  # type: ignore[attr-defined]
        return again

    rows = {name: shuffled(getattr(world, name)) for name in ("devices", "leases", "orders", "requests", "asking")}
    again = msgspec.structs.replace(world, **rows)
    assert share_out(again) == share_out(world)
    assert hand_over(again) == hand_over(world)


def all_waiting_get(world: Situation) -> Iterator[str]:
    for share in share_out(world).values():
        yield share.run_id


def test_a_device_whose_agent_asks_is_given_away_first() -> None:
    world = situation(devices(8), [order(1, "ada")], asking=["d5"])
    assert share_out(world) == {"d5": Share("ada", "run1")}


def test_users_share_at_each_moment_whoever_came_first() -> None:
    world = situation(devices(8), [order(1, "ada", 2000), order(2, "bob", 1), order(3, "eve", 9)])
    assert Counter(all_waiting_get(world)) == {"run1": 4, "run2": 1, "run3": 3}


def test_what_users_have_of_this_soc_counts_and_what_they_have_of_others_does_not() -> None:
    world = situation(devices(2), [order(1, "ada", 9), order(2, "bob", 9)], here={"ada": 3})
    assert Counter(all_waiting_get(world)) == {"run2": 2}
    world = msgspec.structs.replace(world, here={}, elsewhere={"ada": 3})
    assert Counter(all_waiting_get(world)) == {"run1": 1, "run2": 1}


def test_a_shard_to_be_tried_again_goes_first_and_not_to_a_device_that_tried_it() -> None:
    world = situation(devices(2), [order(1, "ada", 5, retries=(Retry(7, ("d1",)),))])
    assert share_out(world) == {"d1": Share("ada", "run1"), "d2": Share("ada", "run1", 7)}
    busy = situation(devices(2), [order(1, "ada", 0, retries=(Retry(7, ("d1",)),))], leases=[held("d2", "bob")])
    assert share_out(busy) == {}


def test_a_run_has_no_more_devices_at_once_than_it_was_given() -> None:
    two = order(1, "ada", 9, most_devices=3, held=1, retries=(Retry(7, ("d1",)),))
    assert sorted(all_waiting_get(situation(devices(8), [two]))) == ["run1", "run1"]


def test_quotas_count_what_a_user_has_anywhere_but_not_what_is_only_reserved() -> None:
    world = situation(devices(8), [order(1, "ada", 9)], quotas={"user:ada": 4}, elsewhere={"ada": 1})
    leases = [held("d1", "ada"), reserved("d2", "ada")]
    assert len(share_out(msgspec.structs.replace(world, leases=leases))) == 2


def test_a_nightly_run_hands_over_to_a_person_what_runs_shards_before_a_process_that_may_not_look() -> None:
    leases = [held("d1", "ci", NIGHTLY), held("d2", "ci", NIGHTLY)]
    world = situation(devices(2), [order(1, "ada")], leases=leases, running=["d2"])
    assert hand_over(world) == {"d2": "ada"}


@pytest.mark.parametrize(("has", "wanted"), [(2, {"d1": "bob"}), (1, {})])
def test_the_second_user_gets_a_device_of_the_first_who_has_two_more(has: int, wanted: dict[str, str]) -> None:
    leases = [held(f"d{n}", "ada") for n in range(1, has + 1)]
    world = situation(devices(has), [order(1, "bob")], leases=leases, running=["d1", "d2"])
    assert hand_over(world) == wanted


def test_nobody_hands_over_to_a_run_that_may_have_no_more() -> None:
    leases = [held(f"d{n}", "ci", NIGHTLY) for n in range(1, 5)]
    bounded = situation(devices(4), [order(1, "ada", 9, most_devices=2, held=1)], leases=leases)
    assert len(hand_over(bounded)) == 1
    assert hand_over(msgspec.structs.replace(bounded, quotas={"user:ada": 0})) == {}


def why(world: Situation) -> str:
    return why_waiting(world)["run1"]


def test_a_run_says_why_it_waits() -> None:
    eight = devices(8, d1=("camera",), d2=("camera",))
    busy = [held(f"d{n}", "bob") for n in range(1, 9)]
    one = order(1, "ada", 3)
    change = msgspec.structs.replace
    assert why(situation(eight, [one], leases=busy)) == "all 8 SM8650 are busy"
    assert why(situation(eight, [one])) == "begins now"
    assert why(situation(eight, [order(2, "eve"), change(one, labels=("camera",))], leases=busy)) == (
        "all 2 SM8650 with camera are busy"
    )
    assert why(situation(eight, [change(one, devices=("d3",))], leases=busy)) == "d3 is busy"
    assert why(situation(eight, [change(one, devices=("left",))])) == "no living host has left"
    assert why(situation(eight, [change(one, labels=("lidar",))])) == "no living host has SM8650 with lidar"
    assert why(situation([], [one])) == "no living host has SM8650"
    assert why(situation(eight, [change(one, ready=0, lacking=12)])) == "bundles are being compiled: 12 left"
    assert why(situation(eight, [change(one, most_devices=2, held=2)])) == "has its 2 devices"
    assert why(situation(eight, [one], quotas={"user:ada": 4}, elsewhere={"ada": 4})) == "quota of ada: 4 devices"
    assert why(situation(eight, [change(one, labels=("camera",))], quotas={"label:camera": 0})) == (
        "quota of camera: 0 devices a user"
    )
    assert why(situation(devices(1), [one], leases=[reserved("d1", "bob")])).startswith("reserved for bob until ")
    again = change(one, ready=0, retries=(Retry(1, ("d1",)),))
    assert why(situation(devices(1), [again])) == "no device is left that has not tried it"
    assert why(situation(devices(2), [again], leases=[held("d2", "bob")])) == "all 2 SM8650 are busy"
    assert why_waiting(situation(eight, [change(one, ready=0, held=3)])) == {}


def test_a_device_of_a_silent_holder_is_waited_for() -> None:
    silent = [held(f"d{n}", "bob", expires_ms=NOW - 9) for n in (1, 2)]
    one, process = order(1, "ada"), Request("r1", ("d1",), 1, "ada", PERSON, NOW - 1)
    reason = "d1: its holder is silent, and counts as dead after one lease duration"
    assert why(situation(devices(1), [one], leases=silent[:1])) == reason
    assert why_waiting(situation(devices(1), [], leases=silent[:1], requests=[process]))["r1"] == reason
    several = situation(devices(2), [order(1, "ada", 2)], leases=silent)
    assert why(several) == "2 devices: their holders are silent, and count as dead after one lease duration"
    assert why(situation(devices(2), [one], leases=silent[1:])) == "begins now"
    given_back = msgspec.structs.replace(silent[0], token="", expires_ms=0)
    assert why(situation(devices(1), [one], leases=[given_back])) == "begins now"


def test_a_quota_of_a_label_that_is_not_used_up_keeps_no_run_waiting() -> None:
    eight = devices(8, d1=("camera",), d2=("camera",))
    busy = [held(f"d{n}", "bob") for n in range(2, 9)] + [held("d1", "ada")]
    wants = order(1, "ada", 3, labels=("camera",))
    for most, reason in ((2, "all 2 SM8650 with camera are busy"), (1, "quota of camera: 1 device a user")):
        world = situation(eight, [wants], leases=busy, quotas={"label:camera": most, "user:ada": 9})
        assert why(world) == reason
