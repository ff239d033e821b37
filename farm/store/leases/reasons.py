"""Why a submitted run waits for devices of a SoC, in a few words for `farm queue`. Pure."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from farm.store.leases.sharing import share_out
from farm.store.leases.situation import LABEL, USER, usable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.store.leases.situation import LivingDevice, OpenOrder, Situation

BEGINS = "begins now"
"""Of a run for which a device is free."""


def why_waiting(situation: Situation) -> dict[str, str]:
    """Return by run id why its shards of this SoC wait; a run of which nothing waits is not in it.

    One reason a run, the one that somebody could do something about first.
    """
    shares = share_out(situation)
    world = _AfterSharing(situation, {device: share.user for device, share in shares.items()})
    given = Counter(share.run_id for share in shares.values())
    return {
        order.run_id: world.reason(order, given[order.run_id])
        for order in situation.orders
        if order.ready or order.retries or order.lacking
    }


class _AfterSharing:
    """Who has what once the free devices are given away."""

    def __init__(self, situation: Situation, given: dict[str, str]) -> None:
        self._situation = situation
        now_ms = situation.now_ms
        holder = {lease.device: lease.user for lease in situation.leases if lease.is_held(now_ms)} | given
        self._used = Counter(holder.values()) + Counter(situation.here) + Counter(situation.elsewhere)
        self._owner = {lease.device: owner for lease in situation.leases if (owner := lease.reserved_by(now_ms))}
        self._until_ms = {lease.device: lease.reserved_until_ms for lease in situation.leases}
        self._labelled = Counter(situation.elsewhere_labelled)
        for device in situation.devices:
            for label in device.labels:
                self._labelled[holder.get(device.id, ""), label] += 1

    def reason(self, order: OpenOrder, given: int) -> str:
        """Return why a run waits that is given so many devices now."""
        known = {device.id: device for device in self._situation.devices}
        may = [known[device] for device in usable(order, self._situation.devices)]
        if not may:
            return f"no living host has {self._wanted(order, 1)}"
        if given:
            return BEGINS
        if not order.ready and not order.retries:
            return f"bundles are being compiled: {order.lacking} left"
        return self._bound(order) or self._kept(order, may) or self._busy(order, may)

    def _bound(self, order: OpenOrder) -> str:
        if order.most_devices is not None and order.held >= order.most_devices:
            return f"has its {_devices(order.most_devices)}"
        quota = self._situation.quotas.get(f"{USER}{order.user}")
        if quota is not None and self._used[order.user] >= quota:
            return f"quota of {order.user}: {_devices(quota)}"
        return ""

    def _kept(self, order: OpenOrder, may: Sequence[LivingDevice]) -> str:
        """Return what keeps a run from all devices that it might use."""
        ours = [device for device in may if self._owner.get(device.id, order.user) == order.user]
        if not ours:
            return f"reserved for {self._reservations(may)}"
        for subject, most in sorted(self._situation.quotas.items()):
            label = subject.removeprefix(LABEL)
            if subject.startswith(LABEL) and self._labelled[order.user, label] >= most:
                ours = [device for device in ours if label not in device.labels]
                if not ours:
                    return f"quota of {label}: {_devices(most)} a user"
        tried = [set(retry.avoid) for retry in order.retries]
        if not order.ready and all(avoid.issuperset(device.id for device in ours) for avoid in tried):
            return "no device is left that has not tried it"
        return ""

    def _reservations(self, devices: Sequence[LivingDevice]) -> str:
        """Return the owners of reserved devices, each with the time at which the first of theirs is free."""
        until_ms: dict[str, int] = {}
        for device in devices:
            owner = self._owner[device.id]
            until_ms[owner] = min(until_ms.get(owner, self._until_ms[device.id]), self._until_ms[device.id])
        return ", ".join(f"{owner} until {_clock(until_ms[owner])}" for owner in sorted(until_ms))

    def _busy(self, order: OpenOrder, may: Sequence[LivingDevice]) -> str:
        if len(may) == 1:
            return f"{next(iter(may[0].names), may[0].id)} is busy"
        return f"all {len(may)} {self._wanted(order, len(may))} are busy"

    def _wanted(self, order: OpenOrder, count: int) -> str:
        """Return what the devices of a run are called."""
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
