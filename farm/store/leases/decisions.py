"""Decisions of the policy about processes that wait for devices, and about what processes hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from farm.policy.reasons import BEGINS, why_waiting
from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import Lease, Request
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import find_socs, read_free, read_situation


def socs_of(connection: Connection, devices: Iterable[str]) -> list[str]:
    """Return the SoCs of devices, sorted: the order in which their locks are taken."""
    return sorted(set(find_socs(connection, devices).values()))


def granted_to(connection: Connection, waiter: Row[Any], now_ms: int) -> list[str]:
    """Return the devices that a waiter with a live request may have now."""
    # Hundreds may wait: read the situation only if a device may be left for this waiter.
    if not lease_rows.may_be_free(connection, waiter, now_ms):
        return []
    given: list[str] = []
    requests = lease_rows.requests_now(connection, now_ms)
    for soc in socs_of(connection, lease_rows.decode_devices(waiter.devices)):
        shares = share_out(read_free(connection, soc, now_ms, requests, skips_unreadable=True).situation)
        given += [device for device, share in sorted(shares.items()) if share.request == waiter.id]
    return given[: waiter.wanted]


def wanted_of(connection: Connection, kept: Sequence[Lease], now_ms: int) -> frozenset[str]:
    """Return the devices of `kept` that should be handed over."""
    if not kept:
        return frozenset()
    ours = {lease.device for lease in kept}
    # Agents that claim devices for submitted runs have marked the devices to hand over.
    wanted = lease_rows.marked_of(connection, kept)
    if requests := lease_rows.requests_now(connection, now_ms):
        for soc in socs_of(connection, ours):
            known = read_situation(connection, soc, now_ms, requests, skips_unreadable=True)
            wanted |= ours & hand_over(known.situation).keys()
    return frozenset(wanted)


def reasons_of(
    connection: Connection, tokens: Collection[str], requests: Sequence[Request], now_ms: int
) -> Mapping[str, str]:
    """Return the reasons why the requests of `tokens` wait, by token; a request without a usable device has no entry.

    `requests` are all requests.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for soc in socs_of(connection, {device for one in requests if one.id in tokens for device in one.devices}):
        known = read_situation(connection, soc, now_ms, requests, skips_unreadable=True)
        for token, why in why_waiting(known.situation).items():
            found.setdefault(token, []).append((soc, why))
    return {token: _joined(found[token]) for token in tokens if token in found}


def _joined(reasons: Sequence[tuple[str, str]]) -> str:
    """Return the reasons of several SoCs as one text; a SoC with a free device outweighs all others."""
    texts = list(dict.fromkeys(why for _, why in reasons))
    if BEGINS in texts:
        return BEGINS
    return texts[0] if len(texts) == 1 else "; ".join(f"{soc}: {why}" for soc, why in reasons)
