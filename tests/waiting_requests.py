"""Requests of processes alone, as the policy serves them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from slow_rules import Grant

from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import Lease, LivingDevice, Request, Situation


def grant(
    requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
) -> tuple[Grant, ...]:
    """Return which request gets which free device; `devices` are the ids that may be used at all."""
    shares = share_out(_situation(requests, devices, leases, now_ms))
    return tuple(Grant(share.request, device) for device, share in sorted(shares.items()))


def to_yield(
    requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
) -> frozenset[str]:
    """Return the devices that their holders should hand over."""
    return frozenset(hand_over(_situation(requests, devices, leases, now_ms)))


def _situation(
    requests: Sequence[Request], devices: Collection[str], leases: Iterable[Lease], now_ms: int
) -> Situation:
    there = [LivingDevice(device) for device in devices]
    return Situation(
        soc="SM8650", now_ms=now_ms, devices=there, leases=list(leases), orders=(), requests=list(requests)
    )
