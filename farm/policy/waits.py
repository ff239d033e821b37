"""Reasons for the wait of runs and processes, and estimates of the start and the end of runs. Pure."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from farm.policy.sharing import share_out
from farm.policy.situation import LABEL, USER, LivingDevice, OpenOrder, Request, Situation, usable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farm.policy.situation import Priority


# Reasons for a wait for devices of a SoC, in a few words: of submitted runs and of processes. Pure.


BEGINS = "begins now"
"""Reason of a run or process that gets a device which is free, or was given back."""
NO_DEVICE = "none of its devices is in service"
"""Reason of a process that could use no device."""


def why_waiting(situation: Situation) -> dict[str, str]:
    """Return why each run and each process waits for this SoC, by run id or token.

    Without an entry: a run without a waiting shard, and a process that could use no device of this SoC. Of several
    reasons the result is a reason that a person can change.
    """
    shares = share_out(situation)
    world = _AfterSharing(situation, {device: share.user for device, share in shares.items()})
    given: dict[str, list[str]] = defaultdict(list)
    for device, share in sorted(shares.items()):
        given[share.run_id or share.request].append(device)
    return {
        order.run_id: world.reason_of_run(order, given[order.run_id])
        for order in situation.orders
        if order.ready or order.retries or order.lacking
    } | {
        one.id: world.reason_of_process(one, given[one.id])
        for one in situation.requests
        if one.count > 0 and world.may_use(one)
    }


class _AfterSharing:
    """Devices by user after the assignment of the free ones."""

    def __init__(self, situation: Situation, given: dict[str, str]) -> None:
        self._situation = situation
        self._given = given
        self._known = {device.id: device for device in situation.devices}
        now_ms = situation.now_ms
        holder = {lease.device: lease.user for lease in situation.leases if lease.is_held(now_ms)} | given
        self._used = Counter(holder.values()) + Counter(situation.here) + Counter(situation.elsewhere)
        self._owner = {lease.device: owner for lease in situation.leases if (owner := lease.reserved_by(now_ms))}
        self._until_ms = {lease.device: lease.reserved_until_ms for lease in situation.leases}
        self._silent = {lease.device for lease in situation.leases if lease.token and not lease.is_held(now_ms)}
        self._labelled = Counter(situation.elsewhere_labelled)
        for device in situation.devices:
            for label in device.labels:
                self._labelled[holder.get(device.id, ""), label] += 1

    def may_use(self, request: Request) -> list[LivingDevice]:
        """Return the devices that a process may use at all."""
        return [self._known[device] for device in request.devices if device in self._known]

    def reason_of_process(self, request: Request, given: Sequence[str]) -> str:
        """Return why a process waits that is given some devices now."""
        if given:
            return self._begins(given)
        may = self.may_use(request)
        reason = self._quota(request.user) or self._kept(request.user, may)
        return reason or self._busy(may, f"{len(may)} {self._situation.soc}")

    def reason_of_run(self, order: OpenOrder, given: Sequence[str]) -> str:
        """Return why a run waits that is given some devices now."""
        may = [self._known[device] for device in usable(order, self._situation.devices)]
        if not may:
            return f"no living host has {self._wanted(order, 1)}"
        if given:
            return self._begins(given)
        if not order.ready and not order.retries:
            return f"bundles are being compiled: {order.lacking} left"
        if order.most_devices is not None and order.held >= order.most_devices:
            return f"has its {_devices(order.most_devices)}"
        tried = () if order.ready else tuple(retry.avoid for retry in order.retries)
        reason = self._quota(order.user) or self._kept(order.user, may, tried)
        return reason or self._busy(may, f"{len(may)} {self._wanted(order, len(may))}")

    def _begins(self, given: Sequence[str]) -> str:
        """Return why a waiter does not have the devices yet that it is given: their leases may only have expired."""
        if not self._silent.issuperset(given):
            return BEGINS
        if len(given) > 1:
            return f"{len(given)} devices: their holders are silent, and count as dead after one lease duration"
        return f"{self._called(given[0])}: its holder is silent, and counts as dead after one lease duration"

    def _called(self, device: str) -> str:
        return next(iter(self._known[device].names), device)

    def _quota(self, user: str) -> str:
        quota = self._situation.quotas.get(f"{USER}{user}")
        return f"quota of {user}: {_devices(quota)}" if quota is not None and self._used[user] >= quota else ""

    def _kept(self, user: str, may: Sequence[LivingDevice], tried: Sequence[Collection[str]] = ()) -> str:
        """Return why a user may have none of these devices; `tried` has the devices that each retry avoids."""
        ours = [device for device in may if self._owner.get(device.id, user) == user]
        if not ours:
            return f"reserved for {self._reservations(may)}"
        for subject, most in sorted(self._situation.quotas.items()):
            label = subject.removeprefix(LABEL)
            if subject.startswith(LABEL) and self._labelled[user, label] >= most:
                ours = [device for device in ours if label not in device.labels]
                if not ours:
                    return f"quota of {label}: {_devices(most)} a user"
        if tried and all({*avoid}.issuperset(device.id for device in ours) for avoid in tried):
            return "no device is left that has not tried it"
        return ""

    def _reservations(self, devices: Sequence[LivingDevice]) -> str:
        """Return the owners of reserved devices, each with the time at which the first of theirs is free."""
        until_ms: dict[str, int] = {}
        for device in devices:
            owner = self._owner[device.id]
            until_ms[owner] = min(until_ms.get(owner, self._until_ms[device.id]), self._until_ms[device.id])
        return ", ".join(f"{owner} until {_clock(until_ms[owner])}" for owner in sorted(until_ms))

    def _busy(self, may: Sequence[LivingDevice], called: str) -> str:
        busy = f"{self._called(may[0].id)} is busy" if len(may) == 1 else f"all {called} are busy"
        first = sorted({self._given[device.id] for device in may if device.id in self._given})
        return f"{' and '.join(first)} first" if first else busy

    def _wanted(self, order: OpenOrder, count: int) -> str:
        """Return the text that names the devices of a run."""
        if order.devices and count == 1:
            return " or ".join(order.devices)
        kinds = {kind.split("/")[1] for kind in order.kinds if kind.count("/") == 2}
        virtual = "virtual " if kinds == {"virtual"} else ""
        labels = f" with {', '.join(order.labels)}" if order.labels else ""
        return f"{virtual}{self._situation.soc}{labels}"


def _clock(time_ms: int) -> str:
    return time.strftime("%H:%M", time.localtime(time_ms / 1000))


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


# Estimates of the start and the end of runs on a shared farm, from their shares of devices over time. Pure.
#
# Devices are given away as `farm.policy.sharing` does, but in fractions, as if a device could serve two users at
# once: with shards of a minute it nearly can.


UNKNOWN_SECONDS = 60.0
"""Expected time of a job without history."""
# Push, health check and recording come on top of the runs that the estimate is made from.
_FACTOR, _MARGIN_SECONDS = 1.25, 10.0


def fits(expected_s: float, until_s: float, now_s: float) -> bool:
    """Return whether a job of `expected_s` ends before `until_s`; 0 for no history, and for a device without an end.

    Times are epoch seconds.
    """
    if not until_s:
        return True
    return now_s + _FACTOR * (expected_s or UNKNOWN_SECONDS) + _MARGIN_SECONDS <= until_s


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Remaining work of a run for one SoC."""

    run_id: str
    soc: str
    user: str
    priority: Priority
    since_ms: int
    waiting_s: float
    """Expected seconds of its waiting shards on one device."""
    waiting: int
    """Number of waiting shards."""
    held_s: float = 0.0
    """Expected remaining seconds of its running shards."""
    held: int = 0
    """Number of running shards."""
    devices: int
    """Living devices that it may use, or as many of them as it may use at once."""
    first_build_s: float = 0.0
    """When the bundles of its first shard are made, about; 0 where a shard could begin now."""
    builds_s: float = 0.0
    """When the last of its bundles is made, about."""
    free_s: float = 0.0
    """When the first reservation ends, where each of its devices is reserved for others; else 0."""


class Expected(msgspec.Struct, frozen=True):
    """About when something happens to a run; seconds from now, infinite where no living device can run it."""

    starts_s: float
    """Seconds to the start of its next shard; 0 if a shard runs."""
    ends_s: float


def expect(
    works: Iterable[Work], devices: Mapping[str, int], quotas: Mapping[str, int] | None = None
) -> dict[str, Expected]:
    """Return about when each run goes on and when it ends, by run id.

    `devices` are the living ones of each SoC, `quotas` the most that users have at once (`user:ada`).
    """
    by_soc: dict[str, list[Work]] = defaultdict(list)
    for work in works:
        by_soc[work.soc].append(work)
    expected: dict[str, Expected] = {}
    for soc, mine in by_soc.items():
        for run_id, found in _Future(mine, devices.get(soc, 0), quotas or {}).expected().items():
            other = expected.get(run_id, Expected(math.inf, 0.0))
            expected[run_id] = Expected(min(other.starts_s, found.starts_s), max(other.ends_s, found.ends_s))
    return expected


class _Future:
    """The devices of one SoC from now until all is done, from one end of a run to the next."""

    def __init__(self, works: Sequence[Work], devices: int, quotas: Mapping[str, int]) -> None:
        self._works = sorted(works, key=lambda work: (-work.priority, work.since_ms, work.run_id))
        self._devices, self._quotas = devices, quotas
        self._left = {work.run_id: work.waiting_s + work.held_s for work in works}

    def expected(self) -> dict[str, Expected]:
        """Return when each run goes on and ends."""
        starts: dict[str, float] = {}
        ends: dict[str, float] = {}
        now_s = 0.0
        active = [work for work in self._works if work.devices > 0]
        while active:
            rates = self._rates(active)
            self._note_starts(active, rates, now_s, starts)
            step_s = min(
                (self._left[work.run_id] / rate for work in active if (rate := rates[work.run_id]) > 0),
                default=math.inf,
            )
            if math.isinf(step_s):
                break
            now_s += step_s
            for work in active:
                self._left[work.run_id] -= step_s * rates[work.run_id]
                if self._left[work.run_id] <= 1e-6:
                    # A shard that is held runs already.
                    alone_s = (work.waiting_s + work.held_s) / _most(work)
                    ends[work.run_id] = max(now_s, work.builds_s, work.free_s and work.free_s + alone_s)
            active = [work for work in active if work.run_id not in ends]
        return {
            work.run_id: Expected(starts.get(work.run_id, math.inf), ends.get(work.run_id, math.inf))
            for work in self._works
        }

    def _rates(self, active: Sequence[Work]) -> dict[str, float]:
        """Return how many devices each run has: persons first, users alike, the older run of a user first."""
        rates = dict.fromkeys((work.run_id for work in active), 0.0)
        free = float(self._devices)
        had: dict[str, float] = defaultdict(float)
        for priority in sorted({work.priority for work in active}, reverse=True):
            of_user: dict[str, list[Work]] = defaultdict(list)
            for work in active:
                if work.priority == priority:
                    of_user[work.user].append(work)
            wanted = {user: float(sum(map(_most, mine))) for user, mine in of_user.items()}
            for user in of_user:
                quota = self._quotas.get(f"user:{user}", math.inf)
                wanted[user] = max(0.0, min(wanted[user], quota - had[user]))
            for user, share in _share_alike(wanted, had, free).items():
                free -= share
                had[user] += share
                for work in of_user[user]:
                    rates[work.run_id] = min(share, float(_most(work)))
                    share -= rates[work.run_id]  # noqa: PLW2901 - what is left for the younger
        return rates

    def _note_starts(
        self, active: Sequence[Work], rates: Mapping[str, float], now_s: float, starts: dict[str, float]
    ) -> None:
        # Users with a share below one device take turns: each gets a device when another shard ends.
        behind_s = 0.0
        for work in active:
            if work.run_id in starts or rates[work.run_id] <= 0:
                continue
            if work.held or not work.waiting:
                starts[work.run_id] = now_s
                continue
            if rates[work.run_id] < 1 - 1e-9:
                behind_s += self._shard_s() / self._devices
                starts[work.run_id] = now_s + behind_s
            else:
                starts[work.run_id] = now_s
            starts[work.run_id] = max(starts[work.run_id], work.first_build_s, work.free_s)

    def _shard_s(self) -> float:
        shards = sum(work.waiting + work.held for work in self._works)
        return sum(work.waiting_s + work.held_s for work in self._works) / max(1, shards)


def _most(work: Work) -> int:
    return max(1, min(work.devices, work.waiting + work.held))


def _share_alike(wanted: Mapping[str, float], had: Mapping[str, float], free: float) -> dict[str, float]:
    """Return how many of the free devices each user gets, so that who has least gets most."""
    # Level up to which free devices fill all users: between `had` and a user's devices with all requests granted.
    ends = [(had.get(user, 0.0), 1) for user in wanted] + [(had.get(user, 0.0) + wanted[user], -1) for user in wanted]
    level, filling, left = 0.0, 0, free
    for end, more in sorted(ends):
        if filling and filling * (end - level) >= left:
            level += left / filling
            break
        left -= filling * (end - level)
        level, filling = end, filling + more
    return {user: min(most, max(0.0, level - had.get(user, 0.0))) for user, most in wanted.items()}
