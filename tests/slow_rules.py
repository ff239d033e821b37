"""Slow reference of the policy for processes that wait: the rules of docs/explanation/leases.md in plain code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from farm.policy.situation import Lease, Priority, Request


class Grant(msgspec.Struct, frozen=True):
    """A free device for a request."""

    request: str
    device: str


def grant(
    requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
) -> tuple[Grant, ...]:
    """Return the free device that each request gets now; `devices` are the ids of usable devices.

    The order: higher priority, then the user with the fewest devices (held, reserved and granted so far), then the
    longest wait. A request never loses its device to a later one, and no device stays free that a waiting request
    could use: a request with a choice gets a device other than its best, if this serves one request more.
    """
    world = _World(requests, devices, leases, now_ms)
    world.fill()
    return tuple(Grant(request.id, device) for device, request in sorted(world.given.items()))


def to_yield(
    requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
) -> frozenset[str]:
    """Return the devices whose holders should hand over as soon as they can, for requests that `grant` leaves waiting.

    The list has a device for each waiting request: of a holder with a lower priority, the lowest first; else of a
    holder with the same priority whose user has at least two devices more than the waiting user, so that the holder
    would not get the device back.
    """
    world = _World(requests, devices, leases, now_ms)
    world.fill()
    return world.take_over()


class _World:
    """Shared state of the two decisions: requests, devices of each user, and devices granted so far."""

    def __init__(
        self, requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
    ) -> None:
        self.given: dict[str, Request] = {}
        self._waiting = [request for request in requests if request.count > 0]
        self._wanted = {request.id: request.count for request in self._waiting}
        self._holdings: Counter[str] = Counter()
        self._reserved: dict[str, str] = {}
        self._held: dict[str, Lease] = {}
        busy = set()
        for lease in leases:
            reserved_by = lease.reserved_by(now_ms)
            if reserved_by:
                self._reserved[lease.device] = reserved_by
            if lease.is_held(now_ms):
                busy.add(lease.device)
                self._holdings[lease.user] += 1
                if lease.device in devices:
                    self._held[lease.device] = lease
            elif reserved_by:
                self._holdings[reserved_by] += 1
        idle = [device for device in devices if device not in busy]
        self._free = {device for device in idle if any(self._suits(device, one) for one in self._waiting)}

    def fill(self) -> None:
        """Give the free devices away."""
        while len(self.given) < len(self._free):
            request = next((one for one in self._in_order() if self._place(one, set())), None)
            if request is None:
                return
            self._serve(request)

    def take_over(self) -> frozenset[str]:
        """Return the devices that holders should hand over, after `fill`."""
        # Priority first, for all: a user served by priority may then have no fewer devices than a sharing user.
        before = self._holdings.copy()

        def has_more(lease: Lease, request: Request) -> bool:
            # This holds as well if users never take their granted devices.
            counts = (before, self._holdings)
            return lease.priority == request.priority and all(n[lease.user] >= n[request.user] + 2 for n in counts)

        by_priority = self._take_over(lambda lease, request: lease.priority < request.priority)
        return frozenset(by_priority | self._take_over(has_more))

    def _take_over(self, may_take: Callable[[Lease, Request], bool]) -> set[str]:
        taken: set[str] = set()
        while claim := self._first_claim(may_take):
            request, lease = claim
            taken.add(lease.device)
            del self._held[lease.device]
            self._holdings[lease.user] -= 1
            self._serve(request)
        return taken

    def _first_claim(self, may_take: Callable[[Lease, Request], bool]) -> tuple[Request, Lease] | None:
        # Hundreds of requests of few users may wait: the leases that a user may take are computed once.
        known: dict[tuple[str, Priority], list[Lease]] = {}
        for request in self._in_order():
            key = request.user, request.priority
            if key not in known:
                known[key] = [lease for lease in self._held.values() if may_take(lease, request)]
            mine = [lease for lease in known[key] if self._suits(lease.device, request)]
            if mine:
                return request, min(mine, key=lambda lease: (lease.priority, -self._holdings[lease.user], lease.device))
        return None

    def _in_order(self) -> list[Request]:
        return sorted(self._waiting, key=lambda r: (-r.priority, self._holdings[r.user], r.since_ms, r.id))

    def _serve(self, request: Request) -> None:
        self._holdings[request.user] += 1
        self._wanted[request.id] -= 1
        if not self._wanted[request.id]:
            self._waiting.remove(request)

    def _suits(self, device: str, request: Request) -> bool:
        return device in request.devices and self._reserved.get(device, request.user) == request.user

    def _place(self, request: Request, seen: set[str]) -> bool:
        """Give a free device to `request`, and move earlier requests to other devices if this makes room."""
        fitting = [d for d in request.devices if d in self._free and d not in seen and self._suits(d, request)]
        for device in fitting:
            if device not in self.given:
                self.given[device] = request
                return True
        for device in fitting:
            if device not in seen:
                seen.add(device)
                if self._place(self.given[device], seen):
                    self.given[device] = request
                    return True
        return False
