"""Assignment of the devices of a SoC to submitted runs and to processes that wait. Pure.

Rules and reasons: docs/explanation/leases.md. A run may use nearly every device and has hundreds of shards, so sets
of devices are integers here, one bit for each device, and a path that makes room for one more request goes from request
to request, never through single devices.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from farm.base.grouping import grouped
from farm.policy.situation import LABEL, USER, Priority, Share, Situation, usable


def share_out(situation: Situation) -> dict[str, Share]:
    """Return the share of each free device by its id; devices without a permitted waiter are left out.

    The order: higher priority, then the user with the fewest devices of this SoC (held, reserved and given so far),
    then the longest wait; within a run, retries go first. No request loses a device to a later one, and
    no device stays free that a waiter may have. Quotas and `most_devices` are never exceeded.
    """
    sharing = _Sharing(situation)
    sharing.fill()
    return sharing.shares()


def hand_over(situation: Situation) -> dict[str, str]:
    """Return the devices that their holders should hand over after the running job, and the user who waits for each.

    For what `share_out` leaves waiting, one device each: of a holder with a lower priority, the lowest first; else of
    one with the same priority whose user has at least two devices more than the user who waits.
    """
    sharing = _Sharing(situation)
    sharing.fill()
    return sharing.take_over()


class _Demand(msgspec.Struct, eq=False):
    """Waiter of one kind: the shards of a run for any device, one retry, or a process."""

    key: tuple[int, str, int]
    priority: Priority
    mask: int
    """Devices that the waiter may have."""
    left: int
    """Number of devices that the waiter still wants."""
    share: Share
    best: tuple[int, ...] = ()
    """Devices by preference; empty where one is as good as another."""
    given: int = 0

    @property
    def user(self) -> str:
        return self.share.user


class _Sharing:
    """State of a decision: waiters, devices by user, and assignments so far.

    Sets of devices are integers: bit n is the device with the nth id.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._ids = sorted(device.id for device in situation.devices)
        self._bit = {device: 1 << n for n, device in enumerate(self._ids)}
        self._quotas = {name.removeprefix(USER): n for name, n in situation.quotas.items() if name.startswith(USER)}
        # Devices of another SoC take nothing from waiters for this one.
        self._holdings: Counter[str] = Counter(situation.here)
        # A reserved device without a process counts for fairness, not against a quota.
        self._used: Counter[str] = self._holdings + Counter(situation.elsewhere)
        self._reserved: dict[str, int] = {}
        self._held: dict[tuple[Priority, str], int] = {}
        busy = self._count_leases()
        self._ungiven = (1 << len(self._ids)) - 1 & ~busy
        self._labels = _Labels(situation, self._bit, self._held)
        self._closed = 0
        """Free devices all of which are given, and that no path makes room on."""
        self._asking = self._mask(situation.asking)
        self._allowed: dict[str, int] = {}
        """Number of devices that each run may still get."""
        self._demands = [*self._demands_of_orders(), *self._demands_of_requests()]
        self._giving: list[_Demand] = []

    def _mask(self, devices: Iterable[str]) -> int:
        return sum(self._bit.get(device, 0) for device in set(devices))

    def _count_leases(self) -> int:
        busy, now_ms = 0, self._situation.now_ms
        for lease in self._situation.leases:
            bit = self._bit.get(lease.device, 0)
            reserved_by = lease.reserved_by(now_ms)
            if reserved_by:
                self._reserved[reserved_by] = self._reserved.get(reserved_by, 0) | bit
            if lease.is_held(now_ms):
                busy |= bit
                self._holdings[lease.user] += 1
                self._used[lease.user] += 1
                key = lease.priority, lease.user
                self._held[key] = self._held.get(key, 0) | bit
            elif reserved_by:
                self._holdings[reserved_by] += 1
        return busy

    def _demands_of_orders(self) -> Iterator[_Demand]:
        known: dict[tuple[tuple[str, ...], ...], int] = {}
        for order in self._situation.orders:
            choice = order.devices, order.labels, order.kinds
            if choice not in known:
                known[choice] = self._mask(usable(order, self._situation.devices))
            mask = known[choice] & ~self._kept_from(order.user)
            most = order.ready + len(order.retries)
            allowed = most if order.most_devices is None else order.most_devices - order.held
            self._allowed[order.run_id] = allowed
            tries = [(mask & ~self._mask(retry.avoid), 1, retry.shard) for retry in order.retries]
            for n, (may, left, shard) in enumerate([*tries, (mask, order.ready, None)]):
                if left > 0 and allowed > 0:
                    share = Share(order.user, order.run_id, shard)
                    yield _Demand((order.since_ms, order.run_id, n), order.priority, may, left, share)

    def _demands_of_requests(self) -> Iterator[_Demand]:
        for request in self._situation.requests:
            if request.count > 0:
                best = tuple(self._bit[device] for device in request.devices if device in self._bit)
                mask = sum(set(best)) & ~self._kept_from(request.user)
                share = Share(request.user, request=request.id)
                key = request.since_ms, request.id, 0
                yield _Demand(key, request.priority, mask, request.count, share, best)

    def _kept_from(self, user: str) -> int:
        return sum(mask for other, mask in self._reserved.items() if other != user)

    def shares(self) -> dict[str, Share]:
        """Return the share of each assigned device."""
        return {self._ids[n]: demand.share for demand in self._giving for n in bits(demand.given)}

    def fill(self) -> None:
        """Give the free devices away."""
        self._serve_in_order(self._demands, self._place)

    def take_over(self) -> dict[str, str]:
        """Return the devices that holders should hand over, with their new users, after `fill`."""
        taken: dict[str, str] = {}
        running = self._mask(self._situation.running)
        # Running shards are handed over before devices of commands.
        holders: dict[Priority, dict[tuple[bool, str], int]] = {priority: {} for priority in Priority}
        for (priority, user), mask in self._held.items():
            holders[priority][False, user], holders[priority][True, user] = mask & running, mask & ~running
        before = self._holdings.copy()

        def take(demand: _Demand, *, of_equals: bool) -> bool:
            may = demand.mask & ~self._labels.exhausted(demand.user)
            # So too if those who are given something never come for it.
            least, least_before = self._holdings[demand.user] + 2, before[demand.user] + 2
            for priority, masks in holders.items():
                if priority > demand.priority or of_equals != (priority == demand.priority):
                    continue
                first = min(
                    (
                        (is_command, -self._holdings[user], there & -there, user)
                        for (is_command, user), mask in masks.items()
                        if (there := mask & may)
                        and (not of_equals or (self._holdings[user] >= least and before[user] >= least_before))
                    ),
                    default=None,
                )
                if first is not None:
                    is_command, _, bit, user = first
                    masks[is_command, user] &= ~bit
                    self._holdings[user] -= 1
                    taken[self._ids[bit.bit_length() - 1]] = demand.user
                    self._labels.count(demand.user, bit, 1)
                    self._count(demand)
                    return True
            return False

        # Priority first, for all: who gets a device by it may then have no less than the one he would share with.
        for of_equals in (False, True):
            left = [demand for demand in self._demands if demand.left]
            self._serve_in_order(left, functools.partial(take, of_equals=of_equals))
        return taken

    def _serve_in_order(self, demands: Iterable[_Demand], serve: Callable[[_Demand], bool]) -> None:
        """Serve one unit at a time, of the first waiter at that moment; a waiter refused once is never served later."""
        of_user = grouped(((-demand.priority, demand.user), demand) for demand in demands)
        for waiting in of_user.values():
            waiting.sort(key=lambda demand: demand.key, reverse=True)
        heap = [(key[0], self._holdings[key[1]], waiting[-1].key, key[1]) for key, waiting in of_user.items()]
        heapq.heapify(heap)
        while heap:
            urgency, had, key, user = heap[0]
            waiting = of_user[urgency, user]
            if had == self._holdings[user] and key == waiting[-1].key:
                demand = waiting[-1]
                quota = self._quotas.get(user)
                if quota is not None and self._used[user] >= quota:
                    waiting.clear()
                elif self._allowed.get(demand.share.run_id, 1) <= 0 or not serve(demand) or not demand.left:
                    waiting.pop()
            if waiting:
                heapq.heapreplace(heap, (urgency, self._holdings[user], waiting[-1].key, user))
            else:
                heapq.heappop(heap)

    def _count(self, demand: _Demand) -> None:
        self._holdings[demand.user] += 1
        self._used[demand.user] += 1
        demand.left -= 1
        if demand.share.run_id:
            self._allowed[demand.share.run_id] -= 1

    def _place(self, demand: _Demand) -> bool:
        """Give a free device to a demand, moving others that have one already where that makes room."""
        may = demand.mask & ~self._closed
        if not may or not self._ungiven:
            return False
        exhausted = self._labels.exhausted(demand.user)
        if room := may & self._ungiven & ~exhausted:
            self._give(demand, self._pick(demand, room))
        elif not self._make_room(demand, may & ~exhausted):
            return False
        self._count(demand)
        return True

    def _make_room(self, first: _Demand, may: int) -> bool:
        """Move demands along a chain of devices that ends at a free one, so that `first` gets a device."""
        came: dict[int, tuple[_Demand, int]] = {}
        seen, queue = 0, [(first, may)]
        for demand, reach in queue:
            if demand is not first and (room := reach & self._ungiven):
                self._move_along(first, demand, self._pick(demand, room), came)
                return True
            fresh = reach & ~seen & ~self._ungiven
            seen |= fresh
            for other in self._giving:
                if other is not first and id(other) not in came and (there := other.given & fresh):
                    came[id(other)] = (demand, there & -there)
                    queue.append((other, other.mask & ~self._labels.exhausted(other.user)))
        if not self._labels.are_limited:
            # All that can be reached is given to those who reach nothing else: so it stays.
            self._closed |= seen
        return False

    def _move_along(self, first: _Demand, demand: _Demand, bit: int, came: dict[int, tuple[_Demand, int]]) -> None:
        self._give(demand, bit)
        while demand is not first:
            before, bit = came[id(demand)]
            demand.given &= ~bit
            self._labels.count(demand.user, bit, -1)
            self._give(before, bit)
            demand = before

    def _give(self, demand: _Demand, bit: int) -> None:
        if not demand.given and demand not in self._giving:
            self._giving.append(demand)
        demand.given |= bit
        self._ungiven &= ~bit
        self._labels.count(demand.user, bit, 1)

    def _pick(self, demand: _Demand, room: int) -> int:
        for bit in demand.best:
            if bit & room:
                return bit
        sooner = room & self._asking or room
        return sooner & -sooner


class _Labels:
    """How many devices every user has of the labels that have a quota."""

    def __init__(self, situation: Situation, bit: Mapping[str, int], held: Mapping[tuple[Priority, str], int]) -> None:
        quotas = {name.removeprefix(LABEL): n for name, n in situation.quotas.items() if name.startswith(LABEL)}
        self.are_limited = bool(quotas)
        self._quotas = {
            label: (sum(bit[device.id] for device in situation.devices if label in device.labels), most)
            for label, most in quotas.items()
        }
        self._used: Counter[tuple[str, str]] = Counter(situation.elsewhere_labelled)
        for label, (mask, _) in self._quotas.items():
            for (_, user), has in held.items():
                self._used[user, label] += (mask & has).bit_count()

    def exhausted(self, user: str) -> int:
        """Return the devices whose labels are exhausted for a user."""
        mask = 0
        for label, (labelled, most) in self._quotas.items():
            if self._used[user, label] >= most:
                mask |= labelled
        return mask

    def count(self, user: str, bit: int, change: int) -> None:
        """Count a device that a user gets (`change` 1) or gives back (-1)."""
        for label, (mask, _) in self._quotas.items():
            self._used[user, label] += change if mask & bit else 0


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, from the lowest."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
