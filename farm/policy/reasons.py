"""Reasons for a wait for devices of a SoC, in a few words: of submitted runs and of processes. Pure."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from farm.policy.sharing import share_out
from farm.policy.situation import LABEL, USER, LivingDevice, OpenOrder, Request, Situation, usable

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
